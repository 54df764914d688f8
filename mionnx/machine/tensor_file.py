"""`.safetensors` files with a checksum of everything in them, checked on reading.

1. The checksum is the entry `mionnx_sha256` of the file's `__metadata__`: SHA-256 of the bytes of all tensors, then of
   the header as JSON with its keys sorted, the checksum itself left out. So it covers names, dtypes, shapes, values and
   all other metadata.
2. A file whose bytes do not give its checksum is refused as damaged, before anything of it is used.
3. A file of mionnx (a metadata key begins with `mionnx_`) without a checksum is refused; one of others is read as it
   is.
4. Equal tensors and metadata give equal files: the entries of the header are sorted.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from mionnx.errors import MIError, SpecFileError
from mionnx.machine.files import is_no_file, write_atomic

CHECKSUM = "mionnx_sha256"
OWN_KEYS = "mionnx_"  # how metadata keys of mionnx begin
RESULT_KEY = "mionnx_result"  # its class is in the metadata
FILE_KINDS = {"mionnx_spec": "HookSpec", "mionnx_directions": "Directions"}
CACHES = {"kv": "KVCache", "rwkv": "RWKVState", "layers": "LayerCache"}
# Names of floating-point dtypes in a header -> numpy's.
MAPPED: dict[str, Any] = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
OTHERS = {
    "mionnx_run": "it is a recorded run, which verify(against=...) reads",
    "mionnx_sweep": "it is the progress of a sweep, which the same sweep continues with resume=...",
}


def to_bytes(tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a file with its checksum."""
    try:
        data = save({name: np.asarray(value, order="C") for name, value in tensors.items()}, dict(metadata or {}))
    except (SafetensorError, KeyError, ValueError) as error:
        raise SpecFileError(f"safetensors cannot hold one of {', '.join(tensors)}: {error}") from error
    header, start = _header_of(data)
    values = memoryview(data)[start:]
    return b"".join([sealed(header, hashlib.sha256(values)), values])


def sealed(header: Mapping[str, Any], values: Any) -> bytes:
    """The beginning of a file, up to its values, with a checksum of its header and the `values` hashed so far."""
    metadata = {**header.get("__metadata__", {}), CHECKSUM: _checksum(values, header)}
    text = json.dumps({**header, "__metadata__": metadata}, sort_keys=True).encode()
    text += b" " * (-len(text) % 8)  # so that the values begin aligned
    return len(text).to_bytes(8, "little") + text


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a checked file, and its first byte of values."""
    with path.open("rb") as file:
        size = file.read(8)
        return _header_of(size + file.read(int.from_bytes(size, "little")))


def _header_of(data: bytes) -> tuple[dict[str, Any], int]:
    start = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:start]), start


def write_tensors(
    path: str | Path, tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a file with its checksum; it appears when it is whole."""
    write_atomic(Path(path), to_bytes(tensors, metadata))


@contextmanager
def open_tensors(path: str | Path, problem: str, error: type[MIError] = SpecFileError) -> Iterator[Any]:
    """Open a file whose checksum holds; a refusal begins with `problem`: "x.safetensors is no saved spec"."""
    _refuse_special(path, problem, error)
    try:
        with safe_open(path, framework="np") as file:
            _check(Path(path), file.metadata() or {}, error)
            yield file
    except (OSError, SafetensorError, AttributeError, TypeError, ValueError, KeyError) as cause:
        # the last four: a tensor of a dtype that numpy does not have
        raise error(f"{problem}: {cause}") from cause


def read_metadata(path: str | Path, problem: str, error: type[MIError] = SpecFileError) -> dict[str, str]:
    """The metadata of a file, unchecked: to see what kind of file it is; see `open_tensors`."""
    _refuse_special(path, problem, error)
    try:
        with safe_open(path, framework="np") as file:
            return dict(file.metadata() or {})
    except (OSError, SafetensorError, TypeError, ValueError) as cause:
        raise error(f"{problem}: {cause}") from cause


