"""The graph made small: constants folded; RMS norms, rotations and GELU as the operators that opset 23 has for them.

Parameters take part as graph inputs, which no pass can fold or merge: folding `Transpose(weight)` would copy the weight
into the graph, and merging equal ones would lose their names. So do numbers beside 0 and 1: onnxscript takes `x + 1e-8`
(the epsilon of Helium's norms) and `x * 1.000005` for `x`.
"""

from collections.abc import Mapping

import onnx_ir as ir
import torch
from onnx_ir.passes.common import LiftConstantsToInitializersPass
from onnxscript import optimizer
from onnxscript.rewriter import onnx_fusions

from exporters.transformers import gelu, norms

NEAR = {0.0: 2e-8, 1.0: 2e-5}  # twice the tolerances of onnxscript's patterns
FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)


def simplify(model: ir.Model, parameters: set[str]) -> list[ir.Value]:
    """Optimise a traced model in place.

    Args:
        model: a traced model; the initializers that are not parameters hold their values.
        parameters: the names of the initializers that a checkpoint feeds.

    Returns:
        the parameters that the graph reads: values of their own names, shapes and dtypes that are no longer
        initializers, to be registered again once they have data.
    """
    graph = model.graph
    LiftConstantsToInitializersPass(size_limit=1)(model)
    held = [value for value in list(graph.initializers.values()) if value.name in parameters]
    beside = {value: value.const_value for value in graph.initializers.values() if _beside_neutral(value, parameters)}
    for value in [*held, *beside]:
        del graph.initializers[value.name]
        value.const_value = None
        graph.inputs.append(value)
    optimizer.optimize_ir(model)
    onnx_fusions.fuse(model)
    gelu.fuse(model)
    norms.widen(model)
    optimizer.optimize_ir(model)
    for value in [*held, *beside]:
        graph.inputs.remove(value)
    for value in beside:
        value.const_value = beside[value]
        if value.uses():
            graph.register_initializer(value)
    return [value for value in held if value.uses()]


def _beside_neutral(value: ir.Value, parameters: set[str]) -> bool:
    """Whether a constant is one number so near to 0 or 1 that passes may take it for these."""
    held = value.const_value
    if held is None or value.name in parameters or held.size != 1 or held.dtype not in FLOATS:
        return False
    number = float(held.numpy().reshape(()))
    return number not in NEAR and any(abs(number - neutral) < near for neutral, near in NEAR.items())


def simplify_traced(model: ir.Model, buffers: Mapping[str, torch.Tensor]) -> list[ir.Value]:
    """Optimise a model that was traced without weights.

    Args:
        model: changed in place.
        buffers: values that no checkpoint holds, by name.

    Returns:
        see `simplify`.
    """
    for name, buffer in buffers.items():
        if name in model.graph.initializers:
            wide = buffer.dtype != torch.bfloat16  # which numpy has not
            held = ir.tensor(buffer.numpy(), name=name) if wide else ir.tensor_adapters.TorchTensor(buffer, name=name)
            model.graph.initializers[name].const_value = held
    return simplify(model, _fakes(model.graph))


def _fakes(graph: ir.Graph) -> set[str]:
    """The initializers traced without data, to be bound to checkpoint tensors."""
    return {
        name
        for name, value in graph.initializers.items()
        if isinstance(getattr(value.const_value, "raw", None), torch.Tensor)
        and type(value.const_value.raw) is not torch.Tensor
    }
