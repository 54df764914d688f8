"""Quantised weights are the numbers that ONNX says they stand for, or are refused by their name."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_dynamic, quantize_static
from repository import REPOSITORY

from mionnx.analysis.weights.graph_weights import GraphWeights
from mionnx.errors import ModelError
from mionnx.graph import matrices
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.weight_value import dequantise, rounded, weight_numbers

GPT2 = REPOSITORY / "models" / "world-gpt2"
LLAMA = REPOSITORY / "models" / "world-llama"
OPERATORS = ["MatMul", "Gather", "Gemm"]


def evaluated(integers: np.ndarray, scale: np.ndarray, zero: np.ndarray | None, **attributes: int) -> np.ndarray:
    """The same by onnx's reference evaluator."""
    arrays = {"q": integers, "s": scale} | ({} if zero is None else {"z": zero})
    node = helper.make_node("DequantizeLinear", [*arrays], ["y"], **attributes)
    weights = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "one", [], [output], weights)
    found: Any = ReferenceEvaluator(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])).run(None, {})
    return found[0]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, ml_dtypes.int4, ml_dtypes.uint4])
@pytest.mark.parametrize(
    ("shape", "attributes"),
    [
        ((), {}),
        ((6,), {"axis": 0}),
        ((8,), {"axis": 1}),
        ((8,), {"axis": -1}),
        ((6, 2), {"axis": 1, "block_size": 4}),
        ((3, 8), {"axis": 0, "block_size": 2}),
    ],
    ids=str,
)
def test_numbers_are_those_of_the_reference(dtype: Any, shape: tuple[int, ...], attributes: dict[str, int]) -> None:
    random = np.random.default_rng(0)
    low, high = int(ml_dtypes.iinfo(dtype).min), int(ml_dtypes.iinfo(dtype).max)
    integers = random.integers(low, high + 1, (6, 8)).astype(dtype)
    scale = random.uniform(0.01, 0.1, shape).astype(np.float32)
    zero = random.integers(max(low, -4), min(high, 7), shape).astype(dtype)
    for zeros in (zero, None):
        found = dequantise(integers, scale, zeros, **attributes)
        assert found.dtype == np.float32
        assert np.array_equal(found, evaluated(integers, scale, zeros, **attributes))


def test_scales_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ModelError, match=r"scales \[5\] along axis 1 do not fit quantised numbers \[6, 8\]"):
        dequantise(np.zeros((6, 8), np.int8), np.ones(5, np.float32))


def parsed(body: str, inputs: str, **weights: np.ndarray) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> g ({inputs}) => (float y) {{ {body} }}')
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    return model


Q = np.arange(-6, 6, dtype=np.int8).reshape(3, 4)
S, Z = np.array([0.5, 0.25, 2.0, 1.0], np.float32), np.array([1, 0, -1, 2], np.int8)


@pytest.mark.parametrize(
    ("body", "inputs"),
    [
        ("y = QLinearMatMul(a, s1, z1, w, s, z, s1, z1)", "int8[n, 3] a, float s1, int8 z1"),
        (
            "p = MatMulInteger(a, w, z1, z) c = Cast<to = 1>(p) t = Mul(s1, s) y = Mul(c, t)",
            "int8[n, 3] a, float s1, int8 z1",
        ),
        ("f = DequantizeLinear<axis = 1>(w, s, z) y = MatMul(a, f)", "float[n, 3] a"),
    ],
    ids=["QLinearMatMul", "MatMulInteger", "DequantizeLinear"],
)
def test_scales_are_found_by_what_the_graph_does(body: str, inputs: str) -> None:
    model = parsed(body, inputs, w=Q, s=S, z=Z)
    assert np.array_equal(weight_numbers(model, Path(), "w"), evaluated(Q, S, Z, axis=1))


@pytest.mark.parametrize(
    ("body", "inputs"),
    [("c = Cast<to = 1>(w) y = MatMul(a, c)", "float[n, 3] a"), ("y = MatMulInteger(a, w)", "int8[n, 3] a")],
)
def test_integers_without_scales_are_refused_by_name(body: str, inputs: str) -> None:
    with pytest.raises(ModelError, match=r"the weight 'w' is quantised, int8 \[3, 4\]"):
        weight_numbers(parsed(body, inputs, w=Q), Path(), "w")


