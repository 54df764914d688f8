"""SHA-256 of large files, computed in the background.

1. A file is known by its device, inode, size and time of change: a hard link to it is the same file, and a changed one
   another. It is read once a process, in a thread that ends with the process.
2. A blob of the Hugging Face Hub's cache is called by its SHA-256: it is not read at all.
3. The digest of a file that changes while it is read is that of no file: it is never given out.
4. A failure is that of one path at one time: a hard link of a file that is gone is read again.
"""

import hashlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Event, Lock, Thread

CHUNK = 2**24
BLOB = re.compile(r"[0-9a-f]{64}")
PAUSE = 0.2  # seconds between two looks at the progress

Identity = tuple[int, int, int, int]


class _Digest:
    """One file's digest, and how much of it has been read."""

    def __init__(self, file: Path) -> None:
        self.file, self.identity = file, identity(file)
        self.done, self.ready = 0, Event()
        self.value: str | None = _named(file)
        self.error: OSError | None = None
        if self.value is not None:
            self.ready.set()

    def run(self) -> None:
        digest = hashlib.sha256()
        try:
            with self.file.open("rb") as stream:
                while chunk := stream.read(CHUNK):
                    digest.update(chunk)
                    self.done += len(chunk)
            if identity(self.file) == self.identity:
                self.value = digest.hexdigest()
            else:
                self.error = OSError(f"{self.file} changes while it is read")
        except OSError as error:
            self.error = error
        self.ready.set()


_lock = Lock()
_digests: dict[Identity, _Digest] = {}


def identity(file: Path) -> Identity:
    """Numbers by which a file differs from every other one, and from itself once it is changed."""
    stat = file.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def _named(file: Path) -> str | None:
    blob = file.resolve()
    return blob.name if blob.parent.name == "blobs" and BLOB.fullmatch(blob.name) else None


def start(files: Iterable[Path]) -> None:
    """Begin to read files in the background, one after another; each is read once a process."""
    begun = []
    with _lock:
        for file in files:
            key = identity(file)
            if key not in _digests or _digests[key].error is not None:  # what failed once is tried again
                _digests[key] = _Digest(file)
                begun.append(_digests[key])
    waiting = [digest for digest in begun if not digest.ready.is_set()]
    if waiting:
        Thread(target=_run, args=(waiting,), name="mionnx-digests", daemon=True).start()


def _run(digests: Iterable[_Digest]) -> None:
    for digest in digests:
        digest.run()


def peek(file: Path) -> str | None:
    """The digest of a file that has been read whole; None before."""
    with _lock:
        digest = _digests.get(identity(file))
    return digest.value if digest is not None and digest.ready.is_set() else None


def wait(file: Path, progress: Callable[[str, int, int], None] = lambda stage, done, total: None) -> str:
    """The digest of a file, waited for."""
    while True:
        start([file])
        with _lock:
            digest = _digests.get(identity(file))
        if digest is None:  # it has changed since it was begun
            continue
        while not digest.ready.wait(PAUSE):
            progress("hashing weights", digest.done, digest.identity[2])
        if digest.value is not None:
            return digest.value
        # an error of another path to the same file, gone meanwhile, is none of this one: it is read anew
        if digest.file == file:
            raise digest.error or OSError(f"{file} cannot be read")
