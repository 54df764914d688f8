"""`edge_attribution`: every edge between heads, MLPs, embedding and logits to first order, from a few passes."""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mionnx.analysis.circuits.edge_scores import EdgeAttribution
from mionnx.analysis.circuits.node_values import NodeValues, node_values
from mionnx.analysis.circuits.nodes import ROLES, Nodes, all_nodes, chosen_receivers, chosen_senders
from mionnx.analysis.circuits.normed_stream import through_norms
from mionnx.analysis.circuits.parts import Floats, Parts
from mionnx.analysis.gradients.first_order import check_metric, part_of, rows_of, with_metric
from mionnx.analysis.gradients.gradients import Seed
from mionnx.analysis.sweep.comparison import Comparison, Pair, Pairs, compares
from mionnx.analysis.sweep.metric import Measure, Tokens
from mionnx.analysis.sweep.patched_runs import CALL_TOKENS
from mionnx.analysis.sweep.receivers import Receiver
from mionnx.errors import GradientError, InputError, ModelError, nearest
from mionnx.graph.axes import heads_axis
from mionnx.graph.hook_points import HookPoint, layer_of
from mionnx.inputs.token_batch import Place
from mionnx.machine.ranges import at_least, at_most
from mionnx.machine.typed import typed
from mionnx.run.hook_cache import HookCache
from mionnx.run.runner import Runner
from mionnx.run.segments import Arrays
from mionnx.run.tokenizing import Prompt
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.intervention import Intervention
from mionnx.spec.metric import check_rules

MOST_STEPS = 1000
ALL_STAGES = -1  # in the place of the stage that a sender writes at
ALONG = ("inputs", "activations")
NORMED_SHARE = 16  # by which steps of one call are fewer, where each receiver's are kept apart
WIDE = 4 * CALL_TOKENS  # tokens of all layers in one call of the graphs that read
Ends = str | HookPoint | Iterable[Receiver]
Receives = tuple[str, int | None]  # a receiver's hook point and head
Gradient = NDArray[Any]  # [steps, or 1 of their sum, seq, hidden]


@compares
@typed(leave=["corrupted", "senders", "receivers", "answer", "versus"])
def edge_attribution(
    model: Runner,
    clean: Prompt | Comparison,
    corrupted: Prompt | None = None,
    senders: Ends = "all",
    receivers: Ends = "all",
    metric: Measure = "logit_diff",
    *,
    answer: Tokens = None,
    versus: Tokens = None,
    steps: int = 1,
    patching: str = "noising",
    rules: str = "gradient",
    position: Place | None = None,
    cotangent: ArrayLike | Seed | None = None,
    ungrouped: bool = False,
    along: str = "inputs",
) -> EdgeAttribution:
    """Edge attribution patching: `path_patch` of every edge to first order, from a few passes.

    The score of an edge is (sender's corrupted value - its clean value), as added to the stream, times the gradient of
    the metric by the stream as this receiver alone reads it (Syed et al. 2023, arXiv:2310.10348).

    Args:
        senders: "all"; or `hook_embed`, `attn.hook_z` (of a recurrent mixer `ssm.hook_z`, of one without heads
            `hook_attn_out`) and `hook_mlp_out` of
            layers, globs and short names allowed; with heads as pairs `("blocks.3.attn.hook_z", [0, 5])`.
        receivers: as for `path_patch`; a receiver is one head's queries, keys or values, a mixer (`ssm.hook_pre`), an
            MLP, or `hook_final_norm`.
        steps: points between the two prompts' embeddings at which gradients are averaged (EAP-IG, Hanna et al. 2024,
            arXiv:2403.17806); 1 takes them at the patched run alone.
        rules: "gradient", or the propagation rules "frozen_norm" or "relp", see `attribute_patch`.
        cotangent: of a metric that is a function, its derivative by the logits, see `attribute_patch`.
        ungrouped: whether keys and values that heads share are receivers of each of these heads, as in EAP-IG:
            "a2.h3<k>" instead of "a2.kv1<k>". The score of the group is the sum of theirs.
        along: what moves from one prompt to the other in the steps: "inputs", the embeddings; or "activations", what
            each layer's heads and each MLP write, one after the other, as in EAP-IG's second method (2 layers + 1 times
            the passes).

    Returns:
        scores [senders, receivers] with labels, `top(k)`, a figure, a page and files.

    Raises:
        HookError: no such sender or receiver; a recurrent model.
        GradientError: a metric without a gradient ("rank").
        InputError: prompts or tokens that do not fit, receivers that all come before the senders, or a model whose
            parts read more than the sum of what others write.

    Example:
        result = model.edge_attribution("The capital of France is", "The capital of Italy is", steps=5)
        result.top(3), result.scores.shape  # (senders, receivers)
    """
    check_metric(metric, cotangent, "path_patch")
    _check(steps, rules, metric == "kl" and patching == "noising")
    if along not in ALONG:
        raise InputError(f"along={along!r}; one of {', '.join(ALONG)}{nearest(along, ALONG)}")
    nodes = all_nodes(model, ungrouped)
    rows, columns = chosen_senders(nodes, senders), chosen_receivers(model.hooked, nodes, receivers)
    _refuse_no_edge(nodes, rows, columns)
    comparison = Comparison(cast(Prompt, clean), corrupted, metric, answer, versus, patching, position)
    compared = comparison.on(model).of_texts("edge attribution")
    begin = time.perf_counter()
    scores, bases = _scores(nodes, EdgeGradients(model, compared, cotangent, rules, steps, along))
    chosen, edges = np.ix_(rows, columns), nodes.edges
    sending, receiving = [nodes.senders[i] for i in rows], [nodes.receivers[i] for i in columns]
    clean_mean, corrupted_mean = compared.ordered(*bases.mean(axis=1).tolist())
    result = EdgeAttribution(
        # Pairs without an edge have products too, which mean nothing.
        np.where(edges, scores, 0.0)[chosen],
        edges[chosen],
        tuple(node.label for node in sending),
        tuple(node.label for node in receiving),
        tuple((node.hook, node.head) for node in sending),
        tuple((node.hook, node.head) for node in receiving),
        clean_mean,
        corrupted_mean,
        compared.metric.name,
        patching,
        rules,
        steps,
        compared.about,
        along=along,
    )
    seconds = time.perf_counter() - begin
    result.cost = {"edges": float(result.count), "pairs": float(len(compared)), "seconds": seconds}
    return result


