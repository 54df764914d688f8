"""Nodes that no output reads are dropped and reported; inputs stay, so that callers may go on feeding them."""

import onnx

from mionnx.graph.builder import edit
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
