"""Rewrite: attention in blocks of queries, each with the keys that its last query reads.

1. One product of all queries with all keys takes the square of a text's length in memory, and half of it is masked. In
   blocks about half is computed, and only one block's scores are there at a time.
2. The bits are those of one product: each number is the same sum in the same order, less the zeros at its end.
3. A layer stays as it is where something reads its scores or its pattern (a capture, an intervention, a gradient),
   where it has no cache, so that queries may read keys behind them, and where its nodes have another form.
4. A text has sixteen tokens or more for each block.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, helper, numpy_helper

from mionnx.graph.dataflow import Dataflow, attributes
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.io_names import KEYS_AND_VALUES

BLOCKS_PREFIX = "mionnx.blocks"
ALIGNED = 16  # a block's first query, and the number of its keys, are multiples: sums go by vectors of numbers
ELEMENTWISE = ("Add", "Mul", "Div", "Tanh")
AXES = 4  # of scores: [batch, n_heads, seq, total]
REPEATING = ("Unsqueeze", "Expand", "Reshape")
KEYS_TURNED = [0, 1, 3, 2]  # keys [batch, n_kv_heads, head_dim, total]


@dataclass
class _Attention:
    """The nodes of one layer's attention.

    Attributes:
        end: what it makes, [batch, n_heads, seq, head_dim].
        heads: query heads, and heads of keys where these are fewer.
        steps: nodes from the product to the scores with their inputs, None for the value that goes through.
        masks: what is added, [..., seq, total].
        replaced: all its nodes, in the order of the graph.
    """

    softmax: NodeProto
    product: NodeProto
    weighted: NodeProto
    queries: str
    keys: str
    end: str
    heads: tuple[int, int | None]
    steps: list[tuple[NodeProto, list[str | None]]]
    masks: set[str]
    replaced: list[NodeProto]


def in_query_blocks(proto: onnx.ModelProto, blocks: int, layers: int) -> onnx.ModelProto:
    """Compute attention in so many blocks of queries, in every layer whose scores and pattern nothing else reads."""
    flow = Dataflow(proto)
    interface = {value.name for value in proto.graph.output}
    parts = {layer: part for layer in range(layers) if (part := _attention(flow, layer, interface)) is not None}
    if not parts:
        return proto
    writer, gone, instead = _Writer(blocks), set[int](), dict[int, list[NodeProto]]()
    for part in parts.values():
        gone |= {id(node) for node in part.replaced}
        instead[id(part.replaced[-1])] = writer.nodes_of(part)
    result = onnx.ModelProto()
    result.CopyFrom(proto)
    del result.graph.node[:]
    for node in flow.nodes:
        result.graph.node.extend(instead.get(id(node), []) if id(node) in gone else [node])
    result.graph.initializer.extend(writer.constants.values())
    return result


def _attention(flow: Dataflow, layer: int, interface: set[str]) -> _Attention | None:
    """A layer's attention, if it has the form that can be computed in blocks."""
    scores, pattern = str(HookPoint.AttnScores(layer)), str(HookPoint.AttnPattern(layer))
    softmax, shape = flow.producer(pattern), flow.facts.shapes.get(scores, ())
    if (
        softmax is None
        or softmax.op_type != "Softmax"
        or list(softmax.input) != [scores]
        or len(shape) != len(KEYS_TURNED)
    ):
        return None
    if attributes(softmax).get("axis", -1) not in (-1, AXES - 1):
        return None
    inner, steps, masks = _Inner(flow, interface), list[tuple[NodeProto, list[str | None]]](), set[str]()
    value, groups = scores, 0
    while True:
        node = flow.producer(value)
        if node is None or not inner.only(value, 1):
            return None
        if node.op_type in ("MatMul", "FusedMatMul"):
            break
        sides = {name for name in node.input if _is_mask(flow, name, shape)}
        through = [name for name in node.input if name not in sides and not _is_number(flow, name)]
        if node.op_type == "Reshape":
            groups, through = groups + 1, [node.input[0]]
        elif node.op_type not in ELEMENTWISE or len(through) != 1:
            return None
        masks |= sides
        steps.append((node, [None if name == through[0] else name for name in node.input]))
        value = through[0]
    product, after = node, inner.next(pattern)
    grouped = after is not None and after.op_type == "Reshape"
    weighted = inner.next(after.output[0]) if grouped and after is not None else after
    if weighted is None or weighted.op_type != "MatMul" or groups != grouped or not masks:
        return None
    last = inner.next(weighted.output[0]) if grouped else weighted
    maker = flow.producer(product.input[0])
    if last is None or (grouped and (last.op_type != "Reshape" or maker is None or maker.op_type != "Reshape")):
        return None
    queries = maker.input[0] if grouped and maker is not None else product.input[0]
    keys, turned = product.input[1], flow.producer(product.input[1])
    if turned is not None and turned.op_type == "Transpose" and product.op_type == "MatMul":
        keys = turned.input[0] if attributes(turned)["perm"] == KEYS_TURNED else ""
    elif product.op_type != "FusedMatMul" or attributes(product).get("transB") != 1:
        return None
    # what has a cache is causal: no query reads a key behind it
    if not (_of_cache(flow, keys) and _of_cache(flow, weighted.input[1])):
        return None
    heads, of_keys = shape[1], flow.facts.shapes.get(product.output[0], ())[1:2]
    if not isinstance(heads, int) or (grouped and not (of_keys and isinstance(of_keys[0], int))):
        return None
    number = int(of_keys[0]) if grouped else None
    replaced = [product, *(one for one, _ in steps), softmax, *([after] if grouped and after else []), weighted, last]
    order = {id(one): i for i, one in enumerate(flow.nodes)}
    replaced = sorted({id(one): one for one in replaced}.values(), key=lambda one: order[id(one)])
    return _Attention(
        softmax, product, weighted, queries, keys, last.output[0], (heads, number), steps[::-1], masks, replaced
    )


