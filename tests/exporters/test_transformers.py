"""Checkpoints of every make become hooked models, or are refused with what is wrong; weights are not copied in vain."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from families import make_checkpoint, make_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from exporters.transformers import export, recognises
from exporters.transformers.trace import buffers_of, skeleton_of
from mionnx import ExportError, HookSpec, MIModel, ModelError
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.weight_record import describe
from mionnx.machine.disk_cache import DiskCache
from mionnx.machine.progress import silent
from mionnx.run import exporting

IDS = np.arange(3, 12)[None]


@pytest.fixture
def llama(checkpoint, tmp_path) -> Path:
    """A llama checkpoint that may be changed."""
    return Path(shutil.copytree(checkpoint("llama"), tmp_path / "llama"))


def logits(folder: Path) -> np.ndarray:
    """What transformers says of a checkpoint."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(torch.from_numpy(IDS)).logits.numpy()


def exported(folder: Path, dtype: str = "float32") -> MIModel:
    export(folder, folder.parent / "hooked", dtype)
    return MIModel.from_pretrained(folder.parent / "hooked", threads=1)


def test_weights_are_referenced_where_they_lie(hooked, checkpoint):
    folder = hooked("llama")
    assert (folder / "model.safetensors").samefile(checkpoint("llama") / "model.safetensors")
    assert not (folder / "converted.safetensors").exists()
    proto = onnx.load(folder / "model.onnx", load_external_data=False)
    inside = [t for t in proto.graph.initializer if t.data_location != onnx.TensorProto.EXTERNAL]
    assert sum(len(t.raw_data) for t in inside) < 1000
    names = {t.name for t in proto.graph.initializer} - {t.name for t in inside}
    assert names == set(load_file(folder / "model.safetensors"))
    assert HookedModel.open(folder, check="full").metadata.weight_files == describe(folder, ["model.safetensors"])


@pytest.mark.slow
def test_the_folder_can_be_moved_and_the_checkpoint_deleted(llama, tmp_path):
    expected = logits(llama)
    export(llama, tmp_path / "here")
    shutil.rmtree(llama)
    (tmp_path / "here").rename(tmp_path / "there")
    found = MIModel.from_pretrained(tmp_path / "there").forward(IDS).output()
    assert np.abs(found - expected).max() < 5e-5


@pytest.mark.slow
def test_a_sharded_checkpoint(checkpoint, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(checkpoint("llama"), dtype=torch.float32)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    files = list((tmp_path / "sharded").glob("*.safetensors"))
    assert len(files) > 2
    found = exported(tmp_path / "sharded").forward(IDS).output()
    assert np.abs(found - logits(tmp_path / "sharded")).max() < 5e-5
    files[0].unlink()
    with pytest.raises(ExportError, match="lacks 1 of the"):
        export(tmp_path / "sharded", tmp_path / "again")


@pytest.mark.slow
def test_a_pytorch_bin_checkpoint(llama):
    expected = logits(llama)
    torch.save(load_file(llama / "model.safetensors"), llama / "pytorch_model.bin")
    (llama / "model.safetensors").unlink()
    assert np.abs(exported(llama).forward(IDS).output() - expected).max() < 5e-5


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.slow
def test_another_dtype_is_converted(llama, dtype):
    export(llama, llama.parent / "hooked", dtype)
    found = load_file(llama.parent / "hooked" / "converted.safetensors")
    expected = load_file(llama / "model.safetensors")
    assert set(found) == set(expected)
    for name, tensor in found.items():
        assert tensor.dtype == getattr(torch, dtype)
        assert torch.equal(tensor, expected[name].to(tensor.dtype))
    assert HookedModel.open(llama.parent / "hooked").metadata.dtype == dtype


@pytest.mark.slow
def test_auto_keeps_the_checkpoints_dtype_and_float32_widens_it(llama):
    half = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(llama / "model.safetensors").items()}
    save_file(half, llama / "model.safetensors", metadata={"format": "pt"})
    export(llama, llama.parent / "auto", "auto")
    assert HookedModel.open(llama.parent / "auto").metadata.dtype == "bfloat16"
    assert not (llama.parent / "auto" / "converted.safetensors").exists()
    assert np.abs(exported(llama).forward(IDS).output() - logits(llama)).max() < 5e-5


