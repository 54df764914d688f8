"""Gradients of a metric by what each receiver reads, every receiver on its own.

1. One pass forward and back gives the gradients by all queries, keys, values, MLP inputs, and by the last stream.
2. A receiver's gradient by the stream that it reads is its own gradient, taken back through its norm and projection
   alone. One further graph for each of queries, keys, values and MLPs does this for all layers at once; its rows are
   the heads, each with the numbers of its own head and zeros elsewhere.
3. With several steps, gradients are averaged at points between the two prompts' embeddings: EAP-IG of Hanna, Pezzelle
   and Belinkov (2024, arXiv:2403.17806), which takes the points k / steps, k = 1 .. steps, from the other prompt to
   the base. With one step that is the base itself: EAP of Syed, Rager and Conmy (2023, arXiv:2310.10348).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mionnx.analysis.circuits.node_values import NodeValues
from mionnx.analysis.circuits.nodes import ROLES, Nodes
from mionnx.analysis.circuits.parts import Floats, Parts
from mionnx.analysis.gradients.first_order import LAST_LOGITS, Seed, with_metric
from mionnx.analysis.sweep.comparison import Pair, Pairs
from mionnx.analysis.sweep.patched_runs import CALL_TOKENS
from mionnx.graph.hook_points import HookPoint
from mionnx.run.hook_cache import HookCache
from mionnx.run.runner import Runner
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.intervention import Intervention

Receives = tuple[str, int | None]  # a receiver's hook point and head
Gradient = NDArray[np.float64]  # [seq, hidden]
WIDE = 4 * CALL_TOKENS  # tokens of all layers in one call of the graphs that read


@dataclass(frozen=True)
class EdgeGradients:
    """Gradients by what receivers read, ready for pairs of prompts.

    Attributes:
        cotangent: the derivative of a metric of one's own by the logits.
        steps: points between the two prompts' embeddings; 1 for the base alone.
    """

    model: Runner
    compared: Pairs
    cotangent: ArrayLike | Seed | None
    rules: str
    steps: int

    def of(self, parts: Parts, values: NodeValues, number: int) -> NDArray[np.float64]:
        """The gradient of one pair's metric by what each receiver reads: the mean over steps.

        Returns:
            [receivers, seq, hidden].
        """
        pair, total = self.compared.pairs[number], dict[Receives, Any]()
        reads = self.compared.reads(self.model, number, *values.logits)
        shares = (np.arange(self.steps) + 1) / self.steps
        most = max(1, CALL_TOKENS // len(pair.base))
        for begin in range(0, self.steps, most):
            cache = self._back(parts.nodes, values, pair, shares[begin : begin + most], reads)
            for key, value in _read_back(parts, cache, self.rules):
                total[key] = total.get(key, 0) + value / self.steps
        return np.stack([total[node.hook, node.head] for node in parts.nodes.receivers])

    def _back(
        self, nodes: Nodes, values: NodeValues, pair: Pair, shares: NDArray[np.float64], reads: Mapping[str, Any]
    ) -> HookCache:
        """The streams, and the gradients by what receivers compute, [steps, ...]."""
        ids = np.repeat(pair.base[None], len(shares), axis=0)
        spec = HookSpec()
        if self.steps > 1:
            start = str(HookPoint.ResidPre(0))
            base, other = (values.of(start, row) for row in (0, 1))
            path = other + np.multiply.outer(shares.astype(np.float32), base - other)
            spec.intervene(start, Intervention.Replace(path))
        stages = sorted({2 * layer for layer in range(nodes.layers)} | {*map(nodes.mlp_stage, range(nodes.layers))})
        hooks = [*dict.fromkeys(node.hook for node in nodes.receivers[:-1]), nodes.stream(2 * nodes.layers)]
        measure = self.compared.metric.measure
        spec = with_metric(self.model, spec, measure, self.cotangent, reads, self.rules, ids)
        return self.model.forward(ids, spec.capture([*map(nodes.stream, stages)]).gradient(hooks), logits=LAST_LOGITS)


def _read_back(parts: Parts, cache: HookCache, rules: str) -> Iterator[tuple[Receives, Gradient]]:
    """The gradients by the streams as each receiver reads them, summed over steps."""
    nodes, grad = parts.nodes, cast(HookCache, cache.grad)
    layers = range(nodes.layers)
    for variant in ROLES:
        hooks = {str(getattr(HookPoint, variant)(layer)): nodes.stream(2 * layer) for layer in layers}
        yield from _by_head(parts, cache, hooks, rules)
    inputs = {str(HookPoint.MlpPre(layer)): nodes.stream(nodes.mlp_stage(layer)) for layer in layers}
    streams = {name: _floats(cache[name]) for name in inputs.values()}
    back = parts.gradients([*inputs], [*streams], streams, {name: _floats(grad[name]) for name in inputs}, rules)
    for name, stream in inputs.items():
        yield (name, None), back[stream].sum(axis=0, dtype=np.float64)
    yield (str(HookPoint.FinalNorm), None), grad[nodes.stream(2 * nodes.layers)].sum(axis=0, dtype=np.float64)


def _by_head(
    parts: Parts, cache: HookCache, hooks: Mapping[str, str], rules: str
) -> Iterator[tuple[Receives, Gradient]]:
    """The gradients by the streams as single heads read them.

    Args:
        cache: streams, and gradients by `hooks`, [steps, n_heads, seq, head_dim].
        hooks: hook point of a layer's queries, keys or values -> the stream that it reads.
    """
    seeds = {name: _floats(cast(HookCache, cache.grad)[name]) for name in hooks}
    counts = {name: cotangent.shape[1] for name, cotangent in seeds.items()}
    steps, heads = np.indices((len(next(iter(seeds.values()))), max(counts.values()))).reshape(2, -1)
    shape = next(iter(cache[stream].shape[1:] for stream in hooks.values()))
    totals = {(name, head): np.zeros(shape) for name, count in counts.items() for head in range(count)}
    most = max(1, WIDE // (parts.seq * len(hooks)))
    for begin in range(0, len(steps), most):
        own, at = heads[begin : begin + most], steps[begin : begin + most]
        streams = {stream: _floats(cache[stream])[at] for stream in hooks.values()}
        cotangents = {name: _of_head(cotangent[at], own) for name, cotangent in seeds.items()}
        back = parts.gradients([*hooks], [*streams], streams, cotangents, rules)
        for name, head in totals:
            totals[name, head] += back[hooks[name]][own == head].sum(axis=0, dtype=np.float64)
    yield from totals.items()


def _of_head(seeds: Floats, heads: NDArray[np.int64]) -> Floats:
    """[rows, n_heads, seq, head_dim], zero but for each row's own head."""
    own = np.arange(seeds.shape[1]) == heads[:, None]
    return np.where(own[:, :, None, None], seeds, np.float32(0))


def _floats(array: NDArray[Any]) -> Floats:
    return array.astype(np.float32, copy=False)
