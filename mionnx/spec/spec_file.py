"""A saved spec: one `.safetensors` file. The format, on one page.

1. The file is an ordinary safetensors file; it is read without executing anything.
2. Its `__metadata__` has two entries: `mionnx_spec` = "1", the version, and `declaration`, a JSON text.
3. The declaration is {"captures": [...], "interventions": [...]}, both in the order of the spec, and where there are
   any "state_knockouts": [...] and "state_steerings": [...].
4. A capture is {"hook": name or glob, "before": true or false}; "positions" and "heads", lists, limit it.
5. An intervention is {"hook": name, "kind": kind, "positions": ..., "heads": ..., "rows": ...}; limits that are not
   given are null. Positions are a list of integers, or a list of such lists, one a batch row. A splice that reads
   another hook point has "reads", its name, besides.
6. The value of intervention n (0-based) is the tensor `interventions.n.value`, in the dtype it was given in; "zero" has
   none. The directions of "project_out" are stored orthonormal, [k, width]; the fragment of "splice" as the bytes of
   an ONNX model, uint8 [n].
7. Refused: another version; a declaration that is no such JSON; a missing or surplus tensor; an unknown kind; NaN
   anywhere, infinity anywhere but in a knockout mask; on saving, a capture by predicate, which no file can hold.
8. A state knockout is {"positions": [...], "layers": [...] or null, "terms": [...]}; a state steering has "scale" and
   "heads" (a list or null) besides.
9. Equal specs give equal files, byte for byte: the header's entries are sorted.
10. Files are written beside their final place and moved there when they are whole.
"""

import json
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_bytes

from mionnx.errors import MIError, SpecFileError
from mionnx.graph.hook_points import HookPoint
from mionnx.machine.files import write_atomic
from mionnx.spec.hook_spec import Capture, HookSpec
from mionnx.spec.intervention import KINDS, Intervention
from mionnx.spec.state_interventions import (
    TERMS,
    StateKnockoutSpec,
    StateSteeringSpec,
    StateTargets,
)

VERSION = "1"
REQUIRED = ("captures", "interventions")
OPTIONAL = ("state_knockouts", "state_steerings")
Targeted = TypeVar("Targeted", bound=StateTargets)


def save(spec: HookSpec, path: str | Path) -> None:
    """Write a spec as one safetensors file.

    Raises:
        SpecFileError: a capture by predicate, a dtype that safetensors does not have, or a file that cannot be written.
    """
    write_atomic(Path(path), serialise(spec))


def serialise(spec: HookSpec) -> bytes:
    """The bytes of the file that `save` writes.

    Raises:
        SpecFileError: a capture by predicate, or a dtype that safetensors does not have.
    """
    tensors = {
        f"interventions.{n}.value": value
        for n, (_, intervention) in enumerate(spec.interventions)
        if (value := _value(intervention)) is not None
    }
    declaration = {
        "captures": [_capture(request) for request in spec.captures],
        "interventions": [_intervention(point, intervention) for point, intervention in spec.interventions],
        "state_knockouts": [_state(knockout) for knockout in spec.state_knockouts],
        "state_steerings": [
            {**_state(steering), "scale": steering.scale, "heads": steering.heads_} for steering in spec.state_steerings
        ],
    }
    declaration = {key: value for key, value in declaration.items() if value or key in REQUIRED}
    try:
        return _ordered(to_bytes(tensors, metadata={"mionnx_spec": VERSION, "declaration": json.dumps(declaration)}))
    except SafetensorError as error:
        raise SpecFileError(f"the spec cannot be saved: {error}") from error


