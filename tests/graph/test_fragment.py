"""Fragments: weights become inputs, the rest is structure; what is none is refused."""

import numpy as np
import onnx
import pytest

from mionnx.errors import InterventionError
from mionnx.graph.fragment import Fragment, written

TEXT = """<ir_version: 10, opset_import: ["" : 21]>
f (float[batch, seq, 2] x) => (float[batch, seq, 2] y)
<float[2, 2] W = {1, 2, 3, 4}, float scale = {2}>
{
  hook_acts = MatMul(x, W)
  y = Mul(hook_acts, scale)
}"""
W = np.array([[1, 2], [3, 4]], np.float32)


def fragment(text: str = TEXT) -> Fragment:
    return Fragment.of(onnx.parser.parse_model(text))


def test_weights_of_more_than_one_number_are_inputs():
    found = fragment()
    assert {name: array.tolist() for name, array in found.weights.items()} == {"W": W.tolist()}
    assert [value.name for value in found.activations] == ["x"]
    assert [tensor.name for tensor in found.structure.graph.initializer] == ["scale"]
    assert (found.size, found.opset) == (16, 21)


def test_the_hash_is_of_the_structure():
    assert fragment().sha256 == fragment(TEXT.replace("{1, 2, 3, 4}", "{5, 6, 7, 8}")).sha256
    assert fragment().sha256 != fragment(TEXT.replace("scale = {2}", "scale = {3}")).sha256
    assert fragment().sha256 != fragment(TEXT.replace("Mul(hook_acts", "Add(hook_acts")).sha256


def test_bytes_and_files_are_the_same_fragment(tmp_path):
    found, x = fragment(), np.ones((1, 3, 2), np.float32)
    (tmp_path / "f.onnx").write_bytes(found.to_bytes())
    for again in (Fragment.of(found.to_bytes()), Fragment.of(tmp_path / "f.onnx"), Fragment.of(found)):
        assert again.sha256 == found.sha256
        assert np.array_equal(again.evaluate(x), x @ W * 2)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("(float[batch, seq, 2] x)", "()", "one input"),
        ("float[batch, seq, 2] y)", "float[batch, seq, 2] y, float[batch, seq, 2] hook_acts)", "one output"),
        ("W = {1, 2, 3, 4}", "W = {1, 2, 3, nan}", "NaN"),
    ],
)
def test_what_is_no_fragment_is_refused(old, new, message):
    proto = onnx.parser.parse_model(TEXT.replace(old, new) if "nan" not in new else TEXT)
    if "nan" in new:
        proto.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(np.full((2, 2), np.nan, np.float32), "W"))
    if not proto.graph.input:
        proto.graph.node[0].input[0] = "W"
    with pytest.raises(InterventionError, match=message):
        Fragment.of(proto)


def test_operators_of_another_domain_and_other_bytes_are_refused():
    own = TEXT.replace('["" : 21]', '["" : 21, "own" : 1]').replace("Mul(hook", "own.Mul(hook")
    with pytest.raises(InterventionError, match="operators of own"):
        fragment(own)
    with pytest.raises(InterventionError, match="no ONNX model"):
        Fragment.of(b"none")
    with pytest.raises(InterventionError, match="no input for the weight 'V'"):
        written(TEXT, {"V": W})
