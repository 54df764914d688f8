"""The command `mionnx demo`: worked examples on the models that ship with the repository."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mionnx.cli.demos import tour
from mionnx.cli.options import Provider
from mionnx.errors import ModelError
from mionnx.model import MIModel

SHIPPED = "models/world-llama and models/world-rwkv7 if left out."


def demo(
    model: Annotated[str | None, typer.Argument(help=f"A model; {SHIPPED}")] = None,
    pages: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Write pages and pictures there.")] = None,
    provider: Provider = "cpu",
) -> None:
    """Run the worked examples on a model.

    Attention patterns, logit lens, attention knockout, patching, ablation, induction heads, attribution, steering,
    RWKV states, runtimes. A model runs those for which it has the hook points.

    Example: mionnx demo --pages pages
    """
    names = [model] if model else [shipped_model("world-llama"), shipped_model("world-rwkv7")]
    tour.run_all([MIModel.from_pretrained(name, provider=provider) for name in names], Console(), pages)


def shipped_model(name: str, folders: Sequence[Path] = (Path(), Path(__file__).parents[2])) -> Path:
    """Find a model that ships with the repository.

    Raises:
        ModelError: neither the current folder nor mionnx' own has a `models` folder with it.
    """
    for folder in folders:
        if (folder / "models" / name / "config.json").is_file():
            return folder / "models" / name
    raise ModelError(f"models/{name} is not here: run in the repository, or name a model")
