"""Rewrite: drop outputs that were not requested; compute the head only at requested positions and tokens.

1. Outputs that are not asked for (logits, keys and values, states) are dropped, and with them what only they need.
2. Logits of the last or of chosen positions: the input of the head's matrix product is cut down, so that it is
   computed for these alone. The head is found by going back from the logits over what works on each number alone (a
   scale, a soft cap, a cast); where there is none, or where the logits themselves are hooked, the logits are cut down.
3. Logits of chosen tokens, and the largest ones, are taken from the logits.
"""

from collections.abc import Callable

import numpy as np
import onnx_graphsurgeon as gs

from mionnx.graph.builder import Builder
from mionnx.graph.edited_graph import named
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.io_names import PRESENTS
from mionnx.graph.output_head import LOGITS, feed_head, find_head, head_and_tail
from mionnx.graph.report import Report
from mionnx.rewrite.plan import LOGIT_BEGIN, LOGIT_COLUMNS, LOGIT_TOKENS, LOGIT_TOP_K, TOP_IDS, Plan

HOOKED = {str(HookPoint.Logits), str(HookPoint.TokenLogits), str(HookPoint.SpanLogits)}  # a row for each token
END = np.iinfo(np.int64).max  # of a slice: up to the last entry


def restrict(graph: gs.Graph, plan: Plan, report: Report) -> None:
    """Cut the model's own outputs down to those of a plan."""
    outputs = plan.outputs
    if not outputs.carried:
        ends = {want.fetched for want in plan.captures}  # of a piece
        graph.outputs = [out for out in graph.outputs if not out.name.startswith(PRESENTS) or out.name in ends]
    if not outputs.logits:
        graph.outputs = [output for output in graph.outputs if output.name != LOGITS]
        return
    op = Builder(graph, LOGITS, "mionnx.logits", report)
    if outputs.last:
        _positions(graph, plan, lambda value: op.Slice(value, [-1], [END], [1]))
    if outputs.begins:
        begin = op.input(LOGIT_BEGIN, np.int64, 1)
        _positions(graph, plan, lambda value: op.Slice(value, begin, [END], [1]))
    if outputs.at_positions:
        # a place for each row of the batch: Gather would take the same for all
        at = op.Unsqueeze(op.input(LOGIT_COLUMNS, np.int64, 2), [2])
        _positions(graph, plan, lambda value: op.GatherND(value, at, batch_dims=1))
    if outputs.of_tokens:
        tokens = op.input(LOGIT_TOKENS, np.int64, 1)
        if not (outputs.only_these and _cut_head(graph, op, tokens)):
            _after(graph, lambda value: op.Gather(value, tokens, axis=_last(graph)))
    if outputs.ranked:
        _rank(graph, op)


def _positions(graph: gs.Graph, plan: Plan, cut: Callable[[gs.Tensor], gs.Tensor]) -> None:
    """Cut down along the sequence, before the head if that changes nothing else."""
    # a hook at the logits sees them all, whatever the call returns
    values = (*plan.captures, *(plan.gradients.by if plan.gradients else ()))
    hooked = HOOKED & {*(edit.hook for edit in plan.edits), *(want.hook for want in values)}
    head = None if hooked else find_head(named(graph)[LOGITS])
    if head is None:
        _after(graph, cut)
        return
    feed_head(head, cut(head.inputs[0]))
    _forget_shape(graph)


def _cut_head(graph: gs.Graph, op: Builder, tokens: gs.Tensor) -> bool:
    """Multiply by the weights of some tokens alone; False where the head has another form."""
    head, passed = head_and_tail(named(graph)[LOGITS])
    # behind the head only scalars may stand: a vector (a bias) has an entry for each token, and would need a cut too
    vectors = [entry for node in passed for entry in node.inputs if isinstance(entry, gs.Constant) and entry.shape]
    if head is None or head.op != "MatMul" or any(np.prod(entry.shape) > 1 for entry in vectors):
        return False
    weight = head.inputs[1]
    turned = weight.inputs[0] if weight.inputs else None
    # tied to the token table [vocab, hidden], or a weight [hidden, vocab] of its own
    if turned is not None and turned.op == "Transpose" and isinstance(turned.inputs[0], gs.Constant):
        head.inputs[1] = op.Transpose(op.Gather(turned.inputs[0], tokens, axis=0), perm=[1, 0])
    elif isinstance(weight, gs.Constant):
        head.inputs[1] = op.Gather(weight, tokens, axis=1)
    else:
        return False
    _forget_shape(graph)
    return True


def _after(graph: gs.Graph, cut: Callable[[gs.Tensor], gs.Tensor]) -> gs.Variable:
    """Let the output be what is part of the logits."""
    full = named(graph)[LOGITS]
    index = next(i for i, output in enumerate(graph.outputs) if output is full)
    part = cut(full)
    full.name, part.name = f"{part.name}.whole", LOGITS  # callers fetch "logits", whatever part that is
    graph.outputs[index] = part
    part.shape = _shape(full)
    _forget_shape(graph)
    return part


def _rank(graph: gs.Graph, op: Builder) -> None:
    k, ids, last = op.input(LOGIT_TOP_K, np.int64, 1), [], _last(graph)

    def largest(value: gs.Tensor) -> gs.Tensor:
        values, tokens = op.TopK(value, k, axis=last, outputs=2, name="top")
        ids.append(tokens)
        return values

    _after(graph, largest)
    ids[0].name, ids[0].shape = TOP_IDS, ["batch", *["mionnx.seq"] * (last - 1), "mionnx.k"]
    graph.outputs += ids
    op.report.outputs.append(TOP_IDS)


def _forget_shape(graph: gs.Graph) -> None:
    """The shape that was written down for the logits is no longer theirs."""
    for output in graph.outputs:
        if output.name in {LOGITS, *HOOKED}:
            output.shape = _shape(output)
    for name in (LOGITS, *sorted(HOOKED)):
        value = named(graph).get(name)
        if value is not None and not isinstance(value, gs.Constant):
            value.shape = _shape(value)


def _last(graph: gs.Graph) -> int:
    """The last axis of the logits: 2, or 1 where a text has one row of them."""
    return len(named(graph)[LOGITS].shape or "bsv") - 1


def _shape(value: gs.Tensor) -> list[str]:
    return (
        ["batch", "mionnx.vocab"] if value.shape and len(value.shape) == 2 else ["batch", "mionnx.seq", "mionnx.vocab"]
    )
