"""The table of operators: each row expands, is put back, and gives what ONNX Runtime's own operator gives."""

from collections import Counter

import fused_llama
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import helper

from exporters.adopt import adopt
from exporters.adopt.operators.expand import expand, named
from exporters.recurrence.expand import expand as expand_recurrences
from exporters.value_types import infer_types
from mionnx import ExportError, HookSpec, MIModel
from mionnx.graph.dataflow import Dataflow
from mionnx.graph.fused_operators import CALL, read_fused, restore, written
from mionnx.graph.operator_table import DOMAIN, OPERATORS

BATCH, SEQ, HEADS, WIDTH = 2, 5, 2, 16
HIDDEN = HEADS * WIDTH
RANDOM = np.random.default_rng(0)
EXPANDED = [operator for operator, row in OPERATORS.items() if row.expansion is not None]
RESTORED = [operator for operator in EXPANDED if OPERATORS[operator].expansion.put_back]
TOLERANCE = 2e-6  # of float32, on numbers of order 1


def numbers(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


X, SKIP, WEIGHT, SHIFT = numbers(BATCH, SEQ, HIDDEN), numbers(BATCH, SEQ, HIDDEN), numbers(HIDDEN), numbers(HIDDEN)
Q, K, V = (numbers(BATCH, HEADS, SEQ, WIDTH) for _ in "qkv")
POSITIONS = np.tile(np.arange(SEQ), (BATCH, 1))
TABLES = [np.cos(numbers(SEQ, WIDTH // 2)), np.sin(numbers(SEQ, WIDTH // 2))]
ONES = np.ones((BATCH, SEQ), np.int32)
LENGTHS = [np.full(BATCH, SEQ - 1, np.int32), np.array(SEQ, np.int32)]
# Operator -> its inputs (None where left out), its attributes, the number of its outputs.
EXAMPLES = {
    ("", "SimplifiedLayerNormalization"): ([X, WEIGHT], {"epsilon": 1e-4}, 1),
    (DOMAIN, "SkipSimplifiedLayerNormalization"): ([X, SKIP, WEIGHT, SHIFT], {"epsilon": 1e-4}, 1),
    (DOMAIN, "SkipLayerNormalization"): ([X, SKIP, WEIGHT, WEIGHT, SHIFT], {"epsilon": 1e-4}, 1),
    (DOMAIN, "RotaryEmbedding"): ([Q, POSITIONS, *TABLES], {"interleaved": 1}, 1),
    ("", "RotaryEmbedding"): ([Q, *TABLES, POSITIONS], {}, 1),
    (DOMAIN, "GroupQueryAttention"): (
        [X, SKIP, SKIP, None, None, *LENGTHS, *TABLES],
        {"num_heads": HEADS, "kv_num_heads": HEADS, "do_rotary": 1},
        1,
    ),
    (DOMAIN, "MultiHeadAttention"): ([X, SKIP, X, WEIGHT.repeat(3)], {"num_heads": HEADS}, 1),
    (DOMAIN, "Attention"): (
        [X, numbers(HIDDEN, 3 * HIDDEN) / 6, numbers(3 * HIDDEN), ONES],
        {"num_heads": HEADS, "unidirectional": 1},
        1,
    ),
    ("", "Attention"): ([Q, K, V, np.tri(SEQ, dtype=bool)[None, None]], {"softcap": 3.0}, 1),
    (DOMAIN, "Gelu"): ([X], {}, 1),
    (DOMAIN, "BiasGelu"): ([X, SHIFT], {}, 1),
    (DOMAIN, "FastGelu"): ([X, SHIFT], {}, 1),
    (DOMAIN, "QuickGelu"): ([X], {"alpha": 1.5}, 1),
    (DOMAIN, "GatedRMSNorm"): ([X, WEIGHT[:WIDTH], SKIP], {"epsilon": 1e-4}, 1),
    (DOMAIN, "GatedAdd"): ([X, SKIP, numbers(BATCH, SEQ, 1)], {}, 1),
    ("", "LpNormalization"): ([X], {}, 1),
    (DOMAIN, "MRotaryEmbedding"): (
        [Q, np.stack([POSITIONS] * 3), *TABLES],
        {"mrope_section": [4, 2, 2], "mrope_layout": 1},
        1,
    ),
    (DOMAIN, "LinearAttentionGate"): ([X, SHIFT, -abs(WEIGHT)], {}, 1),
    (DOMAIN, "CausalConvWithState"): (
        [numbers(BATCH, HIDDEN, SEQ), numbers(HIDDEN, 1, 3), SHIFT, numbers(BATCH, HIDDEN, 2)],
        {"activation": "silu"},
        2,
    ),
    # half as many queries and keys as values; each of a length of its own, as nothing norms them
    (DOMAIN, "LinearAttention"): (
        [
            *(X[:, :, :WIDTH], SKIP[:, :, :WIDTH] / 4, X, numbers(BATCH, HEADS, WIDTH, WIDTH)),
            *(-abs(numbers(BATCH, SEQ, HEADS)) / 4, abs(numbers(BATCH, SEQ, HEADS))),
        ],
        {"q_num_heads": 1, "kv_num_heads": HEADS, "update_rule": "gated_delta"},
        2,
    ),
    (DOMAIN, "FusedMatMul"): ([X, numbers(WIDTH, HIDDEN)], {"transB": 1, "alpha": 0.3}, 1),
    ("", "Transpose"): ([Q], {"perm": [0, 2, 3, 1]}, 1),
}
CALLED = {
    "input_ids": np.ones((BATCH, SEQ), np.int64),
    "attention_mask": ONES.astype(np.int64),
    "position_ids": POSITIONS,
}


def model_of(operator: tuple[str, str]) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A graph of one node, and its inputs."""
    inputs, attributes, count = EXAMPLES[operator]
    feeds = {f"x{place}": value for place, value in enumerate(inputs) if value is not None}
    names = ["" if value is None else f"x{place}" for place, value in enumerate(inputs)]
    node = helper.make_node(operator[1], names, [f"y{n}" for n in range(count)], "it", domain=operator[0], **attributes)
    casts = [name for name, value in feeds.items() if value.dtype == np.int32]  # lengths and masks, as files make them
    feeds = {name: value.astype(np.int64) if name in casts else value for name, value in feeds.items()}
    nodes = [helper.make_node("Cast", [name], [f"{name}.int32"], to=onnx.TensorProto.INT32) for name in casts] + [node]
    node.input[:] = [f"{name}.int32" if name in casts else name for name in names]
    feeds["input_ids"] = CALLED["input_ids"]
    entries = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in feeds.items()
    ]
    outputs = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in node.output]
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(DOMAIN, 1)]
    graph = helper.make_graph(nodes, "one", entries, outputs)
    return helper.make_model(graph, opset_imports=opsets, ir_version=10), feeds


def run(proto: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {entry.name: (CALLED | feeds)[entry.name] for entry in session.get_inputs()})


def test_every_expanded_operator_has_an_example():
    assert EXAMPLES.keys() == {*EXPANDED}


@pytest.mark.parametrize("operator", OPERATORS, ids=".".join)
def test_a_row_is_complete(operator):
    row, known = OPERATORS[operator], onnx.defs.has(operator[1], max_inclusive_version=24, domain=operator[0])
    assert (row.shapes is not None) != known, "either onnx infers its shapes, or the row does"
    if row.expansion is not None:
        assert row.expansion.nodes
        for function in filter(None, (row.expansion.function, row.expansion.moved)):
            assert callable(named(function))


@pytest.mark.parametrize("operator", [one for one in EXPANDED if one not in RESTORED], ids=".".join)
def test_nodes_give_what_an_operator_gives_that_is_never_put_back(operator):
    proto, feeds = model_of(operator)
    model, record = ir.from_proto(proto), []
    infer_types(model)
    assert expand(model, record) == {operator[1]: 1}
    assert record == []
    written_ = {node.op_type for node in model.graph}
    assert written_ <= OPERATORS[operator].expansion.nodes | CALL
    expand_recurrences(model)
    expanded = ir.to_proto(model)
    assert not [node for node in expanded.graph.node if node.domain]
    del expanded.graph.value_info[:]
    for entry in expanded.graph.input:  # a form for one token does not fit where the number of tokens is written down
        entry.type.tensor_type.ClearField("shape")
    for found, expected in zip(run(expanded, feeds), run(proto, feeds), strict=True):
        assert np.abs(expected).max() > 0.5
        np.testing.assert_allclose(found, expected, atol=TOLERANCE * 10)


@pytest.mark.parametrize("operator", RESTORED, ids=".".join)
def test_nodes_and_the_operator_put_back_give_what_it_gives(operator):
    proto, feeds = model_of(operator)
    model, record = ir.from_proto(proto), []
    infer_types(model)
    assert expand(model, record) == {operator[1]: 1}
    (fused,), expanded = record, ir.to_proto(model)
    operators = {node.op_type for node in expanded.graph.node}
    assert not operators & {operator[1]} - {"Transpose"}
    assert operators <= OPERATORS[operator].expansion.nodes | CALL
    flow = Dataflow(expanded)
    restored, count = restore(expanded, flow, read_fused(flow, [written(fused.proto())]), padding=False)
    assert count == 1
    assert [(node.domain, node.op_type) for node in restored.graph.node if node.op_type != "Cast"] == [operator]
    (expected,) = run(proto, feeds)
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(run(expanded, feeds)[0], expected, atol=TOLERANCE * 10)
    np.testing.assert_array_equal(run(restored, feeds)[0], expected)


@pytest.mark.parametrize("operator", EXPANDED, ids=".".join)
def test_shapes_are_those_of_a_run(operator):
    proto, feeds = model_of(operator)
    model = ir.from_proto(proto)
    infer_types(model)
    for value, expected in zip(model.graph.outputs, run(proto, feeds), strict=True):
        assert value.shape is not None
        assert tuple(value.shape) == expected.shape
        assert value.dtype.numpy() == expected.dtype


@pytest.mark.parametrize(
    ("operator", "attribute", "value"),
    [
        ("CausalConvWithState", "dilation", 2),
        ("CausalConvWithState", "state_window", 2),
        ("LinearAttention", "state_window", 2),
        ("LinearAttention", "update_rule", "delta"),
        ("LinearAttention", "q_num_heads", 4),
    ],
)
def test_an_attribute_that_an_expansion_does_not_know_is_refused(operator, attribute, value):
    proto, _ = model_of((DOMAIN, operator))
    node = proto.graph.node[0]
    others = [one for one in node.attribute if one.name != attribute]
    del node.attribute[:]
    node.attribute.extend([*others, helper.make_attribute(attribute, value)])
    with pytest.raises(ExportError, match=f"{operator} node 'it' has .*: it cannot be expanded"):
        expand(ir.from_proto(proto))


def test_an_input_that_an_expansion_does_not_know_is_refused():
    proto, _ = model_of((DOMAIN, "FusedMatMul"))
    proto.graph.node[0].input.append("input_ids")
    with pytest.raises(ExportError, match="FusedMatMul node 'it' has an input 2"):
        expand(ir.from_proto(proto))


def test_a_row_is_all_that_another_operator_needs(monkeypatch, tmp_path):
    """TransposeMatMul is an older name of FusedMatMul, and in no table."""
    file = fused_llama.write(tmp_path / "stock")
    proto = onnx.load(file)
    for node in proto.graph.node:
        if "down" in node.output[0]:
            node.op_type, node.domain = "TransposeMatMul", DOMAIN
    del proto.graph.value_info[:]
    onnx.save(proto, file)
    monkeypatch.setitem(OPERATORS, (DOMAIN, "TransposeMatMul"), OPERATORS[DOMAIN, "FusedMatMul"])
    assert adopt(file, tmp_path / "hooked").expanded["TransposeMatMul"] == 2
    model = MIModel.from_pretrained(tmp_path / "hooked")
    model.forward([[3, 4, 5]], HookSpec().capture("blocks.0.attn.hook_pattern"))
    left = Counter(node.op_type for node in onnx.load_from_string([*model.compiled.values()][-1].model).graph.node)
    assert left["TransposeMatMul"] == 2