def _refuse_special(path: str | Path, problem: str, error: type[MIError]) -> None:
    if is_no_file(Path(path)):
        raise error(f"{problem}: it is a folder, a device or a pipe")


def read_tensors(
    path: str | Path, problem: str, error: type[MIError] = SpecFileError
) -> tuple[dict[str, str], dict[str, NDArray[Any]]]:
    """Read a whole file: its metadata, and its tensors by name; see `open_tensors`."""
    with open_tensors(path, problem, error) as file:
        metadata = {key: text for key, text in (file.metadata() or {}).items() if key != CHECKSUM}
        return metadata, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def map_tensors(path: str | Path, problem: str, error: type[MIError] = SpecFileError) -> dict[str, NDArray[Any]]:
    """The floating-point tensors of a file, mapped: their numbers are read when they are used; see `open_tensors`."""
    with open_tensors(path, problem, error):  # its header is checked: names, dtypes, and what lies where
        header, start = read_header(Path(path))
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            if entry["dtype"] not in MAPPED:
                raise error(f"{path}: {name} has numbers of the dtype {entry['dtype']}; weights are floating-point")
            # an empty file part cannot be mapped
            tensors[name] = (
                np.memmap(path, MAPPED[entry["dtype"]], "r", start + entry["data_offsets"][0], tuple(entry["shape"]))
                if 0 not in entry["shape"]
                else np.zeros(entry["shape"], MAPPED[entry["dtype"]])
            )
    return tensors


def values_checksum(tensors: Mapping[str, NDArray[Any]], facts: Sequence[str]) -> str:
    """SHA-256 (hexadecimal) of arrays with names, dtypes and shapes, and of `facts`, for a file of another format."""
    digest = hashlib.sha256(json.dumps(facts).encode())
    for name in sorted(tensors):
        value = np.asarray(tensors[name], order="C")
        # names and shapes too: the same bytes may be another array
        digest.update(json.dumps([name, str(value.dtype), value.shape]).encode())
        digest.update(value.tobytes())
    return digest.hexdigest()


def _check(path: Path, metadata: Mapping[str, str], error: type[MIError]) -> None:
    if CHECKSUM in metadata:
        if metadata[CHECKSUM] != _checksum_of(path):
            raise error(f"{path} is damaged: it does not have the checksum that was written with it")
    elif any(key.startswith(OWN_KEYS) for key in metadata):
        raise error(f"{path} is damaged: it has no checksum, and every file that mionnx writes has one")


def _checksum_of(path: Path) -> str:
    header, start = read_header(path)
    with path.open("rb") as file:
        file.seek(start)
        return _checksum(hashlib.file_digest(file, "sha256"), header)


def _checksum(values: Any, header: Mapping[str, Any]) -> str:
    """The checksum of rule 1; `values` has seen the bytes of the tensors."""
    facts = {key: text for key, text in header.get("__metadata__", {}).items() if key != CHECKSUM}
    values.update(json.dumps({**header, "__metadata__": facts}, sort_keys=True).encode())
    return str(values.hexdigest())


@contextmanager
def told_of(path: str | Path) -> Iterator[None]:
    """Name a file in what is raised while its contents are made into an object."""
    try:
        yield
    except MIError as error:
        raise type(error)(f"{path}: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise SpecFileError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def whose(metadata: Mapping[str, str]) -> str:
    """Name the content and the reader of a file, in the message of another reader."""
    for key, words in OTHERS.items():
        if key in metadata:
            return words
    kind = metadata.get("kind") if RESULT_KEY in metadata else None
    kind = CACHES.get(metadata.get("mionnx_cache", ""), kind)
    kind = next((name for key, name in FILE_KINDS.items() if key in metadata), kind)
    if kind is None:
        return "it is not of a kind that mionnx writes"
    return f"it is a saved {kind}, which {kind}.load reads"
