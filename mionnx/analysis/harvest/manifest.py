"""The manifest of a folder of activations: how they were made, and the shards with their checksums.

1. `_manifest.json` has "mionnx_activations": 1, "settings", "columns" (name -> dtype and shape of a token's value),
   "complete", "tokens", "rows", "texts", "dropped_tokens" and "shards", each {"files": {name: SHA-256}, "tokens",
   "rows", "digest"}. It holds no time, path or machine: the same harvest gives the same bytes.
2. While a harvest runs, the folder `_progress` gets a file for each finished shard, so that any process can note one.
   When all is done the manifest takes them over, and it goes.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mionnx.errors import SpecFileError
from mionnx.machine.files import atomic_path, make_folder, write_atomic

HARVEST_MANIFEST, PROGRESS = "_manifest.json", "_progress"
FORMAT = "mionnx_activations"
MANIFEST_VERSION = 1
TOKEN_COLUMNS: Mapping[str, "np.dtype[Any]"] = {  # of every harvest, beside its hook points
    "token_ids": np.dtype(np.int32),
    "text_index": np.dtype(np.int64),
    "positions": np.dtype(np.int32),
}


@dataclass(frozen=True)
class Shard:
    """One shard."""

    files: dict[str, str]  # name of each file, within the folder -> SHA-256
    tokens: int
    rows: int
    digest: str  # SHA-256 of its rows' tokens


@dataclass(frozen=True)
class Manifest:
    """Settings of a harvest, and its shards."""

    settings: dict[str, Any]
    columns: dict[str, tuple[str, tuple[int, ...]]]  # name -> dtype and shape of one token's value, in execution order
    # In the order of the texts; none while it is not complete, as `texts` is 0.
    shards: list[Shard] = field(default_factory=list)
    complete: bool = False
    texts: int = 0
    dropped_tokens: int = 0  # tokens at the end that fill no window, where the format has windows only

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    def write(self, folder: Path) -> None:
        """Write it; `_progress` goes when it is complete."""
        rows = sum(shard.rows for shard in self.shards)
        contents = {FORMAT: MANIFEST_VERSION, **asdict(self), "tokens": self.tokens, "rows": rows}
        write_atomic(folder / HARVEST_MANIFEST, (json.dumps(contents, indent=1) + "\n").encode())
        if self.complete:
            shutil.rmtree(folder / PROGRESS, ignore_errors=True)


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder, if it has one."""
    path = folder / HARVEST_MANIFEST
    try:
        contents = json.loads(path.read_text())
        if contents.get(FORMAT) != MANIFEST_VERSION:
            raise SpecFileError(f"{path} is no manifest of activations of version {MANIFEST_VERSION}")
        columns = {name: (str(dtype), tuple(map(int, shape))) for name, (dtype, shape) in contents["columns"].items()}
        shards = [Shard(**entry) for entry in contents["shards"]]
        texts, dropped = int(contents["texts"]), int(contents["dropped_tokens"])
        return Manifest(contents["settings"], columns, shards, contents["complete"], texts, dropped)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SpecFileError(f"{path} is damaged: {error}") from error


def finished(folder: Path) -> list[int]:
    """The numbers of the finished shards of an interrupted harvest."""
    # A note that is being written has another name.
    return sorted(int(path.stem) for path in (folder / PROGRESS).glob("*.json") if path.stem.isdecimal())


def noted(folder: Path, number: int) -> Shard | None:
    """A finished shard of an interrupted harvest, if its note is there and not damaged."""
    path = _note(folder, number)
    try:
        return Shard(**json.loads(path.read_text()))
    # A damaged note counts as none: its shard is made again, and gives the same bytes.
    except (FileNotFoundError, ValueError, TypeError):
        return None
    except OSError as error:
        raise SpecFileError(f"cannot read {path}: {error}") from error


def note(folder: Path, number: int, shard: Shard) -> None:
    """Note a finished shard."""
    make_folder(folder / PROGRESS)
    with atomic_path(_note(folder, number)) as partial, partial.open("w") as file:
        file.write(json.dumps(asdict(shard)))
        # to the disk: a power cut is not to leave an empty note
        file.flush()
        os.fsync(file.fileno())


def _note(folder: Path, number: int) -> Path:
    return folder / PROGRESS / f"{number:05}.json"


def refuse_other(folder: Path, others: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Refuse a folder whose activations were made in another way."""
    for name in sorted({*others, *settings}):
        if others.get(name) != settings.get(name):
            raise SpecFileError(
                f"{folder} holds activations made with {name}={others.get(name)!r}, this harvest has "
                f"{settings.get(name)!r}: choose another folder"
            )


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise SpecFileError(f"cannot read {path}: {error}") from error
