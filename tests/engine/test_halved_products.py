"""Products of 8 bits in floats as two of 4 bits: the same numbers, and what cannot be halved stays."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from mionnx.engine.halved_products import halve_products

COLUMNS, ROWS = 48, 96


def product(block: int, zeros: bool, bias: bool, level: int = 0, bits: int = 8) -> tuple[onnx.ModelProto, np.ndarray]:
    """A model of one product, and the float64 matrix [rows, columns] that its weight stands for."""
    random, blocks = np.random.default_rng(block), ROWS // block
    packed = random.integers(0, 256, (COLUMNS, blocks, block * bits // 8)).astype(np.uint8)
    scales = random.random((COLUMNS, blocks)).astype(np.float32)
    points = random.integers(0, 256, (COLUMNS, blocks)).astype(np.uint8) if zeros else np.full((COLUMNS, blocks), 128)
    held = {"weight": packed, "scales": scales}
    held |= {"points": points} if zeros else {}
    held |= {"bias": random.random(COLUMNS).astype(np.float32)} if bias else {}
    inputs = ["x", "weight", "scales", "points" if zeros else "", "", "bias" if bias else ""]
    while not inputs[-1]:
        inputs.pop()
    settings = {"K": ROWS, "N": COLUMNS, "bits": bits, "block_size": block, "accuracy_level": level}
    node = helper.make_node("MatMulNBits", inputs, ["y"], domain="com.microsoft", **settings)
    graph = helper.make_graph(
        [node], "product",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["tokens", ROWS])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["tokens", COLUMNS])],
        [numpy_helper.from_array(value, name) for name, value in held.items()],
    )  # fmt: skip
    domains = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=domains, ir_version=10)
    matrix = (packed.astype(float) - points[..., None]) * scales[..., None]  # of 8 bits
    return model, matrix.reshape(COLUMNS, -1).T


@pytest.mark.parametrize("block", [16, 32])  # six blocks in a row, and three: zero points of two share a byte
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 5])
def test_the_halves_have_the_numbers_of_the_whole(block, zeros, bias, tokens):
    model, matrix = product(block, zeros, bias)
    x = np.random.default_rng(1).normal(size=(tokens, ROWS)).astype(np.float32)
    expected = x.astype(float) @ matrix
    if bias:
        expected = expected + numpy_helper.to_array(model.graph.initializer[-1])
    assert halve_products(model) == 1
    assert {entry.i for node in model.graph.node for entry in node.attribute if entry.name == "bits"} == {4}
    found = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


def test_what_has_a_kernel_or_is_no_constant_stays():
    for given in ({"level": 4}, {"bits": 4}):
        model, _ = product(32, False, False, **given)
        assert not halve_products(model)
    model, _ = product(32, False, False)
    model.graph.input.append(helper.make_tensor_value_info("scales", onnx.TensorProto.FLOAT, [COLUMNS, 3]))
    assert not halve_products(model)
