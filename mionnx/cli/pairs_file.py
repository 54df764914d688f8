"""Files of many pairs, `--pairs FILE`: a JSON object a line, of which every line has the same keys.

    {"clean": "The capital of France is", "corrupted": "The capital of Italy is", "answer": "Paris", "versus": "Rome",
     "positions": {"subject": "France", "last": -1}}

Only "clean" is needed, and "corrupted" to patch with. Answers are tokens, by text or id.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from mionnx.errors import InputError

KEYS = ("clean", "corrupted", "answer", "versus", "positions")
Pairs = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Many pairs: JSON lines with clean, corrupted, answer, versus, positions."),
]


def read_pairs(path: Path) -> dict[str, Any]:
    """Read the arguments of a call over many pairs.

    Returns:
        key -> a list with an entry a line; "positions": name -> such a list.

    Raises:
        InputError: a file that cannot be read, a line that is no object, other keys, or keys that not all lines have.
    """
    lines = lines_of(path) or []
    records = [_record(f"{path}, line {number}", line) for number, line in enumerate(lines, 1)]
    columns = _columns(str(path), records)
    if "positions" in columns:
        if not all(isinstance(one, dict) for one in columns["positions"]):
            raise InputError(f'{path}: positions are an object, {{"subject": "France", "last": -1}}')
        return {**columns, "positions": _columns(f"{path}, positions", columns["positions"])}
    return columns


def lines_of(path: Path | None) -> list[str] | None:
    """The texts of a file, one a line; None without a file.

    Raises:
        InputError: a file that cannot be read, or without a text.
    """
    if path is None:
        return None
    try:
        texts = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read texts from {path}: {error}") from error
    if not texts:
        raise InputError(f"{path} holds no text")
    return texts


def _record(where: str, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where} is no JSON: {error}") from error
    if not isinstance(record, dict) or not {"clean"} <= record.keys() <= {*KEYS}:
        raise InputError(f"{where}: an object with clean, and as needed {', '.join(KEYS[1:])}")
    return record


def _columns(where: str, records: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Records by key."""
    for number, record in enumerate(records, 1):
        if record.keys() != records[0].keys():
            raise InputError(f"{where}: record {number} has {', '.join(record)}, the first one {', '.join(records[0])}")
    return {key: [record[key] for record in records] for key in records[0]}
