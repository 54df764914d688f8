"""What commands of the command line have in common: options, and how a result is delivered."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, RenderableType

from mionnx.view import Shown

Model = Annotated[str, typer.Argument(help="A hooked model's folder, a Hugging Face checkpoint's folder, or a Hub id.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Provider = Annotated[str, typer.Option(help="cpu, cuda, or the name of any execution provider.")]
SpecFile = Annotated[Path | None, typer.Option(help="A saved HookSpec to begin with.")]
Html = Annotated[Path | None, typer.Option(metavar="FILE", help="Write one HTML page that works offline.")]
Png = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a picture.")]


def deliver(
    result: Shown, table: Callable[[], RenderableType], html: Path | None, png: Path | None, as_json: bool
) -> None:
    """Write the files that are asked for, and print the result: as JSON, or as a table.

    Raises:
        SpecFileError: a file has another ending, or cannot be written.
    """
    for path, ending in ((html, ".html"), (png, ".png")):
        if path is not None:
            if path.suffix.lower() != ending:
                raise typer.BadParameter(f"{path} should end in {ending}")
            result.save(path)
    if as_json:
        typer.echo(result.to_json())
    else:
        Console().print(table())
