"""Files that options name: texts, prompts, pairs, tensors.

A file of pairs, `--pairs FILE`, holds a JSON object a line, of which every line has the same keys:

    {"clean": "The capital of France is", "corrupted": "The capital of Italy is", "answer": "Paris", "versus": "Rome",
     "positions": {"subject": "France", "last": -1}}

Only "clean" is needed, and "corrupted" to patch with. Answers are tokens, by text or id.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from numpy.typing import NDArray

from mionnx.errors import InputError, SpecFileError, nearest
from mionnx.machine.tensor_file import open_tensors

PAIR_KEYS = ("clean", "corrupted", "answer", "versus", "positions")
Prompts = Annotated[list[str] | None, typer.Option("--prompt", metavar="TEXT", help="A prompt; may be repeated.")]
PromptsFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Many prompts: a text a line, or a JSON list of texts or ids.")
]


def read_text(path: Path) -> str:
    """The text of a file; it is an `InputError` that there is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    if not text.strip():
        raise InputError(f"{path} is empty: there is no text in it")
    return text


def lines_of(path: Path, blank: bool = False) -> list[str]:
    """The lines of a file; those without a text too where `blank` is set."""
    return [line for line in read_text(path).splitlines() if blank or line.strip()]


def read_prompts(path: Path) -> list[Any]:
    """Read prompts from a file: one text a line, or a JSON list of texts or of lists of ids."""
    if path.suffix != ".json":
        return lines_of(path)
    prompts = _json(str(path), read_text(path))
    if not isinstance(prompts, list) or not prompts:
        raise InputError(f"{path} has no prompts: a text a line, or a JSON list of texts or of lists of ids")
    return prompts


def texts_of(prompt: list[str] | None, prompts: Path | None, required: bool = True) -> list[Any]:
    """The prompts of --prompt and of --prompts."""
    texts = [*(prompt or ()), *(read_prompts(prompts) if prompts else ())]
    if required and not texts:
        raise typer.BadParameter("give --prompt TEXT, or --prompts FILE")
    return texts


def read_pairs(path: Path) -> dict[str, Any]:
    """Read the arguments of a call over many pairs: key -> an entry a line; "positions": name -> such a list."""
    records = [_record(f"{path}, line {number}", line) for number, line in enumerate(lines_of(path), 1)]
    columns = _columns(str(path), records)
    if "positions" in columns:
        if not all(isinstance(places, dict) for places in columns["positions"]):
            raise InputError(f'{path}: positions are an object, {{"subject": "France", "last": -1}}')
        return {**columns, "positions": _columns(f"{path}, positions", columns["positions"])}
    return columns


def _json(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise InputError(f"{where} is no JSON: {error}") from error


def _record(where: str, line: str) -> dict[str, Any]:
    record = _json(where, line)
    if not isinstance(record, dict) or not {"clean"} <= record.keys() <= {*PAIR_KEYS}:
        raise InputError(f"{where}: an object with clean, and as needed {', '.join(PAIR_KEYS[1:])}")
    return record


def _columns(where: str, records: list[dict[str, Any]]) -> dict[str, list[Any]]:
    for number, record in enumerate(records, 1):
        if record.keys() != records[0].keys():
            raise InputError(f"{where}: record {number} has {', '.join(record)}, the first one {', '.join(records[0])}")
    return {key: [record[key] for record in records] for key in records[0]}


def load_tensor(path: Path, key: str) -> NDArray[Any]:
    """Read one tensor of a safetensors file."""
    with open_tensors(path, f"cannot read {path}") as file:
        names = list(file.keys())
        if key in names:
            return file.get_tensor(key)
    raise SpecFileError(f"{path} has no tensor {key!r}, only {', '.join(names)}{nearest(key, names)}")
