"""The expansion of fused operators in place, by the table `mionnx.graph.operator_table`.

Linear maps stay as they are, quantised ones too: their inputs and outputs are values already.
"""

from collections import Counter
from importlib import import_module
from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common as passes

from exporters.adopt.operators.decoder_writer import TOKEN_INPUT, DecoderWriter
from exporters.adopt.operators.fused import Fused, supporting
from exporters.adopt.operators.joined_columns import join_convolutions
from mionnx.errors import ExportError
from mionnx.graph.operator_table import expansion_of


def named(function: str) -> Any:
    """A function of this folder, "module.function", as the table of operators names it."""
    module, name = function.split(".")
    return getattr(import_module(f"{__package__}.{module}"), name)


def expand(model: ir.Model, record: list[Fused] | None = None) -> dict[str, int]:
    """Expand fused operators in place and `record` each as it was; returns operator -> how many were expanded."""
    passes.CommonSubexpressionEliminationPass()(model)  # sessions duplicate a DequantizeLinear for every reader
    join_convolutions(model)
    op, done, fused = DecoderWriter(model), Counter[str](), list[Fused]()
    for node in list(model.graph):
        expansion = expansion_of((node.domain, node.op_type))
        if expansion is None:
            continue
        _refuse_unknown_inputs(node, expansion.inputs)
        op.begin()
        outputs = named(expansion.function)(op, node)
        if outputs:
            if expansion.put_back:
                fused.append(Fused.of(node, outputs, op.nodes))
            _replace(model.graph, node, outputs, op.nodes)
            done[node.op_type] += 1
    if done:
        model.graph.sort()
        lengths = supporting(fused) if record is not None else []
        model.graph.outputs.extend(lengths)  # lengths that fused operators alone read
        passes.RemoveUnusedNodesPass()(model)
        for value in lengths:
            model.graph.outputs.remove(value)
        for value in [value for value in model.graph.inputs if not value.uses() and value.name != TOKEN_INPUT]:
            model.graph.inputs.remove(value)
    if record is not None:
        record.extend(fused)
    return dict(done)


def _refuse_unknown_inputs(node: ir.Node, count: int) -> None:
    last = max((place for place, value in enumerate(node.inputs) if value is not None), default=0)
    if last >= count:
        raise ExportError(
            f"{node.op_type} node {node.name!r} has an input {last} that is not known: it cannot be expanded"
        )


def _replace(graph: ir.Graph, node: ir.Node, outputs: dict[int, ir.Value], nodes: list[ir.Node]) -> None:
    """Put nodes in the place of one; the values that it made keep their names."""
    graph.insert_before(node, nodes)
    for place, old in enumerate(node.outputs):
        if place not in outputs:
            if old.uses() or old.is_graph_output():
                raise ExportError(f"output {place} of {node.op_type} node {node.name!r} is read: it cannot be expanded")
            continue
        name, new = old.name, outputs[place]
        new.type, new.shape = old.type or new.type, old.shape or new.shape
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        old.name = None
        if name:
            new.name = name
    graph.remove(node, safe=True)
