"""The manifest of a folder of activations: how they were made, and the shards with their checksums.

1. `_manifest.json` has "mionnx_activations": 1, "settings", "columns" (name -> dtype and shape of a token's value),
   "complete", "tokens", "rows", "texts", "dropped_tokens" and "shards", each {"files": {name: SHA-256}, "tokens",
   "rows", "digest"}. It holds no time, path or machine: the same harvest gives the same bytes.
2. While a harvest runs, the folder `_progress` gets a file for each finished shard, so that any process can note one.
   When all is done the manifest takes them over, and it goes.
"""

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mionnx.errors import SpecFileError
from mionnx.machine.files import atomic_path, make_folder, write_atomic

HARVEST_MANIFEST, PROGRESS = "_manifest.json", "_progress"
FORMAT = "mionnx_activations"
MANIFEST_VERSION = 1


@dataclass(frozen=True)
class Shard:
    """One shard.

    Attributes:
        files: name of each file, within the folder -> SHA-256.
        tokens, rows: how many it holds.
        digest: of its rows' tokens.
    """

    files: dict[str, str]
    tokens: int
    rows: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """Settings of a harvest, and its shards.

    Attributes:
        columns: name -> dtype and shape of one token's value, in execution order.
        shards: in the order of the texts; none while it is not complete.
        complete: whether all texts were gone through.
        texts: number of texts; 0 while it is not complete.
        dropped_tokens: tokens at the end that fill no window, where the format has windows only.
    """

    settings: dict[str, Any]
    columns: dict[str, tuple[str, tuple[int, ...]]]
    shards: list[Shard] = field(default_factory=list)
    complete: bool = False
    texts: int = 0
    dropped_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of all shards."""
        return sum(shard.tokens for shard in self.shards)

    def write(self, folder: Path) -> None:
        """Write it; `_progress` goes when it is complete."""
        rows = sum(shard.rows for shard in self.shards)
        contents = {FORMAT: MANIFEST_VERSION, **asdict(self), "tokens": self.tokens, "rows": rows}
        write_atomic(folder / HARVEST_MANIFEST, (json.dumps(contents, indent=1) + "\n").encode())
        if self.complete:
            shutil.rmtree(folder / PROGRESS, ignore_errors=True)


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder; None if there is none.

    Raises:
        SpecFileError: it is damaged, or of another version.
    """
    path = folder / HARVEST_MANIFEST
    try:
        contents = json.loads(path.read_text())
        if contents.get(FORMAT) != MANIFEST_VERSION:
            raise SpecFileError(f"{path} is no manifest of activations of version {MANIFEST_VERSION}")
        columns = {name: _column(*column) for name, column in contents["columns"].items()}
        shards = [Shard(**entry) for entry in contents["shards"]]
        texts, dropped = int(contents["texts"]), int(contents["dropped_tokens"])
        return Manifest(contents["settings"], columns, shards, contents["complete"], texts, dropped)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SpecFileError(f"{path} is damaged: {error}") from error


def _column(dtype: str, shape: Iterable[int]) -> tuple[str, tuple[int, ...]]:
    return str(dtype), tuple(map(int, shape))


def finished(folder: Path) -> list[int]:
    """The numbers of the finished shards of an interrupted harvest."""
    return sorted(int(path.stem) for path in (folder / PROGRESS).glob("*.json") if path.stem.isdecimal())


def noted(folder: Path, number: int) -> Shard | None:
    """A finished shard of an interrupted harvest; None if it has no note, or a damaged one."""
    path = _note(folder, number)
    try:
        return Shard(**json.loads(path.read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None
    except OSError as error:
        raise SpecFileError(f"cannot read {path}: {error}") from error


def note(folder: Path, number: int, shard: Shard) -> None:
    """Note a finished shard."""
    make_folder(folder / PROGRESS)
    with atomic_path(_note(folder, number)) as partial, partial.open("w") as file:
        file.write(json.dumps(asdict(shard)))
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
