"""The matrices of a model, as they are read from its graph, beside those of the torch model."""

import shutil
from dataclasses import replace

import numpy as np
import onnx
import pytest
from repository import REPOSITORY
from safetensors.numpy import load_file

from mionnx import HookError, HookSpec, MIModel, ModelError
from mionnx.graph import matrices
from mionnx.graph.hooked_model import HookedModel

SHIPPED = ["world-llama", "world-gpt2"]


@pytest.mark.parametrize("name", SHIPPED)
def test_heads_times_their_projections_are_their_results(name):
    model = MIModel.from_pretrained(REPOSITORY / "models" / name)
    cache = model.forward("The capital of France is", HookSpec().capture("*hook_z").capture("*hook_result"))
    projections = np.asarray(model.W_O)
    assert projections.shape == (model.num_layers, model.num_heads, model.head_dim, model.hidden_size)
    found = np.einsum("lbshd,lhdw->lbshw", cache.stack("z"), projections)
    assert np.abs(found - cache.stack("result")).max() < 5e-6


@pytest.mark.parametrize("name", [*SHIPPED, "world-rwkv7"])
def test_the_last_norm_times_the_unembedding_is_the_logits(name):
    model = MIModel.from_pretrained(REPOSITORY / "models" / name)
    cache = model.forward("The capital of France is", HookSpec().capture("hook_final_norm"))
    logits = cache["hook_final_norm"] @ matrices.unembedding(model.hooked) + matrices.unembedding_bias(model.hooked)
    assert np.abs(logits - cache.output()).max() / np.abs(logits).max() < 5e-6


def test_a_bias_of_the_head_is_found():
    plain = HookedModel.open(REPOSITORY / "models" / "world-llama")
    proto, bias = onnx.ModelProto(), np.random.default_rng(0).normal(size=plain.metadata.sizes.vocab_size)
    proto.CopyFrom(plain.proto)
    at = next(i for i, node in enumerate(proto.graph.node) if "hook_logits" in node.output)
    proto.graph.node[at].output[0] = "product"
    proto.graph.node.insert(at + 1, onnx.helper.make_node("Add", ["product", "bias"], ["hook_logits"]))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(bias.astype(np.float32), "bias"))
    biased = replace(plain, proto=proto)
    assert np.array_equal(matrices.unembedding_bias(biased), bias.astype(np.float32))
    assert np.array_equal(matrices.unembedding(biased), matrices.unembedding(plain))


def test_a_recurrent_model_has_embeddings_and_no_projections_of_heads():
    folder = REPOSITORY / "models" / "world-rwkv7"
    hooked, stored = HookedModel.open(folder), load_file(folder / "model.safetensors")
    assert np.array_equal(matrices.embedding(hooked), stored["model.embeddings.weight"])
    assert np.array_equal(matrices.unembedding(hooked), stored["lm_head.weight"].T)
    with pytest.raises(HookError, match="no W_O in layer 0"):
        MIModel.from_pretrained(folder).W_O  # noqa: B018


def test_weights_that_are_gone_are_an_error(tmp_path):
    shutil.copytree(REPOSITORY / "models" / "world-llama", tmp_path / "copy")
    hooked = HookedModel.open(tmp_path / "copy")
    (tmp_path / "copy" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"cannot read model.embed_tokens.weight"):
        matrices.embedding(hooked)
