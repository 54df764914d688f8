"""RMS norms with a weight of another dtype than their input, in a form that runtimes run.

Gemma's norms compute in float32 whatever the model's dtype: y = cast(x / rms(x) * (1 + cast(weight))). ONNX allows an
RMSNormalization of a float16 input with a float32 scale, and its output is of the scale's dtype; but the function that
it stands for multiplies the two after casting back to the input's, and ONNX Runtime refuses that. With the input cast
to the scale's dtype first, the operator computes what transformers does.
"""

import onnx_ir as ir


def widen(model: ir.Model) -> int:
    """Cast the input of such norms to the dtype of their scale, in place.

    Returns:
        how many there were.
    """
    mixed = [node for node in model.graph if node.op_type == "RMSNormalization" and _mixed(node)]
    for node in mixed:
        value, scale = node.inputs
        cast = ir.node("Cast", [value], {"to": scale.dtype}, name=f"{node.name}.widened")
        cast.outputs[0].name, cast.outputs[0].dtype = f"{node.outputs[0].name}.widened", scale.dtype
        cast.outputs[0].shape = value.shape
        model.graph.insert_before(node, cast)
        node.replace_input_with(0, cast.outputs[0])
    return len(mixed)


def _mixed(node: ir.Node) -> bool:
    value, scale = node.inputs
    return value.dtype != scale.dtype