def _check(steps: int, rules: str, flat: bool) -> None:
    at_least("steps", steps, 1)
    at_most("steps", steps, MOST_STEPS)
    check_rules(rules)
    if rules.endswith("_pattern"):
        raise InputError(f"rules={rules!r} takes patterns for constant: queries and keys would receive nothing")
    if flat and steps == 1:
        raise GradientError(
            "the KL divergence from the clean run is least at the clean prompt: all gradients are 0; give steps=5"
        )


def _refuse_no_edge(nodes: Nodes, rows: list[int], columns: list[int]) -> None:
    if not nodes.edges[np.ix_(rows, columns)].any():
        first, last = nodes.senders[rows[0]].label, nodes.receivers[columns[-1]].label
        raise InputError(
            f"no edge is possible: every receiver, up to {last}, comes before what {first} and later senders write; "
            "give senders of earlier layers, or later receivers"
        )


def _scores(nodes: Nodes, gradients: EdgeGradients) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """[senders, receivers], mean over pairs; and the metric of both prompts, [2, pairs]."""
    model, compared = gradients.model, gradients.compared
    total, bases = np.zeros(nodes.edges.shape), np.empty((2, len(compared)))
    for number, pair in enumerate(compared.pairs):
        parts = Parts(model, nodes, len(pair.base), pair.at)
        values = node_values(model, nodes, pair)
        changes = values.changes(parts).astype(np.float64)
        received = gradients.of(parts, values, number)
        # A change times a gradient is summed over positions and width: one matrix product for all edges, or for those
        # whose senders write at one stage.
        flat = changes.reshape(len(changes), -1)
        for stage, own in received.items():
            senders = [stage in (ALL_STAGES, node.stage) for node in nodes.senders]
            total[senders] += flat[senders] @ own.reshape(len(own), -1).T / len(compared)
        bases[:, number] = compared.bind(model, number, *values.logits).measure(values.logits)
    if not np.isfinite(total).all():
        raise ModelError("scores of edges are not finite: gradients overflow on these prompts; float32 may help")
    return total, bases


