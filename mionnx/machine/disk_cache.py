"""Disk cache: folders that are built atomically, checked before use, and rebuilt when damaged.

An entry is `{root}/{kind}/{key}/` with its files and `manifest.json`: their sizes and sha256, kind and key, and what
the entry is.

1. It is built in a folder of another name and moved into place. What a killed process leaves of it is removed when the
   next entry is built, or by `mionnx cache prune|clear` (`leftovers`).
2. `{key}.lock` lets one process build while the others wait for it.
3. Before the first use in a process every file is hashed; of files above 256 MiB, those whose size or time of change is
   not what the manifest says (`mionnx cache verify` hashes all). A damaged entry is removed, built again, and said.
4. A process that uses an entry leaves a mark in `{key}.pins/`; what a live process uses is never removed.
5. When the store is larger than `MIONNX_CACHE_LIMIT` (20 GiB), the entries used longest ago go. A file that has a name
   outside of the store too, as the weights of a checkpoint, takes no room of it. For graphs and bases, entries are
   counted once a minute, as that takes 0.2 ms each, and where what was built since may pass the limit.
6. What an interrupted sweep has computed is one file, `{root}/sweeps/{key}.safetensors`, an entry without a manifest:
   it is checked when the sweep goes on, and a sweep that runs writes it again if it is removed.
7. An exported model, `{root}/models/{name}-{key}/`, is an entry without a manifest: its graph has hashes of its files.
8. Where the store cannot be written, mionnx runs without it, and says so once.
9. The folder may hold what others put there. An entry has the file `.mionnx.entry` (a sweep its metadata) with the kind
   and key that it was made for. What has none, or lies elsewhere than it says, is never listed, counted or removed; nor
   is what a link leads to: a kind's folder or an entry that is one. Where an entry is to stand, one that says another
   key is made again, and anything else is left, and done without.
"""

import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import Any

from filelock import FileLock, Timeout

from mionnx.errors import InputError
from mionnx.machine.cache_entry import (
    MANIFEST,
    MARK,
    MODELS,
    SWEEP_NAME,
    SWEEPS,
    CacheEntry,
    bytes_kept,
    digest,
    files_in,
    sha256,
    unlinked,
)
from mionnx.machine.leftovers import LOCK_FILE, new_folder, partial_path, remove_leftovers

ENTRY_KINDS = (MODELS, "bases", "graphs", "npm")
IN_USE = "in use"
DEFAULT_LIMIT = 20 * 2**30
UNITS = {"KB": 2**10, "MB": 2**20, "GB": 2**30, "TB": 2**40, "B": 1, "": 1}
A_MINUTE = 60.0  # seconds
UNUSABLE = (OSError, Timeout, NotImplementedError)  # the last: a file system without locks
Build = Callable[[Path], dict[str, Any]]
# of each store: when all its entries were counted, and their bytes with those of what this process has built since
_counts: dict[Path, tuple[float, int]] = {}


class StoreWarning(UserWarning):
    """A damaged entry, or a cache folder that cannot be used."""


