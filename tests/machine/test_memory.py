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


def test_bytes_of_no_file_are_counted():
    before = memory.anonymous()
    kept = np.ones(8_000_000)  # above 32 MiB no freed memory of the C library is used again
    assert 60_000_000 < memory.anonymous() - before < 80_000_000
    assert kept.any()
