"""One entry of the disk cache: its files, its size, its marks of use, its faults."""

import hashlib
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

MANIFEST = "manifest.json"
MODELS, SWEEPS = "models", "sweeps"  # kinds without a manifest
LARGE = 2**28
A_DAY = 86400.0
CLOCK = 2.0  # seconds by which the time that a process began moves when the machine's clock is set


@dataclass(frozen=True)
class CacheEntry:
    """One entry on disk."""

    path: Path

    @property
    def kind(self) -> str:
        """Kind of entry: "models", "bases", "graphs", "npm" or "sweeps"."""
        return self.path.parent.name

    @property
    def manifest(self) -> dict[str, Any]:
        """Content of `manifest.json`; empty if it cannot be read."""
        try:
            found = json.loads((self.path / MANIFEST).read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def size(self) -> int:
        """Bytes on disk that it alone keeps; see `shared`."""
        return bytes_kept(self.stats)

    @property
    def shared(self) -> int:
        """Bytes of files with a name elsewhere.

        An exported model's weights are often the checkpoint's own files.
        """
        return sum(found.st_size for found in self.stats) - self.size

    @property
    def stats(self) -> list[os.stat_result]:
        """Size, time of change and number of names of each of its files."""
        return [*_stats(self.path)]

    @property
    def used(self) -> float:
        """When it was last used, in seconds since the epoch."""
        try:
            return self.path.stat().st_mtime
        except OSError:
            return 0.0

    @property
    def pins(self) -> Path:
        """Folder of the marks of processes that use it."""
        return self.path.with_name(f"{self.path.name}.pins")

    @property
    def in_use(self) -> bool:
        """Whether a live process uses it."""
        return any(_alive(mark) for mark in [*files_in(self.pins)])

    @property
    def used_by_others(self) -> bool:
        """Whether a live process other than this one uses it."""
        me = f"{socket.gethostname()}@{os.getpid()}@"
        return any(_alive(mark) for mark in [*files_in(self.pins)] if not mark.name.startswith(me))

    def mark(self) -> None:
        """Mark it as used by this process, now.

        Raises:
            OSError: the store cannot be written.
        """
        self.pins.mkdir(exist_ok=True)
        me = psutil.Process()
        (self.pins / f"{socket.gethostname()}@{me.pid}@{me.create_time():.2f}").touch()
        os.utime(self.path)

    def faults(self, thorough: bool = False) -> list[str]:
        """Check its files against the manifest, and list the faults.

        Exported models and sweeps have no manifest: they carry checksums of their own.

        Args:
            thorough: hash large files too, even if their size and time of change are as they were.
        """
        if self.kind in (MODELS, SWEEPS):
            return []
        manifest = self.manifest
        files = manifest.get("files")
        if not isinstance(files, dict):
            return [f"{MANIFEST} is missing or damaged"]
        if manifest.get("sha256") != digest(manifest):
            return [f"{MANIFEST} was changed"]
        found = {str(file.relative_to(self.path)) for file in files_in(self.path)} - {MANIFEST}
        faults = [f"{name} is missing" for name in files.keys() - found]
        faults += [f"{name} does not belong to it" for name in found - files.keys()]
        for name in found & files.keys():
            fact, at = files[name], (self.path / name).stat()
            untouched = at.st_mtime_ns == fact["changed"] and at.st_size > LARGE and not thorough
            if at.st_size != fact["size"] or not (untouched or sha256(self.path / name) == fact["sha256"]):
                faults.append(f"{name} was changed")
        return faults


def bytes_kept(stats: Iterable[os.stat_result]) -> int:
    """Bytes that files keep on the disk, each file counted once.

    One with a name outside of them counts for nothing: removing it here gives nothing back.
    """
    found = [*stats]
    names = Counter((one.st_dev, one.st_ino) for one in found)
    sizes = {(one.st_dev, one.st_ino): one.st_size for one in found if names[one.st_dev, one.st_ino] >= one.st_nlink}
    return sum(sizes.values())


def files_in(path: Path) -> Iterator[Path]:
    """The files of a folder, or the file itself; none where nothing can be read."""
    try:
        yield from (file for file in [path, *sorted(path.rglob("*"))] if file.is_file())
    except OSError:
        return


def _stats(path: Path) -> Iterator[os.stat_result]:
    for file in files_in(path):
        with suppress(OSError):  # removed by another process
            yield file.stat()


def _alive(mark: Path) -> bool:
    """Whether the process of a mark still runs; one of another machine counts for a day."""
    host, _, rest = mark.name.partition("@")
    pid, _, begun = rest.partition("@")
    try:
        if host != socket.gethostname():
            return time.time() - mark.stat().st_mtime < A_DAY
        alive = abs(psutil.Process(int(pid)).create_time() - float(begun)) < CLOCK
    except (psutil.Error, ValueError, OSError):
        alive = False
    if not alive:
        with suppress(OSError):
            mark.unlink(missing_ok=True)
    return alive


def sha256(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(manifest: dict[str, Any]) -> str:
    """SHA-256 of a manifest without its own."""
    text = json.dumps({key: value for key, value in manifest.items() if key != "sha256"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
