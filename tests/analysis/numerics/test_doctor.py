"""The doctor takes what `from_pretrained` takes: checkpoints, stock files, GGUF, encoders, hybrids."""

import shutil

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from repository import REPOSITORY, SHARED
from rescaled import planted

from mionnx import MIModel

OPTIMUM = SHARED / "foreign" / "optimum"
TEXTS = "The capital of France is Paris ."


def agree(model, folder, prompt, most):
    """The largest difference of a model's outputs from those of the sound one in a folder, and of their size."""
    sound = MIModel.from_pretrained(folder, threads=1)
    one, two = (np.asarray(each.forward(prompt).output(), np.float32) for each in (model, sound))
    assert np.isfinite(two).all()
    assert np.abs(one - two).max() < most * max(1.0, np.abs(one).max())


def test_an_encoder_whose_stream_overflows_is_cured(tmp_path):
    bert = REPOSITORY / "models" / "world-bert"
    weight = "bert.encoder.layer.1.output.dense.weight"
    model = planted(bert, tmp_path / "loud", weight, 2.0**16)
    result = model.doctor(TEXTS, folder=tmp_path / "sound")
    assert "reaches" in result.line()
    assert not result.sound
    assert result.after.kl < 1e-3
    agree(model, tmp_path / "sound", "The capital of France is [MASK] .", 2e-2)


@pytest.mark.slow
def test_vectors_have_a_distance_of_their_own(text_encoder, tmp_path):
    model, _ = text_encoder("embedding")
    result = model.doctor("a dog", folder=tmp_path / "sound")
    assert result.forecast.all.vectors
    assert 0 < result.forecast.kl < 1e-5
    assert "half the squared relative distance" in result.line()
    assert "half the squared relative distance" in result.page()
    agree(model, tmp_path / "sound", "a dog", 1e-2)
    assert MIModel.from_pretrained(tmp_path / "sound").hooked.metadata.narrowed["measure"].startswith("half the squ")


def loud_stock_file(folder):
    """A decoder of optimum's exporter, norms in their own nodes, whose embeddings are 3,000 times as large."""
    shutil.copytree(OPTIMUM, folder)
    proto = onnx.load(folder / "model.onnx")
    assert "RMSNormalization" not in {node.op_type for node in proto.graph.node}
    (table,) = [one for one in proto.graph.initializer if "embed_tokens" in one.name]
    table.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(table) * np.float32(3000), table.name))
    (folder / "model.onnx").write_bytes(proto.SerializeToString())
    return folder


@pytest.mark.slow
def test_decomposed_norms_of_a_stock_file_are_seen_though_no_logit_is_infinite(tmp_path):
    model = MIModel.from_pretrained(loud_stock_file(tmp_path / "stock"), threads=1)
    ids = [[5, 9, 2, 7, 11]]
    result = model.doctor(folder=tmp_path / "sound")
    assert result.range.absorbed
    assert result.forecast.all.sound  # nothing shows at the logits
    assert result.forecast.kl > 0.1
    assert "infinite in silence" in result.line()
    assert result.after.kl < 1e-3
    agree(model, tmp_path / "sound", ids, 2e-2)


@pytest.mark.slow
def test_a_checkpoint_without_a_tokenizer_writes_its_own_texts(checkpoint, tmp_path):
    result = MIModel.from_pretrained(checkpoint("llama"), threads=1).doctor(folder=tmp_path / "sound")
    assert result.sound
    assert "nothing overflows" in result.line()
    assert result.range.tokens > 500


@pytest.mark.slow
def test_a_gguf_file_is_diagnosed(tmp_path):
    from families import make_model
    from gguf_files import write_gguf

    reference = make_model("llama")
    reference.model.layers[1].mlp.down_proj.weight.data *= 2.0**17
    model = MIModel.from_pretrained(write_gguf(reference, tmp_path / "loud.gguf"), dtype="float32", threads=1)
    result = model.doctor(folder=tmp_path / "sound")
    assert "blocks.1.mlp.hook_post" in result.line()
    assert result.after.kl < 1e-3
    agree(model, tmp_path / "sound", [[5, 9, 2, 7, 11]], 2e-2)


@pytest.mark.slow
def test_a_hybrid_is_diagnosed(tmp_path):
    from recurrent_families import make_recurrent

    from exporters.transformers import export

    reference = make_recurrent("lfm2", tmp_path / "checkpoint")
    reference.model.layers[1].feed_forward.w2.weight.data *= 2.0**14
    reference.save_pretrained(tmp_path / "checkpoint")
    export(tmp_path / "checkpoint", tmp_path / "hooked")
    model = MIModel.from_pretrained(tmp_path / "hooked", threads=1)
    result = model.doctor(folder=tmp_path / "sound")
    assert "blocks.1.mlp.hook_post reaches" in result.line()
    assert result.after.kl < 1e-3
    agree(model, tmp_path / "sound", [[5, 9, 2, 7, 11]], 2e-2)
