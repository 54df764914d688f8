"""The command `mionnx heads`: scores of previous-token, duplicate-token and induction heads."""

from typing import Annotated

import typer

from mionnx.analysis.attention.repeated_sequences import HEAD_KINDS
from mionnx.cli.opening import PLAIN, RUNS, Opening, opens_model
from mionnx.cli.options import Html, Json, Model, Png, Save, deliver


@opens_model(*RUNS)
def heads(
    model: Model,
    kind: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(HEAD_KINDS)}; all if left out.")] = None,
    batch: Annotated[int, typer.Option(help="Number of random sequences.")] = 8,
    period: Annotated[int, typer.Option(help="Number of tokens before the sequence repeats.")] = 24,
    seed: Annotated[int, typer.Option(help="Random seed of the sequences.")] = 0,
    top: Annotated[int, typer.Option(min=1, help="Number of heads of each kind to print.")] = 5,
    html: Html = None,
    png: Png = None,
    save: Save = None,
    as_json: Json = False,
    opening: Opening = PLAIN,
) -> None:
    """Score previous-token, duplicate-token and induction heads on repeated random sequences.

    Example: mionnx heads models/world-llama --html heads.html
    """
    opened = opening.once(model)
    scores = opened.head_scores(kind or HEAD_KINDS, batch=batch, period=period, seed=seed)
    deliver(scores, lambda: scores.table(top), html, png, as_json, save)
