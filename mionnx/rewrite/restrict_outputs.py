"""Rewrite: only what is asked for leaves the graph, and only what that needs is left in it.

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
from mionnx.graph.io_names import KEYS_AND_VALUES, STATE
from mionnx.graph.output_head import LOGITS, find_head, head_and_tail
from mionnx.graph.report import Report
from mionnx.rewrite.plan import LOGIT_COLUMNS, LOGIT_TOKENS, TOP_IDS, TOP_K, Plan

HOOKED = "hook_logits"


def restrict(graph: gs.Graph, plan: Plan, report: Report) -> None:
    """Cut the model's own outputs down to those of a plan."""
    wanted = plan.outputs
    if not wanted.carried:
        graph.outputs = [
            output for output in graph.outputs if not output.name.startswith((KEYS_AND_VALUES.present, STATE.present))
        ]
    if not wanted.logits:
        graph.outputs = [output for output in graph.outputs if output.name != LOGITS]
        return
    build = Builder(graph, LOGITS, "mionnx.logits", report)
    if wanted.last:
        _positions(graph, plan, lambda value: _last(build, value))
    if wanted.at_positions:
        columns = build.input(LOGIT_COLUMNS, np.int64, 2)
        at = build.node("Unsqueeze", [columns, build.ints("each", 2)], "at", np.int64)
        _positions(graph, plan, lambda value: build.node("GatherND", [value, at], "chosen", batch_dims=1))
    if wanted.of_tokens:
        tokens = build.input(LOGIT_TOKENS, np.int64, 1)
        if not (wanted.only_these and _cut_head(graph, build, tokens)):
            _after(graph, lambda value: build.node("Gather", [value, tokens], "of_tokens", axis=2))
    if wanted.ranked:
        _rank(graph, build)


def _last(build: Builder, value: gs.Tensor) -> gs.Tensor:
    end = build.ints("end", np.iinfo(np.int64).max)
    return build.node("Slice", [value, build.ints("start", -1), end, build.ints("axis", 1)], "last")


def _positions(graph: gs.Graph, plan: Plan, cut: Callable[[gs.Tensor], gs.Tensor]) -> None:
    """Cut down along the sequence, before the head if that changes nothing else."""
    hooked = HOOKED in {*(edit.hook for edit in plan.edits), *(want.hook for want in plan.captures)}
    head = None if hooked else find_head(graph.tensors()[LOGITS])
    if head is None:
        _after(graph, cut)
        return
    head.inputs[0] = cut(head.inputs[0])
    _forget_shape(graph)


def _cut_head(graph: gs.Graph, build: Builder, tokens: gs.Tensor) -> bool:
    """Multiply by the weights of some tokens alone; False where the head has another form."""
    head, passed = head_and_tail(graph.tensors()[LOGITS])
    vectors = [entry for node in passed for entry in node.inputs if isinstance(entry, gs.Constant) and entry.shape]
    if head is None or head.op != "MatMul" or any(np.prod(entry.shape) > 1 for entry in vectors):
        return False
    weight = head.inputs[1]
    turned = weight.inputs[0] if weight.inputs else None
    if turned is not None and turned.op == "Transpose" and isinstance(turned.inputs[0], gs.Constant):
        rows = build.node("Gather", [turned.inputs[0], tokens], "their_rows", axis=0)
        head.inputs[1] = build.node("Transpose", [rows], "their_weights", perm=[1, 0])
    elif isinstance(weight, gs.Constant):
        head.inputs[1] = build.node("Gather", [weight, tokens], "their_weights", axis=1)
    else:
        return False
    _forget_shape(graph)
    return True


def _after(graph: gs.Graph, cut: Callable[[gs.Tensor], gs.Tensor]) -> gs.Variable:
    """Let the output be what is made of the logits."""
    whole = graph.tensors()[LOGITS]
    place = next(i for i, output in enumerate(graph.outputs) if output is whole)
    made = cut(whole)
    whole.name, made.name = f"{made.name}.whole", LOGITS
    graph.outputs[place] = made
    made.shape = None
    _forget_shape(graph)
    return made


def _rank(graph: gs.Graph, build: Builder) -> None:
    k = build.input(TOP_K, np.int64, 1)
    ids = gs.Variable(TOP_IDS, dtype=np.dtype(np.int64), shape=["batch", "mionnx.seq", "mionnx.k"])

    def largest(value: gs.Tensor) -> gs.Tensor:
        values = gs.Variable("mionnx.logits.top", dtype=value.dtype)
        graph.nodes.append(gs.Node("TopK", "mionnx.logits.top:TopK", {"axis": 2}, [value, k], [values, ids]))
        build.report.add(LOGITS, "mionnx.logits.top:TopK")
        return values

    _after(graph, largest)
    graph.outputs.append(ids)
    build.report.outputs.append(TOP_IDS)


def _forget_shape(graph: gs.Graph) -> None:
    """The shape that was written down for the logits is no longer theirs."""
    for output in graph.outputs:
        if output.name in (LOGITS, HOOKED):
            output.shape = ["batch", "mionnx.seq", "mionnx.vocab"]
    for name in (LOGITS, HOOKED):
        value = graph.tensors().get(name)
        if value is not None and not isinstance(value, gs.Constant):
            value.shape = ["batch", "mionnx.seq", "mionnx.vocab"]
