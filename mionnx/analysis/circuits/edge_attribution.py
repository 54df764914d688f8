"""`edge_attribution`: every edge between heads, MLPs, embedding and logits to first order, from a few passes."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mionnx.analysis.circuits.edge_gradients import EdgeGradients
from mionnx.analysis.circuits.edge_scores import EdgeAttribution
from mionnx.analysis.circuits.node_values import NodeValues, node_values
from mionnx.analysis.circuits.nodes import Nodes, all_nodes, chosen_receivers, chosen_senders
from mionnx.analysis.circuits.parts import Parts
from mionnx.analysis.gradients.seeded import Seed, check_metric
from mionnx.analysis.sweep.metric import Measure, Metric, MetricRequest, Tokens
from mionnx.analysis.sweep.pairs import Pair
from mionnx.analysis.sweep.patching import PATCHINGS
from mionnx.analysis.sweep.prompts import and_more, quote, refuse_unlike, until
from mionnx.analysis.sweep.receivers import Receiver
from mionnx.errors import GradientError, InputError, ModelError, nearest
from mionnx.graph.hook_points import HookPoint
from mionnx.machine.ranges import at_least, at_most
from mionnx.machine.typed import typed
from mionnx.run.prompt import prompt_ids
from mionnx.run.runner import Runner
from mionnx.run.tokenizing import Prompt
from mionnx.spec.metric import check_rules

MOST_STEPS = 1000
Ends = str | HookPoint | Iterable[Receiver]


@typed(leave=["senders", "receivers", "answer", "versus"])
def edge_attribution(
    model: Runner,
    clean: Prompt,
    corrupted: Prompt,
    senders: Ends = "all",
    receivers: Ends = "all",
    metric: Measure = "logit_diff",
    *,
    answer: Tokens = None,
    versus: Tokens = None,
    steps: int = 1,
    patching: str = "noising",
    rules: str = "gradient",
    position: int = -1,
    cotangent: ArrayLike | Seed | None = None,
) -> EdgeAttribution:
    """Edge attribution patching: `path_patch` of every edge to first order, from a few passes.

    The score of an edge is (sender's corrupted value - its clean value), as added to the stream, times the gradient of
    the metric by the stream as this receiver alone reads it (Syed et al. 2023, arXiv:2310.10348).

    Args:
        clean, corrupted, metric, answer, versus: see `patch_sweep`; "rank" has no gradient.
        senders: "all"; or `hook_embed`, `attn.hook_z` and `hook_mlp_out` of layers, globs and short names allowed;
            with heads as pairs `("blocks.3.attn.hook_z", [0, 5])`.
        receivers: as for `path_patch`; a receiver is one head's queries, keys or values, an MLP, or `hook_final_norm`.
        steps: points between the two prompts' embeddings at which gradients are averaged (EAP-IG, Hanna et al. 2024,
            arXiv:2403.17806); 1 takes them at the patched run alone.
        patching: "noising" puts corrupted values into the clean run, "denoising" clean ones into the corrupted run.
        rules: "gradient", or the propagation rules "frozen_norm" or "relp", see `attribute_patch`.
        position: whose logits are read.
        cotangent: of a metric that is a function, its derivative by the logits, see `attribute_patch`.

    Returns:
        scores [senders, receivers] with labels, `top(k)`, a figure, a page and files.

    Raises:
        HookError: no such sender or receiver; a recurrent model.
        GradientError: a metric without a gradient.
        InputError: prompts or tokens that do not fit, receivers that all come before the senders, or a model whose
            parts read more than the sum of what others write.

    Example:
        found = model.edge_attribution("The capital of France is", "The capital of Italy is", steps=5)
        found.top(3), found.scores.shape  # (senders, receivers)
    """
    request = MetricRequest(check_metric(metric, cotangent, "path_patch"), answer, versus)
    _check(steps, patching, rules, metric)
    nodes = all_nodes(model.hooked)
    rows, columns = chosen_senders(nodes, senders), chosen_receivers(model.hooked, nodes, receivers)
    _refuse_no_edge(nodes, rows, columns)
    pairs = make_pairs(model, clean, corrupted, position, patching)
    begin = time.perf_counter()
    gradients = EdgeGradients(model, request, cotangent, rules, steps)
    scores, bases = _scores(model, nodes, pairs, gradients, patching == "noising")
    kept, edges = np.ix_(rows, columns), nodes.edges
    sending, receiving = [nodes.senders[i] for i in rows], [nodes.receivers[i] for i in columns]
    clean_mean, corrupted_mean = bases.mean(axis=1).tolist()[:: 1 if patching == "noising" else -1]
    found = EdgeAttribution(
        np.where(edges, scores, 0.0)[kept],
        edges[kept],
        tuple(node.label for node in sending),
        tuple(node.label for node in receiving),
        tuple((node.hook, node.head) for node in sending),
        tuple((node.hook, node.head) for node in receiving),
        clean_mean,
        corrupted_mean,
        request.name,
        patching,
        rules,
        steps,
        about(model, pairs),
    )
    found.cost = {"edges": float(found.count), "pairs": float(len(pairs)), "seconds": time.perf_counter() - begin}
    return found


def make_pairs(model: Runner, clean: Prompt, corrupted: Prompt, position: int, patching: str) -> list[Pair]:
    """Pairs of prompts, each the base and the other one.

    Raises:
        InputError: prompts of different length, or the same up to the position that is read.
    """
    good, bad = prompt_ids(model, clean), prompt_ids(model, corrupted)
    refuse_unlike(good, bad)
    bases, others = (good, bad) if patching == "noising" else (bad, good)
    pairs = [Pair(until(position, base), until(position, other)) for base, other in zip(bases, others, strict=True)]
    for number, pair in enumerate(pairs):
        if pair.other is not None and np.array_equal(pair.base, pair.other):
            raise InputError(f"pair {number}: the clean and the corrupted prompt are the same up to what is read")
    return pairs


def about(model: Runner, pairs: list[Pair]) -> str:
    """A line that names the first pair."""
    first, *_ = pairs
    other = "" if first.other is None else quote(model, first.other)
    return f"{other} into {quote(model, first.base)}{and_more([pair.base for pair in pairs])}"


def _check(steps: int, patching: str, rules: str, metric: Measure) -> None:
    if patching not in PATCHINGS:
        raise InputError(f"patching={patching!r}; {' or '.join(PATCHINGS)}{nearest(patching, PATCHINGS)}")
    at_least("steps", steps, 1)
    at_most("steps", steps, MOST_STEPS)
    check_rules(rules)
    if rules.endswith("_pattern"):
        raise InputError(f"rules={rules!r} takes patterns for constant: queries and keys would receive nothing")
    if metric == "kl" and steps == 1 and patching == "noising":
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


def _scores(
    model: Runner, nodes: Nodes, pairs: list[Pair], gradients: EdgeGradients, noising: bool
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """[senders, receivers], mean over pairs; and the metric of both prompts, [2, pairs]."""
    total, bases = np.zeros(nodes.edges.shape), np.empty((2, len(pairs)))
    for number, pair in enumerate(pairs):
        parts = Parts(model, nodes, len(pair.base))
        found = node_values(model, nodes, pair)
        metric, known = bound_metric(model, gradients.metric, number, len(pairs), found, noising)
        changes = found.changes(parts).astype(np.float64)
        received = gradients.of(parts, found, pair, known)
        total += changes.reshape(len(changes), -1) @ received.reshape(len(received), -1).T / len(pairs)
        bases[:, number] = measured(metric, found.logits)
    if not np.isfinite(total).all():
        raise ModelError("scores of edges are not finite: gradients overflow on these prompts; float32 may help")
    return total, bases


def bound_metric(
    model: Runner, request: MetricRequest, number: int, count: int, found: NodeValues, noising: bool
) -> tuple[Metric, dict[str, Any]]:
    """The metric of a pair, and the tokens or the reference of its gradient."""
    clean, corrupted = found.logits if noising else found.logits[::-1]
    metric = request.bind(model, number, count, clean, corrupted)
    if callable(request.measure):
        return metric, {}
    if request.measure == "kl":
        return metric, {"reference": clean}
    tokens = request.tokens(model, number, count, clean, corrupted)
    return metric, dict(zip(("answer", "versus"), tokens, strict=False))


def measured(metric: Metric, logits: NDArray[Any]) -> NDArray[np.float64]:
    """The metric of logits [rows, vocab]."""
    return metric(logits if metric.needs is None else logits[:, list(metric.needs)])
