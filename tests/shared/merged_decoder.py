"""Optimum's small Llama as a merged decoder: with and without a past, in the two branches of an `If`."""

import shutil
from pathlib import Path

import onnx
from onnx import TensorProto, helper

FOREIGN = Path(__file__).parent / "foreign"


def write(folder: Path, changed: bool = False) -> Path:
    """Write optimum's file twice into an `If`, as its merger does; `changed`: the branch without a past is another."""
    model = onnx.load(FOREIGN / "optimum" / "model.onnx")
    graph, inputs = model.graph, {entry.name for entry in model.graph.input}
    weights = {tensor.name for tensor in graph.initializer}
    branches = {}
    for branch in ("then_branch", "else_branch"):
        nodes, prefix = [], branch[:4] + "/"
        for node in graph.node:
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            copy.name = prefix + node.name
            for names in (copy.input, copy.output):
                names[:] = [name if not name or name in inputs | weights else prefix + name for name in names]
            nodes.append(copy)
        if changed and branch == "else_branch":
            product = next(node for node in nodes if node.op_type == "Softmax")
            product.op_type = "Identity"
            del product.attribute[:]
        outputs = [onnx.ValueInfoProto() for _ in graph.output]
        for made, entry in zip(outputs, graph.output, strict=True):
            made.CopyFrom(entry)
            made.name = prefix + entry.name
        branches[branch] = helper.make_graph(nodes, branch, [], outputs)
    flag = helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1])
    outer = helper.make_graph(
        [helper.make_node("If", ["use_cache_branch"], [entry.name for entry in graph.output], "merged", **branches)],
        "merged",
        [*graph.input, flag],
        graph.output,
        graph.initializer,
    )
    folder.mkdir()
    made = helper.make_model(outer, opset_imports=model.opset_import, ir_version=model.ir_version)
    onnx.save(made, folder / "decoder_model_merged.onnx")
    shutil.copyfile(FOREIGN / "optimum" / "config.json", folder / "config.json")
    return folder / "decoder_model_merged.onnx"
