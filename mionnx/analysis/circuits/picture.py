"""Edges as matplotlib figures: heat maps, and circuits as nodes and lines."""

from collections.abc import Sequence
from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mionnx.view.figure import empty_figure, token_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CELL, LEAST, WIDEST = 0.16, 5.0, 24.0  # inches
LABELS = 110  # most labels along an axis
Edge = tuple[str, str, float]  # labels of sender and receiver, and a number
RED, BLUE = "#b2182b", "#2166ac"


def draw_scores(
    scores: NDArray[np.float64], senders: Sequence[str], receivers: Sequence[str], title: str, metric: str
) -> "Figure":
    """Draw a heat map of edges' scores, senders down and receivers across."""
    height, width = scores.shape
    across, down = (min(WIDEST, max(LEAST, CELL * number)) for number in (width, height))
    figure = empty_figure(across + 1.6, down + 1.2)
    axes = figure.add_subplot()
    limit = float(np.abs(scores).max(initial=0.0)) or 1.0
    image = axes.imshow(scores, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest")
    for axis, names, turned in ((axes.xaxis, receivers, 90), (axes.yaxis, senders, 0)):
        places = range(0, len(names), 1 + len(names) // LABELS)
        axis.set_ticks(list(places), [names[i] for i in places], fontsize=6, rotation=turned)
    axes.set_xlabel("receiver", fontsize=8)
    axes.set_ylabel("sender", fontsize=8)
    figure.colorbar(image, ax=axes, shrink=0.7).set_label(f"change of {metric}", fontsize=8)
    figure.suptitle(_lines(title, across), fontsize=9)
    return figure


def draw_circuit(axes: "Axes", edges: Sequence[Edge], shared: Sequence[tuple[str, str]] = ()) -> None:
    """Draw edges as lines between nodes: layers from the bottom up, MLPs to the right of heads.

    Args:
        axes: to draw on.
        edges: sender, receiver, and what the edge adds to the metric; red raises it, blue lowers it.
        shared: keys and values with the heads that read them, dotted.
    """
    place = places(edges)
    limit = max((abs(score) for *_, score in edges), default=1.0) or 1.0
    for sender, receiver, score in sorted(edges, key=lambda edge: abs(edge[2])):
        strength = abs(score) / limit
        ends = zip(place[node(sender)], place[node(receiver)], strict=True)
        (line,) = axes.plot(*ends, color=RED if score > 0 else BLUE, zorder=1)
        line.set(linewidth=0.5 + 3 * strength, alpha=0.25 + 0.75 * strength)
    for one, other in shared:
        axes.plot(*zip(place[one], place[other], strict=True), color="#888", linestyle=":", linewidth=1, zorder=1)
    for name, (x, y) in place.items():
        box = {"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": "#888", "linewidth": 0.6}
        axes.text(x, y, token_label(name), ha="center", va="center", fontsize=7, bbox=box, zorder=2)
    axes.set_axis_off()
    axes.margins(0.08)


def node(label: str) -> str:
    """The node of a label: that of "a2.h3<q>" is "a2.h3"."""
    return label.partition("<")[0]


def level(name: str) -> float:
    """Height of a node: the embedding is lowest; in a layer keys and values, heads, MLP."""
    if not name[1:2].isdigit():
        return -1.0 if name == "embed" else np.inf
    layer, _, head = name[1:].partition(".")
    return 3.0 * int(layer) + (2 if not head else 0 if head.startswith("kv") else 1)


def places(edges: Sequence[Edge]) -> dict[str, tuple[float, float]]:
    """Node -> its place in a drawing; empty levels are left out."""
    names = [*dict.fromkeys(node(name) for sender, receiver, _ in edges for name in (sender, receiver))]
    rows = {height: [name for name in names if level(name) == height] for height in map(level, names)}
    right = max((len(row) for row in rows.values()), default=1) / 2 + 0.3
    made = {}
    for number, (_, row) in enumerate(sorted(rows.items())):
        row.sort(key=lambda name: int("".join(filter(str.isdigit, name.partition(".")[2])) or 0))
        for column, name in enumerate(row):
            alone = name.startswith("m") or "." not in name
            made[name] = (right if alone else column - (len(row) - 1) / 2 + 0.2 * (number % 2), float(number))
    return made


def _lines(title: str, inches: float) -> str:
    return "\n".join(fill(line, max(30, int(14 * inches))) for line in title.splitlines()).replace("$", r"\$")
