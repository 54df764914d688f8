"""Rewrite: every number is rounded as a narrow dtype would, inside a graph of float32 that any CPU runs.

1. A value is rounded where a runtime stores it: at the output of the node that computes it, by a Cast down and one up.
   What only moves numbers rounds nothing. Inside a node numbers stay float32, as in a runtime that accumulates so.
2. Values are in cells: one of `GROUPS` and a layer. The input `SWITCHES` (bool, [cells]) says which cells are rounded,
   so that one open graph serves all of a forecast.
3. Weights are rounded by a graph of their own (`weights=True`), since a runtime folds them while it opens the graph.
   Numbers in the graph are clipped to the dtype's range first, as converters do: a mask stays finite.
4. Cosines and sines are computed in float32, and rounded: positions are no numbers of a narrow dtype.
5. `accumulated`: products with weights add up in the narrow dtype, one term after the other, as WGSL's do.
6. `decomposed`: fused norms in their own nodes, as a runtime or file without the operator has them.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper

from mionnx.graph.hook_points import layer_of
from mionnx.rewrite.float_graph import NORM_OPERATORS, OF_STREAM, FloatGraph, epsilon_of

SWITCHES = "mionnx.rounded"
NUMBER = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
NARROW_DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
Cell = tuple[str, int | None]  # group, layer
LEAVING = ":leaving"  # end of the names of islands' values as nodes outside read them


@dataclass
class Rounding:
    """A graph whose numbers are rounded in the cells that are switched on.

    Attributes:
        cells: the groups and layers that values are in; the input of switches has one for each.
        values: cell of each value that is rounded, in execution order.
    """

    proto: onnx.ModelProto
    cells: list[Cell] = field(default_factory=list)
    values: dict[str, Cell] = field(default_factory=dict)

    def switches(self, on: Callable[[Cell], bool]) -> NDArray[np.bool_]:
        """The input `SWITCHES`, [cells]."""
        return np.array([on(cell) for cell in self.cells] or [False], bool)


def rounded(
    graph: FloatGraph,
    dtype: str,
    *,
    weights: bool = False,
    islands: frozenset[str] = frozenset(),
    inside: frozenset[str] = frozenset(),
) -> Rounding:
    """Round the values of a graph; weights too where asked for.

    Args:
        islands: values that stay float32, and are rounded for a node outside that reads them.
        inside: values that stay float32, as inside one operator, whoever reads them.
    """
    proto = onnx.ModelProto()
    proto.CopyFrom(graph.proto)
    rounding = Rounding(proto)
    layers = _layers(graph)
    rounding.values = {
        name: (graph.group(node, name), layers.get(name))
        for node, name in graph.computed()
        if name not in islands | inside and (name in graph.carrying or node.op_type in ("Cos", "Sin"))
    }
    leaving = dict(_leaving(graph, islands, layers))
    rounding.cells = [*dict.fromkeys([*rounding.values.values(), *leaving.values()])]
    named, casts = _rounded_weights(graph, proto, dtype) if weights else ({}, [])
    nodes = [*_switch_nodes(proto, rounding.cells), *casts]
    for node in graph.flow.nodes:
        copy = NodeProto.FromString(node.SerializeToString())
        outside = islands.isdisjoint(node.output)
        narrow = {name: f"{name}{LEAVING}" for name in leaving} if outside else {}
        copy.input[:] = [narrow.get(name, named.get(name, name)) for name in copy.input]
        nodes.append(copy)
        table = weights and node.op_type in ("Gather", "GatherBlockQuantized") and node.input[0] not in graph.varying
        for at, name in enumerate(node.output):
            if name in rounding.values:
                copy.output[at] = f"{name}:wide"
                nodes += _pair(name, f"{name}:wide", dtype, rounding.cells.index(rounding.values[name]), table)
            if name in leaving:
                nodes += _pair(f"{name}{LEAVING}", name, dtype, rounding.cells.index(leaving[name]), False)
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    del proto.graph.value_info[:]
    return rounding


def _layers(graph: FloatGraph) -> dict[str, int | None]:
    """Value -> the layer that computes it, of what lies between the embedding and the final norm."""
    layers: dict[str, int | None] = {}
    hooks = {*graph.hooks}
    for node, reads in zip(graph.flow.nodes, graph.flow.reads, strict=True):
        before = [layers[name] for name in reads if layers.get(name) is not None]
        for name in node.output:
            behind = max((one for one in before if one is not None), default=None)
            layers[name] = layer_of(name) if name in hooks else behind
    moved = {graph.origin(hook): layer_of(hook) for hook in reversed(graph.hooks)}
    return layers | moved


def _switch_nodes(proto: onnx.ModelProto, cells: list[Cell]) -> Iterator[NodeProto]:
    """One boolean of each cell, from the input that has them all."""
    proto.graph.input.append(helper.make_tensor_value_info(SWITCHES, TensorProto.BOOL, [max(1, len(cells))]))
    for number in range(len(cells)):
        proto.graph.initializer.append(numpy_helper.from_array(np.array(number, np.int64), f"{SWITCHES}.{number}"))
        yield helper.make_node("Gather", [SWITCHES, f"{SWITCHES}.{number}"], [f"{SWITCHES}.on.{number}"], axis=0)


def _leaving(
    graph: FloatGraph, islands: frozenset[str], layers: Mapping[str, int | None]
) -> Iterator[tuple[str, Cell]]:
    """Values of islands that a node outside reads, with their cells."""
    for node, name in graph.computed():
        if name in islands and any(islands.isdisjoint(reader.output) for reader in graph.flow.readers(name)):
            yield name, (graph.group(node, name), layers.get(name))


def _pair(name: str, wide: str, dtype: str, cell: int, always: bool) -> list[NodeProto]:
    """A value rounded where its cell is switched on."""
    low, up = f"{name}:low", f"{name}:up"
    nodes = [
        helper.make_node("Cast", [wide], [low], low, to=NUMBER[dtype]),
        helper.make_node("Cast", [low], [name if always else up], up, to=TensorProto.FLOAT),
    ]
    inputs = [f"{SWITCHES}.on.{cell}", up, wide]
    return nodes if always else [*nodes, helper.make_node("Where", inputs, [name], f"{name}:switch")]


def _rounded_weights(graph: FloatGraph, proto: onnx.ModelProto, dtype: str) -> tuple[dict[str, str], list[NodeProto]]:
    """Weight -> its rounded value, and the nodes that round; numbers in the graph are rounded at once."""
    named: dict[str, str] = {}
    nodes: list[NodeProto] = []
    tables = {node.input[0] for node in graph.flow.nodes if node.op_type == "Gather"}
    only_tables = {name for name in tables if all(node.op_type == "Gather" for node in graph.flow.readers(name))}
    for tensor in proto.graph.initializer:
        if tensor.data_type != TensorProto.FLOAT or tensor.name in graph.angle_weights:
            continue
        if tensor.data_location == TensorProto.EXTERNAL:
            if tensor.name in only_tables:
                continue  # a run reads few of its rows, which are rounded behind the lookup
            low, up = f"{tensor.name}:low", f"{tensor.name}:rounded"
            nodes += [
                helper.make_node("Cast", [tensor.name], [low], low, to=NUMBER[dtype]),
                helper.make_node("Cast", [low], [up], up, to=TensorProto.FLOAT),
            ]
            named[tensor.name] = up
            continue
        tensor.CopyFrom(numpy_helper.from_array(clipped(numpy_helper.to_array(tensor), dtype), tensor.name))
    return named, nodes


def clipped(array: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """Numbers as a narrow dtype has them, in float32; beyond its range its limits."""
    kind = NARROW_DTYPES[dtype]
    limit = float(ml_dtypes.finfo(kind).max)
    return np.asarray(np.clip(array, -limit, limit).astype(kind).astype(np.float32))


def decomposed(graph: FloatGraph) -> FloatGraph:
    """The graph with fused norms in their own nodes."""
    proto = onnx.ModelProto()
    proto.CopyFrom(graph.proto)
    nodes: list[NodeProto] = []
    axis = "mionnx.norm.axis"
    proto.graph.initializer.append(numpy_helper.from_array(np.array([-1], np.int64), axis))
    for node in graph.flow.nodes:
        fused = node.op_type in NORM_OPERATORS and sum(bool(name) for name in node.output) == 1
        nodes += _opened(proto, node, axis, graph.opset) if fused else [node]
    copies = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del proto.graph.node[:]
    proto.graph.node.extend(copies)
    return FloatGraph(proto, graph.hooks)


def _opened(proto: onnx.ModelProto, node: NodeProto, axis: str, opset: int) -> Iterator[NodeProto]:
    source, weight, result = node.input[0], node.input[1], node.output[0]
    epsilon = f"{result}:epsilon"
    proto.graph.initializer.append(numpy_helper.from_array(np.array(epsilon_of(node), np.float32), epsilon))
    centred = source

    def step(operator: str, inputs: list[str], end: str) -> NodeProto:
        if operator == "ReduceMean":
            of_old: dict[str, Any] = {"axes": [-1]} if opset < 18 else {}
            inputs = inputs[:1] if opset < 18 else inputs
            return helper.make_node(operator, inputs, [f"{result}:{end}"], f"{result}:{end}", **of_old)
        return helper.make_node(operator, inputs, [f"{result}:{end}"], f"{result}:{end}")

    if node.op_type == "LayerNormalization":
        yield step("ReduceMean", [source, axis], "centre")
        yield step("Sub", [source, f"{result}:centre"], "centred")
        centred = f"{result}:centred"
    yield step("Mul", [centred, centred], "square")
    yield step("ReduceMean", [f"{result}:square", axis], "mean")
    yield step("Add", [f"{result}:mean", epsilon], "plus")
    yield step("Sqrt", [f"{result}:plus"], "root")
    yield step("Div", [centred, f"{result}:root"], "unit")
    biased = len(node.input) > 2 and bool(node.input[2])
    end = f"{result}:scaled" if biased else result
    yield helper.make_node("Mul", [f"{result}:unit", weight], [end], f"{result}:scale")
    if biased:
        yield helper.make_node("Add", [end, node.input[2]], [result], f"{result}:shift")


def accumulated(graph: FloatGraph, rounding: Rounding, dtype: str) -> onnx.ModelProto:
    """The rounded graph, whose products with weights add up in the narrow dtype; see rule 5."""
    proto = onnx.ModelProto()
    proto.CopyFrom(rounding.proto)
    of_weights = {node.output[0] for node in graph.products()}
    shapes = graph.flow.facts.shapes
    nodes: list[NodeProto] = []
    for node in proto.graph.node:
        name = node.output[0].removesuffix(":wide")
        plain = graph.flow.producer(name)
        width = shapes.get(plain.input[1], ()) if plain is not None and len(plain.input) > 1 else ()
        sizes = [one for one in width if isinstance(one, int)]
        if node.op_type == "MatMul" and name in of_weights and len(width) == len(sizes) == 2:
            nodes += _loop(proto, node, sizes, NUMBER[dtype])
        else:
            nodes.append(NodeProto.FromString(node.SerializeToString()))
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    return proto


def _loop(proto: onnx.ModelProto, node: NodeProto, width: list[int], kind: int) -> list[NodeProto]:
    """A product as a Scan over its terms, each product and each sum rounded."""
    x, weight, result = node.input[0], node.input[1], node.output[0]
    inner, outer = width
    name = f"{result}:sum"
    for end, numbers in (("rows", [-1, inner, 1]), ("columns", [inner, 1, outer]), ("outer", [outer])):
        proto.graph.initializer.append(numpy_helper.from_array(np.array(numbers, np.int64), f"{name}.{end}"))

    def one(operator: str, inputs: list[str], tail: str, **attributes: Any) -> NodeProto:
        return helper.make_node(operator, inputs, [f"{name}.{tail}"], f"{name}.{tail}", **attributes)

    float32 = TensorProto.FLOAT
    term = [
        one("Mul", [f"{name}.a", f"{name}.b"], "part"),
        one("Cast", [f"{name}.part"], "part low", to=kind),
        one("Cast", [f"{name}.part low"], "part up", to=float32),
        one("Add", [f"{name}.before", f"{name}.part up"], "added"),
        one("Cast", [f"{name}.added"], "added low", to=kind),
        one("Cast", [f"{name}.added low"], "after", to=float32),
    ]
    info = helper.make_tensor_value_info
    takes = [info(f"{name}.before", float32, ["rows", outer]), info(f"{name}.a", float32, ["rows", 1])]
    takes.append(info(f"{name}.b", float32, [1, outer]))
    body = helper.make_graph(term, f"{name}.term", takes, [info(f"{name}.after", float32, ["rows", outer])])
    zero = numpy_helper.from_array(np.zeros(1, np.float32))
    return [
        one("Reshape", [x, f"{name}.rows"], "flat"),
        one("Transpose", [f"{name}.flat"], "terms", perm=[1, 0, 2]),
        one("Reshape", [weight, f"{name}.columns"], "weights"),
        one("Shape", [f"{name}.terms"], "count", start=1, end=2),
        one("Concat", [f"{name}.count", f"{name}.outer"], "shape", axis=0),
        one("ConstantOfShape", [f"{name}.shape"], "zero", value=zero),
        one("Scan", [f"{name}.zero", f"{name}.terms", f"{name}.weights"], "total", body=body, num_scan_inputs=2),
        one("Shape", [x], "lead", start=0, end=-1),
        one("Concat", [f"{name}.lead", f"{name}.outer"], "whole", axis=0),
        helper.make_node("Reshape", [f"{name}.total", f"{name}.whole"], [result], f"{name}.result"),
    ]


def with_flags(graph: FloatGraph, rounding: Rounding) -> tuple[onnx.ModelProto, list[str], list[str]]:
    """The rounded graph with outputs that say where numbers are not finite, and how many became 0.

    Returns:
        the model, with the outputs `BAD` and `ZEROS` beside its own; the values of each, in order.
    """
    proto = onnx.ModelProto()
    proto.CopyFrom(rounding.proto)
    inside = {norm.insides[1] for norm in graph.decomposed}
    bad: list[str] = [name for name in rounding.values if name not in graph.masked]
    zeros = [name for name in bad if name in graph.hooks or name in inside or rounding.values[name][0] == OF_STREAM]
    add = proto.graph.node.append
    line = "mionnx.line"
    proto.graph.initializer.append(numpy_helper.from_array(np.array([-1], np.int64), line))
    proto.graph.initializer.append(numpy_helper.from_array(np.array(0, np.float32), f"{line}.zero"))
    proto.graph.initializer.append(numpy_helper.from_array(np.array([0], np.int64), f"{line}.axis"))
    for name in bad:
        add(helper.make_node("Sub", [name, name], [f"{name}:nothing"]))  # 0, or NaN of what is not finite
        add(helper.make_node("Reshape", [f"{name}:nothing", line], [f"{name}:nothings"]))
        add(helper.make_node("ReduceSum", [f"{name}:nothings", f"{line}.axis"], [f"{name}:bad"], keepdims=1))
    for name in zeros:
        for end, source in (("was", f"{name}:wide"), ("is", name)):
            add(helper.make_node("Equal", [source, f"{line}.zero"], [f"{name}:{end}"]))
        add(helper.make_node("Xor", [f"{name}:was", f"{name}:is"], [f"{name}:gone"]))
        add(helper.make_node("Cast", [f"{name}:gone"], [f"{name}:ones"], to=TensorProto.FLOAT))
        add(helper.make_node("Reshape", [f"{name}:ones", line], [f"{name}:line"]))
        add(helper.make_node("ReduceSum", [f"{name}:line", f"{line}.axis"], [f"{name}:zeros"], keepdims=1))
    for output, names, end in ((BAD, bad, "bad"), (ZEROS, zeros, "zeros")):
        if names:
            add(helper.make_node("Concat", [f"{name}:{end}" for name in names], [output], axis=0))
            proto.graph.output.append(helper.make_tensor_value_info(output, TensorProto.FLOAT, [len(names)]))
    return proto, bad, zeros


BAD, ZEROS = "mionnx.not_finite", "mionnx.flushed"
CASTS = (1e5, 1e-12)  # numbers that a Cast to float16 and back makes infinite and 0


def cast_pair(dtype: str) -> bytes:
    """A model of one Cast down and one up, float32 [2]: whether a runtime keeps such a pair can be seen on it."""
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("from", "to")]
    nodes = [
        helper.make_node("Cast", ["from"], ["low"], to=NUMBER[dtype]),
        helper.make_node("Cast", ["low"], ["to"], to=TensorProto.FLOAT),
    ]
    body = helper.make_graph(nodes, "casts", info[:1], info[1:])
    model = helper.make_model(body, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    return bytes(model.SerializeToString())
