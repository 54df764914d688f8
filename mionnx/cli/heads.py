"""The command line's part about heads: `mionnx heads`."""

from typing import Annotated

import typer

from mionnx.analysis.attention.repeated_sequences import KINDS
from mionnx.cli.options import (
    Html,
    Json,
    Model,
    Png,
    Provider,
    deliver,
)
from mionnx.machine.progress import bars
from mionnx.model import MIModel


def heads(
    model: Model,
    kind: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(KINDS)}; all if left out.")] = None,
    batch: Annotated[int, typer.Option(help="How many random sequences.")] = 8,
    period: Annotated[int, typer.Option(help="Tokens of a sequence, which is given twice.")] = 24,
    seed: Annotated[int, typer.Option(help="Of the sequences.")] = 0,
    top: Annotated[int, typer.Option(min=1, help="How many heads of each kind to print.")] = 5,
    html: Html = None,
    png: Png = None,
    as_json: Json = False,
    provider: Provider = "cpu",
) -> None:
    """Score heads as previous-token, duplicate-token and induction heads, on random sequences that are given twice.

    Example: mionnx heads models/world-llama --html heads.html
    """
    opened = MIModel.from_pretrained(model, provider=provider, prepack=False)
    with bars() as progress:
        found = opened.head_scores(kind or KINDS, batch=batch, period=period, seed=seed, progress=progress)
    deliver(found, lambda: found.table(top), html, png, as_json)
