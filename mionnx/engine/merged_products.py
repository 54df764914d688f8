"""Products with blocks that read the same value, as one product: fewer and larger calls of the kernel.

1. Queries, keys and values, or the two halves of a gated MLP, are products of one value. Where the blocks of their
   weights lie one after another in the file, they are the blocks of one larger weight, and nothing is copied.
2. A `Split` gives the values their names back. Every column is computed from the same numbers in the same order, at
   level 4 and where a kernel's tile holds columns of one product only: the bits are the same.
3. Decoding a small model is bound by the number of calls: SmolLM2 has 121 products in place of 211.
"""

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx
from onnx import helper, numpy_helper

from mionnx.engine.halved_products import halve_products
from mionnx.engine.merged_heads import merge_heads
from mionnx.graph import onnx_file
from mionnx.graph.dataflow import attributes
from mionnx.graph.hooked_model import ROUNDING_LEVEL
from mionnx.graph.packed_weight import LEVEL

PRODUCT, COLUMN_COUNT = "MatMulNBits", "N"
WEIGHT_INPUTS = slice(1, 4)  # inputs of a product: packed numbers, scales, zero points
PLACE_KEYS = {"location", "offset", "length"}  # others tell of packed weights
MOST_INPUTS = 4  # inputs of a product that has no bias and no order
TILE = 16  # columns that a kernel computes together, at most


@dataclass(frozen=True)
class Place:
    """Bytes of a tensor in a file.

    Attributes:
        begin, end: the first of the bytes, and the first after them.
        tail: sizes of all axes but the first.
    """

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
    """A model with products and heads merged, or halved; as it is given where none is."""
    if isinstance(model, Path):
        with model.open("rb") as file:
            if not _mentioned(file):
                return model
    elif PRODUCT.encode() not in model:
        return model
    proto = onnx_file.read(model) if isinstance(model, Path) else onnx_file.parse(model)
    changes = halve_products(proto), merge_products(proto), merge_heads(proto)
    return proto.SerializeToString() if any(changes) else model


def _mentioned(file: BinaryIO) -> bool:
    """Whether a file has the operator's name; mapped, as its weights may lie inside."""
    if not os.fstat(file.fileno()).st_size:
        return False
    with mmap(file.fileno(), 0, access=ACCESS_READ) as mapped:
        return mapped.find(PRODUCT.encode()) >= 0


def merge_products(model: onnx.ModelProto) -> int:
    """Merge products of one value whose weights lie one after another, in place.

    Returns:
        the number of products that are parts of a larger one now.
    """
    graph = model.graph
    inputs = {entry.name for entry in graph.input}
    tensors = {tensor.name: tensor for tensor in graph.initializer if tensor.name not in inputs}
    groups: dict[tuple[object, ...], list[tuple[int, list[Place]]]] = defaultdict(list)
    for at, node in enumerate(graph.node):
        places = _places(node, tensors)
        if places is not None:
            settings = {name: value for name, value in attributes(node).items() if name != COLUMN_COUNT}
            groups[node.input[0], len(places), *sorted(settings.items())].append((at, places))
    runs = [run for group in groups.values() for run in _runs(group)]
    merged = {min(run): _merged([graph.node[at] for at in run], tensors, graph) for run in runs}
    gone = {at for run in runs for at in run}
    nodes = [one for at, node in enumerate(graph.node) for one in merged.get(at, () if at in gone else (node,))]
    if runs:
        copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
        del graph.node[:]
        graph.node.extend(copies)
    return len(gone)


def _places(node: onnx.NodeProto, tensors: dict[str, onnx.TensorProto]) -> list[Place] | None:
    """Places of the parts of a product's weight; None of a node that is not merged."""
    if node.op_type != PRODUCT or len(node.input) > MOST_INPUTS or not all(node.input):
        return None
    settings = attributes(node)
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
