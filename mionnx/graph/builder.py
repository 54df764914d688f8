"""Graphs under construction: `edit` opens one, a `Builder` adds nodes, `serialise` writes it.

The one file of this room that knows onnx-graphsurgeon. A graph is edited without its weights: initializers stay
references into the weight files, so that editing a model of any size costs milliseconds.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx
from numpy.typing import DTypeLike
from onnx_graphsurgeon import Constant, Graph, Node, Tensor, Variable, export_onnx, import_onnx
from onnx_graphsurgeon.logger import G_LOGGER
from onnx_graphsurgeon.logger.logger import LoggerSuppress

from mionnx.graph.dataflow import BOOLEAN, COUNTING
from mionnx.graph.report import Report

# Operator -> the dtype of its outputs, where that is not the dtype of its first input.
OUTPUT_DTYPES: dict[str, type] = {**dict.fromkeys(BOOLEAN, np.bool_), **dict.fromkeys(COUNTING, np.int64)}
# Operators whose inputs all have one dtype (`Where`: all but the condition): a number among them takes it.
ARITHMETIC = frozenset(
    ("Add", "Sub", "Mul", "Div", "Pow", "Mod", "Min", "Max", "Clip", "Where", "Range", "Concat", "BitShift")
)
ONE_DTYPE = ARITHMETIC | BOOLEAN | {"BitShift", "BitwiseAnd"}


class Builder:
    """Adds nodes to a graph: `op.Mul(a, b)`, `op.TopK(x, k, axis=2, outputs=2)`.

    A method of every ONNX operator: inputs are positional, attributes are keywords. It returns the output, or with
    `outputs=n` a tuple of them. Further keywords:

    - `name`: of the output, after the prefix; the operator's if there is none.
    - `dtype`: of the output. By itself it is bool of comparisons, int64 of `Shape`, `to` of `Cast`, and else the dtype
      of the first input (of `Where`, of the second).

    Numbers, lists and arrays given as inputs become constants. An array keeps its dtype. A number or a list has the
    dtype of the other operands where all have one (`Add`, `Where`, `Greater`), and else is int64.

    Outputs are named `{prefix}.{name}`, their nodes `{prefix}.{name}:{op}` (`{prefix}.{op}` both without a name); a
    name that is taken gets a number.
    """

    def __init__(self, graph: Graph, where: str, prefix: str, report: Report) -> None:
        self.graph, self.where, self.prefix, self.report = graph, where, prefix, report
        self._taken: Counter[str] = Counter()
        self._constants: dict[tuple[Any, ...], Constant] = {}

    def __getattr__(self, operator: str) -> Callable[..., Any]:
        if not operator[:1].isupper():
            raise AttributeError(operator)
        return partial(self._node, operator)

    def _node(
        self,
        operator: str,
        *inputs: Any,
        outputs: int = 1,
        name: str | None = None,
        dtype: DTypeLike | None = None,
        **attributes: Any,
    ) -> Any:
        tensors = self._tensors(operator, inputs)
        if operator == "Cast":
            dtype, attributes["to"] = attributes["to"], _number(attributes["to"])
        base = self._unique(name or operator)
        typed_as = tensors[1 if operator == "Where" else 0]  # the first input of a Where is its condition
        dtypes = [dtype or OUTPUT_DTYPES.get(operator) or typed_as.dtype] * outputs
        if operator == "TopK":  # its second output, the indices
            dtypes[1:] = [np.int64]
        variables = tuple(
            Variable(f"{self.prefix}.{base}{f'.{i}' if i else ''}", dtype=own) for i, own in enumerate(dtypes)
        )
        node = f"{self.prefix}.{base}{f':{operator}' if name else ''}"
        self.graph.nodes.append(Node(operator, node, attributes, tensors, list(variables)))
        self.report.add(self.where, node)
        return variables if outputs > 1 else variables[0]

    def _tensors(self, operator: str, inputs: Sequence[Any]) -> list[Tensor]:
        peers = inputs[operator == "Where" :] if operator in ONE_DTYPE else ()
        dtype = next((one.dtype for one in peers if isinstance(one, Tensor)), None)
        return [one if isinstance(one, Tensor) else self._constant(one, dtype) for one in inputs]

    def _constant(self, value: Any, dtype: DTypeLike | None) -> Constant:
        return self.constant(value, None if isinstance(value, np.ndarray | np.generic) else dtype)

    def constant(self, value: Any, dtype: DTypeLike | None = None) -> Constant:
        """A constant of the graph, of an array's own dtype where none is given, else int64 or bool."""
        array = np.asarray(value)
        dtype = None if dtype is None else numpy_dtype(dtype)
        # 0.5 as an int64 would become 0 in silence
        integral = dtype is None or dtype.kind in "iub"
        if integral and array.dtype.kind == "f" and not isinstance(value, np.ndarray | np.generic):
            raise TypeError(f"{value} as an input of a node at {self.where}: give it as an array of some dtype")
        array = array.astype(dtype or array.dtype)
        key = (array.dtype, array.shape, array.tobytes())  # equal constants are one
        if key not in self._constants:
            self._constants[key] = Constant(f"{self.prefix}.{self._unique('Constant')}", array)
        return self._constants[key]

    def input(self, name: str, dtype: DTypeLike, rank: int) -> Variable:
        """A new graph input, dynamic along every axis."""
        variable = Variable(name, dtype=numpy_dtype(dtype), shape=[f"{name}:{axis}" for axis in range(rank)])
        self.graph.inputs.append(variable)
        self.report.inputs.append(name)
        return variable

    def _unique(self, name: str) -> str:
        self._taken[name] += 1
        return name if self._taken[name] == 1 else f"{name}_{self._taken[name]}"


