"""Weights of every quantised linear map are what ONNX Runtime multiplies with: the map of the identity matrix."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from mionnx.errors import ModelError
from mionnx.graph.builder import Builder
from mionnx.graph.dataflow import Dataflow
from mionnx.graph.edited_graph import edit, serialise
from mionnx.graph.report import Report
from mionnx.graph.weight_value import WEIGHT_PLACE, linear_bias, linear_weight, table_of
from mionnx.rewrite.dequantise import dequantised

FLOAT, RANDOM = TensorProto.FLOAT, np.random.default_rng(0)
Case = tuple[list[onnx.NodeProto], dict[str, np.ndarray]]


def graph_of(case: Case, rows: int | None = None) -> onnx.ModelProto:
    """x [n, in] -> y, or ids [n] -> y."""
    nodes, weights = case
    given = helper.make_tensor_value_info("x", FLOAT, ["n", None])
    if rows is not None:
        given = helper.make_tensor_value_info("x", TensorProto.INT64, ["n"])
    made = helper.make_tensor_value_info("y", FLOAT, None)
    held = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(helper.make_graph(nodes, "g", [given], [made], held), opset_imports=opsets, ir_version=10)


def microsoft(operator: str, inputs: list[str], **attributes: Any) -> list[onnx.NodeProto]:
    return [helper.make_node(operator, inputs, ["y"], "map", domain="com.microsoft", **attributes)]


def integers(shape: tuple[int, ...], dtype: Any = np.uint8) -> np.ndarray:
    limits = np.iinfo(dtype)
    return RANDOM.integers(limits.min, limits.max + 1, shape).astype(dtype)


def scales(*shape: int) -> np.ndarray:
    return RANDOM.uniform(0.01, 0.1, shape).astype(np.float32)


def blocks(bits: int, zero: str, width: int = 40, count: int = 6, block: int = 16) -> Case:
    """A MatMulNBits whose last block is not full."""
    number = -(-width // block)
    weights = {"b": integers((count, number, block * bits // 8)), "s": scales(count, number)}
    if zero == "packed":
        weights["z"] = integers((count, -(-number * bits // 8)))
    elif zero == "float":
        weights["z"] = RANDOM.uniform(1, 14, (count, number)).astype(np.float32)
    given = {"K": width, "N": count, "bits": bits, "block_size": block}
    return microsoft("MatMulNBits", ["x", *weights], **given), weights


def several_places(times: int, rows: bool = False) -> Case:
    """A MatMulNBits whose inputs stand at so many places each, in any order; `rows`: some rows alone read them."""
    (product,), weights = blocks(4, "packed", width=40 * times)
    weights["order"] = RANDOM.permutation(np.tile(np.arange(40), times))
    nodes = [helper.make_node("Gather", ["x", "order"], ["placed"], axis=-1)]
    if rows:
        weights |= {"begin": np.array([0]), "end": np.array([1000])}
        nodes.append(helper.make_node("Slice", ["placed", "begin", "end"], ["of_rows"]))
    product.input[0] = nodes[-1].output[0]
    return [*nodes, product], weights


def dynamic() -> Case:
    weights = {"b": integers((40, 6), np.int8), "s": scales(6), "z": integers((6,), np.int8), "c": scales(6)}
    return microsoft("DynamicQuantizeMatMul", ["x", *weights]), weights


def integer_product(operator: str) -> Case:
    """The quantiser's chain: DynamicQuantizeLinear, a product of integers, the product of both scales."""
    weights = {"b": integers((40, 6), np.int8), "s": scales(6), "z": integers((6,), np.int8)}
    nodes = [helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "qs", "qz"])]
    if operator == "MatMulIntegerToFloat":
        return [*nodes, *microsoft(operator, ["q", "b", "qs", "s", "qz", "z"])], weights
    return [
        *nodes,
        helper.make_node("MatMulInteger", ["q", "b", "qz", "z"], ["p"]),
        helper.make_node("Cast", ["p"], ["f"], to=FLOAT),
        helper.make_node("Mul", ["qs", "s"], ["both"]),
        helper.make_node("Mul", ["f", "both"], ["y"]),
    ], weights


def gemm() -> Case:
    weights = {"b": integers((6, 40), np.int8), "s": scales(6), "z": integers((6,), np.int8), "c": scales(6)}
    return [
        helper.make_node("DequantizeLinear", ["b", "s", "z"], ["w"], axis=0),
        helper.make_node("Gemm", ["x", "w", "c"], ["y"], transB=1),
    ], weights


def turned() -> Case:
    nodes = [helper.make_node("Transpose", ["b"], ["w"], perm=[1, 0]), helper.make_node("MatMul", ["x", "w"], ["y"])]
    return nodes, {"b": scales(6, 40)}


LINEAR = {
    **{f"{bits} bits, {zero}": blocks(bits, zero) for bits in (4, 8) for zero in ("none", "packed")},
    "4 bits, float": blocks(4, "float"),
    "whole blocks": blocks(4, "packed", width=32),
    "inputs in another order": several_places(1),
    "each input twice": several_places(2),
    "each input three times, rows": several_places(3, rows=True),
    "DynamicQuantizeMatMul": dynamic(),
    "MatMulInteger": integer_product("MatMulInteger"),
    "MatMulIntegerToFloat": integer_product("MatMulIntegerToFloat"),
    "Gemm": gemm(),
    "Transpose": turned(),
}


def ran(proto: onnx.ModelProto | bytes, x: np.ndarray) -> Any:
    data = proto if isinstance(proto, bytes) else proto.SerializeToString()
    return ort.InferenceSession(data, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]


