"""The page and picture of an attribution graph: tokens across, layers up."""

import numpy as np
from rich.markup import escape

from mionnx.analysis.tracing.effect_graph import EffectGraph
from mionnx.machine.decimals import decimal
from mionnx.view import Columns, Table, Trace, TraceNode, View, readable

DRAWN = 120  # features and errors of a page
LISTED = 40  # rows of the table
DRAWN_SHARE, EDGES_DRAWN = 0.95, 3000


def view_of(graph: EffectGraph) -> View:
    """The leading nodes and their edges."""
    best, few, seq = graph.leading(edges=DRAWN_SHARE), len(graph.features), len(graph.tokens)
    own = graph.influence()
    order = [i for i in np.argsort(-own, kind="stable").tolist() if best.nodes[i] and i < len(own) - seq][:DRAWN]
    columns = [*sorted(order), *range(len(own) - seq, len(own))]
    names, groups = graph.sources, {one: name for name, members in graph.groups.items() for one in members}
    nodes = []
    for i in columns:
        kind = "feature" if i < few else "token" if i >= len(own) - seq else "error"
        layer, position, feature = graph.features[i].tolist() if i < few else (*divmod(i - few, seq), -1)
        layer = -1 if kind == "token" else layer
        label = f"feature {feature}" if i < few else graph.tokens[position] if kind == "token" else "error"
        active = float(graph.activations[i]) if i < few else None
        words = "raises " + ", ".join(map(repr, graph.promotes[names[i]])) if names[i] in graph.promotes else ""
        texts = graph.excited.get(f"{layer}_{feature}", ()) if i < few else ()
        words = "\n".join([*([words] if words else []), *texts])
        group = groups.get(names[i], "")
        nodes.append(TraceNode(names[i], kind, layer, position, label, float(own[i]), active, group, words))
    for row, name in enumerate(graph.receivers[few:]):
        share = float(graph.probabilities[row])
        logit = TraceNode(name, "logit", graph.layers, seq - 1, graph.targets[row], share, None, groups.get(name, ""))
        nodes.append(logit)
    number = {column: i for i, column in enumerate(columns)}
    rows = {column: i for column, i in number.items() if column < few}
    rows |= {few + i: len(columns) + i for i in range(len(graph.targets))}
    edges = [
        (number[column], rows[row], float(graph.effects[row, column]))
        for row, column in np.argwhere(best.edges).tolist()
        if row in rows and column in number
    ]
    edges = sorted(edges, key=lambda edge: -abs(edge[2]))[:EDGES_DRAWN]
    table = Table("node", "token", "activation", "influence", title="Nodes of most influence", on_page={"most": 15})
    for i in order[:LISTED]:
        position = int(graph.features[i, 1]) if i < few else (i - few) % seq
        activation = float(graph.activations[i]) if i < few else None
        table.add_row(names[i], escape(graph.tokens[position]), readable(activation), readable(float(own[i])))
    left = int(best.nodes[: len(own) - seq].sum()) - len(order)
    more = f" {left} more nodes of less influence are left out." if left > 0 else ""
    note = (
        "Circles are features, squares errors of transcoders, boxes tokens and logits; larger is more influence. Red "
        "edges raise what they lead to, blue ones lower it. Click a node for its ways in and out, again to pin it."
    )
    note += more
    facts = (
        f"{few:,} of {graph.active:,} active features; replacement {decimal(graph.replacement_score, 3)}, completeness "
        f"{decimal(graph.completeness_score, 3)}"
    )
    title = f"What leads to {' / '.join(map(repr, graph.targets[:3]))}"
    panels = [Trace(graph.tokens, graph.layers, nodes, edges, note=note), table]
    return View(title, panels, graph.prompt, facts=facts)


def columns_of(graph: EffectGraph) -> Columns:
    """All nodes, those of most influence first."""
    seq, few, own = len(graph.tokens), len(graph.features), graph.influence()
    order = np.argsort(-own, kind="stable")
    places = [(layer, position, feature) for layer, position, feature in graph.features.tolist()]
    places += [(layer, position, None) for layer in range(graph.layers) for position in range(seq)]
    places += [(None, position, None) for position in range(seq)]
    kinds = ["feature"] * few + ["error"] * (graph.layers * seq) + ["token"] * seq
    values = np.concatenate([graph.activations, np.full(len(own) - few, np.nan, np.float32)])
    names = graph.sources
    return {
        "node": [names[i] for i in order],
        "kind": [kinds[i] for i in order],
        "layer": [places[i][0] for i in order],
        "position": [places[i][1] for i in order],
        "token": [graph.tokens[places[i][1]] for i in order],
        "feature": [places[i][2] for i in order],
        "activation": values[order],
        "influence": own[order],
    }
