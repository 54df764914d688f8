"""The hashes of large weight files, recorded while a model is used already.

1. An export does not wait for them. What it writes of a file whose hash is not known yet is its size, its sampled hash
   and its time of change ("changed") in the place of "sha256".
2. Whoever opens such a model hashes the files in the background, and writes `weights.sha256.json` beside the graph, in
   one step: it is there whole, or not at all. Two processes write the same.
3. A file is hashed for the record only if its size, sample and time of change are still those of the export, before and
   after it is read. A copy that got another time before its hash was recorded is never recorded.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Thread, get_ident
from typing import Any

from mionnx.errors import ModelError
from mionnx.graph import file_digest
from mionnx.graph.folder_file import read_json
from mionnx.graph.metadata import Metadata
from mionnx.graph.weight_check import Progress, sampled, silent

RECORD = "weights.sha256.json"
SMALL_FILE = 2**26  # bytes of a file that an export waits for

FileFacts = dict[str, dict[str, Any]]  # file -> size, sampled, and sha256 or changed


def describe(folder: Path, names: Iterable[str], progress: Progress = silent) -> FileFacts:
    """Describe weight files for `Metadata.weight_files`; only small ones are waited for."""
    facts: FileFacts = {}
    for name in sorted({*names}):
        file, stat = folder / name, (folder / name).stat()
        file_digest.start([file])
        digest = file_digest.wait(file, progress) if stat.st_size <= SMALL_FILE else file_digest.peek(file)
        facts[name] = {"size": stat.st_size, "sampled": sampled(file)}
        facts[name] |= {"sha256": digest} if digest else {"changed": stat.st_mtime_ns}
    return facts


def describe_export(
    folder: Path, names: Iterable[str], checkpoint: Iterable[Path], progress: Progress = silent
) -> tuple[str, FileFacts]:
    """Describe an export's weights for `Metadata`: the checkpoint's hash, "" if not known yet, and the files."""
    facts = describe(folder, names, progress)
    digests = [file_digest.peek(file) for file in sorted(checkpoint)]
    return combined(filter(None, digests)) if all(digests) else "", facts


def digest_of(files: Iterable[Path], progress: Progress = silent) -> str:
    """The hash of a checkpoint, waited for."""
    files = sorted(files)  # one hash, in whatever order files are listed
    file_digest.start(files)
    return combined([file_digest.wait(file, progress) for file in files])


def combined(digests: Iterable[str]) -> str:
    """Make one hash of those of several files, in their order; of one file it is its own."""
    digests = list(digests)
    return digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()


def recorded(folder: Path, metadata: Metadata) -> FileFacts:
    """Read what is known of a model's weight files, by its graph and by the record beside it."""
    files = {name: dict(facts) for name, facts in metadata.weight_files.items()}
    if all("sha256" in facts for facts in files.values()):
        return files
    record: Any = {}
    with suppress(ModelError):
        record = read_json(folder / RECORD)
    for name, facts in files.items():
        entry = record.get(name) if isinstance(record, dict) else None
        entry = entry if isinstance(entry, dict) else {}
        same = all(entry.get(key) == facts.get(key) for key in ("size", "sampled"))
        if same and isinstance(entry.get("sha256"), str):
            facts.setdefault("sha256", entry["sha256"])
    return files


def is_pending(folder: Path, metadata: Metadata) -> bool:
    """Whether a weight file's hash has not been recorded yet."""
    return any("sha256" not in facts for facts in recorded(folder, metadata).values())


def complete(folder: Path, metadata: Metadata, progress: Progress = silent) -> FileFacts:
    """Hash the weight files that have not been hashed, and record them; a changed file is refused."""
    record = recorded(folder, metadata)
    pending = {name: facts for name, facts in record.items() if "sha256" not in facts}
    for name, facts in pending.items():
        try:
            _check_unchanged(folder / name, facts)
            facts["sha256"] = file_digest.wait(folder / name, progress)
            _check_unchanged(folder / name, facts)
        except OSError as error:
            raise ModelError(f"cannot read the weights in {folder}: {error}") from error
    if pending:
        # a name of its own for each writer, then one rename: a reader sees the whole record or none
        partial = folder / f".{RECORD}.{os.getpid()}.{get_ident()}.partial"
        with suppress(OSError):  # a folder that is read-only or full: the hashes last as long as the process
            try:
                partial.write_text(json.dumps(record, indent=1))
                partial.replace(folder / RECORD)
            finally:
                partial.unlink(missing_ok=True)
    return record


def complete_beside(folder: Path, metadata: Metadata) -> Thread | None:
    """Do `complete` in a thread that ends with the process; None if nothing is pending."""
    if not is_pending(folder, metadata):
        return None

    def run() -> None:
        with suppress(ModelError):  # said by whoever asks for the hash
            complete(folder, metadata)

    thread = Thread(target=run, name="mionnx-record", daemon=True)
    thread.start()
    return thread


def weights_sha256(folder: Path, metadata: Metadata) -> str:
    """One hash of a model's weights, waited for where it is not known yet."""
    if metadata.weights_sha256 or not metadata.weight_files:
        return metadata.weights_sha256
    return combined(facts["sha256"] for _, facts in sorted(complete(folder, metadata).items()))


def _check_unchanged(file: Path, facts: Mapping[str, Any]) -> None:
    stat = file.stat()
    if (stat.st_size, stat.st_mtime_ns) != (facts.get("size"), facts.get("changed")):
        raise ModelError(
            f"{file} has changed since it was exported, or is a copy, and its hash was not recorded before: "
            "export the model again"
        )
