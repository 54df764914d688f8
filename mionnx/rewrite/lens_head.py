"""Rewrite: the lens. The part of a model after its last layer, reading streams, and giving no logits.

1. The last layer's `hook_resid_post` becomes the input, [1 + n, positions, hidden]: its first entry is the stream that
   the others are compared with.
2. Logits of these are made by the model's own final norm, head and soft cap.
3. Only what is made of them leaves the graph: the largest log-probabilities and their tokens, log-probabilities and
   ranks of chosen tokens, the entropy, and the divergence from the first entry.
"""

from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from mionnx.graph.builder import Builder
from mionnx.graph.edited_graph import named
from mionnx.graph.output_head import LOGITS
from mionnx.graph.report import Report

LENS_K, LENS_TOKENS = "mionnx.lens.k", "mionnx.lens.chosen"
# What a lens gives, by name: shapes are [1 + n, positions], with k or chosen tokens behind for those that have them.
OUTPUTS = ("top", "top_ids", "log_probs", "ranks", "entropy", "divergence")


@dataclass(frozen=True)
class Distribution:
    """Float32 logits [entries, positions, vocab] and their log sum exp [entries, positions, 1]."""

    logits: gs.Tensor
    total: gs.Tensor


def read_out(graph: gs.Graph, report: Report) -> None:
    """Replace the logits [entries, positions, vocab] by the outputs of a lens."""
    op = Builder(graph, LOGITS, "mionnx.lens", report)
    logits = op.Cast(named(graph)[LOGITS], to=np.float32)
    distribution = Distribution(logits, op.ReduceLogSumExp(logits, [2], keepdims=1))
    # logits of all streams are the largest value of the pass; nothing as large as they leaves the graph
    graph.outputs = []
    _largest(op, distribution)
    _chosen(op, distribution)
    _spread(op, distribution)


def _output(op: Builder, name: str, value: gs.Tensor, last: str | None = None) -> None:
    value.name = f"{op.prefix}.{name}"
    value.shape = ["mionnx.entries", "mionnx.positions", *([last] if last else [])]
    op.graph.outputs.append(value)


def _largest(op: Builder, distribution: Distribution) -> None:
    values, ids = op.TopK(distribution.logits, op.input(LENS_K, np.int64, 1), axis=2, outputs=2)
    _output(op, "top", op.Sub(values, distribution.total), "mionnx.k")
    _output(op, "top_ids", ids, "mionnx.k")


def _chosen(op: Builder, distribution: Distribution) -> None:
    """Log-probabilities of chosen tokens, and their ranks: how many tokens have a larger logit."""
    logits, chosen = distribution.logits, op.input(LENS_TOKENS, np.int64, 2)  # [positions, n]
    target = op.Concat(op.Shape(logits, start=0, end=1), op.Shape(chosen), axis=0)
    theirs = op.GatherElements(logits, op.Expand(chosen, target), axis=2)
    _output(op, "log_probs", op.Sub(theirs, distribution.total), "mionnx.n")
    # not the place in a sorted list: equal logits share a rank
    larger = op.Greater(op.Unsqueeze(logits, [3]), op.Unsqueeze(theirs, [2]))
    rank = op.ReduceSum(op.Cast(larger, to=np.int32), [2], keepdims=0)
    _output(op, "ranks", op.Cast(rank, to=np.int64), "mionnx.n")


def _spread(op: Builder, distribution: Distribution) -> None:
    """Entropy and KL divergence from the first entry."""
    logits = distribution.logits
    probabilities = op.Softmax(logits, axis=2)
    # H = -sum p log p = log Z - sum p x, with log p = x - log Z
    mean = op.ReduceSum(op.Mul(probabilities, logits), [2], keepdims=0)
    total = op.Squeeze(distribution.total, [2])
    _output(op, "entropy", op.Sub(total, mean))
    first, likely, first_total = (op.Slice(value, [0], [1], [0]) for value in (logits, probabilities, total))
    # KL(p0 || p) = sum p0 (log p0 - log p) = sum p0 (x0 - x) + log Z - log Z0
    gap = op.ReduceSum(op.Mul(likely, op.Sub(first, logits)), [2], keepdims=0)
    _output(op, "divergence", op.Add(gap, op.Sub(total, first_total)))
