"""The command `mionnx attribute`: direct logit attribution of one token."""

from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Column

from mionnx.analysis.attribution.attribution import Attribution
from mionnx.cli.opening import PLAIN, RUNS, Opening, opens_model
from mionnx.cli.options import Html, Json, Model, Png, Position, Prompt, Save, deliver
from mionnx.machine.decimals import decimal
from mionnx.view import Table


@opens_model(*RUNS)
def attribute(
    model: Model,
    prompt: Prompt,
    answer: Annotated[str | None, typer.Option(help="Token of the logit; the top token if left out.")] = None,
    versus: Annotated[str | None, typer.Option(help="Attribute the answer's lead over this token instead.")] = None,
    position: Position = -1,
    top: Annotated[int, typer.Option(min=1, help="Number of components in the table.")] = 15,
    html: Html = None,
    png: Png = None,
    save: Save = None,
    as_json: Json = False,
    opening: Opening = PLAIN,
) -> None:
    """Decompose a logit into the direct contributions of embeddings, heads and MLPs.

    Example: mionnx attribute models/world-llama "The capital of France is" --answer Paris --versus Berlin
    """
    opened = opening.once(model)
    result = opened.attribute(opened.tokenize(prompt), answer, versus, position=position)
    deliver(result, lambda: attribution_table(result, top), html, png, as_json, save)


def attribution_table(result: Attribution, top: int) -> Table:
    """The components that contribute most, the rest in one row, and the logit as the footer."""
    title = f"{result.what} at position {result.position}, {result.tokens[result.position]!r}"
    table = Table(
        "component",
        Column("contribution", justify="right"),
        title=escape(title),
        show_footer=True,
        min_width=min(80, len(title) + 2),
    )
    shown = result.top(top)
    for label, value in shown:
        table.add_row(label, decimal(value, 4, sign=True))
    left = len(result.labels) - len(shown)
    if left:
        table.add_row(
            f"{left} others", decimal(result.total - sum(value for _, value in shown), 4, sign=True), style="dim"
        )
    table.columns[0].footer = "the logit" if result.versus is None else "the difference"
    table.columns[1].footer = decimal(result.logit, 4, sign=True)
    return table
