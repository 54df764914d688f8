"""Products with blocks that read the same value, as one product, and their heads moved together.

Decoding a small model is bound by the number of nodes: SmolLM2 has 121 products instead of 211, and 14 nodes less in
each layer. Queries, keys and values, or the two halves of a gated MLP, are products of one value. Where the blocks of
their weights lie one after another in the file, they are the blocks of one larger weight, and nothing is copied. Their
offsets (`mionnx.graph.offset_products`) are put side by side when a session is opened, by constant folding.
"""

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from mionnx.engine.engine import graph_of
from mionnx.engine.fused_recurrence import BRANCH, fuse_recurrences
from mionnx.engine.halved_products import (
    BLOCK_PRODUCT,
    FOLDED_PREFIX,
    constants_of,
    halve_products,
    replace_nodes,
)
from mionnx.graph.dataflow import Dataflow, attributes, reads
from mionnx.graph.hooked_model import ROUNDING_LEVEL
from mionnx.graph.packed_weight import LEVEL

COLUMN_COUNT = "N"
NAMES = BLOCK_PRODUCT.encode(), BRANCH.encode()  # of what there is to change, in a file
WEIGHT_INPUTS = slice(1, 4)  # inputs of a product: packed numbers, scales, zero points
PLACE_KEYS = {"location", "offset", "length"}  # others tell of packed weights
MOST_INPUTS = 4  # inputs of a product that has no bias and no order
TILE = 16  # columns that a kernel computes together, at most
COLUMN_AXIS = 2  # axis of what a product makes: batch, seq, columns
HEADS_AXIS, SHAPE_AXES = 2, 4  # before heads are turned: batch, seq, heads, width
TURN = [0, 2, 1, 3]
HEAD_NAMES = re.compile(r"blocks\.\d+\.attn\.hook_[qkv]")
INFERRED = -1  # in a shape: as many as there are


@dataclass(frozen=True)
class Place:
    """Bytes of a tensor in a file, without those at `end`, and the sizes of all its axes but the first."""

    file: str
    begin: int
    end: int
    tail: tuple[int, ...]

    @classmethod
    def of(cls, tensor: onnx.TensorProto) -> "Place | None":
        """The place of a tensor with more than one axis; None for any other."""
        entries = {item.key: item.value for item in tensor.external_data}
        external = tensor.data_location == onnx.TensorProto.EXTERNAL
        if not external or len(tensor.dims) < 2 or "length" not in entries or entries.keys() - PLACE_KEYS:
            return None
        begin = int(entries.get("offset", "0"))
        return cls(entries["location"], begin, begin + int(entries["length"]), tuple(tensor.dims[1:]))

    def precedes(self, other: "Place") -> bool:
        """Whether the other's bytes are the next ones of the file, and its rows of the same shape."""
        return (self.file, self.end, self.tail) == (other.file, other.begin, other.tail)


def with_merged(model: Path | bytes) -> Path | bytes:
    """A model with products and heads merged or halved, and recurrences fused; as it is given where none is."""
    if not (_mentions(model) if isinstance(model, Path) else any(name in model for name in NAMES)):
        return model
    proto = graph_of(model)
    changes = [fuse_recurrences(proto)]
    if any(node.op_type == BLOCK_PRODUCT for node in proto.graph.node):
        changes += [halve_products(proto), merge_blocks(proto)]
    return proto.SerializeToString() if any(changes) else model


def _mentions(path: Path) -> bool:
    """Whether a file has one of the names; mapped, as its weights may lie inside."""
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return False
        with mmap(file.fileno(), 0, access=ACCESS_READ) as mapped:
            return any(mapped.find(name) >= 0 for name in NAMES)


def merge_blocks(model: onnx.ModelProto) -> int:
    """Merge products with blocks, their offsets and their heads, in place; return the number of changes."""
    changes = merge_products(model) + merge_offsets(model) + merge_heads(model)
    if changes:
        graph = model.graph
        needed = {name for node in graph.node for name in reads(node)}
        needed |= {entry.name for entry in (*graph.input, *graph.output)}
        # Copies: they live in the list.
        left = [onnx.TensorProto.FromString(one.SerializeToString()) for one in graph.initializer if one.name in needed]
        del graph.initializer[:]
        graph.initializer.extend(left)
    return changes


