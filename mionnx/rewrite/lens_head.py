"""Rewrite: the lens. The part of a model after its last layer, reading streams, and giving no logits.

1. The last layer's `hook_resid_post` becomes the input, [1 + n, positions, hidden]: its first entry is the stream that
   the others are compared with.
2. Logits of these are made by the model's own final norm, head and soft cap.
3. Only what is made of them leaves the graph: the largest log-probabilities and their tokens, log-probabilities and
   ranks of chosen tokens, the entropy, and the divergence from the first entry.
"""

from dataclasses import dataclass

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from mionnx.graph import onnx_file
from mionnx.graph.builder import Builder
from mionnx.graph.extract import extract
from mionnx.graph.report import Report

K, CHOSEN = "mionnx.lens.k", "mionnx.lens.chosen"
# What a lens gives, by name: shapes are [1 + n, positions], with k or chosen tokens behind for those that have them.
OUTPUTS = ("top", "top_ids", "log_probs", "ranks", "entropy", "divergence")


@dataclass(frozen=True)
class Distribution:
    """Logits [entries, positions, vocab] in float32, and log sum exp of them, [entries, positions, 1]."""

    logits: gs.Tensor
    total: gs.Tensor


def lens(origin: onnx.ModelProto, hook: str, output: str) -> bytes:
    """The lens of a model as a model of its own.

    Args:
        origin: the hooked model's graph; left alone.
        hook: what becomes the input: the last layer's `hook_resid_post`.
        output: the value of the logits.
    """
    graph, report = onnx_file.edit(extract(origin, [hook], [output])), Report()
    build = Builder(graph, output, "mionnx.lens", report)
    logits = build.node("Cast", [graph.outputs[0]], "logits", np.float32, to=onnx.TensorProto.FLOAT)
    total = build.node("ReduceLogSumExp", [logits, build.ints("vocab", 2)], "total", keepdims=1)
    made = Distribution(logits, total)
    graph.outputs = []
    _largest(build, made)
    _chosen(build, made)
    _spread(build, made)
    graph.cleanup().toposort()
    return onnx_file.serialise(graph, origin)


def _give(build: Builder, step: str, value: gs.Tensor, dtype: type, last: str | None = None) -> None:
    """Make a value an output."""
    value.name, value.dtype = f"{build.prefix}.{step}", np.dtype(dtype)
    value.shape = ["mionnx.entries", "mionnx.positions", *([last] if last else [])]
    build.graph.outputs.append(value)


def _largest(build: Builder, made: Distribution) -> None:
    """The k largest log-probabilities."""
    k = build.input(K, np.int64, 1)
    values, ids = gs.Variable("mionnx.lens.values", dtype=np.float32), gs.Variable("mionnx.lens.ids", dtype=np.int64)
    build.node("TopK", [made.logits, k], "largest", out=ids, before=[values], axis=2)
    _give(build, "top", build.node("Sub", [values, made.total], "top"), np.float32, "mionnx.k")
    _give(build, "top_ids", ids, np.int64, "mionnx.k")


def _chosen(build: Builder, made: Distribution) -> None:
    """Of chosen tokens the log-probability, and the rank: how many tokens have a larger logit."""
    chosen = build.input(CHOSEN, np.int64, 2)  # [positions, n]
    shape = build.node("Shape", [made.logits], "entries", np.int64, start=0, end=1)
    target = build.node("Concat", [shape, build.node("Shape", [chosen], "each", np.int64)], "target", axis=0)
    index = build.node("Expand", [chosen, target], "index")
    theirs = build.node("GatherElements", [made.logits, index], "theirs", np.float32, axis=2)
    _give(build, "log_probs", build.node("Sub", [theirs, made.total], "log_probs"), np.float32, "mionnx.n")
    every = build.node("Unsqueeze", [made.logits, build.ints("one", 3)], "every")
    beside = build.node("Unsqueeze", [theirs, build.ints("all", 2)], "beside")
    above = build.node("Greater", [every, beside], "above", np.bool_)
    counted = build.node("Cast", [above], "counted", np.int32, to=onnx.TensorProto.INT32)
    rank = build.node("ReduceSum", [counted, build.ints("tokens", 2)], "sum", keepdims=0)
    wide = build.node("Cast", [rank], "ranks", np.int64, to=onnx.TensorProto.INT64)
    _give(build, "ranks", wide, np.int64, "mionnx.n")


def _spread(build: Builder, made: Distribution) -> None:
    """Entropy, H = log Z - sum p x, and the divergence from the first entry, sum p0 (x0 - x) - log Z0 + log Z."""
    logits, axis, zero = made.logits, build.ints("last", 2), build.ints("first", 0)
    chances = build.node("Softmax", [logits], "chances", axis=2)
    mean = build.node("ReduceSum", [build.node("Mul", [chances, logits], "weighted"), axis], "mean", keepdims=0)
    total = build.node("Squeeze", [made.total, axis], "flat")
    _give(build, "entropy", build.node("Sub", [total, mean], "entropy"), np.float32)
    first, likely, sum_first = (
        build.node("Slice", [value, zero, build.ints(f"{name}.end", 1), zero], f"{name}.first")
        for name, value in (("logits", logits), ("chances", chances), ("total", total))
    )
    apart = build.node("Mul", [likely, build.node("Sub", [first, logits], "difference")], "apart")
    gap = build.node("ReduceSum", [apart, axis], "gap", keepdims=0)
    sums = build.node("Sub", [total, sum_first], "sums")
    _give(build, "divergence", build.node("Add", [gap, sums], "divergence"), np.float32)
