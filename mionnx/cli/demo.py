"""The command `mionnx demo`: worked examples on the models that ship with mionnx."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mionnx.cli.demos import tour
from mionnx.cli.options import Provider
from mionnx.model import MIModel

SHIPPED = ("world-llama", "world-rwkv7")


def demo(
    model: Annotated[str | None, typer.Argument(help=f"A model; {' and '.join(SHIPPED)} if left out.")] = None,
    pages: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Write pages and pictures there.")] = None,
    provider: Provider = "cpu",
) -> None:
    """Run the worked examples on a model.

    Attention patterns, logit lens, attention knockout, patching, ablation, induction heads, attribution, steering,
    RWKV states, runtimes. A model runs those for which it has the hook points.

    Example: mionnx demo --pages pages
    """
    names = [model] if model else SHIPPED
    tour.run_all([MIModel.from_pretrained(name, provider=provider) for name in names], Console(), pages)
