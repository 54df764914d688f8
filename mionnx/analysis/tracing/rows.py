"""`EffectRows`: direct effects of all sources of a prompt on some of its features and on its logits."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.features.transcoder import Floats, Numbers
from mionnx.analysis.tracing.local_model import Arrays
from mionnx.analysis.tracing.sources import Sources
from mionnx.rewrite.gradient.way_back import (
    ROW_PLACES,
    ROW_PRODUCTS,
    ROW_VECTORS,
    SKIPS,
    TOKEN_PRODUCTS,
)

TRACE_MEMORY = 4 * 2**30  # bytes
BUCKETS = 6  # of positions: targets run on the tokens up to the end of theirs, which is 0.6 of the work
COTANGENTS = 2**20  # numbers of the rows of one call at one value
LEAST_ROWS = 16  # rows of a call, where memory allows, so that patterns are not read for each row alone
LIVE = 16  # values of a row that are in memory at once on the way back (measured)
WORKING = 1 / 6  # of the memory: what one call may take
RESERVED = 0.65  # of what sources leave: one call, and what calls leave in the engine's arena (measured)


class EffectRows:
    """The rows of one prompt's graph."""

    def __init__(self, sources: Sources, directions: Floats, memory: int) -> None:
        self.sources, self.directions, self.memory = sources, directions, memory  # directions: [logits, hidden]
        local = sources.local
        self.skips = {
            SKIPS(i): skip for i in range(local.layers) if (skip := local.transcoders.layer(i).skip) is not None
        }

    def chunk(self, end: int) -> int:
        """Rows of one call on the first tokens."""
        width = self.sources.tokens.shape[1]
        columns = [one.index.shape[1] for one in self.sources.written]
        row = 4 * end * (LIVE * width + sum(columns))
        most = max(COTANGENTS // (end * width), LEAST_ROWS)
        vectors = 2 * 4 * end * width * max(columns) * self.sources.gathered  # of one layer, as gathered and turned
        return max(1, min(most, (int(WORKING * self.memory) - vectors) // row))

    def compute(self, nodes: Numbers, out: Floats, done: Callable[[int], None] = lambda rows: None) -> None:
        """Write the direct effects on nodes, features by number and logits as -1, -2, ..., into `out` [nodes, size]."""
        sources, seq = self.sources, len(self.sources.ids)
        position = np.full(len(nodes), seq - 1)
        position[nodes >= 0] = sources.position[nodes[nodes >= 0]]
        ends, count = sorted({-(-seq * (i + 1) // BUCKETS) for i in range(BUCKETS)}), 0
        # from the whole text on, which is there already
        for begin, end in reversed([*zip([0, *ends[:-1]], ends, strict=True)]):
            mine = np.flatnonzero((position >= begin) & (position < end))
            if not len(mine):
                continue
            chunk = self.chunk(end)
            for first in range(0, len(mine), chunk):
                part = mine[first : first + chunk]
                self._run(nodes[part], part, position[part], end, out)
                count += len(part)
                done(count)

    def _run(self, nodes: Numbers, rows: Numbers, position: Numbers, end: int, out: Floats) -> None:
        """One call of the way back, on the first tokens."""
        sources, layers = self.sources, self.sources.local.layers
        layer = np.full(len(nodes), layers)
        layer[nodes >= 0] = sources.layer[nodes[nodes >= 0]]
        # held by this call alone, so that constants of other lengths are gone before those of this one are computed
        feeds = {**sources.feeds(end), **self.skips}
        order, above = list[NDArray[np.int64]](), list[int]()
        for i in reversed(range(layers + 1)):
            above.append(sum(map(len, order)))
            own = np.flatnonzero(layer == i)
            of = nodes[own]
            places = np.zeros((len(own), end), np.float32)
            places[np.arange(len(own)), position[own]] = 1
            feeds[ROW_VECTORS(i)] = self.directions[-1 - of] if i == layers else sources.encoders(of)
            feeds[ROW_PLACES(i)] = places
            order.append(rows[own])
        got = sources.local.back(feeds, sources.gathered)
        spread(sources, got, np.concatenate(order), [above[layers - i] for i in range(layers)], end, out)


def spread(sources: Sources, got: Arrays, targets: Numbers, reached: Sequence[int], end: int, out: Floats) -> None:
    """Write what the way back gave into `out` [rows, size].

    Args:
        got: its outputs.
        targets: the row of `out` of each of its rows; the first `reached[i]` of them come to layer i.
        end: number of the first tokens, on which it ran.
    """
    for i, count in enumerate(reached):
        one, rows = sources.written[i], targets[:count]
        if len(rows):
            products, near = got[ROW_PRODUCTS(i)], one.position < end
            out[rows[:, None], one.feature[near]] += products[one.position[near], :, one.place[near]].T
            first = sources.count + i * len(sources.ids)
            out[rows[:, None], first + np.arange(end)] = products[:, :, 0].T
    first = sources.count + sources.local.layers * len(sources.ids)
    out[targets[:, None], first + np.arange(end)] = got[TOKEN_PRODUCTS]
