"""`Dataflow`: who makes and reads each value, what depends on what, and what crosses a cut."""

import onnx
import pytest

from mionnx.graph.dataflow import Dataflow

DIAMOND = """<ir_version: 10, opset_import: ["" : 21]>
g (float[2] x, float[2] other) => (float[2] y, float[2] z)
<float[2] w = {1, 2}>
{
  a = Add(x, w)
  left = Relu(a)
  right = Neg(a)
  turned = Neg(w)
  y = Sub(left, right)
  z = Mul(right, turned)
}"""

BRANCH = """<ir_version: 10, opset_import: ["" : 21]>
g (float[2] x, bool go) => (float[2] y)
{
  a = Neg(x)
  y = If(go) <
    then_branch = yes () => (float[2] t) { inner = Abs(a)  t = Relu(inner) },
    else_branch = no () => (float[2] e) { e = Identity(x) }
  >
}"""


def flow(text: str) -> Dataflow:
    return Dataflow(onnx.parser.parse_model(text))


def made_by(found: Dataflow, nodes: set[int]) -> set[str]:
    return {found.nodes[i].output[0] for i in nodes}


def test_every_value_has_its_producer_and_its_readers():
    found = flow(DIAMOND)
    assert found.producer("left").op_type == "Relu"
    assert found.producer("x") is found.producer("w") is None
    assert made_by(found, {*found.consumers["a"]}) == {"left", "right"}
    assert "other" not in found.consumers


def test_ancestors_end_at_what_is_known():
    found = flow(DIAMOND)
    assert made_by(found, found.ancestors(["y"])) == {"a", "left", "right", "y"}
    assert made_by(found, found.ancestors(["y"], {"right"})) == {"a", "left", "y"}
    assert made_by(found, found.ancestors(["y"], {"left", "right"})) == {"y"}
    assert found.ancestors(["y"], {"y"}) == set()


def test_descendants_are_what_follows():
    found = flow(DIAMOND)
    assert found.descendants(["right"]) == {"right", "y", "z"}
    assert found.descendants(["w"]) == {"w", "a", "left", "right", "turned", "y", "z"}
    assert found.descendants(["other"]) == {"other"}


def test_only_the_known_values_that_are_read_are_needed():
    assert flow(DIAMOND).needed(["other", "right", "x"], ["z"]) == ["right"]
    assert flow(DIAMOND).needed(["other", "x"], ["z"]) == ["x"]


def test_a_subgraph_reads_from_outside_and_its_own_names_are_not_read():
    found = flow(BRANCH)
    assert {*found.reads[1]} == {"go", "a", "x"}
    assert made_by(found, found.ancestors(["y"])) == {"a", "y"}
    assert "y" in found.descendants(["a"])


@pytest.mark.parametrize(
    ("cuts", "expected"),
    [
        ([["a"]], [("a",)]),
        ([["left"]], [("a", "left")]),  # `right` is first read behind the cut, and so is made there
        ([["left", "right"]], [("left", "right")]),
        ([["a"], ["y"]], [("a",), ("right",)]),
    ],
)
def test_what_is_read_behind_a_cut_crosses_it(cuts, expected):
    found = flow(DIAMOND).crossings(cuts, ["z"] if len(cuts) == 2 else ["y", "z"], ["x"])
    assert [{*names} for names in found] == [{*names} for names in expected]


def test_what_does_not_follow_from_the_sources_crosses_nothing():
    """`turned` is made of a weight alone: each segment makes it for itself."""
    assert all("turned" not in names for names in flow(DIAMOND).crossings([["a"], ["left"]], ["y", "z"], ["x"]))
