"""The residual stream: the dominators of the logits that are sums of two values of text, and the added branches."""

from dataclasses import dataclass, replace

import onnx_ir as ir

from exporters.adopt.flow import KEEPING, Flow, climb
from mionnx.errors import ExportError


@dataclass(frozen=True)
class Step:
    """One residual addition.

    Attributes:
        before, after: the stream before and after it.
        branches: the values added to it: one, or two in a parallel block.
        summed: the sum itself: what comes after it, or in a post-norm stream what is normed to that.
    """

    before: ir.Value
    after: ir.Value
    branches: list[ir.Value]
    summed: ir.Value


def residual_steps(flow: Flow) -> list[Step]:
    """The residual additions of a decoder, in order.

    A stream may be normed after its additions; it is then what comes out of the norms.

    Raises:
        ExportError: there is no residual stream, or one that is changed otherwise after its additions.
    """
    sums = [value for value in flow.chain(flow.logits) if _adds_text(flow, value)]
    if not sums:
        raise ExportError(
            "no sum of two values of text lies on every path to the logits: the graph has no residual stream"
        )
    steps, stream, norms = list[Step](), flow.above(sums[0]), set[str]()
    for value in sums:
        added = _summands(flow, value, stream)
        if added is None and steps:
            stream, added = _normed(flow, stream, value)
            steps[-1] = replace(steps[-1], after=stream)
            norms.add(stream.producer().op_type)
        if added is None:
            raise ExportError(f"{value.name} is a sum, and the stream before it is none of the summands")
        steps.append(Step(stream, value, [part for one in added for part in _parts(flow, stream, one)], value))
        stream = value
    if norms:  # the last sum is normed as the others are
        after = next((one for one in flow.chain(flow.logits, stream) if one.producer().op_type in norms), stream)
        steps[-1] = replace(steps[-1], after=after)
    return steps


def _normed(flow: Flow, summed: ir.Value, following: ir.Value) -> tuple[ir.Value, list[ir.Value] | None]:
    """The value between two sums to which the second one adds, and the added values.

    Without one the first sum and None.
    """
    for value in flow.chain(following, summed)[:-1]:
        added = _summands(flow, following, value)
        if added is not None:
            return value, added
    return summed, None


def _adds_text(flow: Flow, value: ir.Value) -> bool:
    node = value.producer()
    return node is not None and node.op_type == "Add" and len(flow.text(node)) > 1


def _summands(flow: Flow, value: ir.Value, stream: ir.Value) -> list[ir.Value] | None:
    """The values added to the stream to make a value; None if the stream is no summand."""
    if climb(value, KEEPING) is climb(stream, KEEPING):
        return []
    node = value.producer()
    if node is None or node.op_type not in (*KEEPING, "Add"):
        return None
    inputs = flow.text(node)
    for entry in inputs:
        rest = _summands(flow, entry, stream)
        if rest is not None:
            return rest + [other for other in inputs if other is not entry]
    return None


def _parts(flow: Flow, stream: ir.Value, branch: ir.Value) -> list[ir.Value]:
    """An added value; of a parallel block that sums its branches first, both of them."""
    inner = climb(branch, KEEPING)
    if not _adds_text(flow, inner):
        return [branch]
    inputs = flow.text(inner.producer())
    attends = [has_attention(flow, stream, value) for value in inputs]
    return inputs if sorted(attends) == [False, True] else [branch]


def has_attention(flow: Flow, top: ir.Value, bottom: ir.Value) -> bool:
    """Whether a softmax that is multiplied with values lies between two values."""
    return any(node.op_type == "Softmax" and weighs_values(flow, node) for node in flow.between(top, bottom))


def weighs_values(flow: Flow, softmax: ir.Node) -> bool:
    """Whether a product with values reads a softmax: it is an attention pattern, no router."""
    value = softmax.outputs[0]
    for _ in range(8):
        users = [user for user in flow.readers(value) if user.op_type != "IsNaN"]
        if not users:
            return False
        if users[0].op_type == "MatMul":
            return len(flow.text(users[0])) > 1
        value = users[0].outputs[0]
    return False
