"""The matrices that an analysis multiplies with, read from a hooked model's graph and weight files.

They are found by what the graph does with them, not by their names: the embedding is what `input_ids` pick rows from,
the unembedding what the logits are a product with. What comes after a product (a scale, a soft cap) and before the
first hook point (a scale of the embedding) is not part of a matrix. Weight files are mapped, not read: a matrix takes
memory as it is used. Quantised weights are given as the numbers that they stand for, see
`mionnx.graph.quantised_weight`, or refused.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import HookError, ModelError
from mionnx.graph import onnx_file
from mionnx.graph.builder import Constant, Node, Tensor, edit
from mionnx.graph.dataflow import Dataflow
from mionnx.graph.hooked_model import DTYPES, HookedModel
from mionnx.graph.output_head import ELEMENTWISE, LOGITS, head_and_tail
from mionnx.graph.quantised_weight import refuse_integers, rounded, weight_numbers

Matrix = NDArray[Any]
ROUNDING = frozenset({"QuantizeLinear", "DequantizeLinear"})  # of activations, in a quantised graph
INTEGER_PRODUCTS = frozenset({"MatMulInteger", "QLinearMatMul", "MatMulNBits", "DynamicQuantizeMatMul"})
SHAPING = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Identity", "Cast"})  # what leaves every number as it is


@dataclass(frozen=True)
class Head:
    """The unembedding of a graph: its matrix product, weight and bias.

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


def head(model: HookedModel) -> Head:
    """The matrix product that the logits come from.

    Raises:
        ModelError: they come from none, or from one whose matrix is computed.
    """
    product, passed = _head(model)
    weight = _matrix(model, product.inputs[1])
    if product.op == "Gemm":
        weight = weight.T if product.attrs.get("transB", 0) else weight
    bias = _matrix(model, product.inputs[2]) if product.op == "Gemm" and len(product.inputs) > 2 else None
    return Head(product.outputs[0].name, weight, bias, any(node.op == "Tanh" for node in passed))


def embedding(model: HookedModel) -> NDArray[Any]:
    """W_E [vocab, hidden], in the model's dtype, before the scale of some families.

    Raises:
        ModelError: the graph looks tokens up in no matrix of its own.
    """
    flow, held = Dataflow(model.proto), {tensor.name for tensor in model.proto.graph.initializer}
    names = ["input_ids"]  # and the same numbers in another shape
    for name in names:
        for node in (flow.nodes[i] for i in flow.consumers[name]):
            if node.op_type == "Gather" and (node.input[0] in held or _is_dequantised(flow, node.input[0])):
                return weight_numbers(model.proto, model.folder, node.input[0])
            names += node.output[:1] if node.op_type in SHAPING else []
    raise ModelError(f"the graph of {model.folder} picks no rows of a matrix by its tokens")


def unembedding(model: HookedModel) -> NDArray[Any]:
    """W_U [hidden, vocab], in the model's dtype: logits are the final norm's output times W_U.

    Raises:
        ModelError: the logits are no product with a matrix of the graph.
    """
    return head(model).weight


def unembedding_bias(model: HookedModel) -> NDArray[Any]:
    """b_U [vocab], in the model's dtype: the bias of the logits; zeros if there is none.

    Raises:
        ModelError: the logits are no product with a matrix of the graph.
    """
    size = model.metadata.sizes.vocab_size
    product, passed = _head(model)
    for node in [*passed, product]:
        for entry in node.inputs:
            held = isinstance(entry, Constant) and list(entry.shape) == [size]
            if node.op in ("Add", "Gemm") and (held or _dequantises(entry)):
                found = _matrix(model, entry)
                if list(found.shape) == [size]:
                    return found
    return np.zeros(size, DTYPES[model.metadata.dtype])


def output_projections(model: HookedModel) -> NDArray[Any]:
    """W_O [n_layers, n_heads, head_dim, hidden], in the model's dtype.

    Raises:
        HookError: a recurrent model, whose heads' outputs are gated and normed before they are projected.
    """
    sizes = model.metadata.sizes
    if not model.metadata.attention:
        raise HookError(f"a {model.metadata.family} model has no attention, and so no W_O for its heads")
    layers = []
    for attention in model.metadata.attention:
        weight = weight_numbers(model.proto, model.folder, attention.output_projection)
        rows = weight if attention.output_is_rows else weight.T
        layers.append(rows.reshape(sizes.num_heads, sizes.head_dim, sizes.hidden_size))
    return np.stack(layers)


def _head(model: HookedModel) -> tuple[Node, list[Node]]:
    """The matrix product that the logits come from, and the nodes after it, the last first."""
    product, passed = head_and_tail(edit(model.proto).tensors()[LOGITS], ELEMENTWISE | ROUNDING)
    if product is None:
        quantised = {node.op_type for node in model.proto.graph.node} & INTEGER_PRODUCTS
        of = f": it has {', '.join(sorted(quantised))}, products of quantised numbers" if quantised else ""
        raise ModelError(f"{model.metadata.family}: the logits do not come from one matrix product{of}")
    return product, passed


def _matrix(hooked: HookedModel, value: Tensor) -> Matrix:
    """A weight as the graph uses it: turned, of another dtype, or dequantised."""
    if isinstance(value, Constant):
        weight = onnx_file.weight(hooked.proto, hooked.folder, value.name)
        refuse_integers(value.name, weight)
        return weight
    if _dequantises(value):
        return weight_numbers(hooked.proto, hooked.folder, value.name)
    node = value.inputs[0] if value.inputs else None
    if node is not None and node.op == "Transpose":
        matrix = _matrix(hooked, node.inputs[0])
        return matrix.transpose(node.attrs.get("perm", range(matrix.ndim)[::-1]))
    if node is not None and node.op == "Identity":
        return _matrix(hooked, node.inputs[0])
    if node is not None and node.op == "DequantizeLinear" and len(node.inputs) > 2 and node.inputs[0].inputs:
        inner = node.inputs[0].inputs[0]
        if inner.op == "QuantizeLinear":  # of a weight that is turned before it is rounded
            scale, zero = (onnx_file.weight(hooked.proto, hooked.folder, entry.name) for entry in node.inputs[1:3])
            return rounded(_matrix(hooked, inner.inputs[0]), scale, zero)
    if node is not None and node.op == "Cast":
        return _matrix(hooked, node.inputs[0]).astype(np.dtype(value.dtype))
    what = f"made by {node.op}" if node is not None else "an input"
    raise ModelError(f"{hooked.metadata.family}: {value.name} is {what}, where a weight was looked for")


def _dequantises(value: Tensor) -> bool:
    """Whether a value is made by a DequantizeLinear of weights."""
    node = value.inputs[0] if value.inputs else None
    return node is not None and node.op == "DequantizeLinear" and all(isinstance(x, Constant) for x in node.inputs)


def _is_dequantised(flow: Dataflow, name: str) -> bool:
    """The same, by the value's name."""
    maker = flow.producer(name)
    held = {tensor.name for tensor in flow.proto.graph.initializer}
    return maker is not None and maker.op_type == "DequantizeLinear" and {*maker.input} <= held | {""}