@pytest.mark.slow
def test_float16_runs_close_to_float32(llama):
    found = exported(llama, "float16").forward(IDS, HookSpec().capture("hook_final_norm"))
    assert found["hook_final_norm"].dtype == np.float16
    assert np.abs(found.output().astype(np.float32) - logits(llama)).max() < 2e-2


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
@pytest.mark.slow
def test_norms_that_compute_in_float32_run_in_float16(tmp_path, family):
    """Gemma's norms multiply with a float32 weight, and round after: logits a few units of float16 from torch's."""
    make_checkpoint(family, tmp_path / family)
    found = exported(tmp_path / family, "float16").forward(IDS, HookSpec().capture("hook_final_norm"))
    assert found["hook_final_norm"].dtype == np.float16
    half = AutoModelForCausalLM.from_pretrained(tmp_path / family, dtype=torch.float16, attn_implementation="eager")
    with torch.no_grad():
        expected = half.eval()(torch.from_numpy(IDS)).logits.float().numpy()
    unit = 2.0**-10 * np.abs(expected).max()
    assert np.abs(found.output().astype(np.float32) - expected).max() < 4 * unit
    assert np.abs(expected - logits(tmp_path / family)).max() < 4 * unit


def test_an_unknown_dtype(llama):
    with pytest.raises(ExportError, match="float32"):
        export(llama, llama.parent / "hooked", "float31")


@pytest.mark.slow
def test_tied_weights_stored_twice(tmp_path):
    model = make_model("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "tied")
    tensors = load_file(tmp_path / "tied" / "model.safetensors")
    assert "lm_head.weight" not in tensors
    expected = logits(tmp_path / "tied")
    twice = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(twice, tmp_path / "tied" / "model.safetensors", metadata={"format": "pt"})
    assert np.abs(exported(tmp_path / "tied").forward(IDS).output() - expected).max() < 5e-5
    twice["lm_head.weight"] += 1
    save_file(twice, tmp_path / "tied" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ExportError, match="different tensors for the tied"):
        export(tmp_path / "tied", tmp_path / "again")


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.slow
def test_tensors_must_match_one_by_one(llama, tmp_path):
    tensors = load_file(llama / "model.safetensors")
    cases = {
        "1 checkpoint tensors are read by no part of the graph: extra.weight": {
            **tensors,
            "extra.weight": torch.ones(2),
        },
        f"1 weights that the graph reads are not in the checkpoint: {NORM}": {
            k: v for k, v in tensors.items() if k != NORM
        },
        r"is \[32\], the graph reads \[64\]": {**tensors, NORM: tensors[NORM][:32].clone()},
    }
    for number, (message, changed) in enumerate(cases.items()):
        save_file(changed, llama / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ExportError, match=message):
            export(llama, tmp_path / str(number))


def test_damaged_weights(llama, tmp_path):
    data = (llama / "model.safetensors").read_bytes()
    (llama / "model.safetensors").unlink()
    for length in (0, 4, 100, len(data) - 1):
        (llama / "model.safetensors").write_bytes(data[:length])
        with pytest.raises(ExportError, match="intact"):
            export(llama, tmp_path / f"hooked{length}")


@pytest.mark.slow
def test_experts_are_stacked_in_their_order(tmp_path):
    model = make_model("mixtral", num_local_experts=12, num_hidden_layers=1)
    model.save_pretrained(tmp_path / "mixtral")
    assert np.abs(exported(tmp_path / "mixtral").forward(IDS).output() - logits(tmp_path / "mixtral")).max() < 5e-5


@pytest.mark.slow
def test_a_decoder_of_a_family_of_encoders_is_found_by_structure_and_an_encoder_with_its_head_refused(tmp_path):
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 101, "intermediate_size": 96}
    for is_decoder in (True, False):
        config = AutoConfig.for_model("bert", **sizes, num_attention_heads=4, is_decoder=is_decoder)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "bert")
        if is_decoder:
            model = exported(tmp_path / "bert")
            assert model.hooked.has_cache
            assert not model.bidirectional
            assert np.abs(model.forward(IDS).output() - logits(tmp_path / "bert")).max() < 5e-5
            continue
        with pytest.raises(ExportError, match="with BertLMHeadModel: mionnx exports those that predict masked tokens"):
            export(tmp_path / "bert", tmp_path / "encoder")


