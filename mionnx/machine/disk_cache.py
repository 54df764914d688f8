"""Disk cache: folders that are built atomically, checked before use, and rebuilt when damaged.

An entry is `{root}/{kind}/{key}/` with its files and `manifest.json`: their sizes and sha256, and what the entry is.

1. It is built in a folder of another name and moved into place, so that a killed process leaves nothing half-written.
2. `{key}.lock` lets one process build while the others wait for it.
3. Before the first use in a process every file is hashed; of files above 256 MiB, those whose size or time of change is
   not what the manifest says (`mionnx cache verify` hashes all). A damaged entry is removed, built again, and said.
4. A process that uses an entry leaves a mark in `{key}.pins/`; what a live process uses is never removed.
5. When the store is larger than `MIONNX_CACHE_LIMIT` (20 GiB), the entries used longest ago go.
6. What an interrupted sweep has computed is one file, `{root}/sweeps/{key}.safetensors`, an entry without a manifest:
   it is checked when the sweep goes on, and a sweep that runs writes it again if it is removed.
7. Where the store cannot be written, mionnx runs without it, and says so once.
"""

import hashlib
import json
import os
import shutil
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import psutil
from filelock import FileLock, Timeout

from mionnx.errors import InputError
from mionnx.machine.files import atomic_path

MANIFEST = "manifest.json"
KINDS = ("bases", "graphs")
SWEEPS = "sweeps"
LARGE = 2**28
DEFAULT_LIMIT = 20 * 2**30
UNITS = {"KB": 2**10, "MB": 2**20, "GB": 2**30, "TB": 2**40, "B": 1, "": 1}
A_DAY = 86400.0
Build = Callable[[Path], dict[str, Any]]


class StoreWarning(UserWarning):
    """A damaged entry, or a cache folder that cannot be used."""


@dataclass(frozen=True)
class CacheEntry:
    """One entry on disk."""

    path: Path

    @property
    def kind(self) -> str:
        """Kind of entry: "bases", "graphs" or "sweeps"."""
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
        """Bytes on disk."""
        return sum(file.stat().st_size for file in _files(self.path))

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
        return any(_alive(mark) for mark in _files(self.pins))

    def faults(self, thorough: bool = False) -> list[str]:
        """Check its files against the manifest, and list the faults.

        Args:
            thorough: hash large files too, even if their size and time of change are as they were.
        """
        if self.kind == SWEEPS:
            return []
        manifest = self.manifest
        files = manifest.get("files")
        if not isinstance(files, dict):
            return [f"{MANIFEST} is missing or damaged"]
        if manifest.get("sha256") != _digest(manifest):
            return [f"{MANIFEST} was changed"]
        found = {str(file.relative_to(self.path)) for file in _files(self.path)} - {MANIFEST}
        faults = [f"{name} is missing" for name in files.keys() - found]
        faults += [f"{name} does not belong to it" for name in found - files.keys()]
        for name in found & files.keys():
            fact, at = files[name], (self.path / name).stat()
            untouched = at.st_mtime_ns == fact["changed"] and at.st_size > LARGE and not thorough
            if at.st_size != fact["size"] or not (untouched or _sha256(self.path / name) == fact["sha256"]):
                faults.append(f"{name} was changed")
        return faults


