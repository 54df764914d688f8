"""Files of `torch.save`, read and written without torch, and without running what they name.

1. A file is a zip archive of uncompressed members: `NAME/data.pkl`, a pickle of protocol 2, and `NAME/data/N`, the
   numbers of each storage, little-endian. `NAME/byteorder` says so in newer ones.
2. The pickle may hold None, booleans, numbers, texts, lists, tuples, dictionaries and tensors. A tensor is the call of
   `torch._utils._rebuild_tensor_v2` on a storage, an offset, a shape and strides.
3. Reading calls nothing but `OrderedDict` and the function here that stands for that one. Any other name in the pickle
   is refused, and what stands for the two cannot be changed by the file.
4. Refused besides: compressed members and more bytes than the file has, a tensor that reaches outside its storage or
   repeats it, numbers in the other byte order, torch's format of before version 1.6.
"""

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mionnx.errors import MIError, SpecFileError
from mionnx.machine.files import is_no_file, write_atomic

STORAGES: dict[str, Any] = {
    "HalfStorage": np.float16,
    "BFloat16Storage": ml_dtypes.bfloat16,
    "FloatStorage": np.float32,
    "DoubleStorage": np.float64,
    "CharStorage": np.int8,
    "ByteStorage": np.uint8,
    "ShortStorage": np.int16,
    "IntStorage": np.int32,
    "LongStorage": np.int64,
    "BoolStorage": np.bool_,
}
NAMES = {np.dtype(dtype): name for name, dtype in STORAGES.items()}
TENSOR = ("torch._utils", "_rebuild_tensor_v2")
LARGEST_PICKLE = 64 * 2**20  # bytes
THROWN = (  # what zipfile and pickle throw of a damaged file
    OSError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    EOFError,
    ArithmeticError,
    RuntimeError,
    NotImplementedError,
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    struct.error,
)


class _Storage:
    """The name of a storage's class in a pickle."""

    __slots__ = ("dtype",)

    def __init__(self, dtype: Any) -> None:
        self.dtype = np.dtype(dtype)


class _Tensor:
    """What stands in a pickle for the function that makes a tensor."""

    __slots__ = ()

    def __call__(
        self, storage: NDArray[Any], offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any
    ) -> NDArray[Any]:
        if not isinstance(storage, np.ndarray) or len(shape) != len(strides) or min((offset, *shape, *strides, 0)) < 0:
            raise pickle.UnpicklingError("a tensor of no storage, or with negative numbers in its shape")
        last = offset + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
        count = prod(shape)
        if count and (last >= len(storage) or count > len(storage)):
            raise pickle.UnpicklingError(f"a tensor {[*shape]} reaches outside its storage of {len(storage)} numbers")
        steps = tuple(step * storage.itemsize for step in strides)
        return np.lib.stride_tricks.as_strided(storage[offset:], tuple(shape), steps, writeable=False)


