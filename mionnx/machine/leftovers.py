"""Folders that appear complete or not at all, and the parts left by killed processes.

1. A folder is made beside its target as `.{name}.{six digits}.{pid}.partial`, and renamed when it is complete.
2. Its maker holds a lock on a file in it. The system gives a lock back when its process ends, however it ends: a folder
   whose lock is free belongs to nobody, whatever process has the number in its name by now, here or on another machine.
3. One without that file (its process was killed in its first moment, or while it removed an entry of the cache) belongs
   to nobody if no process has its number, or one that began after the folder was last changed.
"""

import atexit
import os
import re
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from threading import Lock

import psutil
from filelock import FileLock

from mionnx.machine.cache_entry import CLOCK, files_in

LOCK_FILE = ".mionnx.lock"
PARTIAL_NAME = re.compile(r"\.(?P<name>.*)\.(?P<pid>\d+)\.partial", re.DOTALL)
AN_HOUR = 3600.0
A_MOMENT = 5.0  # seconds; a live process takes the lock of a folder that it makes in less


@contextmanager
def new_folder(target: Path, error: type[Exception]) -> Iterator[Path]:
    """Yield an empty folder beside a new target, renamed into place if the body succeeds, else removed."""
    partial = partial_path(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        try:
            with FileLock(partial / LOCK_FILE):
                yield partial
                partial.rename(target)  # under its lock: nobody takes it for a leftover meanwhile
                (target / LOCK_FILE).unlink()
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as cause:
        raise error(f"cannot write {target}: {cause}") from cause


def partial_path(target: Path) -> Path:
    """A path beside a target, of this process alone, with its number in the name."""
    return target.with_name(f".{target.name}.{token_hex(3)}.{os.getpid()}.partial")


def remove_leftovers(folder: Path, holding: Collection[str] | None = None, files: re.Pattern[str] | None = None) -> int:
    """Remove the partial folders and files that no process works on any more, and count them."""
    # A partial file has no lock: it has to be an hour old besides. In a folder that is not mionnx' own, a partial
    # folder without a lock has to hold one of the names `holding`, and files are removed by their complete names,
    # `files`, alone.
    try:
        leftovers = [path for path in folder.iterdir() if PARTIAL_NAME.fullmatch(path.name) and _own(path)]
    except OSError:
        return 0
    removed = 0
    for path in leftovers:
        try:
            if (holding is not None and not _ours(path, holding, files)) or not _abandoned(path):
                continue
        except (OSError, NotImplementedError):  # locked, gone meanwhile, or nothing that may be looked into
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        removed += not path.exists()
    return removed


def _ours(path: Path, holding: Collection[str], files: re.Pattern[str] | None) -> bool:
    """Whether mionnx made it, in a folder where others may write too."""
    if path.is_dir():
        begun = files is not None and not any(path.iterdir())  # killed before it had a lock
        return begun or any((path / name).exists() for name in [LOCK_FILE, *holding])
    match = PARTIAL_NAME.fullmatch(path.name)
    return files is not None and match is not None and files.fullmatch(match["name"]) is not None


def _own(path: Path) -> bool:
    """Whether this user made it, and it is no link."""
    try:
        return not path.is_symlink() and (not hasattr(os, "getuid") or path.lstat().st_uid == os.getuid())
    except OSError:
        return False


def _abandoned(partial: Path) -> bool:
    if (partial / LOCK_FILE).is_file():
        begun = partial.stat().st_mtime
        with FileLock(partial / LOCK_FILE, timeout=0):
            # the lock is free: its maker has ended, or is about to take it
            return _dead(partial, begun) or time.time() - begun > A_MOMENT
    changed = max(path.stat().st_mtime for path in [partial, *files_in(partial)])
    return _dead(partial, changed) and (partial.is_dir() or time.time() - changed > AN_HOUR)


def _dead(partial: Path, changed: float) -> bool:
    match = PARTIAL_NAME.fullmatch(partial.name)
    try:
        # the number has been given to a later process
        return match is None or psutil.Process(int(match["pid"])).create_time() > changed + CLOCK
    except (psutil.NoSuchProcess, OverflowError, ValueError):
        return True
    except psutil.Error:
        return False


_temporary: dict[int, Path] = {}  # by process: a forked one makes its own
_held: list[FileLock] = []
_making = Lock()


def temporary_folder() -> Path:
    """The folder of this process for what cannot be kept; it goes away with the process."""
    # What a killed process left in the system's temporary folder is removed by the next that needs one.
    with _making:
        if os.getpid() not in _temporary:
            remove_leftovers(Path(tempfile.gettempdir()), holding=())
            folder = Path(tempfile.mkdtemp(prefix=".mionnx.", suffix=f".{os.getpid()}.partial"))
            lock = FileLock(folder / LOCK_FILE)
            lock.acquire()
            _held.append(lock)  # a lock that nothing refers to would be given back
            _temporary[os.getpid()] = folder
            atexit.register(_remove_temporary)
        return _temporary[os.getpid()]


def _remove_temporary() -> None:
    folder = _temporary.pop(os.getpid(), None)  # none in a forked process that made none
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
