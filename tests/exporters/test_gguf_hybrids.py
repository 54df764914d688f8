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
from exporters.transformers import export
from mionnx import HookSpec, MIModel
from mionnx.errors import ExportError
from mionnx.machine.progress import silent

TOLERANCE = 5e-5
IDS = np.random.default_rng(0).integers(3, VOCAB, (2, 14))
TIED = {"tie_word_embeddings": True}
MIXER, ATTENTION = "linear_attention", "full_attention"
DENSE = [MIXER, "mlp", ATTENTION, MIXER, "mlp"]
ROUTED = {"layers_block_type": [MIXER, "moe", ATTENTION, MIXER, "moe"]}
NO_FACTORS = {
    **{f"{name}_multiplier": 1.0 for name in ("embedding", "lm_head", "key", "attention_in", "attention_out")},
    **{f"ssm_{name}_multiplier": 1.0 for name in ("in", "out")},
    **{"ssm_multipliers": [1.0] * 5, "mlp_multipliers": [1.0] * 2},
}
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
    "nemotron_h": ("nemotron_h", {"layers_block_type": DENSE, "head_dim": 24}),
    "nemotron_h with biases": (
        "nemotron_h",
        {"layers_block_type": DENSE, "mlp_bias": True, "attention_bias": True, "use_conv_bias": False},
    ),
    "nemotron_h with experts": ("nemotron_h", ROUTED),
    "nemotron_h with groups of experts": (
        "nemotron_h",
        {**ROUTED, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "norm_topk_prob": False},
    ),
    "falcon_h1": ("falcon_h1", NO_FACTORS),
    "falcon_h1 without a norm": ("falcon_h1", {**NO_FACTORS, "mamba_rms_norm": False}),
}
FAST = ("mamba2", "qwen3.5", "nemotron_h with experts")
each = pytest.mark.parametrize(
    "case", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in CASES]
)


def made(case: str, folder: Path, sizes: dict[str, int] | None = None, **options: Any) -> tuple[PreTrainedModel, Path]:
    family, changes = CASES[case]
    model = make_recurrent(family, folder / "checkpoint", **changes, **(sizes or {}))
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # which starts as 0, and decides who is chosen
                buffer.copy_(torch.randn_like(buffer) * 0.2)
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
    for case, width in (
        ("qwen3.5", "intermediate_size"),
        ("granite 4 without experts", "shared_intermediate_size"),
        ("nemotron_h", "intermediate_size"),
    ):
        _, file = made(case, tmp_path / case.replace(" ", "-"), {width: 96}, kind=Kind.Q8_0)
        header, state = read_header(file), ours(file).state_dict()
        blocks = blocks_of(header)
        turned = {
            "qwen3.5": ("linear_attn.in_proj_z", "linear_attn.out_proj"),
            "granite 4 without experts": ("self_attn.q_proj", "shared_mlp.input_linear"),
            "nemotron_h": ("mixer.q_proj", "mixer.k_proj"),
        }[case]
        assert all(any(module in name for name in blocks) for module in turned)
        for name, given in blocks.items():
            np.testing.assert_array_equal(given.numbers(), state[name].numpy())


def test_layers_that_predict_further_tokens_are_left_out(tmp_path):
    extra = {"qwen35.nextn_predict_layers": 1, "qwen35.block_count": 4}
    further = {"blk.3.nextn.eh_proj.weight": np.ones((4, 64), np.float32)}
    model, file = made("qwen3.5", tmp_path, extra=extra, factors=further)
    assert np.abs(logits(ours(file)) - logits(model)).max() < TOLERANCE


def test_a_block_of_nemotron_h_that_predicts_further_tokens_is_left_out(tmp_path):
    """It attends and has experts, and stands in the arrays of all layers too."""
    name, width, heads = "nemotron_h_moe", [0, 48, 0, 0, 48, 48], [0, 0, 2, 0, 0, 2]
    extra = {f"{name}.nextn_predict_layers": 1, f"{name}.block_count": 6}
    extra |= {f"{name}.feed_forward_length": width, f"{name}.attention.head_count_kv": heads}
    further = {"blk.5.nextn.eh_proj.weight": np.ones((4, 64), np.float32)}
    model, file = made("nemotron_h with experts", tmp_path, extra=extra, factors=further)
    assert np.abs(logits(ours(file)) - logits(model)).max() < TOLERANCE


