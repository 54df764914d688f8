"""Graphs under construction: `edited_graph` opens and writes them, a `Builder` adds nodes.

The two files of this room that know onnx-graphsurgeon. A graph is edited without its weights: initializers stay
references into the weight files, so that editing a model of any size costs milliseconds.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx
from numpy.typing import DTypeLike
from onnx_graphsurgeon import Constant, Graph, Node, Tensor, Variable

from mionnx.graph.dataflow import BOOLEAN, COUNTING
from mionnx.graph.edited_graph import numpy_dtype
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
