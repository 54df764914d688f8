"""Edges through a stream that is normed after each addition (BERT): what is sent goes through all norms behind it.

A receiver's stream is the sums and norms of what its own senders write, and so is recomputed for it: every edge is
apart, as where the stream is a sum. Gradients are taken back through the same norms, as the model's own run has them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.circuits.node_values import NodeValues
from mionnx.analysis.circuits.parts import Floats, Parts
from mionnx.graph.hook_points import HookPoint
from mionnx.run.hook_cache import HookCache

Key = tuple[str, int | None]  # hook point and head of a receiver
Masks = NDArray[np.bool_]
Sums = Callable[[int, Masks], Floats]


def through_norms(
    parts: Parts, cache: HookCache, read: Iterable[tuple[Key, Floats]], rules: str
) -> Iterator[tuple[Key, Floats]]:
    """Gradients by what each receiver reads, [1, stages, seq, hidden], by what is sent at each stage: sums over steps.

    Args:
        read: those by the streams themselves, [steps, seq, hidden].
    """
    nodes, now = parts.nodes, dict(read)
    stages = {(node.hook, node.head): node.stage for node in nodes.receivers if (node.hook, node.head) in now}
    shape = (1, 2 * nodes.layers + 1, *next(iter(now.values())).shape[1:])
    totals = {key: np.zeros(shape) for key in stages}
    for half in reversed(range(2 * nodes.layers)):
        keys = [key for key, stage in stages.items() if stage > half]
        sums = np.asarray(cache[nodes.sum_point(half)], np.float32)
        seeds = np.concatenate([now[key] for key in keys]).astype(np.float32)
        back = parts.back_through_norm(half, np.tile(sums, (len(keys), 1, 1)), seeds, rules)
        for key, own in zip(keys, np.split(back, len(keys)), strict=True):
            now[key] = own  # by the sum: by what is added, and by the stream before
            totals[key][0, half + 1] = own.sum(axis=0, dtype=np.float64)
    for key, own in totals.items():
        own[0, 0] = now[key].sum(axis=0, dtype=np.float64)
    yield from totals.items()


def composed(
    parts: Parts, values: NodeValues, row: int, stage: int, rows: Sequence[tuple[int, Masks]], writes: Sequence[Any]
) -> Floats:
    """The streams at a stage of circuits, each with the senders that its masks keep, [masks of all, seq, hidden].

    Args:
        row: of the prompt whose values the others carry.
        rows: circuit, and its masks [masks, senders].
        writes: stage at which senders write, their numbers, and their changes by circuit and masks.
    """

    def changes(at: int) -> Floats | int:
        some = [(senders, sums) for stage, senders, sums in writes if stage == at]
        if not some:
            return 0
        return np.concatenate([sum(sums(one, masks[:, senders]) for senders, sums in some) for one, masks in rows])

    count = sum(len(masks) for _, masks in rows)
    start = values.of(str(HookPoint.ResidPre(0)), row)
    stream = np.repeat(start[None], count, axis=0) + changes(0)
    for half in range(stage):
        out = values.of(parts.nodes.out_point(half), row)
        stream = parts.normed(half, stream + out + changes(half + 1))
    return stream
