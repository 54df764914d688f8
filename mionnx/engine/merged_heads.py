"""Heads that one product computes, moved to their places together.

Queries, keys and values of one product are split, reshaped to heads of the same width and turned alike. Here the
product is reshaped and turned once, and the `Split` comes last, along the heads: 4 nodes less in each layer, and the
same numbers. Decoding a small model is bound by the number of nodes. The names of hook points say that the values are
heads of the tokens that the product reads, [batch, heads, seq, width]: what else a foreign graph makes is left alone.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from mionnx.graph.dataflow import Dataflow, attributes

COLUMN_AXIS = 2  # axis of what a product makes: batch, seq, columns
HEADS_AXIS, SHAPE_AXES = 2, 4  # before heads are turned: batch, seq, heads, width
TURN = [0, 2, 1, 3]
HEAD_NAMES = re.compile(r"blocks\.\d+\.attn\.hook_[qkv]")
INFERRED = -1  # in a shape: as many as there are


@dataclass(frozen=True)
class Turned:
    """A `Split`, and the nodes that make heads of each of its outputs.

    Attributes:
        reshapes, transposes: indices, in the order of the outputs.
        sizes: heads of each; none where all have as many.
    """

    split: int
    reshapes: tuple[int, ...]
    transposes: tuple[int, ...]
    sizes: tuple[int, ...]


def merge_heads(model: onnx.ModelProto) -> int:
    """Reshape and turn the parts of a product as one value, in place.

    Args:
        model: in blocks, with a `Split` behind each product that is several.

    Returns:
        the number of products whose heads are moved together now.
    """
    flow, tensors = Dataflow(model), {tensor.name: tensor for tensor in model.graph.initializer}
    ranks = {entry.name: len(entry.type.tensor_type.shape.dim) for entry in model.graph.value_info}
    splits = [at for at, node in enumerate(flow.nodes) if node.op_type == "Split"]
    heads = [turned for at in splits if (turned := _turned(flow, at, tensors, ranks)) is not None]
    merged = {min(one.reshapes): _together(flow.nodes, one) for one in heads}
    gone = {at for one in heads for at in (one.split, *one.reshapes, *one.transposes)}
    nodes = [new for at, node in enumerate(flow.nodes) for new in merged.get(at, () if at in gone else (node,))]
    if heads:
        copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
        del model.graph.node[:]
        model.graph.node.extend(copies)
        sizes = [(merged[min(one.reshapes)][-1], one.sizes) for one in heads if one.sizes]
        added = [numpy_helper.from_array(np.array(counts, np.int64), split.input[1]) for split, counts in sizes]
        model.graph.initializer.extend(added)
    return len(heads)


def _turned(flow: Dataflow, at: int, tensors: dict[str, onnx.TensorProto], ranks: dict[str, int]) -> Turned | None:
    """A `Split` of [batch, seq, columns] whose outputs become heads only; None of any other."""
    split = flow.nodes[at]
    columns = _array(split.input[1], tensors) if len(split.input) > 1 else np.zeros(0, np.int64)
    dimensions = {ranks[name] for name in split.output if name in ranks}
    if columns is None or dimensions != {COLUMN_AXIS + 1} or attributes(split).get("axis", 0) not in (-1, COLUMN_AXIS):
        return None
    reshapes = [_only_reader(flow, name, "Reshape") for name in split.output]
    transposes = [None if i is None else _only_reader(flow, flow.nodes[i].output[0], "Transpose") for i in reshapes]
    pairs = [(i, j) for i, j in zip(reshapes, transposes, strict=True) if i is not None and j is not None]
    ways = {(flow.nodes[i].input[1], *(str(one) for k in (i, j) for one in flow.nodes[k].attribute)) for i, j in pairs}
    if len(pairs) < len(split.output) or len(ways) > 1 or _perm(flow.nodes[pairs[0][1]]) != TURN:
        return None
    heads, width = _end(flow, flow.nodes[pairs[0][0]].input[1], tensors)
    named = all(HEAD_NAMES.fullmatch(flow.nodes[j].output[0]) for _, j in pairs)
    if not named or heads != INFERRED or width < 1:
        return None
    sizes = tuple(int(count) // width for count in columns)
    return Turned(at, tuple(i for i, _ in pairs), tuple(j for _, j in pairs), sizes)


def _only_reader(flow: Dataflow, name: str, op_type: str) -> int | None:
    """The node that reads a value as its first input, if it is the only one and of this type."""
    readers = flow.consumers[name]
    if len(readers) != 1 or any(entry.name == name for entry in flow.proto.graph.output):
        return None
    node = flow.nodes[readers[0]]
    return readers[0] if node.op_type == op_type and node.input[0] == name and name not in node.input[1:] else None


def _end(flow: Dataflow, shape: str, tensors: dict[str, onnx.TensorProto]) -> tuple[int, int]:
    """The last two numbers of a shape; zeros where they are not constant."""
    node = flow.producer(shape)
    names = [shape] if node is None else list(node.input[HEADS_AXIS:]) if node.op_type == "Concat" else []
    arrays = [_array(name, tensors) for name in names]
    numbers = [int(number) for array in arrays if array is not None for number in array]
    constant = len(numbers) == (SHAPE_AXES if node is None else len(names))
    return (numbers[-2], numbers[-1]) if constant and len(numbers) > 1 else (0, 0)


def _array(name: str, tensors: dict[str, onnx.TensorProto]) -> NDArray[np.int64] | None:
    tensor = tensors.get(name)
    external = tensor is None or tensor.data_location == onnx.TensorProto.EXTERNAL
    return None if tensor is None or external else numpy_helper.to_array(tensor).reshape(-1)


def _perm(node: onnx.NodeProto) -> list[int]:
    return next((list(one.ints) for one in node.attribute if one.name == "perm"), [])


def _together(nodes: Sequence[onnx.NodeProto], turned: Turned) -> tuple[onnx.NodeProto, ...]:
    """One `Reshape`, one `Transpose` and the `Split` behind them."""
    places = turned.reshapes[0], turned.transposes[0], turned.split
    reshape, transpose, split = (onnx.NodeProto.FromString(nodes[at].SerializeToString()) for at in places)
    name = split.output[0]
    reshape.input[0], reshape.output[0] = split.input[0], f"{name}.heads"
    transpose.input[0], transpose.output[0] = reshape.output[0], f"{name}.turned"
    split.input[:] = [transpose.output[0], *([f"{name}.head_counts"] if turned.sizes else [])]
    split.output[:] = [nodes[at].output[0] for at in turned.transposes]
    for attribute in split.attribute:
        if attribute.name == "axis":
            attribute.i = TURN.index(HEADS_AXIS)
    return reshape, transpose, split
