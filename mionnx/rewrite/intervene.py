"""Rewrite: interventions become nodes.

1. The node that made the value at a hook point makes `{hook}.before` instead.
2. The interventions follow, each reading what the one before it made, in registration order.
3. The last one makes the value of the hook's own name, so that every later use and every capture sees the result.
4. Values, positions and masks are inputs: the graph depends on what is done where, not on how much of it.
5. A splice brings hook points of its own: it is inserted before what is done at those.
"""

from collections.abc import Callable, Sequence

import numpy as np
import onnx_graphsurgeon as gs

from mionnx.graph.axes import sequence_axis
from mionnx.graph.builder import Builder
from mionnx.graph.report import Report
from mionnx.rewrite.plan import Edit
from mionnx.rewrite.splice import splice

TOKEN_POSITIONS = "mionnx.token_positions"


def intervene(graph: gs.Graph, edits: Sequence[Edit], report: Report) -> None:
    """Insert all edits of a plan."""
    tensors = graph.tensors()
    positions = token_positions(graph, report) if any(edit.at_positions for edit in edits) else None
    for hook in sorted(dict.fromkeys(edit.hook for edit in edits), key=len):  # an inner name is the longer one
        value = tensors[hook] if hook in tensors else graph.tensors()[hook]
        current = _detach(graph, value)
        here = [edit for edit in edits if edit.hook == hook]
        for edit in here:
            out = value if edit is here[-1] else None
            current = _insert(Builder(graph, hook, edit.prefix, report), edit, current, positions, out)


def _detach(graph: gs.Graph, value: gs.Variable) -> gs.Variable:
    """Let what makes the value make `{name}.before` instead; the value itself is then free for a new producer."""
    before = gs.Variable(f"{value.name}.before", dtype=value.dtype, shape=value.shape)
    if not value.inputs:  # the graph starts with it
        graph.inputs = [before if entry is value else entry for entry in graph.inputs]
        return before
    producer = value.inputs[0]
    producer.outputs[next(i for i, output in enumerate(producer.outputs) if output is value)] = before
    return before


def _insert(
    build: Builder, edit: Edit, old: gs.Variable, positions: gs.Variable | None, out: gs.Variable | None
) -> gs.Variable:
    selection = _selection(build, edit, positions)
    changed = _KINDS[edit.kind](build, edit, old, out if selection is None else None)
    if selection is None:
        return changed
    return build.node("Where", [selection, changed, old], "result", dtype=old.dtype, out=out)


def _value(build: Builder, edit: Edit, old: gs.Variable, rank: int | None = None) -> gs.Variable:
    return build.input(edit.value_input, old.dtype, len(edit.axes) if rank is None else rank)


def _replace(build: Builder, edit: Edit, old: gs.Variable, out: gs.Variable | None) -> gs.Variable:
    return build.node("Identity", [_value(build, edit, old)], "changed", out=out)


def _add(build: Builder, edit: Edit, old: gs.Variable, out: gs.Variable | None) -> gs.Variable:
    return build.node("Add", [old, _value(build, edit, old)], "changed", out=out)


def _scale(build: Builder, edit: Edit, old: gs.Variable, out: gs.Variable | None) -> gs.Variable:
    if not edit.hook.endswith(".hook_scores"):
        return build.node("Mul", [old, _value(build, edit, old)], "changed", out=out)
    # Masked scores are the dtype's lowest number; scaled up they would be -inf, and a row of them (padding) NaN.
    lowest = build.constant("lowest", np.finfo(old.dtype).min, old.dtype)
    scaled = build.node("Mul", [old, _value(build, edit, old)], "scaled")
    return build.node("Max", [scaled, lowest], "changed", out=out)


def _zero(build: Builder, edit: Edit, old: gs.Variable, out: gs.Variable | None) -> gs.Variable:
    # Not a product with 0: that would keep NaN and infinity.
    shape = build.node("Shape", [old], "shape", dtype=np.int64)
    return build.node("Expand", [build.constant("zero", 0, old.dtype), shape], "changed", out=out)


def _project_out(build: Builder, edit: Edit, old: gs.Variable, out: gs.Variable | None) -> gs.Variable:
    """x - (x D^T) D, with the orthonormal directions D as [k, width]."""
    directions = _value(build, edit, old, rank=2)
    turned = build.node("Transpose", [directions], "turned", perm=[1, 0])
    along = build.node("MatMul", [build.node("MatMul", [old, turned], "coefficients"), directions], "along")
    return build.node("Sub", [old, along], "changed", out=out)


_KINDS: dict[str, Callable[[Builder, Edit, gs.Variable, gs.Variable | None], gs.Variable]] = {
    "replace": _replace,
    "add": _add,
    "knockout": _add,
    "scale": _scale,
    "zero": _zero,
    "project_out": _project_out,
    "splice": splice,
}


def _selection(build: Builder, edit: Edit, positions: gs.Variable | None) -> gs.Variable | None:
    """Where the edit applies: bool, broadcast to the value; None if everywhere."""
    chosen = []
    if edit.at_positions:
        chosen.append(_at_positions(build, edit, positions))
    if edit.masked:
        chosen.append(build.input(edit.mask_input, np.bool_, len(edit.axes)))
    if len(chosen) == 2:
        return build.node("And", chosen, "where_both", dtype=np.bool_)
    return chosen[0] if chosen else None


def _at_positions(build: Builder, edit: Edit, positions: gs.Variable) -> gs.Variable:
    """[batch, seq] of the tokens at the edit's positions, with axes of 1 wherever the value has another axis."""
    wanted = build.input(edit.positions_input, np.int64, 2)
    each = build.node("Unsqueeze", [positions, build.ints("last", 2)], "each")
    among = build.node("Unsqueeze", [wanted, build.ints("middle", 1)], "among")
    hits = build.node("Cast", [build.node("Equal", [each, among], "equal", dtype=np.bool_)], "hits", np.int32, to=6)
    any_hit = build.node("ReduceMax", [hits, build.ints("over", 2)], "any", keepdims=0)
    here = build.node("Cast", [any_hit], "here", np.bool_, to=9)
    kept = {0, sequence_axis(edit.axes)}
    others = [axis for axis in range(len(edit.axes)) if axis not in kept]
    return build.node("Unsqueeze", [here, build.ints("others", *others)], "at", dtype=np.bool_)


def token_positions(graph: gs.Graph, report: Report) -> gs.Variable:
    """[batch, seq]: each token's position in its own row's text, -1 for padding."""
    tensors = graph.tensors()
    build = Builder(graph, TOKEN_POSITIONS, TOKEN_POSITIONS, report)
    if "attention_mask" not in tensors:  # a recurrent model has no use for a mask or positions of its own
        return build.input(TOKEN_POSITIONS, np.int64, 2)
    mask, ids, positions = (tensors[name] for name in ("attention_mask", "input_ids", "position_ids"))
    total = build.node("Shape", [mask], "total", np.int64, start=1, end=2)
    seq = build.node("Shape", [ids], "seq", np.int64, start=1, end=2)
    first = build.node("Sub", [total, seq], "first")
    end = build.ints("end", np.iinfo(np.int64).max)
    tokens = build.node("Slice", [mask, first, end, build.ints("axis", 1)], "tokens")
    real = build.node("Cast", [tokens], "real", np.bool_, to=9)
    padding = build.constant("padding", -1, np.int64)
    return build.node("Where", [real, positions, padding], "of_tokens", np.int64)
