"""The graph of a file as it came, where a spec touches nothing: beside the file in plain ONNX Runtime, bit by bit."""

import shutil
from pathlib import Path

import merged_decoder
import numpy as np
import onnx
import onnxruntime
import pytest

from exporters.adopt import adopt
from mionnx import HookSpec, MIModel
from mionnx.graph.stock_graph import PADDED_BIT, PAST_BIT, ROWS_BIT, SEVERAL_BIT
from mionnx.rewrite.plan import STOCK
from mionnx.run import stock_calls

FOREIGN = Path(__file__).parents[1] / "shared" / "foreign"
IDS = np.random.default_rng(0).integers(3, 90, (2, 9))


def same_bits(model, file, ids, mask=None, past=None):
    """Logits of an empty spec and of the file are the same bits; the cache after the call."""
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    found = model.forward(ids, attention_mask=mask, cache=past, use_cache=True)
    assert [*model.compiled][-1].fused == STOCK
    mask = found.kv_cache.attention_mask
    known = {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": np.maximum(mask.cumsum(1) - 1, 0)[:, -ids.shape[1] :],
        "use_cache_branch": np.array([past is not None]),
    }
    nothing = np.zeros((len(ids), model.num_kv_heads, 0, model.head_dim), np.float32)
    for entry in session.get_inputs():
        if entry.name.startswith("past"):
            _, layer, part = entry.name.split(".")
            known[entry.name] = nothing if past is None else past.layers[int(layer)][part == "value"]
        elif "int32" in entry.type:
            known[entry.name] = known[entry.name].astype(np.int32)
    (expected,) = session.run(["logits"], {entry.name: known[entry.name] for entry in session.get_inputs()})
    np.testing.assert_array_equal(found.output(), expected)
    return found.kv_cache


def test_a_file_without_fused_operators_runs_itself_with_fast(tmp_path):
    adopt(FOREIGN / "optimum", tmp_path / "hooked")
    model, file = MIModel.from_pretrained(tmp_path / "hooked", fast=True), FOREIGN / "optimum" / "model.onnx"
    kinds = ROWS_BIT | SEVERAL_BIT, ROWS_BIT | PAST_BIT, ROWS_BIT | PAST_BIT | SEVERAL_BIT | PADDED_BIT
    assert all(stock_calls.serves(model.hooked, kind) for kind in kinds)
    past = same_bits(model, file, IDS[:, :5], np.array([[0, 0, 1, 1, 1], [1] * 5]))
    same_bits(model, file, IDS[:, 5:], past=past)
    plain = MIModel.from_pretrained(tmp_path / "hooked")
    base = plain.forward(IDS).output()
    assert [*plain.compiled][-1].fused != STOCK
    np.testing.assert_array_equal(plain.forward(IDS, HookSpec().capture("*")).output(), base)


def test_padding_behind_a_text_was_never_tried(tmp_path):
    adopt(FOREIGN / "optimum", tmp_path / "hooked")
    model = MIModel.from_pretrained(tmp_path / "hooked", fast=True)
    model.forward(IDS, attention_mask=np.tile([1] * 7 + [0] * 2, (2, 1)))
    assert [*model.compiled][-1].fused != STOCK


@pytest.mark.slow
def test_a_merged_decoder_runs_its_own_branch_for_each_call(tmp_path):
    file = merged_decoder.write(tmp_path / "source")
    adopt(file, tmp_path / "hooked")
    model = MIModel.from_pretrained(tmp_path / "hooked", fast=True)
    past = same_bits(model, file, IDS)
    assert "If" in {node.op_type for node in model.hooked.stock.proto.graph.node}
    same_bits(model, file, IDS[:, :2], past=past)


def test_inputs_of_other_dtypes_and_names_are_taken(tmp_path):
    shutil.copytree(FOREIGN / "optimum", tmp_path / "source")
    file = tmp_path / "source" / "model.onnx"
    proto, names = onnx.load(file), {"input_ids": "tokens", "logits": "hook_embed"}
    (ids,) = (value for value in proto.graph.input if value.name == "input_ids")
    ids.type.tensor_type.elem_type = onnx.TensorProto.INT32
    for node in proto.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [{**names, "tokens": "input_ids"}.get(name, name) for name in node.output]
    wide = onnx.helper.make_node("Cast", ["tokens"], ["input_ids"], to=onnx.TensorProto.INT64)
    for node in proto.graph.node:
        node.input[:] = [name if name != "tokens" else "input_ids" for name in node.input]
    proto.graph.node.insert(0, wide)
    ids.name = "tokens"
    next(value for value in proto.graph.output if value.name == "logits").name = "hook_embed"
    onnx.save(proto, file)
    adopt(file, tmp_path / "hooked")
    model = MIModel.from_pretrained(tmp_path / "hooked", fast=True)
    stock = model.hooked.stock
    assert stock.proto.graph.node[0].op_type == "Cast"
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    known = {"tokens": IDS.astype(np.int32), "attention_mask": np.ones_like(IDS)}
    known["position_ids"] = np.tile(np.arange(9), (2, 1))
    past = np.zeros((2, model.num_kv_heads, 0, model.head_dim), np.float32)
    expected = session.run(["hook_embed"], {one.name: known.get(one.name, past) for one in session.get_inputs()})[0]
    np.testing.assert_array_equal(model.forward(IDS).output(), expected)
    assert [*model.compiled][-1].fused == STOCK


@pytest.mark.parametrize("fused", [True, False])
def test_without_fused_operators_no_file_runs_itself(fused, tmp_path):
    adopt(FOREIGN / "genai-fp32", tmp_path / "hooked")
    model = MIModel.from_pretrained(tmp_path / "hooked", fused=fused, fast=True)
    model.forward(IDS)
    assert ([*model.compiled][-1].fused == STOCK) == (fused and model.hooked.stock is not None)
