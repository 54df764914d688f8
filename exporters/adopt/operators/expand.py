"""The table of fused operators, and their expansion in place.

Linear maps stay as they are, quantised ones too: their inputs and outputs are values already.
"""

from collections import Counter
from collections.abc import Callable

import onnx_ir as ir
import onnx_ir.passes.common as passes

from exporters.adopt.operators.attention import grouped_query, multi_head, packed_attention, standard_attention
from exporters.adopt.operators.elementwise import fused_product, gelu, turned_keys, turns_keys_at_once
from exporters.adopt.operators.fused import Fused, supporting
from exporters.adopt.operators.norms import simplified_norm, skip_norm
from exporters.adopt.operators.op_writer import TOKENS, OpWriter
from exporters.adopt.operators.rotary import rotary, standard_rotary
from mionnx.errors import ExportError

Expansion = Callable[[OpWriter, ir.Node], dict[int, ir.Value]]
MICROSOFT = "com.microsoft"
EXPANSIONS: dict[tuple[str, str], Expansion] = {
    ("", "SimplifiedLayerNormalization"): simplified_norm,  # in the standard domain, and none of its operators
    (MICROSOFT, "SimplifiedLayerNormalization"): simplified_norm,
    (MICROSOFT, "SkipSimplifiedLayerNormalization"): skip_norm,
    (MICROSOFT, "SkipLayerNormalization"): skip_norm,
    (MICROSOFT, "RotaryEmbedding"): rotary,
    ("", "RotaryEmbedding"): standard_rotary,
    (MICROSOFT, "GroupQueryAttention"): grouped_query,
    (MICROSOFT, "MultiHeadAttention"): multi_head,
    (MICROSOFT, "Attention"): packed_attention,
    ("", "Attention"): standard_attention,
    (MICROSOFT, "Gelu"): gelu,
    (MICROSOFT, "BiasGelu"): gelu,
    (MICROSOFT, "FastGelu"): gelu,
    (MICROSOFT, "QuickGelu"): gelu,
    (MICROSOFT, "FusedMatMul"): fused_product,
}

# Number of the inputs that an expansion knows, of the operators that may have more.
INPUTS = {
    (MICROSOFT, "GroupQueryAttention"): 16,
    (MICROSOFT, "MultiHeadAttention"): 8,
    (MICROSOFT, "Attention"): 6,
    ("", "Attention"): 6,
}


def expand(model: ir.Model, record: list[Fused] | None = None) -> dict[str, int]:
    """Expand fused operators in place.

    Args:
        model: a foreign graph.
        record: takes each operator as it was, and what reads its inputs now.

    Returns:
        operator -> how many of it were expanded.

    Raises:
        ExportError: one whose sizes are unknown, or of which an output is read that standard operators do not make.
    """
    passes.CommonSubexpressionEliminationPass()(model)  # sessions duplicate a DequantizeLinear for every reader
    op, done, fused = OpWriter(model), Counter[str](), list[Fused]()
    for node in list(model.graph):
        write = turned_keys if turns_keys_at_once(node) else EXPANSIONS.get((node.domain, node.op_type))
        if write is not None:
            _refuse_unknown_inputs(node)
            op.begin()
            made = write(op, node)
            fused.append(Fused.of(node, made, op.nodes))
            _replace(model.graph, node, made, op.nodes)
            done[node.op_type] += 1
    if done:
        model.graph.sort()
        kept = supporting(fused) if record is not None else []
        model.graph.outputs.extend(kept)  # lengths that fused operators alone read
        passes.RemoveUnusedNodesPass()(model)
        for value in kept:
            model.graph.outputs.remove(value)
        for value in [value for value in model.graph.inputs if not value.uses() and value.name != TOKENS]:
            model.graph.inputs.remove(value)
    if record is not None:
        record.extend(fused)
    return dict(done)


def _refuse_unknown_inputs(node: ir.Node) -> None:
    """Refuse an operator with an input that its expansion does not read."""
    known = INPUTS.get((node.domain, node.op_type))
    given = [place for place, value in enumerate(node.inputs) if value is not None]
    if known is not None and any(place >= known for place in given):
        raise ExportError(
            f"{node.op_type} node {node.name!r} has an input {max(given)} that is not known: it cannot be expanded"
        )


def _replace(graph: ir.Graph, node: ir.Node, made: dict[int, ir.Value], nodes: list[ir.Node]) -> None:
    """Put nodes in the place of one; the values that it made keep their names."""
    graph.insert_before(node, nodes)
    for place, old in enumerate(node.outputs):
        if place not in made:
            if old.uses() or old.is_graph_output():
                raise ExportError(f"output {place} of {node.op_type} node {node.name!r} is read: it cannot be expanded")
            continue
        name, new = old.name, made[place]
        new.type, new.shape = old.type or new.type, old.shape or new.shape
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        old.name = None
        if name:
            new.name = name
    graph.remove(node, safe=True)
