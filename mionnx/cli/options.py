"""Options that several commands share, and delivery of a result."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console, RenderableType

from mionnx.errors import InputError
from mionnx.machine.stored import ENDING
from mionnx.view import Shown

SOME = "Only these, as 0,3 or 16-29; may be repeated."
MOST = 10_000  # numbers of one range
Model = Annotated[str, typer.Argument(help="Folder of a model, a .pth file, a shipped model's name, or a Hub id.")]
Prompt = Annotated[str, typer.Argument(help="The prompt.")]
Position = Annotated[int, typer.Option(help="Token of the prompt: from 0, or negative from its end.")]
Layers = Annotated[list[str] | None, typer.Option("--layers", "--layer", metavar="NUMBERS", help=SOME)]
Heads = Annotated[list[str] | None, typer.Option("--heads", "--head", metavar="NUMBERS", help=SOME)]
Captures = Annotated[list[str] | None, typer.Option("--capture", metavar="HOOK", help="Capture; globs allowed.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
SpecFile = Annotated[Path | None, typer.Option(help="A saved HookSpec to begin with.")]
Html = Annotated[Path | None, typer.Option(metavar="FILE", help="Write an HTML page that works offline.")]
Png = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a picture.")]
Save = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a .safetensors file to load in Python.")]
BatchSize = Annotated[str, typer.Option(metavar="N", help="Rows of one pass, or auto: as many as run well and fit.")]
Number = TypeVar("Number", int, float)


def numbers(option: str, text: str, kind: type[Number]) -> list[Number]:
    """Parse the comma-separated numbers of an option, ranges of integers such as 16-29 too.

    Raises:
        InputError: a part is not a number of this kind.
    """
    try:
        return [number for part in text.split(",") for number in spread(part, kind)]
    except ValueError:
        ranges = " or 2-5" if kind is int else ""
        raise InputError(f"--{option} {text!r}: numbers with commas between, as 0,1{ranges}") from None


def spread(part: str, kind: type[Number]) -> list[Number]:
    """The numbers of a part between commas: one, or all of a range of integers.

    Raises:
        ValueError: neither, or a range that ends before it begins or has more than `MOST`.
    """
    ends = re.fullmatch(r"\s*(\d+)-(\d+)\s*", part) if kind is int else None
    if ends is None:
        return [kind(part)]
    first, last = int(ends[1]), int(ends[2])
    if not first <= last < first + MOST:
        raise ValueError(part)
    return [kind(number) for number in range(first, last + 1)]


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        InputError: it cannot be read, or is empty.
    """
    try:
        text = path.read_text()
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read a text from {path}: {error}") from error
    if not text.strip():
        raise InputError(f"{path} is empty: there is no text to measure on")
    return text


def rows_of_pass(text: str) -> int | str:
    """The value of --batch-size: a number, or a word that the verb knows or refuses."""
    return int(text) if text.isdecimal() else text


def chosen(option: str, texts: list[str] | None) -> list[int] | None:
    """The numbers of an option that may be repeated; None if it is left out.

    Raises:
        InputError: a part is no integer.
    """
    return None if texts is None else [number for text in texts for number in numbers(option, text, int)]


def deliver(
    result: Shown,
    table: Callable[[], RenderableType],
    html: Path | None,
    png: Path | None,
    as_json: bool,
    save: Path | None = None,
) -> None:
    """Write the requested files, then print the result as JSON or as a table.

    Raises:
        BadParameter: a file has another ending.
        SpecFileError: a file cannot be written.
    """
    for path, ending in ((html, ".html"), (png, ".png"), (save, ENDING)):
        if path is not None:
            if path.suffix.lower() != ending:
                raise typer.BadParameter(f"{path} should end in {ending}")
            result.save(path)
    if as_json:
        typer.echo(result.to_json())
    else:
        Console().print(table())
