"""Merged decoders: an `If` on a flag holds the decoder twice, with a past and without. The one with a past stays.

It serves an empty past too, which the self-check shows: the file itself is then run through its other branch.
"""

import onnx_ir as ir

from exporters.adopt.flow import KEEPING, climb
from mionnx.errors import ExportError

RESHAPING = KEEPING | {"Squeeze", "Reshape"}


def inline_branch(model: ir.Model) -> str | None:
    """Put the branch with a past in the place of an `If` on a flag of the call.

    Returns:
        the name of the flag, which is no input any more; None where there is no such `If`.

    Raises:
        ExportError: two flags, or one that is read for something else too.
    """
    graph, flag = model.graph, None
    for node in [node for node in graph if node.op_type == "If"]:
        condition = None if node.inputs[0] is None else climb(node.inputs[0], RESHAPING)
        if condition is None or not condition.is_graph_input() or condition.dtype != ir.DataType.BOOL:
            continue
        if flag is not None and flag is not condition:
            raise ExportError(f"two flags choose branches, {flag.name} and {condition.name}")
        flag = condition
        _inline(graph, node, node.attributes["then_branch"].as_graph())
    return None if flag is None else _drop(graph, flag)


def _inline(graph: ir.Graph, node: ir.Node, branch: ir.Graph) -> None:
    """Move a branch's nodes and weights into the graph; its outputs get the names of the node's."""
    taken = {value.name for value in graph.inputs} | {*graph.initializers}
    taken |= {value.name for one in graph for value in one.outputs}
    ends, nodes = list(branch.outputs), list(branch)
    for value in [*branch.initializers.values()]:
        del branch.initializers[value.name]
        _rename(value, taken)
        graph.register_initializer(value)
    for one in nodes:
        for value in one.outputs:
            _rename(value, taken)
    branch.outputs.clear()
    branch.remove(nodes)
    graph.insert_before(node, nodes)
    for old, new in zip(node.outputs, ends, strict=True):
        name, old.name = old.name, None
        new.type, new.shape = new.type or old.type, new.shape or old.shape
        if new.producer() is None or new.is_graph_output():
            copy = ir.node("Identity", [new])
            copy.outputs[0].type, copy.outputs[0].shape = new.type, new.shape
            graph.insert_before(node, copy)
            new = copy.outputs[0]
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        new.name = name
    graph.remove(node, safe=True)


def _rename(value: ir.Value, taken: set[str | None]) -> None:
    """Give a value of a branch a name that the graph has not."""
    name, number = value.name, 0
    while name and name in taken:
        number += 1
        name = f"{value.name}.{number}"
    value.name = name
    taken.add(name)


def _drop(graph: ir.Graph, flag: ir.Value) -> str:
    """Remove a flag that nothing chooses by any more."""
    waiting = [node for node, _ in flag.uses()]
    while waiting:
        node = waiting.pop()
        if any(value.uses() for value in node.outputs):
            raise ExportError(f"the flag {flag.name} is read beside the choice of a branch")
        graph.remove(node, safe=True)
    graph.inputs.remove(flag)
    return str(flag.name)
