"""Control vectors: llama.cpp's file format for steering directions, through the `gguf` package.

1. `general.architecture` is "controlvector"; `controlvector.model_hint` names a kind of model, and
   `controlvector.layer_count` says how many directions there are.
2. The tensor `direction.N`, float32 [width], N >= 1, is added to the output of the block that is N counted from 0:
   `blocks.N.hook_resid_post`. So llama.cpp reads it (`llama_control_vector_load`, and `build_cvec` at block `il == N`):
   the first block has none.
3. `mionnx.sha256`, a key that other readers pass over, is the checksum of names, values, model_hint and layer_count
   (`mionnx.machine.tensor_file.values_checksum`); it is checked where it is there.
4. Refused: another architecture, no directions or fewer than the file says, `direction.0` (llama.cpp refuses it too),
   another type or number of axes, unequal widths, NaN, a damaged file, another checksum. A direction that is all zeros
   does nothing in llama.cpp and is left out.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from reprlib import repr as brief
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import RuntimeMissingError, SpecFileError, install
from mionnx.machine.files import atomic_path, is_no_file
from mionnx.machine.tensor_file import values_checksum

ARCHITECTURE = "controlvector"
HINT, COUNT = f"{ARCHITECTURE}.model_hint", f"{ARCHITECTURE}.layer_count"
CHECKSUM = "mionnx.sha256"
VECTOR_HOOK = "resid_post"
NAME = re.compile(r"direction\.(0|[1-9][0-9]{0,8})")


class LayerLeftOutWarning(UserWarning):
    """A control vector file without the direction of layer 0."""


def _gguf() -> ModuleType:
    try:
        import gguf
    except ImportError as error:
        raise RuntimeMissingError(f"control vectors need the gguf package: {install('gguf')}") from error
    return gguf


def write(vectors: Mapping[int, NDArray[np.float32]], path: str | Path, model_hint: str = "") -> Path:
    """Write a control vector: layer from 1 on -> [width], to add to `blocks.N.hook_resid_post`."""
    gguf = _gguf()
    if 0 in vectors:
        raise SpecFileError(
            "a control vector file has no place for a direction after the first block (direction.N, N >= 1): "
            "steer at a later layer"
        )
    tensors = {f"direction.{layer}": vector for layer, vector in vectors.items()}
    with atomic_path(Path(path)) as partial:
        writer = gguf.GGUFWriter(partial, ARCHITECTURE)
        writer.add_string(HINT, model_hint)
        writer.add_int32(COUNT, len(vectors))
        writer.add_string(CHECKSUM, values_checksum(tensors, [model_hint, str(len(vectors))]))
        for name, vector in tensors.items():
            writer.add_tensor(name, vector)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return Path(path)


def read(path: str | Path) -> dict[int, NDArray[np.float32]]:
    """Read a control vector: layer -> [width], in ascending order, zero vectors left out."""
    gguf = _gguf()
    if is_no_file(Path(path)):
        raise SpecFileError(f"{path} is no GGUF file but a folder, a device or a pipe")
    try:
        reader = gguf.GGUFReader(path)
        fields = {name: reader.get_field(name) for name in reader.fields}
        facts = {name: field.contents() for name, field in fields.items() if field is not None}
        tensors = {tensor.name: (tensor.tensor_type, [*tensor.shape], tensor.data) for tensor in reader.tensors}
    except OSError as error:
        raise SpecFileError(f"cannot read {path}: {error}") from error
    except Exception as error:  # a damaged file makes the reader fail in many ways
        raise SpecFileError(f"{path} is no GGUF file, or a damaged one: {type(error).__name__}: {error}") from error
    if facts.get("general.architecture") != ARCHITECTURE:
        raise SpecFileError(f"{path} is no control vector but a {facts.get('general.architecture')!r}")
    _check_sum(path, facts, {name: data for name, (_, _, data) in tensors.items()})
    vectors = {
        _layer(path, name): _vector(path, name, *entry, gguf.GGMLQuantizationType.F32)
        for name, entry in tensors.items()
        if name.startswith("direction")
    }
    _check(path, vectors, facts.get(COUNT))
    if not any(vector.any() for vector in vectors.values()):
        raise SpecFileError(f"{path}: every direction is zero")
    return {layer: vectors[layer] for layer in sorted(vectors) if vectors[layer].any()}


def _check_sum(path: str | Path, facts: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]) -> None:
    if CHECKSUM not in facts:
        return
    entries = [str(facts.get(HINT, "")), str(facts.get(COUNT))]  # an empty hint is not written
    if facts[CHECKSUM] != values_checksum(tensors, entries):
        raise SpecFileError(f"{path} is damaged: it does not have the checksum that was written with it")


def _layer(path: str | Path, name: str) -> int:
    match = NAME.fullmatch(name)
    if match is None or int(match[1]) == 0:
        why = "there is none after the first block" if match else "a number from 1 on must follow"
        where = f"direction.N belongs to blocks.N.hook_{VECTOR_HOOK}, N >= 1"
        raise SpecFileError(f"{path}: tensor {brief(name)}: {why}; {where}")
    return int(match[1])


def _vector(path: str | Path, name: str, kind: Any, shape: list[Any], data: NDArray[Any], float32: Any) -> NDArray[Any]:
    if kind != float32 or len(shape) != 1:
        raise SpecFileError(f"{path}: {name} must be float32 [width], and is {kind.name} {[int(n) for n in shape]}")
    if not np.isfinite(data).all():
        raise SpecFileError(f"{path}: {name} has NaN or infinity")
    return np.array(data, np.float32)


def _check(path: str | Path, vectors: dict[int, NDArray[Any]], count: Any) -> None:
    if not vectors:
        raise SpecFileError(f"{path} has no tensor direction.N")
    if count is not None and not (isinstance(count, int | np.integer) and count <= len(vectors)):
        there = ", ".join(map(str, sorted(vectors)))
        raise SpecFileError(f"{path} says that it has {count} directions, and has {len(vectors)} (layers {there})")
    widths = {layer: len(vector) for layer, vector in vectors.items()}
    if len({*widths.values()}) > 1:
        raise SpecFileError(f"{path}: directions of different widths: {widths}")