def _of_cache(flow: Dataflow, name: str) -> bool:
    """Whether a value is keys or values as the cache has them, or these repeated for the heads of a group."""
    maker = flow.producer(name)
    while maker is not None and maker.op_type in REPEATING and not name.startswith(KEYS_AND_VALUES.present):
        name = maker.input[0]
        maker = flow.producer(name)
    return name.startswith(KEYS_AND_VALUES.present)


class _Inner:
    """Values that nobody but one node reads."""

    def __init__(self, flow: Dataflow, interface: set[str]) -> None:
        self.flow, self.interface = flow, interface

    def only(self, value: str, count: int) -> bool:
        """Whether so many nodes read a value, and no caller."""
        return value not in self.interface and len(self.flow.consumers.get(value, ())) == count

    def next(self, value: str) -> NodeProto | None:
        """The one reader of a value, which it reads first."""
        reader = self.flow.readers(value)[0] if self.only(value, 1) else None
        return reader if reader is not None and reader.input[0] == value else None


def _is_mask(flow: Dataflow, name: str, scores: tuple[int | str, ...]) -> bool:
    """Whether a value has a row for each query and a column for each key, and does not follow from scores."""
    maker = flow.producer(name)
    same = flow.facts.shapes.get(name, ())[-2:] == scores[-2:]
    return same and maker is not None and maker.op_type in ("Where", "Expand")


def _is_number(flow: Dataflow, name: str) -> bool:
    number = flow.facts.number(name)
    return number is not None and number.size == 1


