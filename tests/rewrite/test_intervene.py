"""Interventions as nodes of a small graph: their order, their limits, their names, equal to numpy."""

import numpy as np
import onnx
import pytest
from toy import ATTN_OUT, HIDDEN, IDS, RESID, Z, reference, run, toy

from mionnx.rewrite.apply_plan import rewrite
from mionnx.rewrite.plan import CaptureNode, Edit, Plan
from mionnx.spec.kinds.add import Add
from mionnx.spec.kinds.scale import Scale
from mionnx.spec.kinds.zero import Zero

STREAM = ("batch", "seq", "hidden")
HEADS = ("batch", "seq", "n_heads", "head_dim")
VECTOR = np.arange(1, HIDDEN + 1, dtype=np.float32).reshape(1, 1, HIDDEN)
FACTOR = np.full((1, 1, 1), 3, np.float32)


def test_without_edits_the_graph_computes_what_numpy_computes():
    (logits,) = run(Plan(), ["logits"])
    assert np.array_equal(logits, reference()["hook_logits"])


@pytest.mark.parametrize("hook", ["hook_embed", ATTN_OUT, RESID])
def test_a_value_and_all_behind_it_change(hook):
    edit = Edit(hook, Add(), 0, STREAM)
    (logits,) = run(Plan((edit,)), ["logits"], **{edit.value_input: VECTOR})
    assert np.array_equal(logits, reference({hook: lambda value: value + VECTOR})["hook_logits"])
    assert not np.array_equal(logits, reference()["hook_logits"])


def test_edits_at_one_hook_apply_in_their_order():
    for kinds, expected in (
        ((Add(), Scale()), lambda x: (x + VECTOR) * 3),
        ((Scale(), Add()), lambda x: x * 3 + VECTOR),
    ):
        edits = tuple(Edit(RESID, kind, n, STREAM) for n, kind in enumerate(kinds))
        values = {edit.value_input: VECTOR if edit.kind.name == "add" else FACTOR for edit in edits}
        plan = Plan(edits, (CaptureNode(RESID), CaptureNode(RESID, before=True)))
        logits, after, before = run(plan, ["logits", RESID, f"{RESID}.before"], **values)
        assert np.array_equal(logits, reference({RESID: expected})["hook_logits"])
        assert np.array_equal(after, expected(before))
        assert np.array_equal(before, reference()[RESID])


def test_positions_are_those_of_the_text_and_padding_has_none():
    """[batch, n] absolute positions, row by row; negative ones select nothing."""
    edit = Edit(ATTN_OUT, Zero(), 0, STREAM, at_positions=True)
    mask = np.array([[0, 1, 1], [1, 1, 1]])
    inputs = {edit.positions_input: np.array([[0, -2], [2, 1]]), "position_ids": np.maximum(mask.cumsum(1) - 1, 0)}
    (logits,) = run(Plan((edit,)), ["logits"], attention_mask=mask, **inputs)
    selected = np.array([[False, True, False], [False, True, True]])[..., None]
    assert np.array_equal(logits, reference({ATTN_OUT: lambda x: np.where(selected, 0, x)})["hook_logits"])


def test_heads_and_rows_are_a_mask_and_go_with_positions():
    edit = Edit(Z, Zero(), 0, HEADS, at_positions=True, masked=True)
    mask = np.array([[True, False], [False, False]]).reshape(2, 1, 2, 1)
    inputs = {edit.positions_input: np.array([[1]]), edit.mask_input: mask}
    (logits,) = run(Plan((edit,)), ["logits"], **inputs)
    expected = reference()[Z].copy()
    expected[0, 1, 0] = 0
    assert np.array_equal(logits, reference({Z: lambda value: expected})["hook_logits"])


def test_values_are_inputs_and_nodes_carry_the_hooks_name():
    model, edit = toy(), Edit(RESID, Add(), 0, STREAM)
    before = model.proto.SerializeToString(deterministic=True)
    content, report = rewrite(model.proto, Plan((edit,)), model.metadata)
    assert model.proto.SerializeToString(deterministic=True) == before
    graph = onnx.load_from_string(content).graph
    assert report.inputs == [edit.value_input] == [entry.name for entry in graph.input][-1:]
    assert {name for names in report.added.values() for name in names} <= {node.name for node in graph.node}
    assert [*report.added] == [RESID]
    assert all(name.startswith(edit.prefix) for name in report.added[RESID])
    assert [entry.name for entry in graph.output] == ["logits"]


def test_a_graph_can_start_at_a_hook_point():
    """The value comes in, whatever the tokens are; an edit there applies to what came in."""
    edit, value = Edit(RESID, Scale(), 0, STREAM), reference()[RESID] + 1
    (logits,) = run(Plan((edit,), starts=(RESID,)), ["logits"], **{f"{RESID}.before": value, edit.value_input: FACTOR})
    assert np.array_equal(logits, reference({RESID: lambda _: value * 3})["hook_logits"])
    (plain,) = run(Plan(starts=(RESID,)), ["logits"], ids=IDS[:, :2] * 0, **{RESID: value})
    assert np.array_equal(plain, reference({RESID: lambda _: value})["hook_logits"])
