"""A graph under construction: its weights by their canonical names, its hook points, and its constants."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray

from exporters.checkpoint_tensors import StoredTensor
from exporters.op_writer import OpWriter
from exporters.recurrence.forms import STATE_DTYPE
from exporters.rwkv.checkpoint import FUSED_MIXES, Shape, TensorLayout
from mionnx.errors import ExportError

RWKV_OPSET = 23
IR_DTYPE = {
    torch.float32: ir.DataType.FLOAT,
    torch.float16: ir.DataType.FLOAT16,
    torch.bfloat16: ir.DataType.BFLOAT16,
}


@dataclass
class Build:
    """A graph under construction."""

    layout: TensorLayout
    tensors: Mapping[str, StoredTensor]
    shape: Shape
    dtype: ir.DataType
    op: OpWriter  # adds nodes, `build.op.Add(x, y)`
    parameters: dict[str, ir.Value] = field(default_factory=dict)  # name -> weight of the graph, without data so far
    hooks: list[str] = field(default_factory=list)  # the hook points so far, in execution order

    def has(self, canonical: str) -> bool:
        """Whether the checkpoint has a tensor."""
        return self.layout.name(canonical) in self.tensors

    def weight(self, canonical: str) -> ir.Value:
        """A tensor of the checkpoint as it is stored."""
        name = self.layout.name(canonical)
        if name not in self.tensors:
            raise ExportError(f"the checkpoint ({self.layout.title}) lacks the tensor {name}")
        if name not in self.parameters:
            dims = self.tensors[name].shape
            self.parameters[name] = ir.Value(name=name, type=ir.TensorType(self.dtype), shape=ir.Shape(dims))
        return self.parameters[name]

    def project(self, value: ir.Value, canonical: str) -> ir.Value:
        """The product with a weight [in, out]."""
        weight = self.weight(canonical)
        # turned by a node, not in the file: the checkpoint's bytes are referenced as they are
        matrix = self.op.Transpose(weight, perm=[1, 0]) if self.layout.turned(canonical) else weight
        return self.op.MatMul(value, matrix)

    def mix(self, layer: int, which: str) -> ir.Value:
        """One of RWKV-7's token-shift mixes, [..., hidden]; older files store six as one tensor."""
        canonical = f"blocks.{layer}.att.{which}"
        if self.has(canonical):
            return self.weight(canonical)
        fused = self.weight(f"blocks.{layer}.att.x_x")
        one = self.op.Gather(fused, FUSED_MIXES.index(which), axis=0)
        return self.op.Reshape(one, [1, 1, self.shape.hidden_size])

    def norm(self, value: ir.Value, canonical: str, epsilon: float | None = None) -> ir.Value:
        """Layer norm over the last axis; fla's may have no bias."""
        inputs = [self.weight(f"{canonical}.weight")]
        inputs += [self.weight(f"{canonical}.bias")] if self.has(f"{canonical}.bias") else []
        epsilon = self.shape.norm_eps if epsilon is None else epsilon
        return self.op.LayerNormalization(value, *inputs, axis=-1, epsilon=epsilon)

    def to_heads(self, value: ir.Value) -> ir.Value:
        """[batch, seq, n_heads * head_dim] as [batch, seq, n_heads, head_dim], in float32."""
        return self.op.Reshape(self.exact(value), [0, 0, self.shape.num_heads, self.shape.head_dim])

    def exact(self, value: ir.Value) -> ir.Value:
        return value if self.dtype == STATE_DTYPE else self.op.Cast(value, to=STATE_DTYPE)

    def plain(self, value: ir.Value) -> ir.Value:
        """Back in the model's dtype."""
        return value if self.dtype == STATE_DTYPE else self.op.Cast(value, to=self.dtype)

    def constant(self, name: str, value: NDArray[Any] | np.generic) -> ir.Value:
        """A constant that all layers share."""
        return self.op.constant(value, value.dtype, name)

    def input(self, name: str, dtype: ir.DataType, dims: Sequence[int | str]) -> ir.Value:
        """A new input of the graph."""
        self.op.graph.inputs.append(value := ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(dims)))
        return value

    def hook(self, name: str, value: ir.Value) -> ir.Value:
        """Name a value as a hook point; later nodes read the value returned."""
        if value.producer() is None or value.name in self.hooks:  # a hook point is made by a node, and bears one name
            value = self.op.Identity(value)
        value.name = name
        self.hooks.append(name)
        return value
