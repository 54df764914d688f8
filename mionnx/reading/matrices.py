"""The head of a model: which matrix product of its graph gives the logits, and what follows it."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from mionnx import graph as graphs
from mionnx.errors import ModelError
from mionnx.hooked_model import HookedModel
from mionnx.hookpoint import HookPoint
from mionnx.rewrite.restrict import find_head

Matrix = NDArray[Any]


@dataclass(frozen=True)
class Head:
    """Where the unembedding is in the graph.

    Attributes:
        product: the name of the value that the matrix product gives, [batch, seq, vocab].
        weight: [hidden, vocab], in the weights' dtype; mapped, not read.
        bias: [vocab] of the product itself (`Gemm`); None if it has none.
        capped: whether a soft cap follows: the logits are then no linear function of the stream.
    """

    product: str
    weight: Matrix
    bias: Matrix | None
    capped: bool


def find(hooked: HookedModel) -> Head:
    """The matrix product that the logits come from.

    Raises:
        ModelError: they come from none, or from one whose matrix is computed.
    """
    graph = graphs.edit(hooked.proto)
    value = graph.tensors()[str(HookPoint.Logits)]
    node, capped = find_head(value), _capped(value)
    if node is None:
        raise ModelError(f"{hooked.metadata.family}: {HookPoint.Logits} do not come from one matrix product")
    weight = _matrix(hooked, node.inputs[1])
    if node.op == "Gemm":
        weight = weight.T if node.attrs.get("transB", 0) else weight
    bias = _matrix(hooked, node.inputs[2]) if node.op == "Gemm" and len(node.inputs) > 2 else None
    return Head(node.outputs[0].name, weight, bias, capped)


def _capped(value: gs.Tensor) -> bool:
    """Whether something that is not linear lies between the head and the logits."""
    while value.inputs and value.inputs[0].op not in ("MatMul", "Gemm"):
        if value.inputs[0].op == "Tanh":
            return True
        value = next((entry for entry in value.inputs[0].inputs if entry.inputs), gs.Variable.empty())
    return False


def _matrix(hooked: HookedModel, value: gs.Tensor) -> Matrix:
    """A weight as the graph uses it: turned, or of another dtype."""
    if isinstance(value, gs.Constant):
        return graphs.weight(hooked.proto, hooked.folder, value.name)
    node = value.inputs[0] if value.inputs else None
    if node is not None and node.op == "Transpose":
        found = _matrix(hooked, node.inputs[0])
        return found.transpose(node.attrs.get("perm", range(found.ndim)[::-1]))
    if node is not None and node.op == "Identity":
        return _matrix(hooked, node.inputs[0])
    if node is not None and node.op == "Cast":
        return _matrix(hooked, node.inputs[0]).astype(np.dtype(value.dtype))
    what = f"made by {node.op}" if node is not None else "an input"
    raise ModelError(f"{hooked.metadata.family}: {value.name} is {what}, where a weight was looked for")