def test_the_factors_of_falcon_h1_are_in_the_weights_of_a_file(tmp_path):
    model = make_recurrent("falcon_h1", tmp_path / "checkpoint")
    found = ours(write_gguf(model, tmp_path / "m.gguf"))
    assert np.abs(logits(found) - logits(model)).max() < TOLERANCE
    given, state = found.state_dict(), model.state_dict()
    changed = {name.split(".")[-2] for name in state if not torch.equal(given[name], state[name])}
    projections = {f"{one}_proj" for one in ("q", "k", "v", "o", "in", "out", "gate", "down")}
    assert changed >= {"embed_tokens", "lm_head", *projections}
    assert {getattr(found.config, f"{name}_multiplier") for name in ("embedding", "lm_head", "key")} == {1.0}


@pytest.mark.slow
def test_hook_points_of_falcon_h1_have_their_values_but_two_with_a_factor(tmp_path, monkeypatch):
    monkeypatch.setenv("MIONNX_CACHE", str(tmp_path / "cache"))
    model = make_recurrent("falcon_h1", tmp_path / "checkpoint")
    export(tmp_path / "checkpoint", tmp_path / "hooked")
    opened = [
        MIModel.from_pretrained(place, threads=1)
        for place in (tmp_path / "hooked", write_gguf(model, tmp_path / "m.gguf"))
    ]
    expected, found = (dict(one.forward(IDS, HookSpec().capture(lambda name: True))) for one in opened)
    assert found.keys() == expected.keys()
    factors = {"hook_result": model.config.attention_out_multiplier, "hook_gate": model.config.mlp_multipliers[0]}
    assert 1.0 not in factors.values()
    for name, value in found.items():
        theirs = expected[name] * factors.get(name.rpartition(".")[2], 1.0)
        np.testing.assert_allclose(value, theirs, rtol=1e-4, atol=1e-4, err_msg=name)


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


def test_what_no_model_of_mamba_2_beside_attention_has_is_refused(tmp_path):
    name, dense = "nemotron_h_moe", "nemotron_h"
    refused = {
        "latent": ("nemotron_h with experts", {f"{name}.moe_latent_size": 32}),
        "a layer is one half": ("nemotron_h", {f"{dense}.attention.head_count_kv": [0, 0, 2, 0, 2]}),
        "one number in each layer that has an MLP": ("nemotron_h", {f"{dense}.feed_forward_length": [0, 96, 0, 0, 64]}),
        "5 numbers, one a layer": ("nemotron_h", {f"{dense}.feed_forward_length": 96}),
        r"blk\.1\.ffn_down\.weight is \[64, 96\]": ("nemotron_h", {f"{dense}.feed_forward_length": [0, 64, 0, 0, 64]}),
        r"blk\.3\.attn_output\.weight is missing": (
            "nemotron_h",
            {f"{dense}.attention.head_count_kv": [0, 0, 0, 2, 0]},
        ),
        "2 .sigmoid.": ("nemotron_h with experts", {f"{name}.expert_gating_func": 1}),
        "expert_group_used_count, a size": (
            "nemotron_h with groups of experts",
            {f"{name}.expert_group_used_count": None},
        ),
        "a multiple of 8": ("nemotron_h", {f"{dense}.ssm.inner_size": 100}),
        "inner_size, a multiple of 8": ("falcon_h1", {"falcon-h1.ssm.inner_size": 100}),
        "cannot be told whether": ("falcon_h1", {"falcon-h1.mlp_gate_multiplier": 0.5}),
    }
    for number, (message, (case, extra)) in enumerate(refused.items()):
        _, file = made(case, tmp_path / str(number), extra=extra)
        with pytest.raises(ExportError, match=message):
            write_checkpoint(read_header(file), tmp_path / "out", "float32", silent)
    tied = {"nemotron_h": ("in one", {"layers_block_type": DENSE}), "falcon_h1": ("a factor in them", {})}
    for family, (message, changes) in tied.items():
        file = write_gguf(make_recurrent(family, tmp_path / family, **TIED, **changes), tmp_path / f"{family}.gguf")
        with pytest.raises(ExportError, match=f"has no output.weight.*{message}"):
            write_checkpoint(read_header(file), tmp_path / "out", "float32", silent)
