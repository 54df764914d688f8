"""Values of a rescaled graph as they truly are: a hook point holds 2^e times its value, `exponents` says which e.

1. In memory a rescaled model has, at each such hook point, a product that takes the power back, whose result has the
   hook's name, and one behind it that puts the power in again, which every other node reads. So a capture, an edit, a
   gradient and a cut at a hook point are those of the model that was rescaled, and no room has to know of exponents.
2. Products with powers of two change no bit. A narrow value is widened to float32 first, which can hold it.
3. The file on disk has none of these nodes; neither has a rewritten graph at hook points that it does not touch
   (`mionnx.rewrite.prune`).
"""

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from mionnx.graph.dataflow import Facts, subgraphs

STORED_END, AGAIN_END = (
    ".stored",
    ".again",
)  # ends of the names of a value as the file computes it, and as others read it
POWER = "mionnx.two_to_"  # prefix of the constants that move powers


def power_of(name: str) -> int | None:
    """The exponent of a constant that moves powers; None of any other value."""
    return int(name.removeprefix(POWER).partition(".")[0]) if name.startswith(POWER) else None


def power(graph: onnx.GraphProto, exponent: int, names: set[str], end: str = "") -> str:
    """The name of the constant 2^exponent in float32, which is added where it is not there yet."""
    name = f"{POWER}{exponent}{end}"
    if name not in names:
        names.add(name)
        graph.initializer.append(numpy_helper.from_array(np.array(2.0**exponent, np.float32), name))
    return name


def renamed(node: NodeProto, names: Mapping[str, str]) -> None:
    """Let a node and its subgraphs read other values."""
    node.input[:] = [names.get(name, name) for name in node.input]
    for graph in subgraphs(node):
        for inner in graph.node:
            renamed(inner, names)
        for value in graph.output:
            value.name = names.get(value.name, value.name)


def with_true_values(origin: onnx.ModelProto, exponents: Mapping[str, int]) -> onnx.ModelProto:
    """A copy of a graph in which hook points hold their true values; see rule 1."""
    if not exponents or all(f"{name}{STORED_END}" in node.output for name in exponents for node in origin.graph.node):
        return origin
    proto = onnx.ModelProto()
    proto.CopyFrom(origin)
    graph, facts, nodes = proto.graph, Facts(origin.graph), list[NodeProto]()
    names = {tensor.name for tensor in graph.initializer}
    again = {name: f"{name}{AGAIN_END}" for name in exponents}
    for node in origin.graph.node:
        node = NodeProto.FromString(node.SerializeToString())
        renamed(node, again)
        nodes.append(node)
        for at, name in enumerate(node.output):
            if name in exponents:
                node.output[at] = f"{name}{STORED_END}"
                nodes += _taken_back(graph, names, name, exponents[name], facts.type(name))
    del graph.node[:]
    graph.node.extend(nodes)
    _tell(graph, exponents)
    return proto


def _taken_back(graph: onnx.GraphProto, names: set[str], name: str, exponent: int, kind: int) -> list[NodeProto]:
    """The nodes from a stored value to its true one, and from that to what others read."""
    back, forth = (power(graph, one, names, ".float32") for one in (-exponent, exponent))
    narrow = kind != TensorProto.FLOAT
    wide, again = (
        (f"{name}.wide", f"{name}{AGAIN_END}.wide") if narrow else (f"{name}{STORED_END}", f"{name}{AGAIN_END}")
    )
    nodes = [
        helper.make_node("Mul", [wide, back], [name], f"{name}:true"),
        helper.make_node("Mul", [name, forth], [again], f"{name}:again"),
    ]
    if narrow:
        nodes.insert(0, helper.make_node("Cast", [f"{name}{STORED_END}"], [wide], f"{name}:wide", to=TensorProto.FLOAT))
        nodes.append(helper.make_node("Cast", [again], [f"{name}{AGAIN_END}"], f"{name}:narrow", to=kind))
    return nodes


def _tell(graph: onnx.GraphProto, exponents: Mapping[str, int]) -> None:
    """Declare the types of the new values."""
    for value in [one for one in graph.value_info if one.name in exponents]:
        for end in (STORED_END, AGAIN_END):
            other = graph.value_info.add()
            other.CopyFrom(value)
            other.name = f"{value.name}{end}"
        value.type.tensor_type.elem_type = TensorProto.FLOAT
