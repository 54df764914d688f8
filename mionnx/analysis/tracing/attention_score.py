"""`attention`: a score of attention as a sum over pairs of nodes (QK attribution, Kamath et al. 2025).

With the scales of norms as constants queries and keys are sums of what features, errors and tokens write, so that their
product is one over pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.features.transcoder_set import TranscoderSet
from mionnx.analysis.tracing.effect_graph import EffectGraph
from mionnx.analysis.tracing.local_model import LocalModel
from mionnx.analysis.tracing.rows import TRACE_MEMORY, EffectRows, spread
from mionnx.analysis.tracing.sources import Sources
from mionnx.errors import HookError, InputError
from mionnx.graph.hook_points import HookPoint
from mionnx.machine.brief import spelled
from mionnx.machine.decimals import decimal
from mionnx.machine.ranges import at_least, index_within
from mionnx.machine.typed import typed
from mionnx.rewrite.gradient.way_back import KEY_ROWS, QUERY_ROWS
from mionnx.run.runner import Runner
from mionnx.spec.hook_spec import HookSpec
from mionnx.view import Bars, Columns, HeatMap, Shown, View

REST = "rest"  # biases, features that are no nodes, and what MLPs write at the first positions
PRODUCT = 1e-3  # of the largest score: how far products of queries and keys may be from the scores
MAPPED, FRAMED = 14, 1000  # nodes of a side of the map, and rows of the frame


@dataclass(frozen=True, eq=False, repr=False)
@typed(InputError)
class AttentionScore(Shown):
    """One score of attention, before the softmax, as a sum over pairs of nodes: one in the query and one in the key.

    Attributes:
        layer, head, query, key: which score; query and key are positions of tokens.
        tokens: [seq], texts.
        score: before the softmax; `pattern`: behind it.
        nodes: [nodes], names as in the graph, "rest" last: biases, features that are no nodes, and what MLPs write at
            the positions that have no features.
        queries, keys: [nodes, head_dim], what each node gives to the query, with the scale of scores, and to the key.
    """

    layer: int
    head: int
    query: int
    key: int
    tokens: tuple[str, ...]
    score: float
    pattern: float
    nodes: tuple[str, ...]
    queries: NDArray[np.float32]
    keys: NDArray[np.float32]

    def of_nodes(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """[nodes] each: the sums of each node's pairs, in the query and in the key."""
        queries, keys = self.queries.astype(np.float64), self.keys.astype(np.float64)
        return queries @ keys.sum(axis=0), keys @ queries.sum(axis=0)

    @property
    def gap(self) -> float:
        """The sum of all pairs minus the score: rounding."""
        return float(self.of_nodes()[0].sum()) - self.score

    def pairs(self, k: int = MAPPED) -> tuple[list[int], list[int], NDArray[np.float64]]:
        """The nodes of the largest sums by size, in the query and in the key, and the pairs of these [k, k].

        Args:
            k: number of nodes of each side.
        """
        at_least("k", k, 1)
        sides = [np.argsort(-np.abs(one), kind="stable")[:k].tolist() for one in self.of_nodes()]
        return *sides, self.queries[sides[0]].astype(np.float64) @ self.keys[sides[1]].T.astype(np.float64)

    def top(self, k: int = 10) -> list[tuple[str, str, float]]:
        """The largest pairs by size: (node in the query, node in the key, share of the score)."""
        at_least("k", k, 0)
        pairs = list[tuple[int, int, float]]()
        for i, query in enumerate(self.queries):
            row = self.keys @ query
            best = np.argsort(-np.abs(row), kind="stable")[:k].tolist()
            pairs += [(i, j, float(row[j])) for j in best]
        pairs = sorted(pairs, key=lambda pair: -abs(pair[2]))[:k]
        return [(self.nodes[i], self.nodes[j], share) for i, j, share in pairs]

    def _facts(self) -> Iterator[str]:
        yield f"layer {self.layer}, head {self.head}"
        yield f"{self.tokens[self.query]!r} ({self.query}) to {self.tokens[self.key]!r} ({self.key})"
        yield f"score {spelled(self.score)}, pattern {spelled(self.pattern)}"

    def _lines(self) -> Iterator[str]:
        for one, other, share in self.top(6):
            yield f"{decimal(share, 3, sign=True):>9}  {self._named(one)} . {self._named(other)}"

    def _named(self, node: str) -> str:
        if node == REST:
            return node
        return f"{node} at {self.tokens[int(node.rpartition('_')[2])]!r}"

    def _columns(self) -> Columns:
        one, other, shares = zip(*self.top(FRAMED), strict=True)
        return {"in_query": [*one], "in_key": [*other], "share": np.array(shares)}

    def view(self) -> View:
        """Pairs of the leading nodes as a map, and the sums of each."""
        rows, columns, pairs = self.pairs()
        sums = self.of_nodes()
        labels = [[self._named(self.nodes[i]) for i in side] for side in (rows, columns)]
        axes = {"node in the query": labels[0], "node in the key": labels[1]}
        panels: list[Bars | HeatMap] = [HeatMap(axes, {"share of the score": pairs}, heading="Pairs of leading nodes")]
        for name, own, side, label in zip(("query", "key"), sums, (rows, columns), labels, strict=True):
            panels.append(Bars(label, own[side], "sum of its pairs", heading=f"In the {name}", order="largest"))
        total = f"All pairs, of {len(self.nodes):,} nodes on each side, sum to {decimal(float(sums[0].sum()), 3)}."
        meaning = (
            "A share is what one node writes into the query times what one writes into the key, with the scales of "
            f'norms and the attention of earlier layers as they are. {total} "{REST}" is biases, features that are no '
            "nodes, and MLPs at positions without features."
        )
        title = f"Why layer {self.layer}, head {self.head} attends to {self.tokens[self.key]!r}"
        facts = f"score {decimal(self.score, 3)}, pattern {decimal(self.pattern, 3)}"
        about = f"from {self.tokens[self.query]!r} ({self.query}) to {self.tokens[self.key]!r} ({self.key})"
        return View(title, panels, about, meaning=meaning, facts=facts)


