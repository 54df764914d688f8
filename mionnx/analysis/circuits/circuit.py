"""`circuit`: the leading edges alone, every other edge patched exactly, and how much of the behaviour they keep."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mionnx.analysis.circuits.circuit_result import Circuit, mib_sizes
from mionnx.analysis.circuits.edge_attribution import edge_attribution
from mionnx.analysis.circuits.edge_scores import EdgeAttribution, check_rank
from mionnx.analysis.circuits.node_values import NodeValues, node_values
from mionnx.analysis.circuits.nodes import Node, Nodes, all_nodes
from mionnx.analysis.circuits.normed_stream import Masks, Sums, composed
from mionnx.analysis.circuits.outside import PATCHING, Outside, captured, check_outside, make_outside, reached
from mionnx.analysis.circuits.parts import Floats, Parts
from mionnx.analysis.gradients.gradients import Seed
from mionnx.analysis.sweep.comparison import Comparison, Pairs, compares
from mionnx.analysis.sweep.metric import Measure, Tokens
from mionnx.errors import InputError
from mionnx.graph.axes import heads_axis
from mionnx.graph.hook_points import HookPoint
from mionnx.inputs.lacking import refuse_normed_stream
from mionnx.inputs.token_batch import Place
from mionnx.machine import memory
from mionnx.machine.ranges import at_least, at_most, listed
from mionnx.machine.typed import typed
from mionnx.run.prompt import By
from mionnx.run.runner import Runner
from mionnx.run.tokenizing import Prompt

CLEAN, CORRUPTED = 0, 1  # rows of `NodeValues`
SHARE = 4  # what senders write may take this part of the free memory: a quarter
MIB = "mib"
MOST_CONTROLS = 1000


@compares
@typed(leave=["corrupted", "edges", "answer", "versus", "by"])
def circuit(
    model: Runner,
    clean: Prompt | Comparison,
    corrupted: Prompt | None = None,
    edges: int | Iterable[int] | str | None = None,
    metric: Measure = "logit_diff",
    *,
    answer: Tokens = None,
    versus: Tokens = None,
    steps: int = 5,
    rules: str = "gradient",
    position: Place | None = None,
    cotangent: ArrayLike | Seed | None = None,
    scores: EdgeAttribution | None = None,
    rank: str = "size",
    controls: int = 0,
    seed: int = 0,
    ablation: str = "patching",
    reference: Prompt | None = None,
    by: By = None,
    ungrouped: bool = False,
) -> Circuit:
    """Keep the leading edges, patch or ablate all others exactly, and measure how faithful the circuit is.

    Every edge that is not kept carries what its sender wrote on the corrupted prompt; kept edges carry what it writes
    now. Faithfulness is (metric - corrupted) / (clean - corrupted): 1 with all edges, 0 with none.

    Args:
        edges: numbers of kept edges, the leading ones; by default from 0 to all of them; "mib" for the ten shares of
            the MIB circuit track, from 0.1 % to all, of which `Circuit.cpr` and `cmd` are.
        steps, rules, cotangent: of the scores, see `edge_attribution`.
        scores: other scores, of all senders and receivers: of other prompts, or an array of one's own in
            `EdgeAttribution.scores`, of a file.
        rank: which edges lead: "size", those with the largest scores to either side, or "score", those that help most.
        controls: number of random circuits of each size, that the leading edges' are compared with.
        seed: a number that determines these.
        ablation: what edges carry that are not kept: "patching", what their sender wrote on the corrupted prompt;
            "zero"; or "mean", that of the sender's values over tokens. Then only edges that lead on from the
            embedding count, and the corrupted metric is that of no edge; scores are by patching all the same.
        reference, by: prompts of "mean", by default the clean ones, and classes of their tokens, see `ablation_sweep`.
        ungrouped: whether keys and values that heads share are receivers of each of these heads, as in EAP-IG; by
            itself where the scores are.

    Returns:
        the metric and the faithfulness by number of edges, with a table, a figure and a page.

    Raises:
        HookError, GradientError: as `edge_attribution`.
        InputError: as there; or more edges than there are, or scores of some nodes only.

    Example:
        result = model.circuit("The capital of France is", "The capital of Italy is", [10, 50, 200])
        result.faithfulness, result.leading(10)
    """
    check_outside(ablation, reference, by)
    nodes = all_nodes(model, ungrouped or (scores is not None and scores.ungrouped))
    if nodes.normed and ablation != PATCHING:  # what is left of a stream without its parts is no stream of the model
        refuse_normed_stream(model.hooked, f"ablation={ablation!r} of edges")
    sizes = _sizes(edges, int(nodes.edges.sum()))
    check_rank(rank)
    at_least("controls", controls, 0)
    at_most("controls", controls, MOST_CONTROLS)
    at_least("seed", seed, 0)
    _refuse_other_nodes(scores, nodes)
    comparison = Comparison(cast(Prompt, clean), corrupted, metric, answer, versus, "noising", position)
    compared = comparison.on(model).of_texts("a circuit")
    begin = time.perf_counter()
    ranking = scores or edge_attribution(
        model, comparison, steps=steps, rules=rules, cotangent=cotangent, ungrouped=ungrouped
    )
    outside = make_outside(model, nodes, ablation, compared, reference, by)
    order, random = ranking.ranked(rank), np.random.default_rng(seed)
    orders = [order, *(random.permutation(order) for _ in range(controls))]
    masks = np.concatenate([_masks(one, nodes, sizes) for one in orders])
    if ablation != PATCHING:
        masks = reached(nodes, masks)
    measured, bases = _values(model, nodes, compared, masks, outside)
    # [pairs, 1 + controls, circuits]
    measured = measured.reshape(len(measured), len(orders), len(sizes))
    by_pair = measured[:, 0]
    seconds = time.perf_counter() - begin
    clean_mean, corrupted_mean = bases.mean(axis=1).tolist()
    return Circuit(
        ranking,
        np.array(sizes),
        by_pair.mean(axis=0),
        by_pair,
        clean_mean,
        corrupted_mean,
        compared.metric.name,
        compared.about,
        {"circuits": float(len(sizes)), "pairs": float(len(compared)), "seconds": seconds},
        rank,
        bases[CLEAN],
        bases[CORRUPTED],
        measured[:, 1:].mean(axis=0),
        ablation,
    )


def _masks(order: NDArray[np.int64], nodes: Nodes, sizes: Sequence[int]) -> Masks:
    """The edges that circuits of some sizes keep, [circuits, senders, receivers]."""
    # The rank of each edge; pairs without an edge rank behind all, so that no circuit keeps them.
    places = np.full(nodes.edges.shape, len(order))
    places[tuple(order.T)] = np.arange(len(order))
    # A circuit keeps the edges of a rank below its size.
    masks: Masks = places < np.array(sizes)[:, None, None]
    return masks


def _sizes(edges: int | Iterable[int] | str | None, most: int) -> list[int]:
    if edges is None:
        return ladder(most)
    if isinstance(edges, str):
        if edges != MIB:
            raise InputError(f"edges={edges!r}: numbers of edges, or {MIB!r} for the shares of the MIB circuit track")
        return sorted({*mib_sizes(most)})
    entries = listed("edges", edges) if isinstance(edges, Iterable) else [edges]
    if not entries:
        raise InputError("edges=[]: no circuit is asked for; give numbers of edges, as [10, 50]")
    for one in entries:
        if isinstance(one, bool) or not isinstance(one, int | np.integer):
            raise InputError(f"edges={one!r}: a number of edges is an integer")
        at_least("edges", int(one), 0)
        at_most("edges", int(one), most)
    return sorted({int(one) for one in entries})


def ladder(most: int) -> list[int]:
    """Make the sizes 0, 1, 2, 5, 10, 20, 50, .. up to all edges."""
    steps = [digit * 10**power for power in range(len(str(most))) for digit in (1, 2, 5)]
    return [0, *(step for step in steps if step < most), most]


def _refuse_other_nodes(scores: EdgeAttribution | None, nodes: Nodes) -> None:
    if scores is None:
        return
    own = [tuple(node.label for node in some) for some in (nodes.senders, nodes.receivers)]
    if [scores.senders, scores.receivers] != own or scores.scores.shape != nodes.edges.shape:
        raise InputError(
            f"scores of {len(scores.senders)} senders and {len(scores.receivers)} receivers; a circuit of this model "
            f"is chosen among all {len(own[0])} senders and {len(own[1])} receivers"
        )
    if not np.isfinite(scores.scores).all():
        raise InputError("scores are not finite: edges cannot be ranked by them")


def _values(
    model: Runner, nodes: Nodes, compared: Pairs, masks: Masks, outside: Outside
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The metric [pairs, circuits], and that of both prompts, [2, pairs]: of the clean one, and with no edge kept."""
    by_pair, bases = np.empty((len(compared), len(masks))), np.empty((2, len(compared)))
    for number, pair in enumerate(compared.pairs):
        parts = Parts(model, nodes, len(pair.base), pair.at)
        values = node_values(model, nodes, pair, captured(outside.ablation))
        metric = compared.bind(model, number, *values.logits)
        bases[:, number] = metric.measure(values.logits)
        values = outside.of(parts, values, pair.base)
        if outside.ablation != PATCHING:
            nothing = CircuitRun(parts, values, np.zeros((1, *nodes.edges.shape), bool))
            bases[CORRUPTED, number] = metric(nothing.logits(metric.needs))[0]
        most = circuits_at_once(nodes, len(pair.base), model.hidden_size)
        for begin in range(0, len(masks), most):
            some = slice(begin, begin + most)
            by_pair[number, some] = metric(CircuitRun(parts, values, masks[some]).logits(metric.needs))
    return by_pair, bases