def merge_products(model: onnx.ModelProto) -> int:
    """Merge products of one value whose weights lie one after another, in place; return how many have become parts."""
    graph, tensors = model.graph, constants_of(model.graph)
    groups: dict[tuple[object, ...], list[tuple[int, list[Place]]]] = defaultdict(list)
    for at, node in enumerate(graph.node):
        places = _places(node, tensors)
        if places is not None:
            settings = {name: value for name, value in attributes(node).items() if name != COLUMN_COUNT}
            groups[node.input[0], len(places), *sorted(settings.items())].append((at, places))
    runs = [run for group in groups.values() for run in _runs(group)]
    parts: dict[int, tuple[onnx.NodeProto, ...]] = {at: () for run in runs for at in run}
    parts |= {min(run): _merged([graph.node[at] for at in run], tensors, graph) for run in runs}
    if runs:
        replace_nodes(graph, parts)
    return sum(map(len, runs))


def _places(node: onnx.NodeProto, tensors: dict[str, onnx.TensorProto]) -> list[Place] | None:
    """Places of the parts of a product's weight; None of a node that is not merged."""
    if node.op_type != BLOCK_PRODUCT or len(node.input) > MOST_INPUTS or not all(node.input):
        return None
    settings = attributes(node)
    # At level 4, and where a kernel's tile holds columns of one product only, every column is computed from the same
    # numbers in the same order: the bits are the same.
    if settings.get(LEVEL, 0) != ROUNDING_LEVEL or settings[COLUMN_COUNT] % TILE:
        return None
    places = [Place.of(tensors[name]) if name in tensors else None for name in node.input[WEIGHT_INPUTS]]
    return None if None in places else [place for place in places if place is not None]


def _runs(group: Sequence[tuple[int, list[Place]]]) -> Iterator[list[int]]:
    """Indices of products whose parts all lie one after another, in the order of the file."""
    run: list[int] = []
    last: list[Place] = []
    for at, places in sorted(group, key=lambda one: one[1][0].begin):
        if run and not all(one.precedes(other) for one, other in zip(last, places, strict=True)):
            yield from [run] if len(run) > 1 else []
            run = []
        run, last = [*run, at], places
    yield from [run] if len(run) > 1 else []


def _merged(
    nodes: Sequence[onnx.NodeProto], tensors: dict[str, onnx.TensorProto], graph: onnx.GraphProto
) -> tuple[onnx.NodeProto, onnx.NodeProto]:
    """One product, and the `Split` of its result; their tensors are added to the graph."""
    parts = [_joined([tensors[node.input[place]] for node in nodes]) for place in range(1, len(nodes[0].input))]
    columns = [attributes(node)[COLUMN_COUNT] for node in nodes]
    output = f"{nodes[0].output[0]}.merged"
    sizes = numpy_helper.from_array(np.array(columns, np.int64), f"{output}.columns")
    graph.initializer.extend([*parts, sizes])
    product = onnx.NodeProto.FromString(nodes[0].SerializeToString())
    product.input[WEIGHT_INPUTS] = [part.name for part in parts]
    product.output[:] = [output]
    for attribute in product.attribute:
        if attribute.name == COLUMN_COUNT:
            attribute.i = sum(columns)
    outputs = [node.output[0] for node in nodes]
    return product, helper.make_node("Split", [output, sizes.name], outputs, f"{output}.split", axis=-1)


def _joined(tensors: Sequence[onnx.TensorProto]) -> onnx.TensorProto:
    """One tensor over the bytes of several that lie one after another."""
    joined = onnx.TensorProto.FromString(tensors[0].SerializeToString())
    joined.name = f"{tensors[0].name}.merged"
    joined.dims[0] = sum(tensor.dims[0] for tensor in tensors)
    lengths = [int(item.value) for tensor in tensors for item in tensor.external_data if item.key == "length"]
    for item in joined.external_data:
        if item.key == "length":
            item.value = str(sum(lengths))
    return joined


