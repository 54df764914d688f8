"""Files of `torch.save` without torch: what torch writes is read, what is written torch reads, and nothing is run."""

import zipfile
from collections import OrderedDict
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from mionnx import SpecFileError
from mionnx.machine.torch_file import read_torch, write_torch

PROBLEM = "x.pt is no file of these"


def contents() -> dict[str, object]:
    import torch

    return {
        "J": {0: torch.arange(6.0).reshape(2, 3).half(), 7: torch.ones(2, 2, dtype=torch.bfloat16).T},
        "transposed": torch.arange(6.0, dtype=torch.float64).reshape(2, 3).T,
        "part": torch.arange(12)[3:9].reshape(2, 3),
        "flags": torch.tensor([True, False]),
        "scalar": torch.tensor(3, dtype=torch.int32),
        "none": torch.zeros(0, 4),
        "facts": {"n": 2**40, "negative": -5, "x": 1.5, "text": "ä\n", "list": [1, (2, None, False)]},
        "ordered": OrderedDict(a=1),
    }


def plain(value):
    """Tensors as arrays."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.float().numpy() if value.dtype == torch.bfloat16 else value.numpy()
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


def same(one, other) -> None:
    if isinstance(other, np.ndarray):
        np.testing.assert_array_equal(np.asarray(one, np.float64), other.astype(np.float64))
        assert one.shape == other.shape
    elif isinstance(other, dict):
        assert [*one] == [*other]
        for key in other:
            same(one[key], other[key])
    elif isinstance(other, list):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            same(a, b)
    else:
        assert one == other
        assert type(one) is type(other)


def test_what_torch_writes_is_read(tmp_path):
    import torch

    torch.save(contents(), tmp_path / "x.pt")
    read = read_torch(tmp_path / "x.pt", PROBLEM)
    same(read, plain(contents()))
    assert read["J"][7].dtype == ml_dtypes.bfloat16
    assert read["J"][0].dtype == np.float16


def test_what_is_written_torch_reads(tmp_path):
    import torch

    value = {
        "J": {0: np.arange(6, dtype=np.float16).reshape(2, 3), 3: np.float32([[1]])},
        "n": [1, -(2**35), True, None],
    }
    value |= {"t": (1.5, "ü"), "wide": np.ones((2, 2), ml_dtypes.bfloat16), "empty": np.zeros((0, 2), np.int64)}
    write_torch(tmp_path / "x.pt", value)
    read = torch.load(tmp_path / "x.pt", weights_only=True)
    same(plain(read), plain({**value, "t": [1.5, "ü"]}) | {"wide": np.ones((2, 2), np.float32)})
    assert read["wide"].dtype == torch.bfloat16
    same(read_torch(tmp_path / "x.pt", PROBLEM)["J"], value["J"])
    first = (tmp_path / "x.pt").read_bytes()
    write_torch(tmp_path / "x.pt", value)
    assert (tmp_path / "x.pt").read_bytes() == first
    with pytest.raises(SpecFileError, match="has no place in a file of torch"):
        write_torch(tmp_path / "y.pt", {"a": np.array(["text"])})
    assert not (tmp_path / "y.pt").exists()


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def archive(path: Path, data: bytes, compression: int = zipfile.ZIP_STORED, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("archive/data.pkl", data)
        for name, content in members.items():
            file.writestr(f"archive/{name.replace('__', '/')}", content)
    return path


def tensor(shape: bytes, strides: bytes, offset: bytes = b"K\x00", count: bytes = b"K\x04") -> bytes:
    storage = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu" + count + b"tQ"
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage + offset + shape + strides + b"\x89}tR."


def test_nothing_that_a_file_names_is_run(tmp_path):
    import torch

    torch.save({"J": Evil(tmp_path / "was here")}, tmp_path / "evil.pt")
    with pytest.raises(SpecFileError, match=r"it names .*nothing was run"):
        read_torch(tmp_path / "evil.pt", PROBLEM)
    assert not (tmp_path / "was here").exists()
    for name in ("builtins\neval", "os\nsystem", "torch\nload", "numpy\nload", "torch._utils\n_rebuild_parameter"):
        data = b"\x80\x02c" + name.encode() + b"\n(X\x01\x00\x00\x001tR."
        with pytest.raises(SpecFileError, match="nothing was run"):
            read_torch(archive(tmp_path / "x.pt", data), PROBLEM)
    # what stands for the function that makes tensors takes no new attributes: BUILD with a state of slots
    changed = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(N}X\x08\x00\x00\x00__call__K\x01stb."
    with pytest.raises(SpecFileError):
        read_torch(archive(tmp_path / "x.pt", changed), PROBLEM)
    good = tensor(b"K\x02K\x02\x86", b"K\x02K\x01\x86")
    numbers = np.arange(4, dtype=np.float32)
    np.testing.assert_array_equal(
        read_torch(archive(tmp_path / "x.pt", good, data__0=numbers.tobytes()), PROBLEM), numbers.reshape(2, 2)
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (tensor(b"K\x02K\x03\x86", b"K\x03K\x01\x86"), "reaches outside its storage of 4"),
        (tensor(b"K\x04\x85", b"K\x02\x85"), "reaches outside"),
        (tensor(b"K\x04\x85", b"K\x01\x85", b"K\x01"), "reaches outside"),
        (tensor(b"J\xff\xff\xff\x7f\x85", b"K\x00\x85"), "reaches outside"),
        (tensor(b"K\x01\x85", b"J\xff\xff\xff\xff\x85"), "negative"),
        (tensor(b"K\x04\x85", b"K\x01\x85", count=b"K\x09"), "has 4 numbers instead of 9"),
        (b"\x80\x02X\x01\x00\x00\x00aQ.", "values to unpack"),
        (b"", "Ran out of input"),
        (b"\x80\x02}", "Ran out of input"),
        (b"(" * 100_000, "Ran out of input"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, data, message):
    path = archive(tmp_path / "x.pt", data, data__0=np.ones(4, np.float32).tobytes())
    with pytest.raises(SpecFileError, match=message) as refusal:
        read_torch(path, PROBLEM)
    assert str(refusal.value).startswith(PROBLEM)


def test_another_file_is_refused(tmp_path):
    import torch

    torch.save({"a": 1}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(SpecFileError, match=r"torch before 1\.6"):
        read_torch(tmp_path / "old.pt", PROBLEM)
    with pytest.raises(SpecFileError, match="folder"):
        read_torch(tmp_path, PROBLEM)
    with pytest.raises(SpecFileError, match="No such file"):
        read_torch(tmp_path / "nothing.pt", PROBLEM)
    bomb = archive(tmp_path / "bomb.pt", b"\x80\x02}.", zipfile.ZIP_DEFLATED, data__0=bytes(10**6))
    with pytest.raises(SpecFileError, match="compressed"):
        read_torch(bomb, PROBLEM)
    big = archive(tmp_path / "big.pt", b"\x80\x02}.", byteorder=b"big")
    with pytest.raises(SpecFileError, match="not little-endian"):
        read_torch(big, PROBLEM)
    torch.save(contents(), tmp_path / "x.pt")
    whole = (tmp_path / "x.pt").read_bytes()
    for length in (0, 3, 100, len(whole) // 2, len(whole) - 30):
        (tmp_path / "cut.pt").write_bytes(whole[:length])
        with pytest.raises(SpecFileError):
            read_torch(tmp_path / "cut.pt", PROBLEM)