def integers_of_bytes(op: Any, packed: Any, bits: int) -> Any:
    """Bytes as the integers in them, the one in the lowest bits first, along a new last axis; of 8 bits as they are."""
    if bits == 8:
        return packed
    parts = []
    for shift in range(0, 8, bits):
        moved = op.BitShift(packed, shift, direction="RIGHT") if shift else packed
        parts.append(op.Unsqueeze(op.BitwiseAnd(moved, 2**bits - 1), [-1]))
    return op.Concat(*parts, axis=-1)


def write(value: Variable, into: Variable) -> Variable:
    """Redirect the output of a value's node to another variable; present readers keep the value."""
    node = value.inputs[0]
    # by identity: equality of tensors is that of their names
    node.outputs[next(i for i, output in enumerate(node.outputs) if output is value)] = into
    return into


def _number(dtype: Any) -> int:
    return dtype if isinstance(dtype, int) else int(onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


def edit(proto: onnx.ModelProto) -> Graph:
    """Import a model as a graph to edit; `proto` is left alone."""
    # graphsurgeon keeps ONNX's number where numpy has no such dtype: bfloat16 is the one of ml_dtypes here.
    with LoggerSuppress(G_LOGGER, G_LOGGER.ERROR):  # it warns of each such number
        graph = import_onnx(proto)
    for part in (graph, *graph.subgraphs(recursive=True)):
        for tensor in (*part.tensors().values(), *part.inputs, *part.outputs):
            if isinstance(tensor, Variable) and isinstance(tensor.dtype, int) and tensor.dtype:
                tensor.dtype = numpy_dtype(tensor.dtype)
    return graph


def numpy_dtype(dtype: Any) -> np.dtype[Any]:
    """Numpy's dtype, or that of ml_dtypes, of a dtype or of ONNX's number of one."""
    return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(dtype) if isinstance(dtype, int) else dtype)


def serialise(graph: Graph, origin: onnx.ModelProto) -> bytes:
    """Serialise an edited graph as an ONNX model, with the metadata of its origin."""
    proto = to_proto(graph, origin, {})
    proto.metadata_props.extend(origin.metadata_props)
    return proto.SerializeToString()


def to_proto(graph: Graph, origin: onnx.ModelProto, defaults: Mapping[str, Sequence[int | str]]) -> onnx.ModelProto:
    """Convert an edited graph to an ONNX model without metadata; `defaults`: constants that are inputs too."""
    proto = export_onnx(graph)
    _restore_defaults(proto, origin)
    for tensor in proto.graph.initializer:
        if tensor.name in defaults:
            value = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(defaults[tensor.name]))
            proto.graph.input.append(value)
    proto.producer_name, proto.producer_version = origin.producer_name, origin.producer_version
    return proto


def _restore_defaults(proto: onnx.ModelProto, origin: onnx.ModelProto) -> None:
    """Restore inputs with a default; graphsurgeon takes them for constants."""
    # an input with a default is an initializer too; graphsurgeon drops the input, as it takes it for a constant
    constants = {tensor.name for tensor in proto.graph.initializer} - {value.name for value in proto.graph.input}
    proto.graph.input.extend(value for value in origin.graph.input if value.name in constants)


def branches(node: Node) -> list[Graph]:
    """The graphs inside of a node; `Node.subgraphs` takes a hundred times as long, as most nodes have none."""
    return [value for value in node.attrs.values() if isinstance(value, Graph)]


def sort_nodes(graph: Graph) -> None:
    """Sort nodes so that each can run, as `Graph.toposort` does, in a chain of any length.

    That one goes from a node to what it reads by recursion: 600 interventions at one hook point are too many.
    """
    for node in graph.nodes:
        for inner in branches(node):
            sort_nodes(inner)
    local = graph._local_tensors()
    levels: dict[int, int] = {}
    nodes: dict[int, Node] = {}

    def read(node: Node) -> list[Node]:
        """The makers of a node's inputs, and of what its subgraphs read from outside."""
        outer = [tensor for inner in branches(node) for tensor in inner._foreign_tensors().values()]
        makers = [maker for tensor in (*node.inputs, *outer) if tensor.name in local for maker in tensor.inputs]
        return [*{id(maker): maker for maker in makers}.values()]

    for node in graph.nodes:
        # a stack in the place of recursion; a node stays on it until all makers of its inputs have a level
        waiting = [(node, read(node))]
        while waiting:
            last, makers = waiting[-1]
            unknown = next((maker for maker in makers if id(maker) not in levels), None)
            if unknown is not None:
                waiting.append((unknown, read(unknown)))
                continue
            nodes[id(last)] = last
            levels.setdefault(id(last), 1 + max((levels[id(maker)] for maker in makers), default=-1))
            waiting.pop()
    graph.nodes = sorted(nodes.values(), key=lambda one: levels[id(one)])  # stable: nodes of one level keep their order
