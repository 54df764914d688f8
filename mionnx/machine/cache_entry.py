"""One entry of the disk cache: its files, its size, its marks of use, its faults."""

import hashlib
import json
import os
import re
import shutil
import socket
import stat
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from mionnx.errors import MIError
from mionnx.machine.tensor_file import read_metadata

MANIFEST = "manifest.json"
MARK = ".mionnx.entry"  # of a folder that mionnx made in the store; holds the address that it was made for
SWEEP_MARK = "mionnx_sweep"  # key in the metadata of a sweep's file: the sweep
SWEEP_NAME = re.compile(r"[0-9a-f]{32}\.safetensors")
PIN = re.compile(r".+@\d+@[\d.]+")  # host, number and beginning of a process
SMALL_FILE = 2**24  # bytes of a mark or manifest that is read
MODELS, SWEEPS = "models", "sweeps"  # kinds without a manifest
LARGE_FILE = 2**28
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
    def address(self) -> str:
        """Kind and key."""
        return f"{self.kind}/{self.path.name}"

    @property
    def made_for(self) -> str | None:
        """The address that mionnx made it for; None if mionnx did not make it, or if it is a link."""
        if self.path.is_symlink():
            return None
        if self.kind == SWEEPS:
            return self._swept_for
        data = small_file(self.path / MARK)
        return None if data is None else data.decode(errors="replace").strip()

    @property
    def _swept_for(self) -> str | None:
        if SWEEP_NAME.fullmatch(self.path.name) is None or not self.path.is_file():
            return None
        try:
            key = read_metadata(self.path, "").get(SWEEP_MARK)
        except MIError:
            return None
        return None if key is None else f"{SWEEPS}/{key[:32]}.safetensors"

    @property
    def manifest(self) -> dict[str, Any]:
        """Content of `manifest.json`; empty if it cannot be read."""
        try:
            table = json.loads(small_file(self.path / MANIFEST) or b"")
        except (ValueError, RecursionError):
            return {}
        return table if isinstance(table, dict) else {}

    @property
    def what(self) -> dict[str, Any]:
        """Facts about its content, as its manifest says."""
        facts = self.manifest.get("what")
        return facts if isinstance(facts, dict) else {}

    @property
    def size(self) -> int:
        """Bytes on disk that it alone keeps; see `shared`."""
        return bytes_kept(self.stats)

    @property
    def shared(self) -> int:
        """Bytes of files with a name elsewhere."""
        # An exported model's weights are often the checkpoint's own files.
        return sum(status.st_size for status in self.stats) - self.size

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
        """Mark it as used by this process, now."""
        unlinked(self.pins).mkdir(exist_ok=True)
        me = psutil.Process()
        # a number alone could be another process' by now, or one on another machine that shares the folder
        (self.pins / f"{socket.gethostname()}@{me.pid}@{me.create_time():.2f}").touch()
        os.utime(self.path)  # the time of use, by which entries are removed

    def faults(self, thorough: bool = False) -> list[str]:
        """The faults of its files against the manifest; entries of models and sweeps carry checksums of their own."""
        if self.kind in (MODELS, SWEEPS):
            return [] if self.made_for == self.address else [f"it was made for {self.made_for}"]
        try:
            return self._faults(self.manifest, thorough)
        except (LookupError, TypeError, AttributeError, OSError):  # numbers and lists where texts are written
            return [f"{MANIFEST} is damaged"]

    def _faults(self, manifest: Mapping[str, Any], thorough: bool) -> list[str]:
        files = manifest.get("files")
        if not isinstance(files, dict):
            return [f"{MANIFEST} is missing or damaged"]
        if manifest.get("sha256") != digest(manifest):
            return [f"{MANIFEST} was changed"]
        if manifest.get("of") != self.address:
            return [f"it was made for {manifest.get('of')}"]
        names = {str(file.relative_to(self.path)) for file in files_in(self.path)} - {MANIFEST}
        faults = [f"{name} is missing" for name in files.keys() - names]
        faults += [f"{name} does not belong to it" for name in names - files.keys()]
        for name in names & files.keys():
            fact, at = files[name], (self.path / name).stat()
            # rule 3 of `disk_cache`: a large file is hashed only where its size or time says that it has changed
            untouched = at.st_mtime_ns == fact["changed"] and at.st_size > LARGE_FILE and not thorough
            if at.st_size != fact["size"] or not (untouched or sha256(self.path / name) == fact["sha256"]):
                faults.append(f"{name} was changed")
        return faults

    def clear(self) -> None:
        """Remove its folder, the mark last: what a killed process leaves still has it."""
        for path in [path for path in self.path.iterdir() if path.name != MARK]:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        shutil.rmtree(self.path)

    def clear_pins(self) -> None:
        """Remove the marks of use."""
        for mark in files_in(unlinked(self.pins)):
            if PIN.fullmatch(mark.name):
                mark.unlink(missing_ok=True)
        with suppress(OSError):  # none, or what mionnx did not put there
            self.pins.rmdir()


def bytes_kept(stats: Iterable[os.stat_result]) -> int:
    """Bytes that files keep on the disk, each file counted once."""
    # One with a name outside of them counts for nothing: removing it here gives nothing back.
    entries = [*stats]
    names = Counter((one.st_dev, one.st_ino) for one in entries)
    sizes = {(one.st_dev, one.st_ino): one.st_size for one in entries if names[one.st_dev, one.st_ino] >= one.st_nlink}
    return sum(sizes.values())


def files_in(path: Path) -> Iterator[Path]:
    """The files of a folder, or the file itself; links are left out, and what cannot be read."""
    if path.is_symlink():
        return
    try:
        yield from (file for file in [path, *sorted(path.rglob("*"))] if file.is_file() and not file.is_symlink())
    except OSError:
        return


def unlinked(path: Path) -> Path:
    """A path in the store of mionnx' own, where a link is removed."""
    if path.is_symlink():
        path.unlink()
    return path


def small_file(path: Path) -> bytes | None:
    """The bytes of a small regular file; None for a link, a pipe, a device."""
    try:
        status = path.lstat()
        return path.read_bytes() if stat.S_ISREG(status.st_mode) and status.st_size <= SMALL_FILE else None
    except OSError:
        return None


def _stats(path: Path) -> Iterator[os.stat_result]:
    for file in files_in(path):
        with suppress(OSError):  # removed by another process
            yield file.stat()


def _alive(mark: Path) -> bool:
    """Whether the process of a mark still runs; one of another machine counts for a day."""
    if PIN.fullmatch(mark.name) is None:
        return False
    host, _, rest = mark.name.partition("@")
    pid, _, begun = rest.partition("@")
    try:
        if host != socket.gethostname():  # its processes cannot be asked for from here
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


def digest(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of a manifest without its own."""
    text = json.dumps({key: value for key, value in manifest.items() if key != "sha256"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
