"""`Builder`: nodes added as calls, under names that a graph viewer groups, each noted in the report."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from numpy.typing import DTypeLike

from mionnx.graph.report import Report

Graph: TypeAlias = gs.Graph
Node: TypeAlias = gs.Node
Tensor: TypeAlias = gs.Tensor
Variable: TypeAlias = gs.Variable
Constant: TypeAlias = gs.Constant

COMPARISONS = frozenset(("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"))
LOGICAL = frozenset(("And", "Or", "Xor", "Not", "IsNaN", "IsInf"))
# Operator -> the dtype of its outputs, where that is not the dtype of its first input.
OUTPUT_DTYPES: dict[str, type] = {
    **dict.fromkeys(COMPARISONS | LOGICAL, np.bool_),
    **dict.fromkeys(("Shape", "Size", "NonZero", "ArgMax", "ArgMin"), np.int64),
}
# Operators whose inputs all have one dtype (`Where`: all but the condition): a number among them takes it.
ARITHMETIC = frozenset(("Add", "Sub", "Mul", "Div", "Pow", "Mod", "Min", "Max", "Clip", "Where", "Range", "Concat"))
ONE_DTYPE = ARITHMETIC | COMPARISONS | LOGICAL


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
        written = tensors[1 if operator == "Where" else 0]
        dtypes = [dtype or OUTPUT_DTYPES.get(operator) or written.dtype] * outputs
        if operator == "TopK":
            dtypes[1:] = [np.int64]
        made = tuple(
            gs.Variable(f"{self.prefix}.{base}{f'.{i}' if i else ''}", dtype=own) for i, own in enumerate(dtypes)
        )
        node = f"{self.prefix}.{base}{f':{operator}' if name else ''}"
        self.graph.nodes.append(gs.Node(operator, node, attributes, tensors, list(made)))
        self.report.add(self.where, node)
        return made if outputs > 1 else made[0]

    def _tensors(self, operator: str, inputs: Sequence[Any]) -> list[Tensor]:
        """The inputs, those that are no tensors as constants."""
        peers = inputs[operator == "Where" :] if operator in ONE_DTYPE else ()
        dtype = next((one.dtype for one in peers if isinstance(one, gs.Tensor)), None)
        return [one if isinstance(one, gs.Tensor) else self._constant(one, dtype) for one in inputs]

    def _constant(self, value: Any, dtype: DTypeLike | None) -> Constant:
        return self.constant(value, None if isinstance(value, np.ndarray | np.generic) else dtype)

    def constant(self, value: Any, dtype: DTypeLike | None = None) -> Constant:
        """A constant of the graph, of an array's own dtype where none is given, else int64 or bool.

        Raises:
            TypeError: fractions without a dtype, or of an integer one.
        """
        array = np.asarray(value)
        whole = dtype is None or np.dtype(dtype).kind in "iub"
        if whole and array.dtype.kind == "f" and not isinstance(value, np.ndarray | np.generic):
            raise TypeError(f"{value} as an input of a node at {self.where}: give it as an array of some dtype")
        array = array.astype(dtype or array.dtype)
        key = (array.dtype, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = gs.Constant(f"{self.prefix}.{self._unique('Constant')}", array)
        return self._constants[key]

    def input(self, name: str, dtype: DTypeLike, rank: int) -> Variable:
        """A new graph input, dynamic along every axis."""
        variable = gs.Variable(name, dtype=np.dtype(dtype), shape=[f"{name}:{axis}" for axis in range(rank)])
        self.graph.inputs.append(variable)
        self.report.inputs.append(name)
        return variable

    def _unique(self, name: str) -> str:
        self._taken[name] += 1
        return name if self._taken[name] == 1 else f"{name}_{self._taken[name]}"


def write(value: Variable, into: Variable) -> Variable:
    """Let the node that makes a value make another variable in its place; its readers so far keep the old one."""
    node = value.inputs[0]
    node.outputs[next(i for i, output in enumerate(node.outputs) if output is value)] = into
    return into


def _number(dtype: Any) -> int:
    """ONNX's number of a dtype."""
    return dtype if isinstance(dtype, int) else int(onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))
