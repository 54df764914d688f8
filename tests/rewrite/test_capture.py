"""Captures as outputs of a small graph: whole, in part, before an intervention, and derived."""

import numpy as np
import pytest
from toy import ATTN_OUT, HEADS, HIDDEN, RESID, WEIGHTS, Z, reference, run, toy

from mionnx import InterventionError, ModelError
from mionnx.graph.layers import Attention
from mionnx.graph.metadata import Metadata
from mionnx.rewrite.apply_plan import rewrite
from mionnx.rewrite.plan import CaptureNode, Edit, Outputs, Plan
from mionnx.spec.kinds.zero import Zero

RESULT = "blocks.0.attn.hook_result"
ONLY = Outputs(logits=False)


def test_captures_are_outputs_in_the_order_of_the_plan():
    nodes = (CaptureNode("hook_embed"), CaptureNode(Z), CaptureNode("hook_logits"))
    found = run(Plan(captures=nodes), ["logits", *(node.fetched for node in nodes)])
    expected = reference()
    assert np.array_equal(found[0], expected["hook_logits"])
    for node, value in zip(nodes, found[1:], strict=True):
        assert np.array_equal(value, expected[node.hook])


def test_a_part_is_gathered_in_the_graph():
    node = CaptureNode(Z, at_positions=True, at_heads=True)
    columns = np.array([[2, 0], [1, 1]])
    (part,) = run(
        Plan(captures=(node,)), [node.fetched], **{node.columns_input: columns, node.heads_input: np.array([1])}
    )
    assert node.fetched == f"{Z}.part"
    assert np.array_equal(part, reference()[Z][np.arange(2)[:, None], columns][:, :, [1]])


@pytest.mark.parametrize("limits", [{}, {"at_heads": True}])
def test_numbers_are_cast_in_the_graph(limits):
    node = CaptureNode(Z, dtype="float16", **limits)
    feeds = {node.heads_input: np.array([1])} if limits else {}
    (found,) = run(Plan(captures=(node,)), [node.fetched], **feeds)
    whole = reference()[Z][:, :, [1]] if limits else reference()[Z]
    assert node.fetched == f"{Z}.part.float16" if limits else f"{Z}.float16"
    assert found.dtype == np.float16
    assert np.array_equal(found, whole.astype(np.float16))


def test_shares_of_the_heads_add_up_to_the_output():
    whole, shares = run(Plan(captures=(CaptureNode(ATTN_OUT), CaptureNode(RESULT))), [ATTN_OUT, RESULT])
    rows = WEIGHTS["W_O"].reshape(HEADS, -1, HIDDEN)
    assert np.array_equal(shares, np.einsum("bshd,hdm->bshm", reference()[Z], rows))
    assert np.array_equal(shares.sum(2), whole)


def test_a_derived_value_is_the_same_before_and_after():
    nodes = CaptureNode(RESULT, before=True), CaptureNode(RESULT)
    before, after = run(Plan(captures=nodes), [node.fetched for node in nodes])
    (alone,) = run(Plan(captures=nodes[:1]), [f"{RESULT}.before"])
    assert np.array_equal(before, after)
    assert np.array_equal(alone, after)


def test_a_projection_that_no_node_reads_is_refused():
    model = toy()
    metadata = Metadata("toy", "float32", model.metadata.sizes, model.metadata.hooks, [Attention("W_X", True)])
    with pytest.raises(ModelError, match="W_X"):
        rewrite(model.proto, Plan(captures=(CaptureNode(RESULT),)), metadata)


def test_without_logits_only_what_a_capture_needs_is_left():
    model = toy()
    _, report = rewrite(model.proto, Plan(captures=(CaptureNode(Z),), outputs=ONLY), model.metadata)
    assert len(report.removed) == len(model.proto.graph.node) - 3  # embedding, its shape, and the reshape
    assert report.outputs == [Z]


def test_an_edit_behind_every_output_is_refused():
    edit = Edit(RESID, Zero(), 0, ("batch", "seq", "hidden"))
    with pytest.raises(InterventionError, match="changes nothing that is asked for"):
        run(Plan((edit,), (CaptureNode(Z),), ONLY), [Z])
    (found,) = run(Plan((edit,), (CaptureNode(RESID),), ONLY), [RESID])
    assert not found.any()
