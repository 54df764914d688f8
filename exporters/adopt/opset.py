"""The opset that hooks are written in: graphs of an older one are brought to it, as far as decoders differ there."""

import numpy as np
import onnx_ir as ir

from mionnx.errors import ExportError

OLDEST, WRITTEN = 13, 18  # from 13 on axes of Squeeze and Unsqueeze are inputs, from 18 on those of all reductions
AXES_IN_13 = frozenset(("ReduceSum",))


def modernise(model: ir.Model) -> None:
    """Bring a model to opset 18, if it is older.

    Raises:
        ExportError: it is older than opset 13.
    """
    version = model.opset_imports.get("", 0)
    if version < OLDEST:
        raise ExportError(
            f"the graph is of opset {version}; graphs from opset {OLDEST} on are adopted: convert it with "
            "onnx.version_converter, or export it again"
        )
    if version >= WRITTEN:
        return
    for place, node in enumerate(list(model.graph)):
        if node.domain == "" and node.op_type.startswith("Reduce") and "axes" in node.attributes:
            axes = np.asarray(node.attributes.pop("axes").as_ints(), np.int64)
            name = f"adopted.axes.{place}"
            made = ir.Value(
                name=name,
                type=ir.TensorType(ir.DataType.INT64),
                shape=ir.Shape(axes.shape),
                const_value=ir.tensor(axes),
            )
            model.graph.register_initializer(made)
            node.resize_inputs(2)
            node.replace_input_with(1, made)
        elif node.domain == "" and node.op_type == "Split" and len(node.inputs) == 1:
            node.attributes["num_outputs"] = ir.AttrInt64("num_outputs", len(node.outputs))
    model.opset_imports[""] = WRITTEN
