"""Memory that a process gives back."""

import ctypes
import subprocess
import sys

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


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_pages_of_mapped_files_go_back_to_the_page_cache(tmp_path):
    """Read pages are given back, and read again; mappings written to, or of others too, keep what they have."""
    size, written = 8_000_000, tmp_path / "written"
    for path in (tmp_path / "read", written):
        np.arange(size, dtype=np.uint8).tofile(path)
    read = np.memmap(tmp_path / "read", np.uint8, "c")
    private = np.memmap(written, np.uint8, "c")
    private[:5] = 77
    total = int(read.sum()) + int(private.sum())
    assert memory.release_mapped([tmp_path / "read"], 2 * size) == 0
    assert memory.release_mapped([tmp_path / "read", written], size // 2) >= size * 0.9
    assert memory.release_mapped([tmp_path / "read"], 0) < size // 10
    assert int(read.sum()) + int(private.sum()) == total
    assert memory.release_mapped([tmp_path / "elsewhere"], 0) == 0
    np.arange(size, dtype=np.uint8).tofile(tmp_path / "shared")
    shared = np.memmap(tmp_path / "shared", np.uint8, "r")
    assert int(shared.sum()) > 0
    assert memory.release_mapped([tmp_path / "shared"], 0) == 0


def test_bytes_of_no_file_are_counted():
    before = memory.anonymous()
    kept = np.ones(8_000_000)  # above 32 MiB no freed memory of the C library is used again
    assert 60_000_000 < memory.anonymous() - before < 80_000_000
    assert kept.any()