@pytest.mark.parametrize("name", LINEAR)
def test_a_linear_map_of_the_identity_is_its_weight(name: str) -> None:
    case = LINEAR[name]
    proto = graph_of(case)
    flow = Dataflow(proto)
    node = next(node for node in case[0] if node.op_type in WEIGHT_PLACE)
    weight, bias = linear_weight(flow, Path(), node), linear_bias(flow, Path(), node)
    expected = ran(proto, np.eye(weight.shape[0], dtype=np.float32)) - (0 if bias is None else bias)
    assert np.abs(weight - expected).max() <= 3e-6 * np.abs(expected).max()
    assert (bias is not None) == ("c" in case[1])


@pytest.mark.parametrize("name", [name for name in LINEAR if name != "Transpose"])
def test_nodes_of_the_numbers_give_the_numbers(name: str) -> None:
    """`dequantised` in a graph is `linear_weight` in numpy, to the bit where zero points are whole."""
    case = LINEAR[name]
    proto = graph_of(case)
    node = next(node for node in case[0] if node.op_type in WEIGHT_PLACE)
    weight = linear_weight(Dataflow(proto), Path(), node)
    graph = edit(proto)
    numbers = dequantised(Builder(graph, "here", "w", Report()), graph.tensors()["b"])
    numbers.shape, numbers.dtype = None, np.dtype(np.float32)
    graph.outputs = [numbers]
    found = ran(serialise(graph, proto), np.zeros((1, 40 if name != "whole blocks" else 32), np.float32))
    found = found if found.shape == weight.shape else found.T
    assert np.abs(found - weight).max() <= (1e-6 if "float" in name else 0)


@pytest.mark.parametrize(
    ("form", "bits", "zero"),
    [("uint4", 4, True), ("int4", 4, False), ("uint8", 4, True), ("uint8", 4, False), ("uint8", 8, True)],
)
def test_every_row_of_a_table_in_blocks_is_what_is_gathered(form: str, bits: int, zero: bool) -> None:
    rows, width, block = 5, 64, 16
    kind = {"uint4": TensorProto.UINT4, "int4": TensorProto.INT4, "uint8": TensorProto.UINT8}[form]

    def held(shape: tuple[int, int]) -> np.ndarray:
        packed = (*shape[:1], shape[1] * bits // 8) if form == "uint8" else shape
        tensor = onnx.TensorProto(data_type=kind, dims=packed)
        tensor.raw_data = integers((shape[0] * shape[1] * bits // 8,)).tobytes()
        return numpy_helper.to_array(tensor)

    weights = {"b": held((rows, width)), "s": scales(rows, width // block)} | (
        {"z": held((rows, width // block))} if zero else {}
    )
    inputs = ["b", "x", *[*weights][1:]]
    case = microsoft("GatherBlockQuantized", inputs, block_size=block, bits=bits), weights
    proto = graph_of(case, rows)
    assert np.array_equal(table_of(Dataflow(proto), Path(), case[0][0]), ran(proto, np.arange(rows)))


def test_a_table_that_is_turned_or_packed_for_the_head_is_read() -> None:
    """onnxruntime-genai ties embeddings: the head's weight, turned or reshaped, is the table."""
    float_table = {"b": scales(6, 40)}
    nodes = [helper.make_node("Transpose", ["b"], ["t"], perm=[1, 0]), helper.make_node("Gather", ["t", "x"], ["y"])]
    proto = graph_of((nodes, float_table), 40)
    assert np.array_equal(table_of(Dataflow(proto), Path(), nodes[1]), float_table["b"].T)
    head, weights = blocks(4, "none", width=32)
    weights["shape"] = np.array([6, 16])
    table = microsoft("GatherBlockQuantized", ["t", "x", "s"], block_size=16, bits=4)[0]
    proto = graph_of(([helper.make_node("Reshape", ["b", "shape"], ["t"]), table], weights), 6)
    found = table_of(Dataflow(proto), Path(), table)
    assert np.array_equal(found, ran(proto, np.arange(6)))
    assert np.array_equal(found, linear_weight(Dataflow(graph_of((head, weights))), Path(), head[0]).T)


def test_what_is_not_read_is_refused_by_its_name() -> None:
    nodes, weights = blocks(4, "packed")
    nodes[0].input.append("g")
    weights["g"] = np.arange(48, dtype=np.int32)
    with pytest.raises(ModelError, match="map: MatMulNBits with g_idx"):
        linear_weight(Dataflow(graph_of((nodes, weights))), Path(), nodes[0])
    graph = edit(graph_of((nodes, weights)))
    with pytest.raises(ModelError, match="map: MatMulNBits of 4 bits, or with g_idx"):
        dequantised(Builder(graph, "here", "w", Report()), graph.tensors()["b"])
    odd = [helper.make_node("Relu", ["b"], ["w"]), helper.make_node("MatMul", ["x", "w"], ["y"])]
    with pytest.raises(ModelError, match="w is made by Relu, where a weight was looked for"):
        linear_weight(Dataflow(graph_of((odd, {"b": scales(40, 6)}))), Path(), odd[1])
    plain = [helper.make_node("Cast", ["b"], ["w"], to=FLOAT), helper.make_node("MatMul", ["x", "w"], ["y"])]
    graph = edit(graph_of((plain, {"b": integers((40, 6), np.int8)})))
    with pytest.raises(ModelError, match="b is quantised, and the graph does not say its scales"):
        dequantised(Builder(graph, "here", "w", Report()), graph.tensors()["b"])