@dataclass(frozen=True)
class EdgeGradients:
    """Gradients of a metric by what each receiver reads, every receiver on its own, ready for pairs of prompts.

    One pass forward and back gives the gradients by all queries, keys, values, MLP inputs, and by the last stream. Each
    is then taken back through its own norm and projection alone, to the stream that its receiver reads.
    """

    model: Runner
    compared: Pairs
    cotangent: ArrayLike | Seed | None
    rules: str
    steps: int
    along: str

    def of(self, parts: Parts, values: NodeValues, number: int) -> dict[int, NDArray[np.float64]]:
        """The gradient of one pair's metric by what each receiver reads, [receivers, seq, hidden]: mean over steps.

        It is that of the change of any sender; of a stream that is normed between additions it goes by the stage that
        the sender writes at, back through the norms behind it.
        """
        pair, total = self.compared.pairs[number], dict[Receives, Any]()
        reads = self.compared.reads(self.model, number, *values.logits)
        # A right Riemann sum: the last point is the base itself, as in EAP-IG.
        shares = (np.arange(self.steps) + 1) / self.steps  # of the way from the other prompt to the base
        most = max(1, CALL_TOKENS // len(pair.base) // (NORMED_SHARE if parts.nodes.normed else 1))
        moving = [str(HookPoint.ResidPre(0))]
        if self.along == "activations" and self.steps > 1:
            moving += dict.fromkeys(node.hook for node in parts.nodes.senders[1:])
        for hook, begin in product(moving, range(0, self.steps, most)):
            cache = self._back(parts.nodes, values, pair, shares[begin : begin + most], reads, hook)
            read = _read_back(parts, cache, self.rules, _feeding(hook) if self.steps > 1 else set())
            for key, value in through_norms(parts, cache, read, self.rules) if parts.nodes.normed else read:
                # Steps may be in several batches; each adds its share of the mean.
                total[key] = total.get(key, 0) + value.sum(axis=0, dtype=np.float64) / (self.steps * len(moving))
        received = np.stack([total[node.hook, node.head] for node in parts.nodes.receivers])
        return {ALL_STAGES: received} if not parts.nodes.normed else dict(enumerate(received.swapaxes(0, 1)))

    def _back(
        self,
        nodes: Nodes,
        values: NodeValues,
        pair: Pair,
        shares: NDArray[np.float64],
        reads: Mapping[str, Any],
        moving: str,
    ) -> HookCache:
        """The streams, and the gradients by what receivers compute, [steps, ...], as one hook point moves."""
        rows = rows_of(pair, [pair.base] * len(shares))
        spec = HookSpec()
        if self.steps > 1:
            base, other = (values.of(moving, row) for row in (0, 1))
            path = other + np.multiply.outer(shares.astype(np.float32), base - other)
            # The path is between these values alone: ids stay those of the base.
            spec.intervene(moving, Intervention.Replace(path))
        stages = sorted({2 * layer for layer in range(nodes.layers)} | {*map(nodes.mlp_stage, range(nodes.layers))})
        # The last receiver is the final norm, whose gradient is by the stream before it.
        hooks = [*dict.fromkeys(node.hook for node in nodes.receivers[:-1]), nodes.stream(2 * nodes.layers)]
        hooks = [hook for hook in hooks if self.steps == 1 or hook not in _feeding(moving)]
        inside = _attended(nodes, hooks)
        hooks += [z for z in inside if z not in hooks]
        measure = self.compared.metric.measure
        spec = with_metric(self.model, spec, measure, self.cotangent, reads, self.rules, rows, pair)
        sums = [nodes.sum_point(half) for half in range(2 * nodes.layers)] if nodes.normed else []
        spec.capture([*map(nodes.stream, stages), *sums, *(name for names in inside.values() for name in names)])
        spec.gradient(hooks)
        return self.model.forward(rows, spec, logits=part_of(pair, self.model))


def _feeding(moving: str) -> set[str]:
    """What a layer's heads, mixer or MLP read: once what they write is replaced, nothing depends on it."""
    point = HookPoint.parse(moving)
    reads = {"AttnZ": tuple(ROLES), "AttnOut": ("SsmPre",), "SsmZ": ("SsmPre",), "MlpOut": ("MlpPre",)}.get(
        point.variant, ()
    )
    return {str(getattr(HookPoint, variant)(point.layer)) for variant in reads}


def _read_back(parts: Parts, cache: HookCache, rules: str, idle: set[str]) -> Iterator[tuple[Receives, Gradient]]:
    """The gradients by the streams as each receiver reads them, [steps or 1, seq, hidden]; `idle`: 0, and left out."""
    nodes, grad = parts.nodes, cast(HookCache, cache.grad)
    attending = [layer for layer in sorted(nodes.attends) if str(HookPoint.AttnQ(layer)) not in idle]
    split = _split(parts, cache, rules, _attended(nodes, {node.hook for node in nodes.receivers} - idle))
    for variant in ROLES if attending else ():
        hooks = {str(getattr(HookPoint, variant)(layer)): nodes.stream(2 * layer) for layer in attending}
        hooks = {name: stream for name, stream in hooks.items() if name in nodes.read}
        yield from _by_head(parts, cache, hooks, rules, split) if hooks else ()
    mixing = {str(HookPoint.SsmPre(layer)): nodes.stream(2 * layer) for layer in sorted(nodes.mixers)}
    neurons = {str(HookPoint.MlpPre(layer)): nodes.stream(nodes.mlp_stage(layer)) for layer in sorted(nodes.mlps)}
    for own in (mixing, neurons):  # apart: the two may read the same stream
        if not (inputs := {name: stream for name, stream in own.items() if name not in idle}):
            continue
        streams = {name: _floats(cache[name]) for name in inputs.values()}
        back = parts.gradients([*inputs], [*streams], streams, {name: _floats(grad[name]) for name in inputs}, rules)
        for name, stream in inputs.items():
            yield (name, None), back[stream]
    # The last stream is read by the final norm, or the head, alone: its gradient is the receiver's own.
    yield (nodes.receivers[-1].hook, None), _floats(grad[nodes.stream(2 * nodes.layers)])


def _attended(nodes: Nodes, hooks: Container[str]) -> dict[str, tuple[str, ...]]:
    """Values that heads give -> the queries, keys and values that they come of, where heads share some of these."""
    layers = dict.fromkeys(layer for name in nodes.shared if name in hooks and (layer := layer_of(name)) is not None)
    return {str(HookPoint.AttnZ(layer)): nodes.attention_inputs(layer) for layer in layers}


def _split(parts: Parts, cache: HookCache, rules: str, inside: Mapping[str, tuple[str, ...]]) -> Arrays:
    """The gradients by shared keys and values, each head's share by itself, [steps, n_heads, seq, head_dim]."""
    shared = {name: group for name, group in parts.nodes.shared.items() if any(name in own for own in inside.values())}
    entries = [name for names in inside.values() for name in names]
    values = {name: _floats(cache[name]) for name in entries}
    seeds = {z: _floats(cast(HookCache, cache.grad)[z]) for z in inside}
    by_member: dict[str, list[Floats]] = {name: [] for name in shared}
    # What heads read changes with the keys of their group alone: a pass for each member of the groups, with the
    # gradients by what these members read.
    for member in range(max(shared.values(), default=0)):
        own = {z: _of_member(seed, member, shared[inside[z][1]]) for z, seed in seeds.items()}
        back = parts.gradients([*inside], entries, values, own, rules)
        for name, gradients in by_member.items():
            gradients.append(back[name])
    # Members are the faster axis: heads of a group follow each other.
    stacked = {name: np.stack(gradients, axis=2) for name, gradients in by_member.items()}
    return {name: one.reshape(len(one), -1, *one.shape[3:]) for name, one in stacked.items()}


def _of_member(seed: Floats, member: int, group: int) -> Floats:
    """A gradient [steps, seq, n_heads, head_dim], of one head of each group."""
    own = np.arange(seed.shape[2]) % group == member
    return np.where(own[:, None], seed, np.float32(0))


def _by_head(
    parts: Parts, cache: HookCache, hooks: Mapping[str, str], rules: str, split: Arrays
) -> Iterator[tuple[Receives, Gradient]]:
    """The gradients by the streams as single heads read them; `hooks`: of one kind, each with its stream."""
    place = heads_axis(HookPoint.parse(next(iter(hooks))).axes or ()) or 1
    seeds = {name: split.get(name, _floats(cast(HookCache, cache.grad)[name])) for name in hooks}
    seeds = {name: np.moveaxis(seed, place, 1) for name, seed in seeds.items()}
    counts = {name: cotangent.shape[1] for name, cotangent in seeds.items()}
    # A row for each step and head: as many heads as the hook point with the most has (keys may be shared).
    steps, heads = np.indices((len(next(iter(seeds.values()))), max(counts.values()))).reshape(2, -1)
    shape = next(iter(cache[stream].shape for stream in hooks.values()))
    # norms behind a stream differ from step to step: gradients are taken back through them before they are summed
    apart = parts.nodes.normed
    shape = shape if apart else (1, *shape[1:])
    totals = {(name, head): np.zeros(shape) for name, count in counts.items() for head in range(count)}
    most = max(1, WIDE // (parts.seq * len(hooks)))  # a row is a head of a step, its numbers zero elsewhere
    for begin in range(0, len(steps), most):
        own, at = heads[begin : begin + most], steps[begin : begin + most]
        streams = {stream: _floats(cache[stream])[at] for stream in hooks.values()}
        cotangents = {
            name: np.moveaxis(_of_head(cotangent[at], own, parts.nodes.shared.get(name, 1)), 1, place)
            for name, cotangent in seeds.items()
        }
        back = parts.gradients([*hooks], [*streams], streams, cotangents, rules)
        for name, head in totals:
            some = own == head
            if apart:
                totals[name, head][at[some]] = back[hooks[name]][some]
            else:
                totals[name, head][0] += back[hooks[name]][some].sum(axis=0, dtype=np.float64)
    yield from totals.items()


def _of_head(seeds: Floats, heads: NDArray[np.int64], group: int) -> Floats:
    own = np.arange(seeds.shape[1]) == heads[:, None]
    alone = np.where(own[:, :, None, None], seeds, np.float32(0))
    # Of heads that share keys, one alone is not zero: its gradient stands where the group's keys do.
    rows, count, *rest = alone.shape
    return alone.reshape(rows, count // group, group, *rest).sum(axis=2)


def _floats(array: NDArray[Any]) -> Floats:
    return array.astype(np.float32, copy=False)
