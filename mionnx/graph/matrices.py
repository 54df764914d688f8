"""The matrices that an analysis multiplies with, read from a hooked model's graph and weight files.

They are found by what the graph does with them, not by their names. What comes after a product (a scale, a soft cap)
and before the first hook point (a scale of the embedding) is not part of a matrix. Weight files are mapped, not read.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from mionnx.errors import HookError, ModelError
from mionnx.graph import onnx_file
from mionnx.graph.dataflow import Dataflow
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import DTYPES, HookedModel
from mionnx.graph.output_head import HEAD_ELEMENTWISE, LOGITS
from mionnx.graph.weight_value import (
    Matrix,
    linear_bias,
    linear_weight,
    product_of,
    table_of,
    weight_value,
)

ACTIVATION_ROUNDING = frozenset({"QuantizeLinear", "DequantizeLinear"})  # of activations, in a quantised graph
INTEGER_PRODUCTS = frozenset({"MatMulInteger", "QLinearMatMul", "MatMulNBits", "DynamicQuantizeMatMul"})
RESHAPING = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Identity", "Cast"})  # what leaves every number as it is
POSITION_INPUT = "position_ids"
WEIGHT_LOOKUPS = frozenset({"Gather", "GatherBlockQuantized"})


@dataclass(frozen=True)
class Head:
    """The unembedding of a graph: its matrix product, weight and bias."""

    product: str  # the name of the value that the matrix product gives, [batch, seq, vocab]
    weight: Matrix  # [hidden, vocab], in the weights' dtype; mapped, not read
    bias: Matrix | None  # [vocab] of the product itself (`Gemm`); None if it has none
    capped: bool  # whether a soft cap follows: the logits are then no linear function of the stream


def head(model: HookedModel) -> Head:
    """The matrix product that the logits come from."""
    product = _head(model)
    weight = linear_weight(product.flow, model.folder, product.product)
    bias = linear_bias(product.flow, model.folder, product.product)
    # Tanh: the soft cap of gemma2
    return Head(product.value, weight, bias, any(node.op_type == "Tanh" for node in product.passed))


def embedding(model: HookedModel) -> NDArray[Any]:
    """W_E [vocab, hidden], in the model's dtype, before the scale of some families."""
    flow = Dataflow(model.proto)
    names = ["input_ids"]  # and the same numbers in another shape
    for name in names:
        for node in flow.readers(name):
            if node.op_type in WEIGHT_LOOKUPS and node.input[1] == name and node.input[0] not in flow.varying:
                return table_of(flow, model.folder, node)
            names += node.output[:1] if node.op_type in RESHAPING else []
    raise ModelError(f"the graph of {model.folder} picks no rows of a matrix by its tokens")


def position_embedding(model: HookedModel) -> NDArray[Any]:
    """W_pos [positions, hidden], the rows of positions 0, 1, ...; of models with a table of positions.

    Raises:
        HookError: positions enter the model in another way (rotations of queries and keys).
    """
    flow, value = Dataflow(model.proto), str(HookPoint.PosEmbed)
    node = flow.producer(value) if value in model.metadata.hooks else None
    while node is not None and node.op_type in RESHAPING:
        node = flow.producer(node.input[0])
    if node is None or node.op_type not in WEIGHT_LOOKUPS or node.input[0] in flow.varying:
        rotary = str(HookPoint.AttnRotQ(0)) in model.metadata.hooks
        why = (
            "positions rotate queries and keys, weights.QK(distance=) says how"
            if rotary
            else "it has no table of positions"
        )
        raise HookError(f"{model.metadata.family}: no W_pos: {why}")
    return table_of(flow, model.folder, node)[_first_row(flow, model, node.input[1]) :]


def _first_row(flow: Dataflow, model: HookedModel, rows: str) -> int:
    """The row of position 0 (OPT and RoBERTa begin at row 2)."""
    first = 0
    while rows != POSITION_INPUT:
        node = flow.producer(rows)
        varying = [] if node is None else [name for name in node.input if name in flow.varying]
        if node is None or len(varying) != 1 or node.op_type not in RESHAPING | {"Add"}:
            raise HookError(f"{model.metadata.family}: no W_pos: the graph computes rows of its table from the text")
        if node.op_type == "Add":
            other = next(name for name in node.input if name != varying[0])
            first += int(onnx_file.weight(model.proto, model.folder, other).reshape(-1)[0])
        rows = varying[0]
    return first


def unembedding(model: HookedModel) -> NDArray[Any]:
    """W_U [hidden, vocab], in the model's dtype: logits are the final norm's output times W_U."""
    return head(model).weight


def unembedding_bias(model: HookedModel) -> NDArray[Any]:
    """b_U [vocab], or [labels], in the model's dtype: the bias of the logits; zeros if there is none."""
    size = model.metadata.columns
    product = _head(model)
    # of a MatMul the bias is an Add behind it, of a Gemm it is an input of its own
    for name in product.constants():
        bias = weight_value(product.flow, model.folder, name)
        if list(bias.shape) == [size]:
            return bias
    own = linear_bias(product.flow, model.folder, product.product)
    return np.zeros(size, DTYPES[model.metadata.dtype]) if own is None else own


@dataclass(frozen=True)
class _Head:
    """The matrix product behind the logits."""

    flow: Dataflow
    product: onnx.NodeProto
    value: str  # what it gives as [batch, seq, vocab]; of integers, with their scale
    passed: list[onnx.NodeProto]  # the nodes after it, the last first

    def constants(self) -> Iterator[str]:
        """The values that are added behind the product and depend on no input."""
        for node in self.passed:
            if node.op_type == "Add":
                yield from (name for name in node.input if name not in self.flow.varying)


def _head(model: HookedModel) -> _Head:
    flow = Dataflow(model.proto)
    name, passed = LOGITS, list[onnx.NodeProto]()
    while (node := flow.producer(name)) is not None:
        product = product_of(flow, node)
        if product is not None:
            return _Head(flow, product, name, passed)
        computed = [entry for entry in node.input if entry in flow.varying]
        if node.op_type not in HEAD_ELEMENTWISE | ACTIVATION_ROUNDING or len(computed) != 1:
            break
        passed.append(node)
        name = computed[0]
    quantised = {node.op_type for node in model.proto.graph.node} & INTEGER_PRODUCTS
    of = f": it has {', '.join(sorted(quantised))}, products of quantised numbers" if quantised else ""
    raise ModelError(f"{model.metadata.family}: the logits do not come from one matrix product{of}")
