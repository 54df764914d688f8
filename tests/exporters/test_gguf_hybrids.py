"""GGUF files of models with recurrent layers: the checkpoint that they were made of comes back, and opens."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_files import write_gguf
from recurrent_families import VOCAB, make_recurrent
from transformers import AutoModelForCausalLM, PreTrainedModel

from exporters.gguf.assemble import write_checkpoint
from exporters.gguf.blocks import blocks_of
from exporters.gguf.header import read_header
from mionnx import MIModel
from mionnx.errors import ExportError
from mionnx.machine.progress import silent

TOLERANCE = 5e-5
IDS = np.random.default_rng(0).integers(3, VOCAB, (2, 14))
TIED = {"tie_word_embeddings": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("mamba", {}),
    "mamba, tied": ("mamba", {**TIED, "use_bias": False}),
    "falcon_mamba": ("falcon_mamba", {}),
    "mamba2": ("mamba2", {}),
    "jamba": ("jamba", {}),
    "jamba without experts": ("jamba", {"num_experts": 1, "num_experts_per_tok": 1}),
    "granite 4": ("granitemoehybrid", {"position_embedding_type": "nope", "attention_multiplier": 0.2}),
    "granite 4 without experts": (
        "granitemoehybrid",
        {"position_embedding_type": "nope", "num_local_experts": 0, "num_experts_per_tok": 0, "logits_scaling": 2.0},
    ),
    "lfm2_moe": ("lfm2_moe", {}),
    "qwen3.5": ("qwen3_5_text", {}),
    "qwen3.5, a head of values a key": ("qwen3_5_text", {"linear_num_key_heads": 4, "tie_word_embeddings": True}),
    "qwen3.5 with experts": ("qwen3_5_moe_text", {}),
    "qwen3_next": ("qwen3_next", {}),
}
FAST = ("mamba2", "qwen3.5")
each = pytest.mark.parametrize(
    "case", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in CASES]
)


def made(case: str, folder: Path, sizes: dict[str, int] | None = None, **options: Any) -> tuple[PreTrainedModel, Path]:
    family, changes = CASES[case]
    model = make_recurrent(family, folder / "checkpoint", **changes, **(sizes or {}))
    return model, write_gguf(model, folder / "m.gguf", **options)


def logits(model: PreTrainedModel) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(IDS), use_cache=False).logits.numpy()


def ours(file: Path) -> PreTrainedModel:
    """The checkpoint that is made of a file, loaded by transformers."""
    folder = file.with_suffix("")
    write_checkpoint(read_header(file), folder, "float32", silent)
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model.eval()


@each
def test_a_file_in_float32_is_the_model_that_it_was_made_of(case, tmp_path):
    model, file = made(case, tmp_path)
    found = ours(file)
    given, state = found.state_dict(), model.state_dict()
    assert given.keys() == state.keys()
    off = {name: float((given[name] - state[name]).abs().max()) for name in state}
    assert max(off.values()) < 2e-6, off  # of logarithms of float32, and norms with one added and subtracted
    assert np.abs(logits(found) - logits(model)).max() < TOLERANCE
    for key in ("hidden_size", "num_hidden_layers", "eos_token_id", "tie_word_embeddings"):
        assert getattr(found.config, key) == getattr(model.config, key)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_file_opens(case, tmp_path, monkeypatch):
    monkeypatch.setenv("MIONNX_CACHE", str(tmp_path / "cache"))
    model, file = made(case, tmp_path)
    found = MIModel.from_pretrained(file, threads=1).forward(IDS).output()
    expected = logits(model)
    assert np.abs(found - expected).max() < TOLERANCE * max(1, np.abs(expected).max())


@pytest.mark.slow
def test_a_quantised_mamba_is_what_transformers_makes_of_it(tmp_path, monkeypatch):
    _, file = made("mamba, tied", tmp_path, kind=Kind.Q8_0)
    monkeypatch.setattr("transformers.modeling_utils.is_accelerate_available", lambda: True)
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    assert np.abs(logits(ours(file)) - logits(theirs)).max() < TOLERANCE


def test_blocks_are_those_of_the_checkpoint_s_rows(tmp_path):
    """Rows and columns in another order, and rows of two tensors in one, keep their blocks."""
    for case, width in (("qwen3.5", "intermediate_size"), ("granite 4 without experts", "shared_intermediate_size")):
        _, file = made(case, tmp_path / case.replace(" ", "-"), {width: 96}, kind=Kind.Q8_0)
        header, state = read_header(file), ours(file).state_dict()
        blocks = blocks_of(header)
        turned = {
            "qwen3.5": ("linear_attn.in_proj_z", "linear_attn.out_proj"),
            "granite 4 without experts": ("self_attn.q_proj", "shared_mlp.input_linear"),
        }[case]
        assert all(any(module in name for name in blocks) for module in turned)
        for name, given in blocks.items():
            np.testing.assert_array_equal(given.numbers(), state[name].numpy())


def test_layers_that_predict_further_tokens_are_left_out(tmp_path):
    extra = {"qwen35.nextn_predict_layers": 1, "qwen35.block_count": 4}
    further = {"blk.3.nextn.eh_proj.weight": np.ones((4, 64), np.float32)}
    model, file = made("qwen3.5", tmp_path, extra=extra, factors=further)
    assert np.abs(logits(ours(file)) - logits(model)).max() < TOLERANCE


def test_what_no_model_has_is_refused(tmp_path):
    refused = {
        "its metadata mean": ("qwen3.5", {"qwen35.ssm.group_count": 1}),
        "Bamba, which is not read": ("granite 4", {"granitehybrid.rope.scaling.finetuned": True}),
        "a multiple of 64": ("mamba2", {"mamba2.ssm.inner_size": 100}),
        "states 5 layers": ("mamba2", {"mamba2.block_count": 5}),
        "one number in each layer that attends": ("granite 4", {"granitehybrid.attention.head_count_kv": [1, 2, 0]}),
    }
    for message, (case, extra) in refused.items():
        _, file = made(case, tmp_path / str(len(message)), extra=extra)
        with pytest.raises(ExportError, match=message):
            write_checkpoint(read_header(file), tmp_path / "out", "float32", silent)
    model = make_recurrent("mamba2", tmp_path / "checkpoint")
    with torch.no_grad():
        next(value for name, value in model.named_parameters() if name.endswith("A_log")).fill_(-200)
    file = write_gguf(model, tmp_path / "zero.gguf")
    with pytest.raises(ExportError, match="numbers that no decay is"):
        write_checkpoint(read_header(file), tmp_path / "zero", "float32", silent)