class DiskCache:
    """All entries under one root.

    Attributes:
        root: the store's folder.
        limit: bytes that it may hold.
    """

    def __init__(self, root: Path, limit: int | None = None) -> None:
        self.root = root
        self.limit = _limit() if limit is None else limit
        self._checked: set[Path] = set()

    def find(self, kind: str, key: str) -> CacheEntry | None:
        """Find an undamaged entry; a damaged one is removed with a warning."""
        entry = CacheEntry(self.root / kind / key)
        try:
            if not entry.path.is_dir():
                return None
            with self._lock(entry):
                return entry if self._usable(entry) else None
        except (OSError, Timeout) as error:
            _say(f"the store {self.root} cannot be read ({error}): running without it")
            return None

    def get(self, kind: str, key: str, build: Build) -> CacheEntry | None:
        """Find an entry, or build it; None if the cache cannot be written.

        Args:
            kind, key: its address; the key is a hash of everything that the result depends on.
            build: writes the files into a folder, and returns facts for the manifest.
        """
        entry = CacheEntry(self.root / kind / key)
        try:
            entry.path.parent.mkdir(parents=True, exist_ok=True)
            with self._lock(entry):
                if not self._usable(entry):
                    self._build(entry, build)
                    self._checked.add(entry.path)
                    self._mark(entry)
        except (OSError, Timeout) as error:
            _say(f"the store {self.root} cannot be used ({error}): running without it")
            return None
        self.prune()
        return entry

    def _lock(self, entry: CacheEntry) -> FileLock:
        return FileLock(f"{entry.path}.lock")

    def _usable(self, entry: CacheEntry) -> bool:
        """Whether the entry is there and undamaged; marks it as used."""
        if not entry.path.is_dir():
            return False
        if entry.path not in self._checked:
            faults = entry.faults()
            if faults:
                _say(f"the store's entry {entry.kind}/{entry.path.name} is damaged ({faults[0]}): it is made again")
                shutil.rmtree(entry.path)
                return False
            self._checked.add(entry.path)
        self._mark(entry)
        return True

    def _mark(self, entry: CacheEntry) -> None:
        entry.pins.mkdir(exist_ok=True)
        me = psutil.Process()
        (entry.pins / f"{socket.gethostname()}@{me.pid}@{me.create_time():.2f}").touch()
        os.utime(entry.path)

    def _build(self, entry: CacheEntry, build: Build) -> None:
        for left in entry.path.parent.glob(f".{entry.path.name}.*.partial"):
            shutil.rmtree(left, ignore_errors=True)  # of a process that was killed: nobody else builds under this lock
        with atomic_path(entry.path, OSError) as partial:
            partial.mkdir()
            facts = build(partial)
            files = {
                str(file.relative_to(partial)): {
                    "size": file.stat().st_size,
                    "changed": file.stat().st_mtime_ns,
                    "sha256": _sha256(file),
                }
                for file in _files(partial)
            }
            manifest: dict[str, Any] = {"what": facts, "files": files, "made": time.time()}
            manifest["sha256"] = _digest(manifest)
            (partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
            _sync(partial)

    def all(self) -> list[CacheEntry]:
        """Every entry, the one used longest ago first."""
        folders = [path for kind in KINDS for path in (self.root / kind).glob("*") if path.is_dir()]
        found = [CacheEntry(path) for path in folders if not path.name.startswith(".") and path.suffix != ".pins"]
        found += [CacheEntry(path) for path in (self.root / SWEEPS).glob("*.safetensors") if path.is_file()]
        return sorted(found, key=lambda entry: entry.used)

    def prune(self, limit: int | None = None) -> list[CacheEntry]:
        """Remove the least recently used entries until the cache is within its limit.

        An entry in use stays.

        Returns:
            the removed entries.
        """
        limit = self.limit if limit is None else limit
        entries, removed = self.all(), []
        total = sum(entry.size for entry in entries)
        for entry in entries:
            if total <= limit:
                break
            size = entry.size
            if self.remove(entry):
                removed.append(entry)
                total -= size
        return removed

    def remove(self, entry: CacheEntry) -> bool:
        """Remove an entry, unless a live process uses it.

        Returns:
            whether it was removed.
        """
        try:
            if entry.kind == SWEEPS:
                entry.path.unlink()
                return True
            with FileLock(f"{entry.path}.lock", timeout=0):
                if entry.in_use:
                    return False
                doomed = entry.path.with_name(f".{entry.path.name}.{os.getpid()}.partial")
                entry.path.rename(doomed)  # at once: nobody finds half of it
                shutil.rmtree(doomed, ignore_errors=True)
                shutil.rmtree(entry.pins, ignore_errors=True)
        except (OSError, Timeout):
            return False
        self._checked.discard(entry.path)
        return True


def _files(folder: Path) -> Iterator[Path]:
    try:
        yield from (path for path in [folder, *sorted(folder.rglob("*"))] if path.is_file())
    except OSError:
        return


def _alive(mark: Path) -> bool:
    """Whether the process of a mark still runs; one of another machine counts for a day."""
    host, _, rest = mark.name.partition("@")
    pid, _, begun = rest.partition("@")
    try:
        if host != socket.gethostname():
            return time.time() - mark.stat().st_mtime < A_DAY
        alive = f"{psutil.Process(int(pid)).create_time():.2f}" == begun
    except (psutil.Error, ValueError, OSError):
        alive = False
    if not alive:
        mark.unlink(missing_ok=True)
    return alive


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(manifest: dict[str, Any]) -> str:
    text = json.dumps({key: value for key, value in manifest.items() if key != "sha256"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _sync(folder: Path) -> None:
    """Flush the files to disk before the entry gets its name."""
    for path in _files(folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def size_of(text: str) -> int:
    """Parse a size such as "20GB" into bytes.

    Raises:
        InputError: it is none.
    """
    number = text.strip().upper().rstrip("KMGTB ")
    unit = text.strip().upper()[len(number) :].strip()
    try:
        return int(float(number) * UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        raise InputError(f"{text!r} is no size; give one such as 20GB") from None


def _limit() -> int:
    """`MIONNX_CACHE_LIMIT` in bytes."""
    text = os.environ.get("MIONNX_CACHE_LIMIT")
    return size_of(text) if text else DEFAULT_LIMIT


_said: set[str] = set()
_saying = Lock()


def _say(message: str) -> None:
    """Warn, once for each message."""
    with _saying:
        if message in _said:
            return
        _said.add(message)
    warnings.warn(message, StoreWarning, stacklevel=2)
