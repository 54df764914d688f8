"""The pooling of a stream into one vector a text: written behind files without one, told from numbers in others."""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from exporters.adopt.flow import static
from exporters.adopt.operators.decoder_writer import MASK_INPUT, DecoderWriter
from exporters.probe import Array
from exporters.sentence_folder import SentenceModules
from mionnx.errors import ExportError
from mionnx.graph.metadata import POOLINGS

SMALLEST = 1e-9  # of a number of tokens
SHORTEST = 1e-12  # of a vector whose length is made 1, as in torch
LOWEST = -1e9  # in the place of padding, of a maximum
CLOSE = 1e-4  # of two poolings by numbers, relative


def write_pooling(model: ir.Model, stream: ir.Value, sentence: SentenceModules) -> tuple[ir.Value, ir.Value]:
    """Write the modules of a folder behind a stream [batch, seq, hidden]; returns the pooled vector, the embedding."""
    strange = [one.kind for one in sentence.modules if one.kind != "Normalize"]
    if strange:
        raise ExportError(
            f"modules.json has a {strange[0]} behind the pooling, and the file does not compute it: it is not added; "
            "export the checkpoint"
        )
    op = DecoderWriter(model)
    op.begin()
    parts = [_pooled(op, stream, mode) for mode in sentence.poolings]
    pooled = embedding = parts[0] if len(parts) == 1 else op.Concat(*parts, axis=1)
    if sentence.modules:
        length = op.Clip(op.ReduceL2(pooled, [1], keepdims=1), op.number(SHORTEST, _kind(stream)))
        embedding = op.Div(pooled, op.Expand(length, op.Shape(pooled)))
    width = static(stream, 2)
    for value in (pooled, embedding):
        value.type, value.shape = stream.type, ir.Shape(["batch", width and width * len(parts)])
    model.graph.extend(op.nodes)
    return pooled, embedding


def _kind(stream: ir.Value) -> ir.DataType:
    kind = stream.dtype
    if kind not in (ir.DataType.FLOAT, ir.DataType.FLOAT16):
        raise ExportError(f"a stream of {kind} is not pooled")
    return kind


def _pooled(op: DecoderWriter, stream: ir.Value, mode: str) -> ir.Value:
    """One vector a row, [batch, hidden], of the tokens that are no padding; as `exporters.transformers.sentence`."""
    mask, kind = op.input(MASK_INPUT, ["batch", "total"]), _kind(stream)
    narrow = kind == ir.DataType.FLOAT16
    if mode == "cls":
        return _at(op, stream, op.ArgMax(mask, axis=1, keepdims=1))
    if mode == "max":
        real = op.Cast(op.Unsqueeze(mask, [2]), to=int(ir.DataType.BOOL))
        return op.ReduceMax(op.Where(real, stream, op.number(-1e4 if narrow else LOWEST, kind)), [1], keepdims=0)
    places = op.Mul(op.CumSum(mask, op.constant(1, np.int64)), mask)  # 1, 2, ... of each row's own text
    if mode == "lasttoken":
        return _at(op, stream, op.ArgMax(places, axis=1, keepdims=1))
    weights = op.Cast(op.Unsqueeze(places if mode == "weightedmean" else mask, [2]), to=int(kind))
    total = op.Clip(op.ReduceSum(weights, [1], keepdims=0), op.number(1e-4 if narrow else SMALLEST, kind))
    summed = op.ReduceSum(op.Mul(stream, weights), [1], keepdims=0)
    return op.Div(summed, op.Sqrt(total) if mode == "mean_sqrt_len" else total)


def _at(op: DecoderWriter, stream: ir.Value, column: ir.Value) -> ir.Value:
    """The stream at one column [batch, 1] of each row."""
    sizes = op.Mul(op.Shape(stream), op.constant([1, 0, 1], np.int64))
    places = op.Expand(op.Unsqueeze(column, [2]), op.Add(sizes, op.constant([0, 1, 0], np.int64)))
    return op.Squeeze(op.GatherElements(stream, places, axis=1), [1])


def poolings_of(stream: Array, pooled: Array) -> list[str]:
    """The pooling that makes a vector of a stream of texts without padding, by its numbers; empty if none does."""
    places = np.arange(1, stream.shape[1] + 1, dtype=np.float64)
    weighted, count = np.einsum("bsh,s->bh", stream.astype(np.float64), places / places.sum()), stream.shape[1]
    summed = stream.sum(1, dtype=np.float64)
    numbers = {"cls": stream[:, 0], "max": stream.max(1), "mean": summed / count, "lasttoken": stream[:, -1]}
    numbers |= {"mean_sqrt_len": summed / np.sqrt(count), "weightedmean": weighted}
    allowed = CLOSE * max(1.0, float(np.abs(pooled).max()))
    return [mode for mode in POOLINGS if _close(numbers[mode], pooled, allowed)][:1]


def _close(one: Array, other: Array, allowed: float) -> bool:
    return one.shape == other.shape and float(np.abs(one - other).max()) <= allowed


def has_length_one(embedding: Array) -> bool:
    """Whether the vectors of some texts have length 1."""
    lengths: Sequence[float] = np.linalg.norm(embedding.astype(np.float64), axis=-1)
    return bool(np.abs(np.asarray(lengths) - 1).max() < CLOSE)
