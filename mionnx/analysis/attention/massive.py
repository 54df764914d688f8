"""Sinks and massive activations: heads that attend to the first token, and single numbers far above all others.

A head is a sink where later tokens give the first one more than 0.3 of their attention in the mean (Gu et al. 2024,
arXiv:2410.10781). A number of a residual stream is massive above 100 and above 1,000 times the median size of that
stream's numbers (Sun et al. 2024, arXiv:2402.17762); the two occur together.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from mionnx.graph.hook_points import HookPoint
from mionnx.machine.brief import count
from mionnx.run.runner import Runner

SINK = 0.3
LEAST, TIMES = 100.0, 1000.0
NAMED = 4  # numbers that a sentence names
Massive = tuple[int, int, int, float]  # layer, position, feature, and the number


def streams_after(model: Runner, layers: Sequence[int]) -> dict[int, str]:
    """The hook points of the streams behind some layers, of those that have one."""
    names = {layer: str(HookPoint.ResidPost(layer)) for layer in layers}
    return {layer: name for layer, name in names.items() if name in model.hooked.order}


def massive_in(streams: Mapping[int, NDArray[np.floating]]) -> list[Massive]:
    """The massive activations of streams [.., seq, hidden], by layer; of several rows the largest at each place."""
    massive: list[Massive] = []
    for layer, stream in streams.items():
        rows = stream.reshape(-1, *stream.shape[-2:]).astype(np.float32, copy=False)
        sizes = np.abs(rows)
        limits = np.maximum(LEAST, TIMES * np.median(sizes, axis=(1, 2), keepdims=True))
        largest: dict[tuple[int, int], float] = {}
        for row, position, feature in np.argwhere(sizes > limits).tolist():
            number, at = float(rows[row, position, feature]), (position, feature)
            largest[at] = max(largest.get(at, 0.0), number, key=abs)
        massive += [(layer, *at, number) for at, number in sorted(largest.items())]
    return massive


def merged(one: Sequence[Massive], other: Sequence[Massive]) -> list[Massive]:
    """The massive activations of both, the larger where both have one."""
    largest = {entry[:3]: entry[3] for entry in one}
    for *at, number in other:
        place = (int(at[0]), int(at[1]), int(at[2]))
        largest[place] = max(largest.get(place, 0.0), number, key=abs)
    return [(*place, number) for place, number in sorted(largest.items())]


def about_sinks(shares: NDArray[np.floating], massive: Sequence[Massive], tokens: Sequence[str] | None = None) -> str:
    """How many heads are sinks, and which numbers are massive, the largest first.

    `shares`: mean attention of heads to the first token, NaN where there is no head.
    """
    finite = shares[np.isfinite(shares)]
    heads = f"{int((finite > SINK).sum())} of {count(len(finite), 'head')}"
    sinks = f"Sinks: from {heads} the first token gets more than {SINK} of the attention of later ones."
    return f"{sinks} {_about(massive, tokens)}" if massive else sinks


def _about(massive: Sequence[Massive], tokens: Sequence[str] | None) -> str:
    spans: dict[tuple[int, int], list[tuple[int, float]]] = {}
    for layer, position, feature, number in massive:
        spans.setdefault((position, feature), []).append((layer, number))
    ranked = sorted(spans.items(), key=lambda one: -max(abs(number) for _, number in one[1]))
    parts = []
    for (position, feature), own in ranked[:NAMED]:
        layers = f"layer {own[0][0]}" if len(own) == 1 else f"layers {own[0][0]} to {own[-1][0]}"
        token = f" {tokens[position]!r}" if tokens is not None else ""
        largest = max((number for _, number in own), key=abs)
        parts.append(f"{largest:,.0f} in number {feature} at token {position}{token} ({layers})")
    more = f", and at {len(ranked) - NAMED} more places" if len(ranked) > NAMED else ""
    return f"Massive activations of the stream: {'; '.join(parts)}{more}."
