"""`circuit`: the leading edges alone, every other edge patched exactly, and how much of the behaviour they keep."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mionnx.analysis.circuits.circuit_result import Circuit
from mionnx.analysis.circuits.circuit_run import CircuitRun, circuits_at_once
from mionnx.analysis.circuits.edge_attribution import edge_attribution
from mionnx.analysis.circuits.edge_scores import EdgeAttribution
from mionnx.analysis.circuits.node_values import node_values
from mionnx.analysis.circuits.nodes import Nodes, all_nodes
from mionnx.analysis.circuits.parts import Parts
from mionnx.analysis.gradients.gradients import Seed
from mionnx.analysis.sweep.comparison import Comparison, Pairs, compares
from mionnx.analysis.sweep.metric import Measure, Tokens
from mionnx.errors import InputError
from mionnx.machine.ranges import at_least, at_most, listed
from mionnx.machine.typed import typed
from mionnx.run.runner import Runner
from mionnx.run.tokenizing import Prompt

Masks = NDArray[np.bool_]


@compares
@typed(leave=["corrupted", "edges", "answer", "versus"])
def circuit(
    model: Runner,
    clean: Prompt | Comparison,
    corrupted: Prompt | None = None,
    edges: int | Iterable[int] | None = None,
    metric: Measure = "logit_diff",
    *,
    answer: Tokens = None,
    versus: Tokens = None,
    steps: int = 5,
    rules: str = "gradient",
    position: int = -1,
    cotangent: ArrayLike | Seed | None = None,
    scores: EdgeAttribution | None = None,
) -> Circuit:
    """Keep the leading edges, patch all others exactly, and measure how faithful the circuit is.

    Every edge that is not kept carries what its sender wrote on the corrupted prompt; kept edges carry what it writes
    now. Faithfulness is (metric - corrupted) / (clean - corrupted): 1 with all edges, 0 with none.

    Args:
        edges: numbers of kept edges, the leading ones by the size of their score; by default from 0 to all of them.
        steps, rules, cotangent: of the scores, see `edge_attribution`.
        scores: other scores, of all senders and receivers: of other prompts, or an array of one's own in
            `EdgeAttribution.scores`.

    Returns:
        the metric and the faithfulness by number of edges, with a table, a figure and a page.

    Raises:
        HookError, GradientError: as `edge_attribution`.
        InputError: as there; or more edges than there are, or scores of some nodes only.

    Example:
        result = model.circuit("The capital of France is", "The capital of Italy is", [10, 50, 200])
        result.faithfulness, result.kept(10)
    """
    nodes = all_nodes(model.hooked)
    sizes = _sizes(edges, int(nodes.edges.sum()))
    _refuse_other_nodes(scores, nodes)
    comparison = Comparison(cast(Prompt, clean), corrupted, metric, answer, versus, "noising", position)
    compared = comparison.on(model).of_texts("a circuit")
    begin = time.perf_counter()
    ranking = scores or edge_attribution(model, comparison, steps=steps, rules=rules, cotangent=cotangent)
    by_pair, bases = _values(model, nodes, compared, _masks(ranking, sizes))
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
    )


def _sizes(edges: int | Iterable[int] | None, most: int) -> list[int]:
    """The numbers of kept edges, ascending."""
    if edges is None:
        return ladder(most)
    entries = listed("edges", edges) if isinstance(edges, Iterable) and not isinstance(edges, str) else [edges]
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


def _masks(ranking: EdgeAttribution, sizes: Sequence[int]) -> Masks:
    """[circuits, senders, receivers]: the leading edges."""
    order = ranking.ranked()
    masks = np.zeros((len(sizes), *ranking.scores.shape), bool)
    for mask, size in zip(masks, sizes, strict=True):
        mask[tuple(order[:size].T)] = True
    return masks


def _values(
    model: Runner, nodes: Nodes, compared: Pairs, masks: Masks
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The metric [pairs, circuits], and that of both prompts, [2, pairs]."""
    by_pair, bases = np.empty((len(compared), len(masks))), np.empty((2, len(compared)))
    for number, pair in enumerate(compared.pairs):
        parts = Parts(model, nodes, len(pair.base))
        values = node_values(model, nodes, pair)
        metric = compared.bind(model, number, *values.logits)
        bases[:, number] = metric.measure(values.logits)
        most = circuits_at_once(nodes, len(pair.base), model.hidden_size)
        for begin in range(0, len(masks), most):
            some = slice(begin, begin + most)
            by_pair[number, some] = metric(CircuitRun(parts, values, masks[some]).logits(metric.needs))
    return by_pair, bases
