"""The matrix product that logits come from, through what scales, caps and casts them."""

import onnx
import pytest

from mionnx.graph.edited_graph import edit
from mionnx.graph.output_head import find_head, head_and_tail

GRAPH = """<ir_version: 10, opset_import: ["" : 21]>
g (float[1, 4] x) => (float[1, 3] y)
<float[4, 3] W = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, float[1] s = {2}>
{
  h = Relu(x)
  BODY
}"""


def last_value(body: str):
    graph = edit(onnx.parser.parse_model(GRAPH.replace("BODY", body)))
    return graph.outputs[0]


@pytest.mark.parametrize(
    ("body", "tail"),
    [
        ("y = MatMul(h, W)", []),
        ("p = MatMul(h, W)  y = Add(p, s)", ["Add"]),
        ("p = MatMul(h, W)  d = Div(p, s)  t = Tanh(d)  y = Mul(t, s)", ["Mul", "Tanh", "Div"]),
        ("y = Gemm(h, W)", []),
    ],
)
def test_the_product_is_found_behind_elementwise_nodes(body, tail):
    head, passed = head_and_tail(last_value(body))
    assert head.op in ("MatMul", "Gemm")
    assert [node.op for node in passed] == tail


@pytest.mark.parametrize(
    "body",
    [
        "p = MatMul(h, W)  y = Softmax(p)",  # no elementwise node
        "p = MatMul(h, W)  q = Neg(p)  y = Add(p, q)",  # two computed values
    ],
)
def test_what_is_no_plain_head_has_none(body):
    assert find_head(last_value(body)) is None
