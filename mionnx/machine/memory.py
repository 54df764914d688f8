"""Free and total memory of this machine or container, to refuse what cannot fit before it runs."""

import ctypes
import sys
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
PROCESS = Path("/proc/self")
DONT_NEED = 4  # Linux' MADV_DONTNEED
PRIVATE = "rw-p"  # access to a mapping that this process alone may write to


def available() -> int:
    """Free bytes of the machine, or of its container if that has less."""
    free = int(psutil.virtual_memory().available)
    try:
        limit, used = ((CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
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
    """Return freed memory to the system that the C library holds back.

    Returns:
        whether any was returned; False without glibc, the one C library with such a call.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    return trim is not None and bool(trim(0))


def anonymous() -> int:
    """Resident bytes of this process, those of mapped files not counted on Linux."""
    try:
        lines = (PROCESS / "status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))
    except (OSError, StopIteration):
        return int(psutil.Process().memory_info().rss)


def release_mapped(files: Collection[Path], keep: int) -> int:
    """Return pages of mapped files to the page cache if more than `keep` bytes are held.

    The mappings stay: a page that is read again is found in the page cache (some 0.1 s a gigabyte). Only private
    mappings that may be written to, as sessions have them, and never were, are touched, and only on Linux. No other
    thread may unmap them meanwhile: what it maps at their address instead would be lost.

    Returns:
        bytes given back.
    """
    names = {str(file.resolve()) for file in files}
    held = [part for part in _mappings() if part[2] in names]
    total = sum(size for _, _, _, size in held)
    if total <= keep:
        return 0
    advise = ctypes.CDLL(None).madvise
    for start, length, _, _ in held:
        advise(ctypes.c_void_p(start), ctypes.c_size_t(length), DONT_NEED)
    return total


def _mappings() -> Iterator[tuple[int, int, str, int]]:
    """Start, length, file and bytes (PSS) of private mappings of files, never written to."""
    try:
        parts = (PROCESS / "smaps").read_text().split("VmFlags:")
    except OSError:  # another system
        return
    for part in parts:
        lines = part.splitlines()
        first = next((number for number, line in enumerate(lines) if "-" in line.partition(" ")[0]), None)
        if first is None:
            continue
        address, access, _, _, _, *path = lines[first].split(maxsplit=5)
        sizes = {key: int(value.split()[0]) for key, _, value in (line.partition(":") for line in lines[first + 1 :])}
        if access == PRIVATE and path and sizes.get("Pss") and not sizes.get("Anonymous"):
            start, end = (int(number, 16) for number in address.split("-"))
            yield start, end - start, path[0], sizes["Pss"] * 1024


def format_bytes(size: int) -> str:
    """Format a number of bytes: "1.5 GiB"."""
    number, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number < 1024 or unit == "TiB":
            break
        number /= 1024
    return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
