"""Tables of results at one position, or of their largest entries."""

import numpy as np
from rich.markup import escape
from rich.table import Column

from mionnx.analysis.attention.attention_patterns import AttentionPatterns
from mionnx.analysis.attribution.attribution import Attribution, Attributions
from mionnx.analysis.lens.lens_result import LensResult, label_of
from mionnx.analysis.steering.dose_response import DoseResponse
from mionnx.machine.decimals import decimal
from mionnx.view import Table


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


def attention_table(result: AttentionPatterns, index: int) -> Table:
    """The key that each head attends to most at one position, with its weight."""
    title = escape(f"most attended token at position {index}, {result.tokens[index]!r}, by head")
    # Eight columns fit into a terminal; above, the heads of a layer share one.
    wide = len(result.heads) > 8
    table = Table("layer", *(["heads"] if wide else map(str, result.heads)), title=title)
    for i, layer in enumerate(result.layers):
        best = result.patterns[i, :, index].argmax(axis=-1)
        cells = [
            f"{result.tokens[key]!r} {decimal(result.patterns[i, j, index, key], 2)}" for j, key in enumerate(best)
        ]
        if wide:
            cells = ["  ".join(f"{head}: {cell}" for head, cell in zip(result.heads, cells, strict=True))]
        table.add_row(str(layer), *map(escape, cells))
    return table


def attribution_table(result: Attribution, k: int) -> Table:
    """The components that contribute most, the rest in one row, and the logit as the footer."""
    title = f"{result.what} at position {result.position}, {result.tokens[result.position]!r}"
    table = Table(
        "component",
        Column("contribution", justify="right"),
        title=escape(title),
        show_footer=True,
        # As wide as its title, so that this is not folded over two narrow columns.
        min_width=min(80, len(title) + 2),
    )
    shown = result.top(k)
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


def mean_table(result: Attributions, k: int) -> Table:
    """The components that contribute most on average, with the spread over prompts."""
    columns = ("mean contribution", "standard deviation", "standard error")
    table = Table("component", *(Column(name, justify="right") for name in columns), title=escape(result.what))
    spread = dict(zip(result.labels, zip(result.std, result.sem, strict=True), strict=True))
    for label, value in result.top(k):
        table.add_row(label, decimal(value, 4, sign=True), *(decimal(one, 4) for one in spread[label]))
    return table


def dose_table(response: DoseResponse, i: int) -> Table:
    """The answers to one prompt, a row a strength."""
    target = repr(response.names[int(response.targets[i])])
    columns = ["strength", "of the stream", "top token", "probability", escape(f"P({target})"), "KL (nats)"]
    title, caption = (
        escape(text)
        for text in (f"{response.prompts[i]!r}, steered at {response.hook}", f"{target} {response.turn(i)}")
    )
    table = Table(*(Column(name, justify="right") for name in columns), title=title, caption=caption)
    for n, strength in enumerate(response.strengths):
        table.add_row(
            f"{strength:g}",
            f"{decimal(100 * response.share * strength, 1)} %",
            escape(repr(response.top(i)[n])),
            decimal(response.answers.top_probabilities[i, n], 4),
            decimal(response.probabilities[i, n], 4),
            decimal(response.kl[i, n], 4),
        )
    return table
