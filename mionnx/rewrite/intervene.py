"""Rewrite: interventions become nodes.

1. The node that made the value at a hook point makes `{hook}.before` instead.
2. The interventions follow, each reading what the one before it made, in registration order.
3. The last one makes the value of the hook's own name, so that every later use and every capture sees the result.
4. Values, positions and masks are inputs: the graph depends on what is done where, not on how much of it.
5. A splice brings hook points of its own: it is inserted before what is done at those. The fragment's values get the
   names `{hook}.{name}` where these begin with `hook_`, and else, as its nodes do, the prefix of the splice: two copies
   never collide. What goes in and comes out is cast where it computes in another dtype; its weights become inputs.
"""

from collections.abc import Sequence
from functools import reduce

import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import DTypeLike

from mionnx.graph.axes import sequence_axis
from mionnx.graph.builder import Builder, write
from mionnx.graph.edited_graph import edit as editable
from mionnx.graph.edited_graph import named
from mionnx.graph.fragment import HOOK, FittedFragment
from mionnx.graph.report import Report
from mionnx.rewrite.plan import Edit

TOKEN_POSITIONS = "mionnx.token_positions"


def intervene(graph: gs.Graph, edits: Sequence[Edit], report: Report) -> None:
    """Insert all edits of a plan."""
    tensors = named(graph)
    limited, counted = (any(getattr(edit, name) for edit in edits) for name in ("at_positions", "counted"))
    positions = token_positions(graph, report, counted) if limited else None
    for hook in sorted(dict.fromkeys(edit.hook for edit in edits), key=len):  # an inner name is the longer one
        value = tensors[hook] if hook in tensors else named(graph)[hook]
        current = _detach(graph, value)
        here = [edit for edit in edits if edit.hook == hook]
        for edit in here:
            current = _insert(EditBuilder(graph, edit, report), current, positions)
        write(current, value)


def _detach(graph: gs.Graph, value: gs.Variable) -> gs.Variable:
    """Rename the producer's output to `{name}.before`, which frees the value for a new producer."""
    before = gs.Variable(f"{value.name}.before", dtype=value.dtype, shape=value.shape)
    if not value.inputs:  # the graph starts with it
        graph.inputs = [before if entry is value else entry for entry in graph.inputs]
        return before
    return write(value, before)


def _insert(op: "EditBuilder", old: gs.Variable, positions: gs.Variable | None) -> gs.Variable:
    edit = op.edit
    selection = _selection(op, edit, old, positions)
    ranks = [edit.kind.rank(len(edit.axes), name) for name in edit.kind.values]
    inputs = [op.input(name, old.dtype, rank) for name, rank in zip(edit.value_inputs, ranks, strict=True)]
    changed = edit.kind.nodes(op, old, *inputs)
    # computed everywhere, and taken where it is selected: shapes do not depend on the selection
    return changed if selection is None else op.Where(selection, changed, old, dtype=old.dtype)


class EditBuilder(Builder):
    """Adds the nodes of one edit; `op.fragment(x)` is the output of its fragment."""

    def __init__(self, graph: gs.Graph, edit: Edit, report: Report) -> None:
        super().__init__(graph, edit.hook, edit.prefix, report)
        self.edit = edit

    def fragment(self, x: gs.Variable) -> gs.Variable:
        """Insert the edit's fragment behind `x`."""
        return splice(self, self.edit, x)


def _selection(op: Builder, edit: Edit, old: gs.Variable, positions: gs.Variable | None) -> gs.Variable | None:
    """Selected entries: bool, broadcast to the value; None if the edit has no limits."""
    chosen = []
    if edit.at_positions:
        chosen.append(_at_positions(op, edit, positions))
    if edit.masked:
        chosen.append(op.input(edit.mask_input, np.bool_, len(edit.axes)))
    if edit.at_experts is not None:
        chosen.append(_at_experts(op, edit, old))
    if edit.switched:
        chosen.append(op.input(edit.switch_input, np.bool_, 0))
    return reduce(op.And, chosen) if chosen else None


def _at_positions(op: Builder, edit: Edit, positions: gs.Variable) -> gs.Variable:
    """Tokens at the edit's positions: bool, [batch, seq] and axes of 1 in the value's rank."""
    positions_value = op.input(edit.positions_input, np.int64, 2)
    selected = {0, sequence_axis(edit.axes)}
    here = among(op, positions, positions_value)
    return op.Unsqueeze(here, [axis for axis in range(len(edit.axes)) if axis not in selected])


