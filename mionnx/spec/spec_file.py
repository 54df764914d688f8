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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from numpy.typing import NDArray

from mionnx.errors import SpecFileError
from mionnx.machine.tensor_file import read_tensors, to_bytes, told_of, whose

SPEC_FORM = "1"
REQUIRED = ("captures", "interventions")
OPTIONAL = ("state_knockouts", "state_steerings", "gradients", "metric")
Declaration = dict[str, Any]
Tensors = dict[str, NDArray[Any]]
Spec = TypeVar("Spec")


def serialise(declaration: Mapping[str, list[Any]], tensors: Tensors) -> bytes:
    """The bytes of a spec file.

    Args:
        declaration: the lists of rule 3; optional ones are left out where they are empty.
        tensors: values by name.
    """
    return to_bytes(tensors, _metadata(declaration))


def _metadata(declaration: Mapping[str, list[Any]]) -> dict[str, str]:
    lists = {key: entries for key, entries in declaration.items() if entries or key in REQUIRED}
    return {"mionnx_spec": SPEC_FORM, "declaration": json.dumps(lists)}


def load(path: str | Path, build: Callable[[Declaration, Tensors], Spec]) -> Spec:
    """Read a spec file.

    Args:
        build: makes the spec of a declaration, and takes the tensors that it uses out of the dictionary.

    Raises:
        SpecFileError: the file is missing, damaged, or of another version.
    """
    metadata, tensors = read_tensors(path, f"{path} is no saved spec")
    if "mionnx_spec" not in metadata:
        raise SpecFileError(f"{path} is no saved spec: {whose(metadata)}")
    if metadata["mionnx_spec"] != SPEC_FORM:
        raise SpecFileError(f"{path} is no spec of version {SPEC_FORM}: its metadata says {metadata['mionnx_spec']!r}")
    with told_of(path):
        spec = build(_checked(json.loads(metadata["declaration"])), tensors)
    if tensors:
        raise SpecFileError(f"{path} holds tensors that no intervention uses: {', '.join(sorted(tensors))}")
    return spec


def _checked(declaration: Any) -> Declaration:
    lists = [isinstance(part, list) for part in declaration.values()]
    if not {*REQUIRED} <= declaration.keys() <= {*REQUIRED, *OPTIONAL} or not all(lists):
        raise ValueError(f"the declaration must be lists: {', '.join(REQUIRED)}; {', '.join(OPTIONAL)} may follow")
    return declaration
