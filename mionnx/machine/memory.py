"""Free and total memory of this machine or container, to refuse what cannot fit before it runs."""

import ctypes
import gc
import os
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from threading import RLock

import psutil

CGROUP = Path("/sys/fs/cgroup")
PROCESS = Path("/proc/self")
MAPPINGS = Path("/proc/sys/vm/max_map_count")
DONT_NEED = 4  # of madvise


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


@cache
def most_mappings() -> int:
    """Return how many pieces of files and of memory a process may map; a number beyond any use where none is set."""
    try:
        return int(MAPPINGS.read_text())
    except (OSError, ValueError):
        return sys.maxsize


def release() -> bool:
    """Return freed memory that the C library holds back; False without glibc, the one that has such a call."""
    # glibc keeps freed pages for later allocations, unless it is asked
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    return trim is not None and bool(trim(0))


def resident() -> tuple[int, int]:
    """Resident bytes of this process, and those of mapped files among them, a page once for each mapping.

    Where the system does not tell them apart, those of files are 0.
    """
    try:
        # looked at in every call, and Python's own files take five times as long as the system's
        file = os.open(f"{PROCESS}/statm", os.O_RDONLY)
        try:
            _, pages, of_files, *_ = os.read(file, 256).split()
        finally:
            os.close(file)
        return int(pages) * os.sysconf("SC_PAGE_SIZE"), int(of_files) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return int(psutil.Process().memory_info().rss), 0


mapped = RLock()  # held while pages are let go, and by whatever unmaps a file that an engine maps
_mapping = [0]  # how many are opening files at this moment


@contextmanager
def mapping() -> Iterator[None]:
    """Map and unmap files: no pages are let go meanwhile."""
    with mapped:
        _mapping[0] += 1
    try:
        yield
    finally:
        with mapped:
            _mapping[0] -= 1


Part = tuple[Path, int, int]  # of a file: where it begins, and its length in bytes


def let_go(parts: Collection[Part], files: Collection[Path] = ()) -> None:
    """Take pages of mapped files out of this process.

    They stay in the system's cache of files: what is read again is there again, 64 KiB at a time (measured: 17 ms for
    0.5 GB). Nothing is let go while a thread maps files (`mapping`), and none may unmap one meanwhile (`mapped`): what
    came to lie at its addresses would be lost.

    Args:
        parts: what an engine maps, each by itself. Other mappings of these files stay: torch maps a whole file, and may
            write into it in memory, which would be lost.
        files: files that engines alone map, and never write to.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    real = {file: os.path.realpath(file) for file in {file for file, _, _ in parts}}
    spans = {(real[file], begin - begin % page, -(-(begin + length) // page) * page) for file, begin, length in parts}
    whole_files = {os.path.realpath(file) for file in files}
    names = {*real.values(), *whole_files}
    with mapped, _without_collection(), suppress(OSError):
        if _mapping[0]:
            return
        lines = (PROCESS / "maps").read_text().splitlines()
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for line in lines:
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and (name := fields[5]) in names:
                begin, end = (int(address, 16) for address in fields[0].split("-"))
                offset = int(fields[2], 16)
                if name in whole_files or (name, offset, offset + end - begin) in spans:
                    advise(begin, end - begin, DONT_NEED)


@contextmanager
def _without_collection() -> Iterator[None]:
    """Collect no garbage: it might be what maps a file."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def format_bytes(size: int) -> str:
    """Format a number of bytes: "1.5 GiB"."""
    number, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number < 1024 or unit == "TiB":
            break
        number /= 1024
    return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