class DiskCache:
    """All entries under one root."""

    def __init__(self, root: Path, limit: int | None = None) -> None:
        self.root = root
        self.limit = _limit() if limit is None else limit  # bytes that it may hold
        self._checked: set[Path] = set()

    def find(self, kind: str, key: str) -> CacheEntry | None:
        """Find an undamaged entry; a damaged one is removed with a warning."""
        entry = CacheEntry(self.root / kind / key)
        try:
            if not entry.path.is_dir() or entry.path.parent.is_symlink():
                return None
            with self._lock(entry):
                return entry if self._usable(entry) else None
        except UNUSABLE as error:
            self.say_unusable(error, "running without it")
            return None

    def get(self, kind: str, key: str, build: Build) -> CacheEntry | None:
        """Find the entry of a key, a hash of all that it depends on, or build it; None if it cannot be written."""
        # `build` writes the files into a folder, and returns facts for the manifest.
        entry, is_new = CacheEntry(self.root / kind / key), False
        try:
            self.kind_folder(kind)
            with self._lock(entry):
                if not self._usable(entry):
                    self._build(entry, build)
                    self._checked.add(entry.path)
                    is_new = True
                    entry.mark()
        except UNUSABLE as error:
            self.say_unusable(error, "running without it")
            return None
        if is_new:
            self._limit_growth(entry)
        return entry

    def folder(self, kind: str, key: str, make: Callable[[Path], None], otherwise: str) -> Path | None:
        """Folder of an entry without a manifest, made if it is not there; None if the store cannot be written."""
        # `make` writes the files into an empty folder, and its errors pass; a warning says what is done `otherwise`.
        entry, is_new = CacheEntry(self.root / kind / key), False
        try:
            self.kind_folder(kind)
            with self._lock(entry):
                if not self._usable(entry):
                    self.tidy()
                    with _new_entry(entry) as partial:
                        make(partial)
                    is_new = True
                    entry.mark()
        except UNUSABLE as error:
            there = self._holds(entry)
            self.say_unusable(error, "what is in it is used as it is" if there else otherwise)
            return entry.path if there else None
        if is_new:
            self.prune()
        return entry.path

    def use(self, folder: Path) -> None:
        """Mark an entry that was found by its path as used by this process."""
        # A folder outside of this store is left as it is.
        entry = CacheEntry(folder.resolve())
        if not self._holds(entry):
            return
        with suppress(*UNUSABLE), self._lock(entry):  # marks only keep an entry: a model opens without one
            entry.mark()

    def say_unusable(self, error: Exception, otherwise: str, subject: str = "") -> None:
        """Warn once for each reason that the store is of no use, and of what is done otherwise."""
        # by number: two messages of one reason differ in the path
        number = getattr(error, "errno", None)
        key = f"{self.root} {number} {subject}" if number else ""
        _say(f"the store {self.root} cannot be used ({error}): {otherwise}", key)

    def kind_folder(self, kind: str) -> Path:
        """The folder of the entries of a kind, made if it is not there; a link is refused."""
        folder = self.root / kind
        if folder.is_symlink():
            raise OSError(f"{folder} is a link, which is not followed: set MIONNX_CACHE, or link the whole store")
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _lock(self, entry: CacheEntry, timeout: float = -1) -> FileLock:
        return FileLock(unlinked(entry.path.with_name(f"{entry.path.name}.lock")), timeout=timeout)

    def _usable(self, entry: CacheEntry) -> bool:
        """Whether the entry is there and undamaged; marks it as used."""
        if not os.path.lexists(entry.path):
            return False
        if entry.made_for is None:
            raise OSError(f"mionnx did not make {entry.path}: it is left as it is")
        if entry.path not in self._checked:  # files are hashed once a process
            faults = entry.faults()
            if faults:
                _say(f"the store's entry {entry.address} is damaged ({faults[0]}): it is made again")
                entry.clear()
                return False
            self._checked.add(entry.path)
        entry.mark()
        return True

    def _build(self, entry: CacheEntry, build: Build) -> None:
        self.tidy()
        with _new_entry(entry) as partial:
            facts = build(partial)
            files = {
                str(file.relative_to(partial)): {
                    "size": file.stat().st_size,
                    "changed": file.stat().st_mtime_ns,
                    "sha256": sha256(file),
                }
                for file in files_in(partial)
                if file.name != LOCK_FILE
            }
            manifest: dict[str, Any] = {"of": entry.address, "what": facts, "files": files, "made": time.time()}
            manifest["sha256"] = digest(manifest)
            (partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
            _sync(partial)  # a machine that stops must not leave a name without its contents

    def all(self) -> list[CacheEntry]:
        """Every entry, the one used longest ago first."""
        entries = [CacheEntry(path) for kind in (*ENTRY_KINDS, SWEEPS) for path in self._in(kind)]
        return sorted((entry for entry in entries if entry.made_for == entry.address), key=lambda entry: entry.used)

    def _in(self, kind: str) -> list[Path]:
        """The paths in the folder of a kind; none if that is a link."""
        folder = self.root / kind
        return [] if folder.is_symlink() else [*folder.glob("*")]

    @property
    def size(self) -> int:
        """Bytes that all entries keep on the disk."""
        return bytes_kept(chain(*(entry.stats for entry in self.all())))

    def prune(self, limit: int | None = None) -> list[CacheEntry]:
        """Remove the least recently used entries, but for those in use, until the cache is within its limit."""
        limit = self.limit if limit is None else limit
        self.tidy()
        stats = {entry: entry.stats for entry in self.all()}
        removed, size = [], bytes_kept(chain(*stats.values()))
        # removed one by one until the rest fits: files that two entries share come free with the second
        for entry in [*stats]:
            if size <= limit:
                break
            if not self.remove(entry):
                removed.append(entry)
                del stats[entry]
                size = bytes_kept(chain(*stats.values()))
        _counts[self.root] = time.monotonic(), size
        return removed

    def _limit_growth(self, entry: CacheEntry) -> None:
        """Prune where the store may have grown beyond its limit by an entry."""
        counted, size = _counts.get(self.root, (-math.inf, 0))
        size += entry.size
        if size > self.limit or time.monotonic() > counted + A_MINUTE:
            self.prune()
        else:
            _counts[self.root] = counted, size

    def tidy(self) -> int:
        """Remove what killed processes left unfinished, and count it."""
        folders = [self.root / kind for kind in (*ENTRY_KINDS, SWEEPS)]
        return sum(remove_leftovers(one, (MARK,), SWEEP_NAME) for one in folders if not one.is_symlink())

    def discard(self, folder: Path, reason: str) -> bool:
        """Remove a damaged entry and say so, unless it is another store's or another process uses it."""
        entry = CacheEntry(folder.resolve())
        if not self._holds(entry) or self.remove(entry, mine=True):
            return False
        _say(f"the store's entry {entry.address} is damaged ({reason}): it is made again")
        return True

    def _holds(self, entry: CacheEntry) -> bool:
        inside = entry.path.resolve().parent.parent == self.root.resolve() and entry.kind in ENTRY_KINDS
        return inside and entry.made_for == entry.address

    def remove(self, entry: CacheEntry, mine: bool = False) -> str:
        """Remove an entry, unless a live process uses it (`mine`: one but this); returns why it stays, or ""."""
        try:
            if entry.kind == SWEEPS:
                entry.path.unlink()
                return ""
            with self._lock(entry, timeout=0):  # an entry that is being built or read stays
                if entry.used_by_others if mine else entry.in_use:
                    return IN_USE
                doomed = CacheEntry(partial_path(entry.path))
                entry.path.rename(doomed.path)  # at once: nobody finds half of it
                with suppress(OSError):  # what is left of it goes with `tidy`
                    doomed.clear()
                entry.clear_pins()
        except Timeout:
            return IN_USE
        except UNUSABLE as error:
            return str(getattr(error, "strerror", None) or error)
        self._checked.discard(entry.path)
        return ""


@contextmanager
def _new_entry(entry: CacheEntry) -> Iterator[Path]:
    """A new folder with the mark of an entry."""
    with new_folder(entry.path, OSError) as partial:
        (partial / MARK).write_text(entry.address)
        yield partial


def _sync(folder: Path) -> None:
    for path in files_in(folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def size_of(text: str) -> int:
    """Parse a size such as "20GB" into bytes."""
    number = text.strip().upper().rstrip("KMGTB ")
    unit = text.strip().upper()[len(number) :].strip()
    try:
        return int(float(number) * UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        raise InputError(f"{text!r} is no size; give one such as 20GB") from None


def _limit() -> int:
    text = os.environ.get("MIONNX_CACHE_LIMIT")
    return size_of(text) if text else DEFAULT_LIMIT


_said: set[str] = set()
_saying = Lock()


def _say(message: str, subject: str = "") -> None:
    """Warn, once for each message, or for each subject."""
    with _saying:
        if (subject or message) in _said:
            return
        _said.add(subject or message)
    warnings.warn(message, StoreWarning, stacklevel=2)
