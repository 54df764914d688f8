"""`EffectRows`: direct effects of all sources of a prompt on some of its features and on its logits."""

from collections.abc import Callable

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
    SOURCES,
    TOKEN_PRODUCTS,
    TOKEN_SOURCES,
)

BUCKETS = 6  # of positions: targets run on the tokens up to the end of theirs, which is 0.6 of the work
COTANGENTS = 2**20  # numbers of the rows of one call at one value


class EffectRows:
    """The rows of one prompt's graph."""

    def __init__(self, sources: Sources, directions: Floats) -> None:
        self.sources, self.directions = sources, directions  # directions: [logits, hidden]
        local = sources.local
        self._skips = {
            SKIPS(i): skip for i in range(local.layers) if (skip := local.transcoders.layer(i).skip) is not None
        }

    def compute(self, nodes: Numbers, out: Floats, done: Callable[[int], None] = lambda rows: None) -> None:
        """Write the direct effects on nodes, features by number and logits as -1, -2, ..., into `out` [nodes, size]."""
        sources, seq = self.sources, len(self.sources.ids)
        position = np.full(len(nodes), seq - 1)
        position[nodes >= 0] = sources.position[nodes[nodes >= 0]]
        begin, count = 0, 0
        for end in sorted({-(-seq * (i + 1) // BUCKETS) for i in range(BUCKETS)}):
            mine = np.flatnonzero((position >= begin) & (position < end))
            begin = end
            if not len(mine):
                continue
            # what the first tokens compute does not depend on those behind them
            feeds = sources.constants if end == seq else sources.local.constants(sources.ids[:end])
            feeds = {**feeds, **self._skips}
            feeds |= {SOURCES(i): one.vectors[:end] for i, one in enumerate(sources.written)}
            feeds[TOKEN_SOURCES] = sources.tokens[:end]
            chunk = max(1, COTANGENTS // (end * sources.tokens.shape[1]))
            for first in range(0, len(mine), chunk):
                part = mine[first : first + chunk]
                self._run(nodes[part], part, position[part], end, feeds, out)
                count += len(part)
                done(count)

    def _run(self, nodes: Numbers, rows: Numbers, position: Numbers, end: int, feeds: Arrays, out: Floats) -> None:
        """One call of the way back, on the first tokens."""
        sources, layers = self.sources, self.sources.local.layers
        layer = np.full(len(nodes), layers)
        layer[nodes >= 0] = sources.layer[nodes[nodes >= 0]]
        feeds, order, above = dict(feeds), list[NDArray[np.int64]](), list[int]()
        for i in reversed(range(layers + 1)):
            above.append(sum(map(len, order)))
            own = np.flatnonzero(layer == i)
            of = nodes[own]
            places = np.zeros((len(own), end), np.float32)
            places[np.arange(len(own)), position[own]] = 1
            feeds[ROW_VECTORS(i)] = self.directions[-1 - of] if i == layers else sources.encoders[of]
            feeds[ROW_PLACES(i)] = places
            order.append(rows[own])
        targets = np.concatenate(order)
        got = sources.local.back([*(ROW_PRODUCTS(i) for i in range(layers)), TOKEN_PRODUCTS], feeds)
        for i, one in enumerate(sources.written):
            reached = targets[: above[layers - i]]
            if len(reached):
                products, near = got[ROW_PRODUCTS(i)], one.position < end
                out[reached[:, None], one.feature[near]] += products[one.position[near], :, one.place[near]].T
                first = sources.count + i * len(sources.ids)
                out[reached[:, None], first + np.arange(end)] = products[:, :, 0].T
        first = sources.count + layers * len(sources.ids)
        out[targets[:, None], first + np.arange(end)] = got[TOKEN_PRODUCTS]
