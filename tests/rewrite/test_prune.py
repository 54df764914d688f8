"""Nodes that no output reads are dropped and reported; inputs stay, so that callers may go on feeding them."""

import time

import onnx
import onnx_graphsurgeon as gs
import pytest
from onnx import TensorProto, helper

from mionnx.graph.edited_graph import edit
from mionnx.graph.report import Report
from mionnx.rewrite.prune import prune

GRAPH = """<ir_version: 10, opset_import: ["" : 21]>
g (float[2] x, float[2] idle) => (float[2] y)
{
  [second] y = Relu(a)
  [dead] b = Neg(a)
  [deader] c = Neg(b)
  [first] a = Abs(x)
}"""


def test_dead_nodes_go_and_the_others_can_run_in_their_order():
    graph, report = edit(onnx.parser.parse_model(GRAPH)), Report()
    prune(graph, report)
    assert [node.name for node in graph.nodes] == ["first", "second"]
    assert report.removed == ["dead", "deader"]
    assert [entry.name for entry in graph.inputs] == ["x", "idle"]
    prune(graph, report)
    assert report.removed == ["dead", "deader"]


def chain(nodes: int, shared: bool, used: int) -> gs.Graph:
    """A chain of which some nodes, from its beginning, are used; each may read one value beside."""
    more = ["one"] if shared else []
    nodes = [
        helper.make_node("Add" if shared else "Neg", [f"v{i}", *more], [f"v{i + 1}"], name=f"n{i}")
        for i in range(nodes)
    ]
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("v0", "one")]
    outputs = [helper.make_tensor_value_info(f"v{used}", TensorProto.FLOAT, [1])]
    return gs.import_onnx(helper.make_model(helper.make_graph(nodes, "chain", inputs, outputs)))


@pytest.mark.parametrize("nodes", [3_000, pytest.param(30_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("used", [1, 2, 1000])  # the share of the nodes, as a divisor
@pytest.mark.parametrize("shared", [False, True])
def test_chains_are_pruned_in_seconds(nodes, shared, used):
    """Finding 9: half of a chain that reads what the other half reads took 6 s of 3,000 nodes, as the square."""
    used = nodes // used
    graph, report = chain(nodes, shared, used), Report()
    begun = time.process_time()
    prune(graph, report)
    assert time.process_time() - begun < nodes / 3000
    assert [node.name for node in graph.nodes] == [f"n{i}" for i in range(used)]
    assert len(report.removed) == nodes - used
    onnx.checker.check_model(gs.export_onnx(graph))
