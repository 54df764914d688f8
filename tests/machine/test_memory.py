"""Memory that a process gives back."""

import ctypes
import mmap
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mionnx.machine import memory


def test_what_is_free_goes_back_to_the_system():
    """A process that frees much below something it keeps still holds the pages, until they are given back."""
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("not glibc")
    program = (
        "import psutil; from mionnx.machine import memory\n"
        "kept = [bytes(60_000) for _ in range(2000)]\n"
        "last = bytes(60_000)\n"
        "del kept\n"
        "before = psutil.Process().memory_info().rss; assert memory.release()\n"
        "assert before - psutil.Process().memory_info().rss > 50_000_000"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_resident_bytes_are_counted_and_those_of_files_apart(tmp_path):
    size, of_files = memory.resident()
    kept = np.ones(8_000_000)  # above 32 MiB no freed memory of the C library is used again
    after, of_files_after = memory.resident()
    assert 60_000_000 < after - size < 80_000_000
    assert abs(of_files_after - of_files) < 2_000_000
    assert kept.any()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_pages_of_files_are_let_go_where_an_engine_maps_them_and_nowhere_else(tmp_path):
    page, size = mmap.PAGESIZE, 16_000_000
    file, other = tmp_path / "weights", tmp_path / "base"
    for path in (file, other):
        path.write_bytes(np.arange(size // 4, dtype=np.int32).tobytes())

    def mapped(path: Path, begin: int, length: int) -> np.ndarray:
        with path.open("rb") as stream:
            private = mmap.mmap(stream.fileno(), length, mmap.MAP_PRIVATE, offset=begin)
        return np.frombuffer(private, np.int32)

    part, whole, base = mapped(file, page, 8_000_000), mapped(file, 0, size), mapped(other, 0, size)
    whole.flags.writeable = True
    whole[5] = -1  # in memory alone: as a program does that trains what it has loaded
    sums = [int(array.sum(dtype=np.int64)) for array in (part, whole, base)]
    before = memory.resident()[1]
    memory.let_go([(file, page + 100, 7_999_900)], [other])
    assert before - memory.resident()[1] > 22_000_000
    assert [int(array.sum(dtype=np.int64)) for array in (part, whole, base)] == sums
    assert whole[5] == -1
    memory.let_go([(tmp_path / "of no mapping", 0, 5)])
