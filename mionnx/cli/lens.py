"""The command `mionnx lens`: predictions of every layer at one position."""

from typing import Annotated

import numpy as np
import typer
from rich.markup import escape
from rich.table import Column

from mionnx.analysis.lens.lens_result import LensResult, label_of
from mionnx.cli.opening import PLAIN, RUNS, Opening, opens_model
from mionnx.cli.options import (
    Html,
    Json,
    Layers,
    Model,
    Png,
    Position,
    Prompt,
    Save,
    chosen,
    deliver,
)
from mionnx.machine.decimals import decimal
from mionnx.view import Table


@opens_model(*RUNS)
def lens(
    model: Model,
    prompt: Prompt,
    token: Annotated[list[str] | None, typer.Option(help="A further token to follow; may be repeated.")] = None,
    position: Position = -1,
    top: Annotated[int, typer.Option(min=1, help="Number of top tokens.")] = 5,
    layers: Layers = None,
    html: Html = None,
    png: Png = None,
    save: Save = None,
    as_json: Json = False,
    opening: Opening = PLAIN,
) -> None:
    """Show the next token that every layer would predict, were it the last (the logit lens).

    The table is of one position; page, picture and JSON hold all.

    Example: mionnx lens models/world-llama "The capital of France is" --token Berlin --html lens.html
    """
    opened = opening.once(model)
    result = opened.logit_lens(opened.tokenize(prompt), k=top, layers=chosen("layers", layers), token_ids=token or ())
    index = result.at(position)
    deliver(result, lambda: lens_table(result, index), html, png, as_json, save)


def lens_table(result: LensResult, index: int) -> Table:
    """Top tokens, probabilities, rank, entropy and KL divergence by layer, at one position."""
    answer = result.spell(int(result.answers[index]))
    words = [answer, *(result.spell(token) for token in result.tracked)]
    table = Table(
        "after",
        "top tokens",
        *(Column(escape(f"P({word!r})"), justify="right") for word in words),
        Column("rank", justify="right"),
        Column("entropy", justify="right"),
        Column("KL from the last layer", justify="right"),
        title=escape(f"position {result.positions[index]}, after {result.tokens[index]!r}"),
    )
    for i, point in enumerate(result.points):
        best = ", ".join(
            f"{result.spell(one)!r} {decimal(probability, 3)}" for one, probability in result.best(i, index)
        )
        probabilities = [decimal(probability, 4) for probability in np.exp(result.readout.log_probs[i, index])]
        facts = [str(result.answer_rank[i, index])]
        facts += [decimal(values[i, index], 3) for values in (result.entropy, result.divergence)]
        table.add_row(label_of(point), escape(best), *probabilities, *facts)
    return table
