"""The graph made small: constants folded; RMS norms, rotations and GELU as the operators that opset 23 has for them."""

import math
from collections.abc import Container, Mapping
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.passes.common import LiftConstantsToInitializersPass
from onnxscript import optimizer
from onnxscript.rewriter import onnx_fusions, pattern

from exporters.op_writer import move

NEAR = {0.0: 2e-8, 1.0: 2e-5}  # twice the tolerances of onnxscript's patterns
FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)
CUBIC = 0.044715
SCALE = math.sqrt(2 / math.pi)
LACKING_BFLOAT16 = ("TopK",)  # operators, in the opsets before 24


# `nn.GELU` is traced to its operator; transformers' own activations compute the same in eight steps, each of which a
# runtime writes to memory and reads back. A step that anything else reads, a hook point's marker for one, stays, and so
# do all the others. So does a GELU whose constants are not those of the formula to 1e-5: those of a graph in half
# precision, whose roundings are what the checkpoint's own code computes.
class _Tanh(pattern.RewriteRuleClassBase):
    """Tanh GELU: 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."""

    def pattern(self, op: Any, x: Any) -> Any:
        cubic = op.Add(x, op.Mul(op.Pow(x, 3.0), CUBIC))
        return op.Mul(op.Mul(x, 0.5), op.Add(op.Tanh(op.Mul(cubic, SCALE)), 1.0))

    def rewrite(self, op: Any, x: Any) -> Any:
        return op.Gelu(x, approximate="tanh")


class _FactoredTanh(_Tanh):
    """`FastGELUActivation`: 0.5 x (1 + tanh(sqrt(2 / pi) x (1 + 0.044715 x x)))."""

    def pattern(self, op: Any, x: Any) -> Any:
        factor = op.Add(op.Mul(op.Mul(x, CUBIC), x), 1.0)
        return op.Mul(op.Mul(x, 0.5), op.Add(op.Tanh(op.Mul(op.Mul(x, SCALE), factor)), 1.0))


class _Erf(pattern.RewriteRuleClassBase):
    """`GELUActivation` in Python: 0.5 x (1 + erf(x / sqrt(2)))."""

    def pattern(self, op: Any, x: Any) -> Any:
        return op.Mul(op.Mul(x, 0.5), op.Add(op.Erf(op.Div(x, math.sqrt(2))), 1.0))

    def rewrite(self, op: Any, x: Any) -> Any:
        return op.Gelu(x, approximate="none")


GELU = pattern.RewriteRuleSet([_Tanh.rule(), _FactoredTanh.rule(), _Erf.rule()])


def simplify(model: ir.Model, parameters: set[str]) -> list[ir.Value]:
    """Optimise a traced model in place; initializers besides `parameters`, which a checkpoint feeds, hold values."""
    # Returns the parameters that the graph reads: values of their own names, shapes and dtypes that are no longer
    # initializers, to be registered again once they have data.
    graph = model.graph
    LiftConstantsToInitializersPass(size_limit=1)(model)
    # As graph inputs no pass can fold or merge parameters: folding `Transpose(weight)` would copy the weight into the
    # graph, and merging equal ones would lose their names. Numbers beside 0 and 1 become inputs too: onnxscript takes
    # `x + 1e-8` (the epsilon of Helium's norms) and `x * 1.000005` for `x`.
    weights = [value for value in list(graph.initializers.values()) if value.name in parameters]
    beside = {value: value.const_value for value in graph.initializers.values() if _beside_neutral(value, parameters)}
    for value in [*weights, *beside]:
        del graph.initializers[value.name]
        value.const_value = None
        graph.inputs.append(value)
    optimizer.optimize_ir(model)
    onnx_fusions.fuse(model)
    GELU.apply_to_model(model)
    _widen_norms(model)
    optimizer.optimize_ir(model)
    for value in [*weights, *beside]:
        graph.inputs.remove(value)
    for value in beside:
        value.const_value = beside[value]
        if value.uses():
            graph.register_initializer(value)
    return [value for value in weights if value.uses()]


def _beside_neutral(value: ir.Value, parameters: set[str]) -> bool:
    """Whether a constant is one number so near to 0 or 1 that passes may take it for these."""
    constant = value.const_value
    if constant is None or value.name in parameters or constant.size != 1 or constant.dtype not in FLOATS:
        return False
    number = float(constant.numpy().reshape(()))
    return number not in NEAR and any(abs(number - neutral) < near for neutral, near in NEAR.items())


def simplify_traced(model: ir.Model, buffers: Mapping[str, torch.Tensor]) -> list[ir.Value]:
    """Optimise a model that was traced without weights, as `simplify` does; no checkpoint holds the `buffers`."""
    for name, buffer in buffers.items():
        if name in model.graph.initializers:
            wide = buffer.dtype != torch.bfloat16  # which numpy has not
            tensor = ir.tensor(buffer.numpy(), name=name) if wide else ir.tensor_adapters.TorchTensor(buffer, name=name)
            model.graph.initializers[name].const_value = tensor
    return simplify(model, _fakes(model.graph))


def _fakes(graph: ir.Graph) -> set[str]:
    """The initializers traced without data, to be bound to checkpoint tensors."""
    return {
        name
        for name, value in graph.initializers.items()
        if isinstance(getattr(value.const_value, "raw", None), torch.Tensor)
        and type(value.const_value.raw) is not torch.Tensor
    }


def _widen_norms(model: ir.Model) -> None:
    """Cast the input of norms with a wider scale to its dtype, in place."""
    for node in [node for node in model.graph if node.op_type == "RMSNormalization"]:
        value, scale = node.inputs
        # Gemma's norms compute in float32 whatever the model's dtype. ONNX allows a float16 input with a float32 scale,
        # but its function multiplies the two after casting back, and ONNX Runtime refuses that.
        if value.dtype != scale.dtype:
            cast = _cast(value, scale.dtype)
            cast.name, cast.outputs[0].name = f"{node.name}.widened", f"{node.outputs[0].name}.widened"
            model.graph.insert_before(node, cast)
            node.replace_input_with(0, cast.outputs[0])


def widen(model: ir.Model, only: Container[str] | None = None) -> None:
    """Compute in float32 what is computed in bfloat16, and round, in place: by some operators, or by all if None."""
    # Falcon rounds its ALiBi biases so. Sums and products of two bfloat16 numbers, computed in float32 and rounded once
    # more, are those of bfloat16 arithmetic (float32 has more than twice its digits), and ONNX Runtime has kernels.
    for node in [node for node in model.graph if node.op_type != "Cast" and any(map(_is_narrow, node.outputs))]:
        if only is not None and node.op_type not in only:
            continue
        for place, value in enumerate(node.inputs):
            if value is not None and _is_narrow(value):
                cast = _cast(value, ir.DataType.FLOAT)
                model.graph.insert_before(node, cast)
                node.replace_input_with(place, cast.outputs[0])
        for value in filter(_is_narrow, node.outputs):
            reads = list(value.uses())
            value.dtype = ir.DataType.FLOAT
            rounded = _cast(value, ir.DataType.BFLOAT16)
            model.graph.insert_after(node, rounded)
            move(reads, rounded.outputs[0])


def _is_narrow(value: ir.Value) -> bool:
    return value.dtype == ir.DataType.BFLOAT16


def _cast(value: ir.Value, kind: ir.DataType) -> ir.Node:
    node = ir.node("Cast", [value], {"to": kind})
    node.outputs[0].dtype, node.outputs[0].shape = kind, value.shape
    return node
