"""Free and total memory of this machine or container, to refuse what cannot fit before it runs."""

import ctypes
import sys
from functools import cache
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
PROCESS = Path("/proc/self")


def available() -> int:
    """Free bytes of the machine, or of its container if that has less."""
    free = int(psutil.virtual_memory().available)
    try:
        limit, used = ((CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        # the machine may have less free than the container's limit leaves, or the other way round
        return free if limit == "max" else max(0, min(free, int(limit) - int(used)))
    except (OSError, ValueError):  # no cgroup, or an older kind
        return free


@cache
def total() -> int:
    """Bytes of memory of the machine, or of its container if that has less."""
    machine = int(psutil.virtual_memory().total)
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        return machine if limit == "max" else min(machine, int(limit))
    except (OSError, ValueError):
        return machine


def release() -> bool:
    """Return freed memory that the C library holds back; False without glibc, the one that has such a call."""
    # glibc keeps freed pages for later allocations, unless it is asked
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    return trim is not None and bool(trim(0))


def anonymous() -> int:
    """Resident bytes of this process, those of mapped files not counted on Linux."""
    try:
        lines = (PROCESS / "status").read_text().splitlines()
        # kB, which are 1024 bytes there
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))
    except (OSError, StopIteration):
        return int(psutil.Process().memory_info().rss)


def format_bytes(size: int) -> str:
    """Format a number of bytes: "1.5 GiB"."""
    number, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number < 1024 or unit == "TiB":
            break
        number /= 1024
    return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
