"""The command line's part about reading: `mionnx lens`, `mionnx attention`, `mionnx attribute`."""

from typing import Annotated

import numpy as np
import typer
from rich.markup import escape
from rich.table import Column, Table

from mionnx.analysis.attention.attention import AttentionPatterns
from mionnx.analysis.attribution.attribution import Attribution
from mionnx.analysis.lens.lens_result import LensResult, label_of
from mionnx.cli.options import (
    Html,
    Json,
    Model,
    Png,
    Provider,
    deliver,
)
from mionnx.model import MIModel

Prompt = Annotated[str, typer.Argument(help="The text to run on.")]
Position = Annotated[int, typer.Option(help="Which token of the prompt, from 0, or negative from its end.")]
Some = Annotated[list[int] | None, typer.Option(metavar="NUMBER", help="Only this one; may be given several times.")]


def lens(
    model: Model,
    prompt: Prompt,
    token: Annotated[
        list[str] | None, typer.Option(help="A further token to follow; may be given several times.")
    ] = None,
    position: Position = -1,
    top: Annotated[int, typer.Option(min=1, help="How many of the likeliest tokens.")] = 5,
    layers: Some = None,
    html: Html = None,
    png: Png = None,
    as_json: Json = False,
    provider: Provider = "cpu",
) -> None:
    """Show what every layer would predict next, were it the last (the logit lens).

    The table is of one position; the page, the picture and JSON are of all.

    Example: mionnx lens models/world-llama "The capital of France is" --token Berlin --html lens.html
    """
    opened = MIModel.from_pretrained(model, provider=provider, prepack=False)
    result = opened.logit_lens(opened.tokenize(prompt), k=top, layers=layers, tokens=token or ())
    place = result.at(position)
    deliver(result, lambda: lens_table(result, place), html, png, as_json)


def lens_table(result: LensResult, place: int) -> Table:
    """What each point predicts at one position."""
    answer = result.spell(int(result.answers[place]))
    asked = [result.spell(token) for token in result.tracked]
    columns = [f"P({word!r})" for word in [answer, *asked]]
    table = Table(
        "after",
        "likeliest next tokens",
        *(Column(escape(name), justify="right") for name in columns),
        Column("rank", justify="right"),
        Column("entropy", justify="right"),
        Column("KL from the last layer", justify="right"),
        title=escape(f"position {result.positions[place]}, after {result.tokens[place]!r}"),
    )
    for i, point in enumerate(result.points):
        likeliest = ", ".join(f"{result.spell(one)!r} {chance:.3f}" for one, chance in result.best(i, place))
        chances = [f"{chance:.4f}" for chance in np.exp(result.readout.log_probs[i, place])]
        facts = [str(result.answer_rank[i, place])]
        facts += [f"{values[i, place]:.3f}" for values in (result.entropy, result.divergence)]
        table.add_row(label_of(point), escape(likeliest), *chances, *facts)
    return table


def attention(
    model: Model,
    prompt: Prompt,
    position: Position = -1,
    layers: Some = None,
    heads: Some = None,
    html: Html = None,
    png: Png = None,
    as_json: Json = False,
    provider: Provider = "cpu",
) -> None:
    """Show which tokens are read, layer by layer and head by head; of an RWKV its effective attention.

    The table is of one position and what each head reads most there; the page has everything.

    Example: mionnx attention models/world-llama "The capital of France is" --html attention.html
    """
    opened = MIModel.from_pretrained(model, provider=provider, prepack=False)
    result = opened.attention(opened.tokenize(prompt), layers, heads)
    place = result.at(position)
    deliver(result, lambda: attention_table(result, place), html, png, as_json)


def attention_table(result: AttentionPatterns, place: int) -> Table:
    """What each head reads most at one position."""
    title = escape(f"what position {place}, {result.tokens[place]!r}, reads most, by head")
    wide = len(result.heads) > 8
    table = Table("layer", *(["heads"] if wide else map(str, result.heads)), title=title)
    for i, layer in enumerate(result.layers):
        best = result.patterns[i, :, place].argmax(axis=-1)
        cells = [f"{result.tokens[key]!r} {result.patterns[i, j, place, key]:.2f}" for j, key in enumerate(best)]
        if wide:
            cells = ["  ".join(f"{head}: {cell}" for head, cell in zip(result.heads, cells, strict=True))]
        table.add_row(str(layer), *map(escape, cells))
    return table


def attribute(
    model: Model,
    prompt: Prompt,
    answer: Annotated[str | None, typer.Option(help="Whose logit; the likeliest token's if left out.")] = None,
    versus: Annotated[str | None, typer.Option(help="The answer's lead over this token, instead.")] = None,
    position: Position = -1,
    top: Annotated[int, typer.Option(min=1, help="How many components the table shows.")] = 15,
    html: Html = None,
    png: Png = None,
    as_json: Json = False,
    provider: Provider = "cpu",
) -> None:
    """Take a logit apart into what embeddings, heads and MLPs add to it directly.

    Example: mionnx attribute models/world-llama "The capital of France is" --answer Paris --versus Berlin
    """
    opened = MIModel.from_pretrained(model, provider=provider, prepack=False)
    result = opened.attribute(opened.tokenize(prompt), answer, versus, position=position)
    deliver(result, lambda: attribution_table(result, top), html, png, as_json)


def attribution_table(result: Attribution, top: int) -> Table:
    """The components that contribute most."""
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
        table.add_row(label, f"{value:+.4f}")
    left = len(result.labels) - len(shown)
    if left:
        table.add_row(f"{left} others", f"{result.total - sum(value for _, value in shown):+.4f}", style="dim")
    table.columns[0].footer = "the logit" if result.versus is None else "the difference"
    table.columns[1].footer = f"{result.logit:+.4f}"
    return table