def test_a_rotation_that_no_graph_can_hold(tmp_path):
    model = make_model("llama", num_hidden_layers=1)
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model.save_pretrained(tmp_path / "dynamic")
    with pytest.raises(ExportError, match="dynamic"):
        export(tmp_path / "dynamic", tmp_path / "hooked")


class TestTheStore:
    def test_a_checkpoint_is_exported_once(self, llama, tmp_path, monkeypatch):
        monkeypatch.setenv("MIONNX_CACHE", str(tmp_path / "store"))
        first = MIModel.from_pretrained(llama)
        made = (first.hooked.folder / "model.onnx").stat().st_mtime_ns
        second = MIModel.from_pretrained(llama)
        assert second.hooked.folder == first.hooked.folder
        assert (second.hooked.folder / "model.onnx").stat().st_mtime_ns == made
        (llama / "config.json").write_text((llama / "config.json").read_text() + "\n")
        assert MIModel.from_pretrained(llama).hooked.folder != first.hooked.folder

    @pytest.mark.slow
    def test_two_processes_export_once(self, llama, tmp_path):
        code = "import sys; from mionnx import MIModel; print(MIModel.from_pretrained(sys.argv[1]).hooked.folder)"
        environment = {**os.environ, "MIONNX_CACHE": str(tmp_path / "store")}
        command = [sys.executable, "-c", code, str(llama)]
        running = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        folders = {process.communicate()[0] for process in running}
        assert len(folders) == 1
        assert [str(entry.path) for entry in DiskCache(tmp_path / "store").all()] == [
            folder.strip() for folder in folders
        ]

    def test_an_export_that_fails_leaves_nothing(self, llama, tmp_path):
        (llama / "model.safetensors").unlink()
        with pytest.raises(ExportError, match="holds no weights"):
            exporting.export(llama, tmp_path / "out" / "hooked", "float32", silent)
        assert list((tmp_path / "out").iterdir()) == []

    def test_a_target_that_exists(self, llama, tmp_path):
        with pytest.raises(ExportError, match="exists already"):
            exporting.export(llama, tmp_path, "float32", silent)

    @pytest.mark.slow
    def test_in_place(self, llama):
        expected = logits(llama)
        inode = (llama / "model.safetensors").stat().st_ino
        exporting.export_in_place(llama, "float32", silent)
        assert (llama / "model.safetensors").stat().st_ino == inode
        assert not [path for path in llama.iterdir() if path.name.startswith(".")]
        assert np.abs(MIModel.from_pretrained(llama).forward(IDS).output() - expected).max() < 5e-5
        onnx.checker.check_model(str(llama / "model.onnx"), full_check=True)


def test_recognising_a_checkpoint_reads_its_config_only(tmp_path):
    assert not recognises(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert not recognises(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert recognises(tmp_path)
    with pytest.raises(ModelError, match="one file of a model: give its folder"):
        MIModel.from_pretrained(tmp_path / "config.json")


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_the_context_length_is_that_of_the_config(models, references, family):
    length = references(family).config.max_position_embeddings
    assert models(family).hooked.metadata.context_length == models(family).cfg.n_ctx == length > 0


def test_the_short_factors_of_longrope_divide_the_frequencies():
    short = [1.0 + index / 4 for index in range(8)]
    factors = {"short_factor": short, "long_factor": [2 * factor for factor in short]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32, **factors}
    model = make_model("phi3", rope_parameters=rope, original_max_position_embeddings=32)
    found = buffers_of(skeleton_of(model.config, torch.float32))["model.rotary_emb.inv_freq"]
    assert torch.equal(found, model.model.rotary_emb.inv_freq)
    assert found[1] < 0.9 * 1e4 ** (-1 / 8)