class _Writer:
    """Writes the nodes of blocks.

    Attributes:
        constants: the small numbers that the nodes read, by name.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks, self.constants = blocks, dict[str, onnx.TensorProto]()
        self._bounds: dict[str, list[tuple[str, str, str]]] = {}  # of a mask: each block's first and end query, end key
        self._rows: dict[tuple[str, int], str] = {}  # mask, block -> the part of the mask

    def nodes_of(self, part: _Attention) -> list[NodeProto]:
        """The nodes of a layer."""
        nodes: list[NodeProto] = []
        bounds = self._bounds_of(min(part.masks), nodes)
        name = f"{BLOCKS_PREFIX}.{part.softmax.output[0]}"
        ends = []
        for number, (first, end, keys_end) in enumerate(bounds):
            ends.append(f"{name}.{number}.end")
            nodes += self._block(part, number, (first, end, keys_end), f"{name}.{number}", ends[-1])
        nodes.append(_node("Concat", ends, part.end, axis=2))
        return nodes

    def _block(
        self, part: _Attention, number: int, bounds: tuple[str, str, str], name: str, end: str
    ) -> Iterator[NodeProto]:
        first, last, keys_end = bounds
        heads, of_keys = part.heads
        zero, rows = self._integers([0]), self._integers([2])
        yield _node("Slice", [part.queries, first, last, rows], value := f"{name}.q")
        yield _node("Slice", [part.keys, zero, keys_end, rows], keys := f"{name}.k")
        yield _node("Slice", [part.weighted.input[1], zero, keys_end, rows], values := f"{name}.v")
        if part.product.op_type == "MatMul":
            yield _node("Transpose", [keys], f"{name}.k.turned", perm=KEYS_TURNED)
            keys = f"{name}.k.turned"
        if of_keys is not None:
            yield _node("Reshape", [value, self._integers([0, of_keys, -1, 0])], f"{name}.q.grouped")
            value = f"{name}.q.grouped"
        yield _like(part.product, [value, keys], value := f"{name}.scores")
        for step, (node, inputs) in enumerate(part.steps):
            own: list[str] = []
            for one in inputs:
                if one in part.masks:
                    if (one, number) not in self._rows:
                        self._rows[one, number] = shown = f"{BLOCKS_PREFIX}.{one}.{number}"
                        yield _node("Slice", [one, first, last, self._integers([-2])], f"{shown}.rows")
                        yield _node("Slice", [f"{shown}.rows", zero, keys_end, self._integers([-1])], shown)
                    own.append(self._rows[one, number])
                else:
                    own.append(value if one is None else one)
            if node.op_type == "Reshape":
                yield _node("Reshape", [value, self._integers([0, heads, -1, 0])], f"{name}.{step}")
            else:
                yield _like(node, own, f"{name}.{step}")
            value = f"{name}.{step}"
        yield _like(part.softmax, [value], value := f"{name}.pattern")
        if of_keys is None:
            yield _like(part.weighted, [value, values], end)
            return
        yield _node("Reshape", [value, self._integers([0, of_keys, -1, 0])], f"{name}.grouped")
        yield _like(part.weighted, [f"{name}.grouped", values], f"{name}.z")
        yield _node("Reshape", [f"{name}.z", self._integers([0, heads, -1, 0])], end)

    def _bounds_of(self, mask: str, nodes: list[NodeProto]) -> list[tuple[str, str, str]]:
        """The first and end query and the end key of each block; their nodes are written on first use."""
        if mask in self._bounds:
            return self._bounds[mask]
        name, unit, count = f"{BLOCKS_PREFIX}.{mask}", self._integers([ALIGNED]), self._integers([self.blocks])
        seq, total, past = f"{name}.seq", f"{name}.total", f"{name}.past"
        nodes += [_node("Shape", [mask], seq, start=-2, end=-1), _node("Shape", [mask], total, start=-1)]
        nodes.append(_node("Sub", [total, seq], past))
        bounds, first = list[tuple[str, str, str]](), self._integers([0])
        for number in range(1, self.blocks):
            one = f"{name}.bound.{number}"
            nodes += [
                _node("Mul", [seq, self._integers([number])], f"{one}.all"),
                _node("Div", [f"{one}.all", count], f"{one}.part"),
                _node("Div", [f"{one}.part", unit], f"{one}.units"),
                _node("Mul", [f"{one}.units", unit], one),
                _node("Add", [past, one], f"{one}.seen"),
                _node("Add", [f"{one}.seen", self._integers([ALIGNED - 1])], f"{one}.more"),
                _node("Div", [f"{one}.more", unit], f"{one}.keys.units"),
                _node("Mul", [f"{one}.keys.units", unit], f"{one}.keys.up"),
                _node("Min", [f"{one}.keys.up", total], f"{one}.keys"),
            ]
            bounds.append((first, one, f"{one}.keys"))
            first = one
        self._bounds[mask] = [*bounds, (first, seq, total)]
        return self._bounds[mask]

    def _integers(self, numbers: list[int]) -> str:
        name = ".".join([BLOCKS_PREFIX, *map(str, numbers)])
        if name not in self.constants:
            self.constants[name] = numpy_helper.from_array(np.array(numbers, np.int64), name)
        return name


def _node(op: str, inputs: list[str], output: str, **settings: Any) -> NodeProto:
    return helper.make_node(op, inputs, [output], name=output, **settings)


def _like(node: NodeProto, inputs: list[str], output: str) -> NodeProto:
    """The same operator on other values."""
    same = NodeProto(op_type=node.op_type, domain=node.domain, name=output, attribute=node.attribute)
    same.input.extend(inputs)
    same.output.append(output)
    return same