@typed(InputError)
def attention(
    self: EffectGraph, model: Runner, transcoders: TranscoderSet, layer: int, head: int, query: int, key: int
) -> AttentionScore:
    """Explain a score of attention, before the softmax, by pairs of the graph's nodes (Kamath et al. 2025).

    Args:
        model, transcoders: those of the graph.
        layer, head: of the score.
        query, key: positions of the tokens that attends and that is attended to, negative from the end.

    Raises:
        InputError: no such layer, head or position, a key behind the query, or scores that are no product of queries
            and keys alone (a soft cap, ALiBi, relative positions).
        HookError: a model without the hook points of queries, keys and scores.

    Example:
        graph.attention(model, transcoders, layer=2, head=3, query=-1, key=4).top(5)
    """
    layer = index_within("layer", layer, min(model.num_layers, self.layers + 1))
    query, key = (index_within(name, one, len(self.tokens)) for name, one in (("query", query), ("key", key)))
    if key > query:
        raise InputError(f"key {key} is behind query {query}, which does not attend to it")
    local = LocalModel(model, transcoders, layers=self.layers)
    points = _points(model, layer)
    clean = model.forward(self.token_ids, HookSpec().capture([*points, str(HookPoint.AttnPattern(layer))]))
    queries, keys, scores = (clean[point][0] for point in points)
    head = index_within("head", head, len(queries))
    key_head = head // (len(queries) // len(keys))
    scale = scale_of(queries[head], keys[key_head], scores[head], model.hooked.name)
    ends = (queries, head, query), (keys, key_head, key)
    parts = _parts(self, local, (layer, points[0], points[1]), ends)
    rests = [array[one, position] - part.sum(axis=0) for part, (array, one, position) in zip(parts, ends, strict=True)]
    sides = [np.concatenate([part, rest[None]]) for part, rest in zip(parts, rests, strict=True)]
    alive = np.flatnonzero(np.any([one.any(axis=1) for one in sides], axis=0))
    names = [*self.sources, REST]
    return AttentionScore(
        *(layer, head, query, key, self.tokens, float(scores[head, query, key])),
        float(clean[HookPoint.AttnPattern(layer)][0, head, query, key]),
        tuple(names[i] for i in alive),
        (sides[0][alive] * scale).astype(np.float32),
        sides[1][alive].astype(np.float32),
    )


def _points(model: Runner, layer: int) -> list[str]:
    """The hook points of a layer's queries and keys, as they are multiplied, and of its scores."""
    hooks = model.hooked.metadata.hooks
    turned = str(HookPoint.AttnRotQ(layer)) in hooks
    ends = (HookPoint.AttnRotQ, HookPoint.AttnRotK) if turned else (HookPoint.AttnQ, HookPoint.AttnK)
    points = [str(point(layer)) for point in (*ends, HookPoint.AttnScores)]
    if missing := [point for point in points if point not in hooks]:
        raise HookError(f"{model.hooked.name} has no {missing[0]}: its scores are not explained")
    return points


def scale_of(queries: NDArray, keys: NDArray, scores: NDArray, name: str) -> float:
    """What products of queries and keys [seq, head_dim] are multiplied by to be scores [seq, seq]."""
    seen = np.tril(np.ones(scores.shape, bool)) & (scores > np.finfo(np.float16).min)  # others are masked
    products: NDArray[np.float64] = (queries.astype(np.float64) @ keys.T.astype(np.float64))[seen]
    own: NDArray[np.float64] = scores[seen].astype(np.float64)
    scale = float(products @ own) / max(float(products @ products), 1e-30)
    if np.abs(own - scale * products).max() > PRODUCT * np.abs(own).max():
        raise InputError(
            f"scores of {name} are no product of queries and keys alone (a soft cap, or positions in the scores): not "
            "explained"
        )
    return scale


def _parts(
    graph: EffectGraph,
    local: LocalModel,
    layer: tuple[int, str, str],
    sides: Sequence[tuple[NDArray, int, int]],  # queries or keys [heads, seq, width], head and position
) -> list[NDArray[np.float32]]:
    """What each source of the graph gives to a query and to a key, [sources, width] each."""
    ids, width = graph.token_ids.tolist(), sides[0][0].shape[2]
    sources = Sources(local, ids, graph.skip, TRACE_MEMORY)
    rows = EffectRows(sources, np.zeros((0, 0), np.float32), TRACE_MEMORY)
    constants, _ = local.run(ids, captures=False, attention=layer)
    out, half = np.zeros((2 * width, sources.size), np.float32), max(1, rows.chunk(len(ids)) // 2)
    for begin in range(0, width, half):
        numbers, seeds = np.arange(begin, min(begin + half, width)), dict[str, NDArray]()
        for name, (array, head, position) in zip((QUERY_ROWS, KEY_ROWS), sides, strict=True):
            seeds[name] = np.zeros((len(numbers), *array.shape), np.float32)
            seeds[name][np.arange(len(numbers)), head, position, numbers] = 1
        got = local.back({**constants, **rows.skips, **sources.vectors(len(ids)), **seeds}, sources.gathered, layer)
        targets = np.concatenate([numbers, width + numbers])
        spread(sources, got, targets, [len(targets)] * layer[0], len(ids), out)
    columns = np.concatenate([sources.numbers(graph.features), np.arange(sources.count, sources.size)])
    parts = out[:, columns].T
    return [parts[:, :width], parts[:, width:]]