class _Reader(pickle.Unpickler):
    def __init__(self, data: bytes, archive: zipfile.ZipFile, root: str) -> None:
        super().__init__(io.BytesIO(data))
        self._archive, self._root = archive, root
        self._storages: dict[str, NDArray[Any]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == TENSOR:
            return _Tensor()
        if module == "torch" and name in STORAGES:
            return _Storage(STORAGES[name])
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of such a file: nothing was run")

    def persistent_load(self, pid: Any) -> NDArray[Any]:
        kind, storage, key, _, count = pid
        if kind != "storage" or not isinstance(storage, _Storage):
            raise pickle.UnpicklingError(f"it holds a {kind!r:.40}, no storage")
        if key not in self._storages:
            data = self._archive.read(f"{self._root}data/{key}")
            numbers = np.frombuffer(data, storage.dtype.newbyteorder("<") if storage.dtype.isbuiltin else storage.dtype)
            if len(numbers) < count:
                raise pickle.UnpicklingError(f"the storage {key} has {len(numbers)} numbers instead of {count}")
            self._storages[key] = numbers
        return self._storages[key]


def read_torch(path: str | Path, problem: str, error: type[MIError] = SpecFileError) -> Any:
    """Read a file: its dictionaries, lists and numbers, with arrays for tensors; a refusal begins with `problem`."""
    if is_no_file(Path(path)):
        raise error(f"{problem}: it is a folder, a device or a pipe")
    try:
        with zipfile.ZipFile(path) as archive:
            root = _checked(archive, Path(path).stat().st_size)
            return _Reader(archive.read(f"{root}data.pkl"), archive, root).load()
    except zipfile.BadZipFile as cause:
        raise error(f"{problem}: no archive of torch.save (those of torch before 1.6 are not read): {cause}") from cause
    except RecursionError as cause:
        raise error(f"{problem}: it is nested too deep") from cause
    except THROWN as cause:
        raise error(f"{problem}: {cause}") from cause


def _checked(archive: zipfile.ZipFile, size: int) -> str:
    """The folder inside the archive; what is larger than its file is refused."""
    members = archive.infolist()
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise ValueError("its members are compressed, which those of torch.save are not")
    if sum(member.file_size for member in members) > size:
        raise ValueError("its members are larger together than the file")
    pickles = [member for member in members if member.filename.endswith("data.pkl")]
    if len(pickles) != 1 or pickles[0].file_size > LARGEST_PICKLE:
        raise ValueError(f"it has {len(pickles)} members data.pkl, or a large one")
    root = pickles[0].filename.removesuffix("data.pkl")
    order = f"{root}byteorder"
    if order in archive.namelist() and archive.read(order) != b"little":
        raise ValueError("its numbers are not little-endian")
    return root


def write_torch(path: str | Path, value: Any) -> Path:
    """Write dictionaries, lists, tuples, texts, numbers and arrays as `torch.load(weights_only=True)` reads them."""
    writer = _Writer()
    data = b"\x80\x02" + writer.encode(value) + b"."
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        members = {"data.pkl": data, "byteorder": b"little", "version": b"3\n"}
        members |= {f"data/{i}": array.tobytes() for i, array in enumerate(writer.storages)}
        for name, content in members.items():
            # a fixed time: equal contents give equal files
            archive.writestr(zipfile.ZipInfo(f"archive/{name}"), content)
    write_atomic(Path(path), file.getvalue())
    return Path(path)


class _Writer:
    """Opcodes of pickle's protocol 2 for values; `pickle` itself names no class that is not installed."""

    def __init__(self) -> None:
        self.storages: list[NDArray[Any]] = []

    def encode(self, value: Any) -> bytes:
        """The opcodes that put a value on the stack."""
        if value is None:
            return b"N"
        if isinstance(value, bool | np.bool_):
            return b"\x88" if value else b"\x89"
        if isinstance(value, int | np.integer):
            return self._integer(int(value))
        if isinstance(value, float | np.floating):
            return b"G" + struct.pack(">d", value)
        if isinstance(value, str):
            text = value.encode()
            return b"X" + struct.pack("<I", len(text)) + text
        if isinstance(value, np.ndarray):
            return self._tensor(value)
        if isinstance(value, Mapping):
            pairs = b"".join(self.encode(key) + self.encode(one) for key, one in value.items())
            return b"}(" + pairs + b"u"
        if isinstance(value, list | tuple):
            entries = b"".join(map(self.encode, value))
            return b"(" + entries + b"t" if isinstance(value, tuple) else b"](" + entries + b"e"
        raise SpecFileError(f"a {type(value).__name__} has no place in a file of torch")

    def _integer(self, value: int) -> bytes:
        if -(2**31) <= value < 2**31:
            return b"J" + struct.pack("<i", value)
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        return b"\x8a" + bytes([len(data)]) + data

    def _tensor(self, array: NDArray[Any]) -> bytes:
        if array.dtype not in NAMES:
            raise SpecFileError(f"an array of {array.dtype} has no place in a file of torch: {', '.join(STORAGES)}")
        strides = tuple(prod(array.shape[i + 1 :]) for i in range(array.ndim))
        storage = (self.encode("storage"), b"ctorch\n" + NAMES[array.dtype].encode() + b"\n")
        place = (self.encode(str(len(self.storages))), self.encode("cpu"), self.encode(array.size))
        self.storages.append(np.ascontiguousarray(array))
        hooks = b"ccollections\nOrderedDict\n)R"
        call = b"c" + "\n".join(TENSOR).encode() + b"\n"
        numbers = self.encode(0) + self.encode(array.shape) + self.encode(strides) + self.encode(False)
        return call + b"((" + b"".join((*storage, *place)) + b"tQ" + numbers + hooks + b"tR"