class CircuitRun:
    """Exact runs of some circuits on one pair of prompts: kept edges carry new values, others the corrupted prompt's.

    A row is one circuit. Each receiver reads the corrupted stream, plus, for each kept edge into it, what the sender
    writes now minus what it wrote on the corrupted prompt; the embedding writes that of the clean prompt.
    """

    def __init__(self, parts: Parts, values: NodeValues, masks: Masks) -> None:
        # What nodes write on either prompt; the kept edges [circuits, senders, receivers].
        self.parts, self.nodes, self.values, self.masks = parts, parts.nodes, values, masks
        # The senders that have written, and a function: circuit, which of them are kept [masks, these senders] -> their
        # change of the stream beside the corrupted prompt, [masks, seq, hidden].
        self.writes: list[tuple[int, list[int], Sums]] = []  # the stage first

    def logits(self, tokens: Sequence[int] | None) -> Floats:
        """The logits of each circuit where the metric reads, [circuits, columns or tokens]."""
        start = str(HookPoint.ResidPre(0))
        embedding = self.values.of(start, CLEAN) - self.values.of(start, CORRUPTED)
        senders = _numbers(self.nodes.senders, str(HookPoint.Embed))
        self._write(senders, np.repeat(embedding[None, None], len(self.masks), axis=0))
        for layer in range(self.nodes.layers):
            heads, neurons = self.nodes.heads_point(layer), layer in self.nodes.mlps
            # What both halves of a parallel layer read is what neither has written yet.
            read = self._first_half(layer)
            if neurons and self.nodes.parallel:
                changes = self._mlp_changes(layer)
            if heads is not None and read is not None:
                self._write_heads(layer, heads, read)
            elif read is not None:
                out = str(HookPoint.AttnOut(layer))
                self._write(_numbers(self.nodes.senders, out), (read - self.values.of(out, CORRUPTED))[:, None])
            if neurons:
                changes = changes if self.nodes.parallel else self._mlp_changes(layer)
                self._write(_numbers(self.nodes.senders, str(HookPoint.MlpOut(layer))), changes[:, None])
        streams, which = self._streams([len(self.nodes.receivers) - 1])
        # Circuits that read the same last stream share one run of the head.
        return self.parts.logits(streams, tokens)[which[:, 0]]

    def _write(self, senders: list[int], changes: Floats) -> None:
        """Add senders whose changes, [circuits, these senders, seq, hidden], add up."""

        def sums(circuit: int, masks: Masks) -> Floats:
            own = changes[circuit]
            return (masks.astype(np.float32) @ own.reshape(len(own), -1)).reshape(len(masks), *own.shape[1:])

        self._add(senders, sums)

    def _add(self, senders: list[int], sums: Sums) -> None:
        self.writes.append((self.nodes.senders[senders[0]].stage, senders, sums))

    def _streams(self, receivers: Sequence[int]) -> tuple[Floats, NDArray[np.int64]]:
        """The different streams that a stage reads, [streams, seq, hidden], and which one [circuits, receivers]."""
        stage = self.nodes.receivers[receivers[0]].stage
        base = self.values.of(self.nodes.stream(stage), CORRUPTED)
        streams, rows = list[Floats](), list[tuple[int, Masks]]()
        which = np.empty((len(self.masks), len(receivers)), np.int64)
        # Senders that have not written yet stay out: no receiver of this stage reads them.
        past = [sender for _, senders, _ in self.writes for sender in senders]
        for circuit, mask in enumerate(self.masks):
            own = np.zeros((len(receivers), mask.shape[0]), bool)
            own[:, past] = mask[past][:, receivers].T
            # Receivers that keep edges from the same senders read the same stream, which is computed once.
            masks, inverse = np.unique(own, axis=0, return_inverse=True)
            which[circuit] = inverse.ravel() + sum(len(own) for _, own in rows)
            # Each circuit's streams begin where those of the circuits before it end.
            rows.append((circuit, masks))
            if not self.nodes.normed:
                streams.append(base + sum(sums(circuit, masks[:, senders]) for _, senders, sums in self.writes))
        if self.nodes.normed:
            return composed(self.parts, self.values, CORRUPTED, stage, rows, self.writes), which
        return np.concatenate(streams), which

    def _first_half(self, layer: int) -> Floats | None:
        """What a layer's heads read or its mixer writes; None of an MLP alone."""
        if layer in self.nodes.mixers:
            return self._mixer_writes(layer)
        return self._heads_read(layer) if layer in self.nodes.attends else None

    def _heads_read(self, layer: int) -> Floats:
        """Values that heads read, by what they compute with, [circuits, seq, n_heads, head_dim]."""
        hooks = self.nodes.attention_inputs(layer)
        receivers = _numbers(self.nodes.receivers, *hooks)
        streams, which = self._streams(receivers)
        values = self.parts.heads_in(layer, streams)
        heads: dict[str, list[Floats]] = {name: [] for name in hooks}
        places = {name: heads_axis(HookPoint.parse(name).axes or ()) or 1 for name in hooks}
        for column, node in enumerate(self.nodes.receivers[number] for number in receivers):
            by_head = np.moveaxis(values[node.hook], places[node.hook], 1)
            heads[node.hook].append(by_head[which[:, column], self.nodes.own_head(node)])
        return self.parts.attention(layer, {name: np.stack(own, axis=places[name]) for name, own in heads.items()})

    def _write_heads(self, layer: int, z: str, read: Floats) -> None:
        out = str(HookPoint.AttnOut(layer))
        senders, base = _numbers(self.nodes.senders, z), self.values.of(z, CORRUPTED)
        written = self.values.of(out, CORRUPTED)

        def normed(circuit: int, masks: Masks) -> Floats:
            some, which = np.unique(masks, axis=0, return_inverse=True)
            mixed = np.where(some[:, None, :, None], read[circuit], base)
            change: Floats = self.parts.attention_out({layer: mixed})[layer] - written
            # An exact 0: recomputing the corrupted output may differ from the captured one in its last bits.
            change[~some.any(axis=1)] = 0
            return change[which.ravel()]

        # Where the output is normed before it is added (Gemma 2), no head writes a share of its own: a receiver reads
        # the output computed from the kept heads' values now, and the other heads' corrupted ones.
        if not self.parts.linear[layer]:
            self._add(senders, normed)
            return
        changes = np.zeros((len(self.masks), len(senders), *written.shape), np.float32)
        circuits, heads = np.nonzero(self.masks[:, senders].any(axis=2))  # what nobody reads is not computed
        if len(circuits):
            # A row for each head: its new value, and the corrupted ones of all others.
            own = (np.arange(len(senders)) == heads[:, None])[:, None, :, None]
            mixed = np.where(own, read[circuits], base)
            changes[circuits, heads] = self.parts.attention_out({layer: mixed})[layer] - written
        self._write(senders, changes)

    def _mixer_writes(self, layer: int) -> Floats:
        """What a mixer writes: [circuits, seq, n_heads, value], or without heads [circuits, seq, hidden]."""
        streams, which = self._streams(_numbers(self.nodes.receivers, str(HookPoint.SsmPre(layer))))
        return self.parts.mixer_out(layer, streams)[which[:, 0]]

    def _mlp_changes(self, layer: int) -> Floats:
        """Change of the MLP's output from the corrupted prompt's, [circuits, seq, hidden]."""
        streams, which = self._streams(_numbers(self.nodes.receivers, str(HookPoint.MlpPre(layer))))
        changes: Floats = self.parts.mlp_out(layer, streams) - self.values.of(str(HookPoint.MlpOut(layer)), CORRUPTED)
        return changes[which[:, 0]]


def _numbers(nodes: Sequence[Node], *hooks: str) -> list[int]:
    return [number for number, node in enumerate(nodes) if node.hook in hooks]


def circuits_at_once(nodes: Nodes, seq: int, hidden: int) -> int:
    """Number of circuits for which memory has room."""
    a_layer = max(1, len(nodes.receivers) // nodes.layers)
    # 4 bytes a number: each sender's change, and the streams of a layer's receivers with what they compute.
    return int(max(1, memory.available() // SHARE // (4 * seq * hidden * (len(nodes.senders) + 2 * a_layer))))
