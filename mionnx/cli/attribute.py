"""The command `mionnx attribute`: direct logit attribution of one token."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Column

from mionnx.analysis.attribution.attribution import Attribution
from mionnx.analysis.attribution.attributions import Attributions
from mionnx.cli.opening import PLAIN, RUNS, Opening, opens_model
from mionnx.cli.options import Html, Json, Model, Png, Position, Save, deliver
from mionnx.cli.sweep_options import prompts
from mionnx.machine.decimals import decimal
from mionnx.view import Table


@opens_model(*RUNS)
def attribute(
    model: Model,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; none with --pairs.")] = None,
    answer: Annotated[str | None, typer.Option(help="Token of the logit; the top token if left out.")] = None,
    versus: Annotated[str | None, typer.Option(help="Attribute the answer's lead over this token instead.")] = None,
    pairs: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Many prompts: JSON lines with clean, answer, versus; the rest is not read."),
    ] = None,
    position: Position = -1,
    top: Annotated[int, typer.Option(min=1, help="Number of components in the table.")] = 15,
    html: Html = None,
    png: Png = None,
    save: Save = None,
    as_json: Json = False,
    opening: Opening = PLAIN,
) -> None:
    """Decompose a logit into the direct contributions of embeddings, heads and MLPs.

    Examples:

    mionnx attribute models/world-llama "The capital of France is" --answer Paris --versus Berlin

    mionnx attribute models/world-llama --pairs pairs.jsonl
    """
    asked = prompts(prompt, None, pairs, answer=answer, versus=versus)
    opened = opening.once(model)
    result = opened.attribute(asked["clean"], asked.get("answer"), asked.get("versus"), position=position)
    table = mean_table if isinstance(result, Attributions) else attribution_table
    deliver(result, lambda: table(result, top), html, png, as_json, save)


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


def mean_table(result: Attributions, top: int) -> Table:
    """The components that contribute most on average, with the spread over prompts."""
    columns = ("mean contribution", "standard deviation", "standard error")
    table = Table("component", *(Column(name, justify="right") for name in columns), title=escape(result.what))
    spread = dict(zip(result.labels, zip(result.std, result.sem, strict=True), strict=True))
    for label, value in result.top(top):
        table.add_row(label, decimal(value, 4, sign=True), *(decimal(one, 4) for one in spread[label]))
    return table