def merge_offsets(model: onnx.ModelProto) -> int:
    """Add the offsets of the parts of a product before its `Split`, in place; return how many parts have some."""
    flow, weights = Dataflow(model), constants_of(model.graph)
    changes: dict[int, tuple[onnx.NodeProto, ...]] = {}
    parts = 0
    for at, split in enumerate(flow.nodes):
        source = flow.producer(split.input[0]) if split.op_type == "Split" else None
        if source is None or source.op_type != BLOCK_PRODUCT or source.output[0] != split.input[0]:
            continue
        shares = [share for name in split.output if (share := _offset_share(flow, name, weights)) is not None]
        columns = [weights[flow.nodes[product].input[1]].dims[-1] for product, _ in shares]
        sizes = _array(split.input[1], weights) if len(split.input) > 1 else None
        sums = {flow.nodes[product].input[0] for product, _ in shares}
        if sizes is None or columns != sizes.tolist() or len(sums) > 1:
            continue
        parts += len(shares)
        changes |= {i: () for share in shares for i in share} | {at: ()}
        changes[min(total for _, total in shares)] = _with_offsets(flow, split, shares)
    if changes:
        replace_nodes(model.graph, changes)
    return parts


def _offset_share(flow: Dataflow, name: str, weights: dict[str, onnx.TensorProto]) -> tuple[int, int] | None:
    """The product of a part's offsets, and the `Add` of both, if nothing else reads the two; None without offsets."""
    readers = flow.consumers[name]
    total = flow.nodes[readers[0]] if len(readers) == 1 else None
    if total is None or total.op_type != "Add" or total.input[0] != name or total.input[1] == name:
        return None
    product = flow.producers.get(total.input[1])
    if product is None or flow.nodes[product].op_type != "MatMul" or len(flow.consumers[total.input[1]]) > 1:
        return None
    shown = {entry.name for entry in flow.proto.graph.output}
    offsets = weights.get(flow.nodes[product].input[1])
    fits = offsets is not None and len(offsets.dims) == 2 and shown.isdisjoint((name, total.input[1]))
    return (product, readers[0]) if fits else None


def _with_offsets(
    flow: Dataflow, split: onnx.NodeProto, shares: Sequence[tuple[int, int]]
) -> tuple[onnx.NodeProto, ...]:
    """The offsets side by side, their product with the sums, the sum with the blocks' product, and its `Split`."""
    products, totals = ([flow.nodes[share[i]] for share in shares] for i in (0, 1))
    source = split.input[0]
    offsets, share, total = f"{FOLDED_PREFIX}{source}.offsets", f"{source}.of_offsets", f"{source}.sum"
    last = onnx.NodeProto.FromString(split.SerializeToString())
    last.input[0], last.output[:] = total, [one.output[0] for one in totals]
    return (
        helper.make_node("Concat", [one.input[1] for one in products], [offsets], offsets, axis=1),
        helper.make_node("MatMul", [products[0].input[0], offsets], [share], share),
        helper.make_node("Add", [source, share], [total], total),
        last,
    )


@dataclass(frozen=True)
class Turned:
    """A `Split`, and the nodes that make heads of each of its outputs, by their indices."""

    split: int
    reshapes: tuple[int, ...]
    transposes: tuple[int, ...]
    sizes: tuple[int, ...]  # heads of each; none where all have as many


def merge_heads(model: onnx.ModelProto) -> int:
    """Reshape and turn a product once, with the `Split` of its heads last, in place; return how many were."""
    flow, tensors = Dataflow(model), {tensor.name: tensor for tensor in model.graph.initializer}
    ranks = {entry.name: len(entry.type.tensor_type.shape.dim) for entry in model.graph.value_info}
    splits = [at for at, node in enumerate(flow.nodes) if node.op_type == "Split"]
    heads = [turned for at in splits if (turned := _turned(flow, at, tensors, ranks)) is not None]
    if heads:
        gone: dict[int, tuple[onnx.NodeProto, ...]] = {
            at: () for one in heads for at in (one.split, *one.reshapes, *one.transposes)
        }
        merged = {min(one.reshapes): _together(flow.nodes, one) for one in heads}
        sizes = [(merged[min(one.reshapes)][-1].input[1], one.sizes) for one in heads if one.sizes]
        replace_nodes(model.graph, gone | merged)
        counts = (numpy_helper.from_array(np.array(each, np.int64), name) for name, each in sizes)
        model.graph.initializer.extend(counts)
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
    if len(pairs) < len(split.output) or len(ways) > 1:
        return None
    if [*next((one.ints for one in flow.nodes[pairs[0][1]].attribute if one.name == "perm"), [])] != TURN:
        return None
    heads, width = _end(flow, flow.nodes[pairs[0][0]].input[1], tensors)
    # The names say that these are heads of the product's tokens: what else a foreign graph makes is left alone.
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
