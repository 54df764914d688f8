"""Weight files compared with what was recorded of them when the model was exported.

1. Recorded of each file in the metadata's `weight_files`: its size, a sampled hash, and the hash of all its bytes.
2. The sampled hash is SHA-256 of 16 blocks of 64 KiB, spread evenly from the first to the last: under a millisecond a
   file, whatever its size. It is checked whenever a model is opened, so that weights that were exchanged, trained on in
   place, cut or only half copied are noticed. One flipped bit between two blocks is not: `check="full"` reads it all.
3. The models that ship have `weights_sha256` alone, the hash of their one `model.safetensors`: all of it is checked.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

from mionnx.errors import InputError, ModelError, nearest
from mionnx.graph.metadata import Metadata

LEVELS = ("sampled", "full", "none")
# Of a sampled hash. Times of change serve for nothing here: copies and hard links have others for the same bytes.
BLOCK, BLOCKS = 2**16, 16
CHUNK, PART = 2**24, 2**20  # bytes read at a time; in a thread, which stops between two
CHECKPOINT = "model.safetensors"  # the weight file of which `weights_sha256` is the hash, if it is the only one
AGAIN = "export the model again, or open it with check='none' if you changed them on purpose"

Hashes = tuple[str, dict[str, dict[str, Any]]]  # of all files together; size and hashes of each
Progress = Callable[[str, int, int], None]  # (stage, done, total), as in `mionnx.machine.progress`


def silent(stage: str, done: int, total: int) -> None:
    """Show no progress."""


def sampled(file: Path) -> str:
    """SHA-256 of 16 blocks of a file, the first and the last among them."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        last = max(0, file.stat().st_size - BLOCK)
        # a set: blocks of a small file coincide
        for start in sorted({last * n // (BLOCKS - 1) for n in range(BLOCKS)}):
            stream.seek(start)
            digest.update(stream.read(BLOCK))
    return digest.hexdigest()


def sha256(files: Iterable[Path], progress: Progress = silent) -> str:
    """SHA-256 of files' bytes, in the order given."""
    files = list(files)
    total, done = sum(file.stat().st_size for file in files), 0
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while chunk := stream.read(CHUNK):
                digest.update(chunk)
                done += len(chunk)
                progress("hashing weights", done, total)
    return digest.hexdigest()


@contextmanager
def hashed_beside(folder: Path, names: Iterable[str]) -> Iterator[Callable[[], Hashes]]:
    """Hash weight files in a thread of its own; yields a function that waits for `sha256` of all, and their facts."""
    # Each byte is read once, for both hashes. A thread that is still reading when the block ends is stopped.
    files, stop = [folder / name for name in sorted({*names})], Event()
    with ThreadPoolExecutor(1, "hashing weights") as pool:
        try:
            yield pool.submit(_hashes, files, stop).result
        finally:
            stop.set()


def _hashes(files: Iterable[Path], stop: Event) -> Hashes:
    total, hashes = hashlib.sha256(), dict[str, dict[str, Any]]()
    for file in files:
        digests = [total, hashlib.sha256()] if hashes else [total]  # the first file's own hash is that of all so far
        with file.open("rb") as stream:
            while not stop.is_set() and (chunk := stream.read(PART)):
                for digest in digests:
                    digest.update(chunk)
        hashes[file.name] = {"size": file.stat().st_size, "sampled": sampled(file), "sha256": digests[-1].hexdigest()}
    return total.hexdigest(), hashes


def check(folder: Path, metadata: Metadata, names: Iterable[str], level: str, progress: Progress = silent) -> None:
    """Compare weight files with what was recorded of them: "sampled", "full" (every byte), or "none"."""
    if level not in LEVELS:
        raise InputError(f"check={level!r} must be one of {', '.join(LEVELS)}{nearest(str(level), LEVELS)}")
    if level == "none":
        return
    try:
        if not metadata.weight_files and {*names} == {CHECKPOINT} and metadata.weights_sha256:
            if sha256([folder / CHECKPOINT], progress) != metadata.weights_sha256:
                raise _difference(folder / CHECKPOINT)
        else:
            _compare(folder, metadata.weight_files, {*names}, level == "full", progress)
    except OSError as error:
        raise ModelError(f"cannot read the weights in {folder}: {error}") from error


def _compare(
    folder: Path, recorded: Mapping[str, Mapping[str, Any]], names: set[str], full: bool, progress: Progress
) -> None:
    for name in sorted(names):
        entry = recorded.get(name)
        if entry is None:  # a file that a later program wrote, as when a model is quantised
            if full:
                raise ModelError(f"nothing was recorded of {folder / name}, so that it cannot be checked")
            continue
        file = folder / name
        same = file.stat().st_size == entry.get("size") and sampled(file) == entry.get("sampled")
        if not same or (full and sha256([file], progress) != entry.get("sha256")):
            raise _difference(file)


def _difference(file: Path) -> ModelError:
    return ModelError(f"{file} is damaged or not the file that was exported: {AGAIN}")
