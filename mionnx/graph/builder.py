"""Adding nodes to a graph under names that say where they belong, noting each in the report."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import DTypeLike

from mionnx.graph.report import Report


class Builder:
    """Adds nodes at one hook point of one graph.

    Every node's output is named `{prefix}.{step}`, and the node `{output}:{op}`, so that a graph viewer shows what
    belongs together.
    """

    def __init__(self, graph: gs.Graph, where: str, prefix: str, report: Report) -> None:
        self.graph, self.where, self.prefix, self.report = graph, where, prefix, report

    def node(
        self,
        op: str,
        inputs: list[gs.Tensor],
        step: str,
        dtype: DTypeLike | None = None,
        out: gs.Tensor | None = None,
        before: Sequence[gs.Tensor] = (),
        **attributes: Any,
    ) -> gs.Tensor:
        """Add one node; its last output, of the first input's dtype unless another is given.

        Args:
            op, inputs, attributes: of the node.
            step: what its name says after the prefix.
            dtype, out: of the output, or the output itself.
            before: outputs that precede it.
        """
        output = gs.Variable(f"{self.prefix}.{step}", dtype=dtype or inputs[0].dtype) if out is None else out
        name = f"{self.prefix}.{step}:{op}"
        self.graph.nodes.append(gs.Node(op, name, attributes, inputs, [*before, output]))
        self.report.add(self.where, name)
        return output

    def constant(self, step: str, value: Any, dtype: DTypeLike) -> gs.Constant:
        """A constant of the graph."""
        return gs.Constant(f"{self.prefix}.{step}", np.array(value, dtype))

    def ints(self, step: str, *values: int) -> gs.Constant:
        """A constant list of axes or a shape."""
        return self.constant(step, values, np.int64)

    def input(self, name: str, dtype: DTypeLike, rank: int) -> gs.Variable:
        """A new graph input, dynamic along every axis."""
        variable = gs.Variable(name, dtype=np.dtype(dtype), shape=[f"{name}:{axis}" for axis in range(rank)])
        self.graph.inputs.append(variable)
        self.report.inputs.append(name)
        return variable
