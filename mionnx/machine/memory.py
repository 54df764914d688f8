"""How much memory is left, so that a request that cannot fit is refused before anything runs; and giving it back."""

import ctypes
import sys
from functools import cache
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")


def available() -> int:
    """Bytes that can still be used: of the machine, or of the container around this process where that has less."""
    free = int(psutil.virtual_memory().available)
    try:
        limit, used = ((CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return free if limit == "max" else max(0, min(free, int(limit) - int(used)))
    except (OSError, ValueError):  # no cgroup, or an older kind
        return free


@cache
def total() -> int:
    """Bytes that this machine has, or the container around this process."""
    machine = int(psutil.virtual_memory().total)
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        return machine if limit == "max" else min(machine, int(limit))
    except (OSError, ValueError):
        return machine


def release() -> bool:
    """Give back to the system what this process has freed and its C library keeps for later.

    Returns:
        whether there was something to give back; False where the C library is not glibc, which alone has such a call.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    return trim is not None and bool(trim(0))


def format_bytes(size: int) -> str:
    """Bytes for people: "1.5 GiB"."""
    number, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number < 1024 or unit == "TiB":
            break
        number /= 1024
    return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
