"""Options of the commands that go over cells: prompts, hook point, axes, tokens."""

from pathlib import Path
from typing import Annotated, Any

import typer

from mionnx.cli.pairs_file import read_pairs

Clean = Annotated[str, typer.Argument(help="The clean prompt.")]
IfAny = Annotated[str | None, typer.Argument(help="The clean prompt; none with --pairs.")]
OTHER = "The corrupted prompt, of equal length."
Kind = Annotated[str | None, typer.Option(help="A hook point of any layer: resid_pre, z, mlp_out, ..")]
Over = Annotated[str | None, typer.Option(help="Axes: layer,position,head,source,neuron.")]
Answer = Annotated[str | None, typer.Option(help="A token; the clean prompt's top token if left out.")]
Versus = Annotated[str | None, typer.Option(help="A token; the corrupted prompt's top token if left out.")]
Read = Annotated[int, typer.Option(help="Position of the logits that the metric reads.")]
Cells = Annotated[int, typer.Option(min=1, help="Number of cells to list where the map does not fit.")]


def given(**options: Any) -> dict[str, Any]:
    """The options that the command line gives; the others keep the defaults of the call."""
    return {name: value for name, value in options.items() if value is not None}


def prompts(clean: str | None, corrupted: str | None, pairs: Path | None, **tokens: str | None) -> dict[str, Any]:
    """The prompts of a call, with their answers: of the command line, or of a file of pairs.

    Raises:
        BadParameter: neither or both, or an answer besides those of the file.
        InputError: see `read_pairs`.
    """
    if (clean is None) == (pairs is None):
        raise typer.BadParameter("give a clean prompt, or --pairs FILE")
    if pairs is None:
        return given(clean=clean, corrupted=corrupted, **tokens)
    found = read_pairs(pairs)
    for name, token in given(**tokens).items():
        if name in found:
            raise typer.BadParameter(f"--{name}: {pairs} has one for each pair")
        found[name] = token
    return found


def axes(over: str | None) -> list[str] | None:
    """The axes of an option, which are separated by commas."""
    return over.split(",") if over else None
