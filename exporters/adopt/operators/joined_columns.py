"""A short convolution in standard operators: columns of the past and of the call joined, convolved and cut.

    joined = Concat(past, x); y = Slice(Conv(joined), the call's last); present = Slice(joined, the last)

It becomes one CausalConvWithState (as of ONNX Runtime), which the table of operators knows. What is carried may be more
columns than the kernel reads: LFM2's files for transformers.js carry one more.
"""

import numpy as np
import onnx_ir as ir

from exporters.adopt.flow import static
from mionnx.graph.operator_table import DOMAIN

ALONG = 2  # the axis of columns, of [batch, channels, columns]


def join_convolutions(model: ir.Model) -> int:
    """Join the nodes of each convolution; returns how many there are."""
    graph, joined = model.graph, 0
    for node in [node for node in graph if node.op_type == "Conv" and node.domain == ""]:
        together = node.inputs[0].producer() if node.inputs[0] is not None else None
        if together is None or not _concatenates(together) or not _is_causal(node):
            continue
        past, x = together.inputs
        cuts = [one for one, _ in together.outputs[0].uses() if one is not node]
        presents = [one.outputs[0] for one in cuts if one.op_type == "Slice" and one.outputs[0].is_graph_output()]
        if len(cuts) != 1 or len(presents) != 1 or not _cuts_the_end(cuts[0], static(past, ALONG)):
            continue
        last = [one for one, _ in node.outputs[0].uses()]
        result = node.outputs[0]
        if len(last) == 1 and last[0].op_type == "Slice" and _begins_at_a_length(last[0]):
            result = last[0].outputs[0]
        elif static(past, ALONG) != static(node.inputs[1], ALONG) - 1:
            continue  # as many columns as the call has come out of a past of kernel - 1 alone
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        convolution = ir.node("CausalConvWithState", [x, node.inputs[1], bias, past], domain=DOMAIN, num_outputs=2)
        convolution.name = node.name
        graph.insert_before(node, convolution)
        for old, new in zip((result, presents[0]), convolution.outputs, strict=True):
            new.type, new.shape, name = old.type, old.shape, old.name
            ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
            old.name = None
            new.name = name
        joined += 1
    return joined


def _concatenates(node: ir.Node) -> bool:
    """Whether a node puts columns of a call behind those of a past."""
    if node.op_type != "Concat" or len(node.inputs) != 2 or node.attributes.get_int("axis", 0) not in (ALONG, -1):
        return False
    past = node.inputs[0]
    return past is not None and past.is_graph_input() and static(past, ALONG) is not None


def _is_causal(node: ir.Node) -> bool:
    """Whether a convolution is of each channel by itself, without steps, gaps and padding."""
    weight, attributes = node.inputs[1], node.attributes
    if weight is None or static(weight, 1) != 1 or attributes.get_int("group", 1) != static(weight, 0):
        return False
    plain = {"pads": 0, "strides": 1, "dilations": 1}
    lists = {name: attributes[name].as_ints() for name in plain if name in attributes}
    numbers = all(number == plain[name] for name, values in lists.items() for number in values)
    return numbers and attributes.get_string("auto_pad", "NOTSET") in ("NOTSET", "VALID")


def _numbers(node: ir.Node, place: int) -> list[int] | None:
    value = node.inputs[place] if place < len(node.inputs) else None
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    return None if tensor is None else np.asarray(tensor.numpy()).ravel().tolist()


def _cuts_the_end(node: ir.Node, count: int | None) -> bool:
    """Whether a Slice keeps the last columns, as many as the past had."""
    starts, ends, axes = (_numbers(node, place) for place in (1, 2, 3))
    steps = _numbers(node, 4) or [1]
    open_end = ends is not None and len(ends) == 1 and ends[0] >= np.iinfo(np.int32).max
    return starts == [-(count or 0)] and open_end and axes in ([ALONG], [-1]) and steps == [1]


def _begins_at_a_length(node: ir.Node) -> bool:
    """Whether a Slice keeps columns from a place on that the call's length says."""
    ends, axes, steps = _numbers(node, 2), _numbers(node, 3), _numbers(node, 4) or [1]
    open_end = ends is not None and len(ends) == 1 and ends[0] >= np.iinfo(np.int32).max
    return _numbers(node, 1) is None and open_end and axes in ([ALONG], [-1]) and steps == [1]
