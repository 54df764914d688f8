"""The graph made small: constants folded; RMS norms, rotations and GELU as the operators that opset 23 has for them.

Parameters take part as graph inputs, which no pass can fold or merge: folding `Transpose(weight)` would copy the weight
into the graph, and merging equal ones would lose their names.
"""

from collections.abc import Mapping

import onnx_ir as ir
import torch
from onnxscript import optimizer
from onnxscript.rewriter import onnx_fusions

from exporters.transformers import gelu, norms


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
    held = [value for value in list(graph.initializers.values()) if value.name in parameters]
    for value in held:
        del graph.initializers[value.name]
        value.const_value = None
        graph.inputs.append(value)
    optimizer.optimize_ir(model)
    onnx_fusions.fuse(model)
    gelu.fuse(model)
    norms.widen(model)
    optimizer.optimize_ir(model)
    for value in held:
        graph.inputs.remove(value)
    return [value for value in held if value.uses()]


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