def _at_experts(op: Builder, edit: Edit, old: gs.Variable) -> gs.Variable:
    """Places of the edit's experts: bool, [batch, seq, n_chosen] and axes of 1."""
    assert edit.at_experts is not None  # else nobody asks
    choice = old if edit.hook == edit.at_experts else named(op.graph)[edit.at_experts]
    numbers = op.input(edit.experts_input, np.int64, 1)
    equal = op.Equal(op.Unsqueeze(choice, [3]), op.Unsqueeze(numbers, [0, 1, 2]))
    here = op.Cast(op.ReduceMax(op.Cast(equal, to=np.int32), [3], keepdims=0), to=np.bool_)
    return op.Unsqueeze(here, [3]) if len(edit.axes) > 3 else here  # one axis behind: the value of each chosen expert


def among(op: Builder, positions: gs.Tensor, targets: gs.Tensor) -> gs.Variable:
    """[batch, seq] bool: tokens at `positions` [batch, seq] among `targets` [batch or 1, n]."""
    equal = op.Equal(op.Unsqueeze(positions, [2]), op.Unsqueeze(targets, [1]))
    any_equal = op.ReduceMax(op.Cast(equal, to=np.int32), [2], keepdims=0)
    return op.Cast(any_equal, to=np.bool_)


def token_positions(graph: gs.Graph, report: Report, counted: bool = False) -> gs.Variable:
    """Position of each token in its row's text, -1 for padding: int64 [batch, seq]; an input if `counted`."""
    tensors = named(graph)
    op = Builder(graph, TOKEN_POSITIONS, TOKEN_POSITIONS, report)
    if counted or "attention_mask" not in tensors:  # a recurrent model may have no mask or positions of its own
        return op.input(TOKEN_POSITIONS, np.int64, 2)
    mask, ids = (tensors[name] for name in ("attention_mask", "input_ids"))
    # the mask covers the past as well: its last columns are those of this call's tokens
    first = op.Sub(op.Shape(mask, start=1, end=2), op.Shape(ids, start=1, end=2))
    tokens = op.Slice(mask, first, [np.iinfo(np.int64).max], [1])
    positions = tensors.get("position_ids")
    if positions is None:  # distances alone count (ALiBi)
        counted = op.Slice(op.CumSum(mask, 1), first, [np.iinfo(np.int64).max], [1])
        positions = op.Sub(counted, 1)
    return op.Where(op.Cast(tokens, to=np.bool_), positions, -1, name="of_tokens")


def splice(op: Builder, edit: Edit, old: gs.Variable) -> gs.Variable:
    """Insert the edit's fragment behind a value; its output, of the value's dtype."""
    fit = edit.fit
    if fit is None:
        raise ValueError(f"{edit.prefix} has no fragment")
    inner = editable(fit.proto)
    weights = [tensor for tensor in inner.inputs if tensor.name in fit.weights]
    activations = [tensor for tensor in inner.inputs if tensor.name not in fit.weights]
    output = inner.outputs[0]
    _rename(inner, edit, fit)
    op.graph.inputs += weights
    op.report.inputs += [tensor.name for tensor in weights]
    sources = [old] if edit.reads is None else [old, named(op.graph)[edit.reads]]
    for value, into in zip(sources, activations, strict=True):
        write(_cast(op, value, into.dtype), into)
    for node in inner.nodes:
        op.graph.nodes.append(node)
        op.report.add(edit.hook, node.name)
    return _cast(op, output, old.dtype)


def _cast(op: Builder, value: gs.Tensor, dtype: DTypeLike) -> gs.Variable:
    """A value under another name, cast if its dtype is another."""
    if value.dtype is None or np.dtype(value.dtype) == np.dtype(dtype):
        return op.Identity(value, dtype=np.dtype(dtype))
    return op.Cast(value, to=np.dtype(dtype))


def _rename(inner: gs.Graph, edit: Edit, fit: FittedFragment) -> None:
    """Give values and nodes of a fragment unique names, also inside `If`, `Loop` and `Scan`."""
    inner_points = {one.name: one for one in fit.inner}
    done = set[int]()
    for number, graph in enumerate([inner, *inner.subgraphs(recursive=True)]):
        for tensor in [*graph.inputs, *named(graph).values(), *graph.outputs]:
            if id(tensor) in done or not tensor.name:  # inputs are among the tensors too; no name: left out
                continue
            done.add(id(tensor))
            here = inner_points.get(tensor.name) if number == 0 else None
            # the shape was for the fragment alone; here its axes follow from the value that it reads
            if here is not None and not isinstance(tensor, gs.Constant):
                tensor.dtype, tensor.shape = np.dtype(here.dtype), None
            own = tensor.name.startswith(HOOK) and here is not None
            tensor.name = f"{edit.hook if own else edit.prefix}.{tensor.name}"
        for at, node in enumerate(graph.nodes):
            # number: nodes of two subgraphs may have one name
            node.name = f"{edit.prefix}.{number}.{node.name or at}:{node.op}"
