"""Influence of nodes on the logits, and the nodes and edges of most influence, as circuit-tracer chooses them.

Shares are sizes of effects, of sum 1 over the sources of each target. The influence of a node is p (S + S^2 + ...) of
shares S and the weights p of the logits. Effects go up only: one pass from the logits down gives the whole series.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float32]
Vector = NDArray[np.float64]
Mask = NDArray[np.bool_]
LEAST = 1e-10  # of the sum of a row
SHARES_AT_ONCE = 2**22  # effects whose shares are in memory at once


def shares(effects: Matrix) -> Matrix:
    """Sizes of effects [targets, sources], of sum 1 in each row."""
    sizes = np.abs(effects)
    sizes /= np.maximum(sizes.sum(axis=1, dtype=np.float64), LEAST)[:, None].astype(sizes.dtype)
    return sizes


def influence(
    effects: NDArray[np.floating],
    layer: NDArray[np.int64],
    feature: NDArray[np.int64],
    weights: Vector,
    rows: NDArray[np.int64] | None = None,
) -> Vector:
    """The influence of each source, [sources].

    Args:
        effects: [rows, sources].
        layer, feature: of each target that is a feature, its layer and its column among the sources.
        weights: [targets], features with the logits behind them; of logits their probabilities; of features 0, or 1 for
            the one that is traced.
        rows: [targets], the row of each; in the order of the rows if left out.
    """
    count, total = len(layer), np.zeros(effects.shape[1])
    place = np.arange(len(weights)) if rows is None else rows
    block = max(1, SHARES_AT_ONCE // effects.shape[1])
    for number in (-1, *np.unique(layer)[::-1]):
        targets = np.arange(count, len(weights)) if number < 0 else np.flatnonzero(layer == number)
        share = weights[targets] + (0 if number < 0 else total[feature[targets]])
        for begin in range(0, len(targets), block):
            part = slice(begin, begin + block)
            sizes = np.abs(effects[place[targets[part]]])
            sums = np.maximum(sizes.sum(axis=1, dtype=np.float64), LEAST)
            total += (share[part] / sums).astype(sizes.dtype) @ sizes  # of shares, which are not written down
    return total


@dataclass(frozen=True)
class Leading:
    """The nodes and edges of most influence.

    Attributes:
        nodes: [sources], whether each is one of them; logits always are.
        edges: [targets, sources].
        cumulated: [sources], the share of all influence that a node and those before it have.
    """

    nodes: Mask
    edges: Mask
    cumulated: Vector


def leading(
    effects: Matrix, layer: NDArray[np.int64], tokens: int, weights: Vector, nodes: float, edges: float
) -> Leading:
    """Nodes with a share of all influence, then edges with a share of theirs, then no node without ways in and out.

    Args:
        effects: [targets, sources]: features, then logits; features, then errors, then tokens.
        layer: [features].
        tokens: number of the last sources, which stay whatever their influence is.
    """
    features, sources = len(layer), effects.shape[1]
    own = influence(effects, layer, np.arange(features), weights)
    alive = own >= _threshold(own, nodes)
    alive[sources - tokens :] = True
    columns = np.flatnonzero(alive)
    rows = np.concatenate([np.flatnonzero(alive[:features]), np.arange(features, len(effects))])
    few = len(rows) - (len(effects) - features)  # features among the rows, which are the first columns too
    part = shares(effects[np.ix_(rows, columns)])
    flow = influence(part, layer[rows[:few]], np.arange(few), weights[rows])
    into = np.concatenate([flow[:few], np.zeros(len(rows) - few)]) + weights[rows]
    scores = part * into[:, None]
    edge = (scores >= _threshold(scores[scores > 0], edges)) & (scores > 0)
    fixed, still = np.ones(len(columns), bool), len(columns) - tokens
    while True:
        before = fixed.copy()
        fixed[:still] &= edge[:, :still].any(axis=0)  # a way out
        fixed[:few] &= edge[:few].any(axis=1)  # and of features, one in
        if (fixed == before).all():
            break
        edge[:few][~fixed[:few]] = False
        edge[:, ~fixed] = False
    order = np.argsort(-own, kind="stable")
    cumulated = np.empty(sources)
    cumulated[order] = np.cumsum(own[order]) / max(own.sum(), LEAST)
    node_mask, edge_mask = np.zeros(sources, bool), np.zeros(effects.shape, bool)
    node_mask[columns], edge_mask[np.ix_(rows, columns)] = fixed, edge
    return Leading(node_mask, edge_mask, cumulated)


def _threshold(scores: NDArray[np.floating], share: float) -> float:
    """The score down to which scores, from the largest on, have a share of their sum."""
    if not len(scores):
        return 0.0
    falling = np.sort(scores)[::-1]
    running = np.cumsum(falling, dtype=np.float64)
    if not running[-1]:
        return 0.0
    return float(falling[min(int(np.searchsorted(running / running[-1], share)), len(falling) - 1)])
