"""Spec files: one `.safetensors` file a spec. The format, on one page.

1. The file is an ordinary safetensors file; it is read without executing anything.
2. Its `__metadata__` has three entries: `mionnx_spec` = "1", the version, `declaration`, a JSON text, and the checksum
   of `mionnx.machine.tensor_file`, which is checked.
3. The declaration is {"captures": [...], "interventions": [...]}, both in the order of the spec, and where there are
   any "state_knockouts": [...] and "state_steerings": [...].
4. A capture is {"hook": name or glob, "before": true or false}; "positions" and "heads", lists, limit it;
   "dtype" is what its numbers are cast to.
5. An intervention is {"hook": name or glob, "kind": kind, "positions": ..., "heads": ..., "rows": ...}; limits that
   are not given are null. Positions are a list of integers, or a list of such lists, one a batch row. A splice that
   reads another hook point has "reads", its name, besides; an intervention limited to experts or
   neurons has "experts" or "neurons", a list.
6. The value of intervention n (0-based) is the tensor `interventions.n.value`, in the dtype it was given in; "zero" has
   none, and a kind of several values one tensor for each, `interventions.n.{name}`. The directions of "project_out" are
   stored orthonormal, [k, width]; the fragment of "splice" as the bytes of an ONNX model, uint8 [n].
7. Refused: another version; a declaration that is no such JSON; a missing or surplus tensor; an unknown kind; NaN
   anywhere, an infinity that the kind does not have; on saving, a predicate, which no file can hold.
8. A state knockout is {"positions": [...], "layers": [...] or null, "terms": [...]}; a state steering has "scale" and
   "heads" (a list or null) besides.
9. A gradient is written as a capture; "metric" is a list of at most one {"name", "answer", "versus", "position"}, with
   "of" if it is that of a hook point, and its arrays are the tensors `metric.reference` and `metric.cotangent`.
10. Equal specs give equal files, byte for byte: the header's entries are sorted.
11. Files are written atomically: a temporary file is renamed into place.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from numpy.typing import NDArray

from mionnx.errors import SpecFileError
from mionnx.machine.tensor_file import read_tensors, to_bytes, told_of, whose
from mionnx.spec.intervention import Intervention, find_kind
from mionnx.spec.metric import MetricSpec
from mionnx.spec.state_interventions import StateKnockoutSpec, StateSteeringSpec

SPEC_FORM = "1"
REQUIRED = ("captures", "interventions")
OPTIONAL = ("state_knockouts", "state_steerings", "gradients", "metric")
Tensors = dict[str, NDArray[Any]]
Spec = TypeVar("Spec", bound=Any)  # a `HookSpec`, which imports this file


def serialise(declaration: Mapping[str, list[Any]], tensors: Tensors) -> bytes:
    """The bytes of a spec file: the lists of rule 3, and values by name."""
    lists = {key: entries for key, entries in declaration.items() if entries or key in REQUIRED}
    return to_bytes(tensors, {"mionnx_spec": SPEC_FORM, "declaration": json.dumps(lists)})


def load(path: str | Path, spec: Spec) -> Spec:
    """Read a spec file into an empty spec."""
    metadata, tensors = read_tensors(path, f"{path} is no saved spec")
    if "mionnx_spec" not in metadata:
        raise SpecFileError(f"{path} is no saved spec: {whose(metadata)}")
    if metadata["mionnx_spec"] != SPEC_FORM:
        raise SpecFileError(f"{path} is no spec of version {SPEC_FORM}: its metadata says {metadata['mionnx_spec']!r}")
    with told_of(path):
        declaration = json.loads(metadata["declaration"])
        lists = [isinstance(part, list) for part in declaration.values()]
        if not {*REQUIRED} <= declaration.keys() <= {*REQUIRED, *OPTIONAL} or not all(lists):
            raise ValueError(f"the declaration must be lists: {', '.join(REQUIRED)}; {', '.join(OPTIONAL)} may follow")
        fill(spec, declaration, tensors)
    # Each tensor that was used was taken out.
    if tensors:
        raise SpecFileError(f"{path} holds tensors that no intervention uses: {', '.join(sorted(tensors))}")
    return spec


def fill(spec: Spec, declaration: Mapping[str, Any], tensors: Tensors) -> Spec:
    """Register what a declaration says; the tensors that it uses are taken out of `tensors`."""
    for what, ask in (("captures", spec.capture), ("gradients", spec.gradient)):
        for entry in declaration.get(what, []):
            if not isinstance(entry["before"], bool):
                raise ValueError(f"before must be true or false, got {entry['before']!r}")
            limits = {name: entry[name] for name in ("positions", "heads", "dtype") if name in entry}
            ask(_hook(entry), before=entry["before"], **limits)
    for entry in declaration.get("metric", []):
        arrays: dict[str, Any] = {name: tensors.pop(name) for name in [*tensors] if name.startswith("metric.")}
        spec.metric = MetricSpec(**entry, **{name.removeprefix("metric."): array for name, array in arrays.items()})
    for n, entry in enumerate(declaration["interventions"]):
        names = find_kind(entry["kind"]).stored_values
        values = {name: tensors.pop(f"interventions.{n}.{name}") for name in names}
        spec.intervene(_hook(entry), Intervention.from_entry(entry, values))
    for entry in declaration.get("state_knockouts", []):
        spec.set_state_knockout(StateKnockoutSpec.from_entry(entry))
    for entry in declaration.get("state_steerings", []):
        spec.set_state_steering(StateSteeringSpec.from_entry(entry))
    return spec


def _hook(entry: Mapping[str, Any]) -> str:
    if not isinstance(entry["hook"], str):
        raise ValueError(f"hook must be a name or a glob, got {entry['hook']!r}")
    return entry["hook"]
