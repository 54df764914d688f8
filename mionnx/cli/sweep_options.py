"""Options of the commands that go over cells: prompts, hook point, axes, tokens."""

from typing import Annotated, Any

import typer

Clean = Annotated[str, typer.Argument(help="The clean prompt.")]
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


def axes(over: str | None) -> list[str] | None:
    """The axes of an option, which are separated by commas."""
    return over.split(",") if over else None
