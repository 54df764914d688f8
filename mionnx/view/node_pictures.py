"""Pictures of nodes with lines between them: circuits, and attribution graphs."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from mionnx.view.figure import token_label
from mionnx.view.panels import Graph, Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure

    Part = Figure | SubFigure

RAISES, LOWERS, NEUTRAL, GROUPED = "#b2182b", "#2166ac", "#888", "#f4c27a"  # the last: nodes of a supernode
PICTURED_EDGES = 300  # of an attribution graph, those of the largest effects
SHAPES = {"feature": "o", "error": "D", "token": "s", "logit": "s"}


def draw_graph(part: "Part", panel: Graph, beside: int) -> None:
    """Edges as lines between nodes: layers from the bottom up, MLPs to the right of heads."""
    axes, edges = part.subplots(), panel.edges[: panel.drawn]
    place = _placed({label.partition("<")[0]: label for edge in edges for label in edge[:2]}, panel.places)
    limit = max((abs(score) for *_, score in edges), default=1.0) or 1.0
    # The leading edges last, on top of the others.
    for sender, receiver, score in reversed(edges):
        strength = abs(score) / limit
        ends = zip(place[sender.partition("<")[0]], place[receiver.partition("<")[0]], strict=True)
        (line,) = axes.plot(*ends, color=RAISES if score > 0 else LOWERS, zorder=1)
        line.set(linewidth=0.5 + 3 * strength, alpha=0.25 + 0.75 * strength)
    for one, other in panel.shared:
        if one in place and other in place:
            axes.plot(*zip(place[one], place[other], strict=True), color=NEUTRAL, linestyle=":", linewidth=1, zorder=1)
    for name, (x, y) in place.items():
        box = {"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": NEUTRAL, "linewidth": 0.6}
        axes.text(x, y, token_label(name), ha="center", va="center", fontsize=7, bbox=box, zorder=2)
    axes.set_axis_off()
    axes.margins(0.08)
    title = f"the {len(edges)} leading edges; by being kept, red raises {panel.unit}, blue lowers it"
    axes.set_title(token_label(title), fontsize=9)


def _placed(names: Iterable[str], places: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """Node -> its place in the drawing; nodes without a number stand to the right."""
    levels = sorted({places[name][1] for name in names})
    rows = [sorted((name for name in names if places[name][1] == level), key=places.__getitem__) for level in levels]
    right = max(map(len, rows), default=1) / 2 + 0.3
    return {
        name: (column - (len(row) - 1) / 2 + 0.2 * (number % 2) if "." in name else right, number)
        # Every other row is shifted, so that edges between nodes of one column do not run through those between.
        for number, row in enumerate(rows)
        for column, name in enumerate(row)
    }


def trace_size(panel: Trace, beside: int) -> tuple[float, float]:
    """Inches of an attribution graph."""
    return min(24.0, 2.5 + 0.95 * len(panel.tokens)), min(16.0, 2.0 + 0.75 * panel.layers)


def draw_trace(part: "Part", panel: Trace, beside: int) -> None:
    """Tokens across and layers up; nodes of one place stand side by side, larger ones have more influence."""
    axes, cells = part.subplots(), defaultdict(list)
    for index, node in enumerate(panel.nodes):
        cells[node.layer, node.position].append(index)
    place = {}
    for (layer, position), members in cells.items():
        for number, index in enumerate(members):
            offset = (number - (len(members) - 1) / 2) * min(0.16, 0.8 / len(members))
            place[index] = (position + offset, layer + 0.12 * (number % 2))
    limit = max((abs(weight) for *_, weight in panel.edges), default=1.0) or 1.0
    for source, target, weight in reversed(panel.edges[:PICTURED_EDGES]):
        strength, ends = abs(weight) / limit, zip(place[source], place[target], strict=True)
        (line,) = axes.plot(*ends, color=RAISES if weight > 0 else LOWERS, zorder=1)
        line.set(linewidth=0.3 + 2.5 * strength, alpha=0.12 + 0.8 * strength)
    most = max((node.influence for node in panel.nodes), default=1.0) or 1.0
    for index, node in enumerate(panel.nodes):
        x, y = place[index]
        if node.kind in ("token", "logit"):
            words = token_label(node.label, 12)
            box = {"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": NEUTRAL, "linewidth": 0.6}
            axes.text(x, y, words, ha="center", va="center", fontsize=7, bbox=box, zorder=3)
            continue
        colour, inside = NEUTRAL if node.kind == "error" else "#444", GROUPED if node.group else "white"
        size = 12 + 110 * node.influence / most
        axes.scatter([x], [y], s=size, marker=SHAPES[node.kind], facecolor=inside, edgecolor=colour, zorder=2)
    for name in dict.fromkeys(node.group for node in panel.nodes if node.group):
        xs, ys = zip(*(place[index] for index, node in enumerate(panel.nodes) if node.group == name), strict=True)
        box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}
        label = axes.text(sum(xs) / len(xs), max(ys) + 0.16, token_label(name, 30), fontsize=7, style="italic")
        label.set(ha="center", bbox=box, zorder=3)
    axes.set_yticks([*range(panel.layers)], [f"layer {layer}" for layer in range(panel.layers)], fontsize=7)
    axes.set_xticks([])
    axes.set_xlim(-0.7, len(panel.tokens) - 0.3)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_title("circles: features, diamonds: errors; red edges raise, blue ones lower", fontsize=8)