def test_a_weight_that_is_rounded_after_it_was_computed() -> None:
    numbers, scale, zero = np.linspace(-9, 9, 24, dtype=np.float32).reshape(4, 6), np.float32(0.05), np.uint8(100)
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]),
    ]
    arrays = {"x": numbers, "s": np.array(scale), "z": np.array(zero)}
    weights = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "one", [], [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)], weights)
    expected: Any = ReferenceEvaluator(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])).run(
        None, {}
    )
    assert np.array_equal(rounded(numbers, arrays["s"], arrays["z"]), expected[0])


class Prompt(CalibrationDataReader):
    """One text of five tokens for the calibration of static quantisation."""

    def __init__(self, model: onnx.ModelProto) -> None:
        sizes = {"batch": 1, "seq": 5, "past": 0, "total": 5, "past_seq": 0, "total_seq": 5}
        feeds = {value.name: self._feed(value, sizes) for value in model.graph.input}
        self.left = iter([feeds])

    def _feed(self, value: onnx.ValueInfoProto, sizes: dict[str, int]) -> np.ndarray:
        tensor = value.type.tensor_type
        shape = [dim.dim_value or sizes.get(dim.dim_param, 5) for dim in tensor.shape.dim]
        if value.name.startswith("past"):
            shape[2] = 0
        if value.name == "attention_mask":
            return np.ones(shape, np.int64)
        dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        return np.arange(int(np.prod(shape))).astype(dtype).reshape(shape)

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.left, None)


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path, str, bool], HookedModel]:
    def make(source: Path, how: str, per_channel: bool) -> HookedModel:
        folder = Path(shutil.copytree(source, tmp_path_factory.mktemp("quantised") / "model"))
        source = shutil.copytree(source, tmp_path_factory.mktemp("source") / "model")  # onnx refuses linked weights
        model = onnx.load(source / "model.onnx")
        options: dict[str, Any] = {"op_types_to_quantize": OPERATORS, "per_channel": per_channel}
        if how == "dynamic":
            quantize_dynamic(model, folder / "model.onnx", **options)
        else:
            quantize_static(model, folder / "model.onnx", Prompt(model), QuantFormat.QDQ, **options)
        return HookedModel.open(folder, check="none")

    return make


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("source", "how", "per_channel"),
    [(GPT2, "dynamic", True), (GPT2, "dynamic", False), (GPT2, "static", True), (LLAMA, "dynamic", False)],
    ids=["gpt2-dynamic-channels", "gpt2-dynamic", "gpt2-static-channels", "llama-dynamic"],
)
def test_matrices_of_a_quantised_model_are_near_those_of_the_model(
    source: Path, how: str, per_channel: bool, quantised: Callable[[Path, str, bool], HookedModel]
) -> None:
    """Rounding moves a number by at most half a step; the steps of 8 bits are the range / 255."""
    plain, coarse = HookedModel.open(source), quantised(source, how, per_channel)

    def projections(model: HookedModel) -> np.ndarray:
        return GraphWeights(model).read("W_O", 1)

    for read in (matrices.embedding, matrices.unembedding, projections, matrices.unembedding_bias):
        expected, found = read(plain), read(coarse)
        assert (found.shape, found.dtype) == (expected.shape, np.float32), read.__name__
        assert np.abs(found - expected).max() <= np.ptp(expected) / 255, read.__name__
    assert not np.array_equal(matrices.embedding(plain), matrices.embedding(coarse))


def test_a_head_of_integer_products_is_refused_by_name(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(LLAMA, tmp_path / "model"))
    with pytest.raises(ModelError, match="MatMulInteger, products of quantised numbers"):
        matrices.unembedding(_with_integer_head(folder))


def _with_integer_head(folder: Path) -> HookedModel:
    """world-llama, with the last product on integers."""
    model = HookedModel.open(folder)
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    last = [node for node in proto.graph.node if node.op_type == "MatMul"][-1]
    last.op_type = "MatMulInteger"
    vars(model)["proto"] = proto
    return model