def _ordered(data: bytes) -> bytes:
    """The same file, the entries of its header sorted: safetensors writes them in any order."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8:end]), sort_keys=True).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data[end:]


def load(path: str | Path) -> HookSpec:
    """Read a spec from a file that `save` wrote.

    Raises:
        SpecFileError: the file is missing, damaged, or of another version.
        InterventionError: a value in it that no intervention may have (NaN, infinity), or a limit that is none.
        HookError: an intervention at a pattern.
    """
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, AttributeError, TypeError, ValueError) as error:
        # the last three: a tensor of a dtype that numpy does not have
        raise SpecFileError(f"{path} is no saved spec: {error}") from error
    if metadata.get("mionnx_spec") != VERSION:
        raise SpecFileError(
            f"{path} is no spec of version {VERSION}: its metadata says {metadata.get('mionnx_spec')!r}"
        )
    try:
        spec = _parse(json.loads(metadata["declaration"]), tensors)
    except MIError as error:
        raise type(error)(f"{path}: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise SpecFileError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    if tensors:
        raise SpecFileError(f"{path} holds tensors that no intervention uses: {', '.join(sorted(tensors))}")
    return spec


def _capture(request: Capture) -> dict[str, Any]:
    if callable(request.what):
        raise SpecFileError("a capture by predicate cannot be saved: name the hook points, or use a glob")
    limits = {"positions": request.positions, "heads": request.heads}
    given = {name: limit for name, limit in limits.items() if limit is not None}
    return {"hook": str(request.what), "before": request.before, **given}


def _value(intervention: Intervention) -> NDArray[Any] | None:
    if intervention.fragment is not None:
        return np.frombuffer(intervention.fragment.to_bytes(), np.uint8)
    # not ascontiguousarray: it adds an axis
    return None if intervention.value is None else np.asarray(intervention.value, order="C")


def _intervention(point: HookPoint, intervention: Intervention) -> dict[str, Any]:
    return {
        "hook": point.name,
        "kind": intervention.kind,
        "positions": intervention.positions,
        "heads": intervention.heads,
        "rows": intervention.rows,
        **({} if intervention.reads is None else {"reads": intervention.reads}),
    }


def _state(spec: StateTargets) -> dict[str, Any]:
    return {"positions": spec.positions_, "layers": spec.layers_, "terms": spec.terms}


def _targeted(spec: Targeted, entry: dict[str, Any]) -> Targeted:
    spec.terms = _known_terms(entry["terms"])
    spec.positions(entry["positions"])
    return spec if entry["layers"] is None else spec.layers(entry["layers"])


def _known_terms(terms: list[str]) -> list[str]:
    if not isinstance(terms, list) or not {*terms} <= {*TERMS}:
        raise ValueError(f"terms must be among {', '.join(TERMS)}, got {terms!r}")
    return terms


def _parse(declaration: dict[str, Any], tensors: dict[str, np.ndarray]) -> HookSpec:
    """Build the spec; takes the tensors it uses out of `tensors`."""
    lists = [isinstance(part, list) for part in declaration.values()]
    if not {*REQUIRED} <= declaration.keys() <= {*REQUIRED, *OPTIONAL} or not all(lists):
        raise ValueError(f"the declaration must be lists: {', '.join(REQUIRED)}; {', '.join(OPTIONAL)} may follow")
    spec = HookSpec()
    for entry in declaration["captures"]:
        if not isinstance(entry["before"], bool):
            raise ValueError(f"before must be true or false, got {entry['before']!r}")
        spec.capture(entry["hook"], before=entry["before"], positions=entry.get("positions"), heads=entry.get("heads"))
    for n, entry in enumerate(declaration["interventions"]):
        carries = KINDS.get(entry["kind"], False) or entry["kind"] == "splice"
        value = tensors.pop(f"interventions.{n}.value") if carries else None
        if value is not None and entry["kind"] == "project_out" and not _orthonormal(value):
            raise ValueError(f"interventions.{n}.value must be orthonormal directions, [k, width]")
        limits = {limit: entry[limit] for limit in ("positions", "heads", "rows")}
        spec.intervene(entry["hook"], _made(entry, value, limits))
    for entry in declaration.get("state_knockouts", []):
        spec.set_state_knockout(_targeted(StateKnockoutSpec(), entry))
    for entry in declaration.get("state_steerings", []):
        steering = _targeted(StateSteeringSpec(entry["scale"]), entry)
        spec.set_state_steering(steering if entry["heads"] is None else steering.heads(entry["heads"]))
    return spec


def _made(entry: dict[str, Any], value: NDArray[Any] | None, limits: dict[str, Any]) -> Intervention:
    if entry["kind"] != "splice":
        return Intervention._of(entry["kind"], value, *limits.values())
    if value is None or value.dtype != np.uint8 or value.ndim != 1:
        raise ValueError("a fragment is the bytes of an ONNX model, uint8 [n]")
    return Intervention.Splice(value.tobytes(), reads=entry.get("reads"), **limits)


def _orthonormal(directions: np.ndarray) -> bool:
    if directions.ndim != 2:
        return False
    exact = directions.astype(np.float64)
    return np.allclose(exact @ exact.T, np.eye(len(exact)), atol=1e-2)  # whoever wrote the file may have rounded
