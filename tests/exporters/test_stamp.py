"""Layers copied from traced ones are the layers that a full trace has, node by node; unknown ones are traced."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from families import CONFIGS, GEMMA, NO_GROUPS, TINY, make_checkpoint
from recurrent_families import CONFIGS as RECURRENT
from same_graph import described
from tiny_configs import tiny_config
from transformers import AutoConfig

from exporters.transformers import hooked_graph
from exporters.transformers.hooked_graph import make_graph
from exporters.transformers.kinds import Kinds
from exporters.transformers.stamp import stamp
from exporters.transformers.trace import buffers_of, carried_by, find_kinds, skeleton_of
from mionnx import MIModel

SLIDING = ["sliding_attention"]
PATTERN = [*(SLIDING * 5), "full_attention"]
BLOCKS = ["linear_attention", "linear_attention", "hybrid", "hybrid"]
EXPERTS = {**TINY, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LINES = {"n_embd": 64, "n_head": 4, "n_positions": 64, "vocab_size": 101}
# family -> what differs from its tiny config; six to eight layers where kinds alternate, three where there is one
DEEP: dict[str, dict[str, Any]] = {
    **{family: {"num_hidden_layers": 3} for family in CONFIGS},
    "gemma2": {"num_hidden_layers": 6},
    "gemma3_text": {"num_hidden_layers": 8, "layer_types": [*PATTERN, *SLIDING, *SLIDING]},
    "qwen3_moe": {**EXPERTS, "num_hidden_layers": 6, "mlp_only_layers": [0, 2]},
    "jetmoe": {
        **{"hidden_size": 64, "intermediate_size": 48, "num_key_value_heads": 2, "kv_channels": 16, "vocab_size": 101},
        **{"num_local_experts": 4, "num_hidden_layers": 3},
    },
    "longcat_flash": {**tiny_config("longcat_flash"), "num_layers": 3},  # two layers in each
    "smollm3": {**TINY, "num_hidden_layers": 6},
    "zamba2": {**RECURRENT["zamba2"], "num_hidden_layers": 8, "layers_block_type": [*BLOCKS, *BLOCKS]},
    "falcon_h1": RECURRENT["falcon_h1"],
    "nemotron_h": {**RECURRENT["nemotron_h"], "layers_block_type": [*RECURRENT["nemotron_h"]["layers_block_type"]] * 2},
    "cohere2": {**TINY, "num_hidden_layers": 6},
    **{family: {**LINES, "n_layer": 3, "rotary_dim": 8} for family in ("gptj", "ctrl", "openai-gpt")},
    "falcon": {**NO_GROUPS, "num_hidden_layers": 3},
    "gpt_neox_japanese": {**NO_GROUPS, "num_hidden_layers": 4},  # a bias in the last one
    "gpt_neo": {
        **{"hidden_size": 64, "num_heads": 4, "num_layers": 6, "intermediate_size": 96, "vocab_size": 101},
        **{"max_position_embeddings": 64, "attention_types": [[["global", "local"], 3]], "window_size": 8},
    },
}
ALTERNATING = {
    "llama": ({"num_hidden_layers": 4}, [0, 0, 0, 0], [0]),
    "gpt2": ({"n_layer": 4}, [0, 0, 0, 0], [0]),
    "gemma2": ({**GEMMA, "num_hidden_layers": 6}, [0, 1, 0, 1, 0, 1], [0, 1]),
    "gemma3_text": (DEEP["gemma3_text"], [0, 0, 0, 0, 0, 1, 0, 0], [0, 5]),
    "qwen3_moe": (DEEP["qwen3_moe"], [0, 1, 0, 1, 1, 1], [0, 1]),
    "smollm3": (DEEP["smollm3"], [0, 0, 0, 1, 0, 0], [0, 3]),
}


def config_of(family: str, changes: dict[str, Any]) -> Any:
    merged = {**CONFIGS.get(family, {}), **changes}
    if family == "gpt2":
        merged["n_layer"] = merged.pop("num_hidden_layers", merged["n_layer"])
    return AutoConfig.for_model(family, **merged)


def kinds(family: str, changes: dict[str, Any], edit: Callable[[Any], None] = lambda model: None) -> Kinds:
    """The kinds of a family's layers, in a model that `edit` has changed."""
    config = config_of(family, changes)
    skeleton = skeleton_of(config, torch.float32)
    edit(skeleton)
    return find_kinds(skeleton, (carried_by(skeleton), torch.float32), buffers_of(skeleton))


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name == "gpt2" else pytest.mark.slow) for name in DEEP]
)
@pytest.mark.slow
def test_a_stamped_graph_is_the_traced_one(family):
    stages: list[str] = []
    config = config_of(family, DEEP[family])
    stamped, whole = (make_graph(config, torch.float32, stages.append, each) for each in (False, True))
    traced = [int(stage.split()[1]) for stage in stages if stage.startswith("tracing")]
    assert traced[0] < traced[1] == stamped.sizes.num_layers
    assert list(stamped.hooks.items()) == list(whole.hooks.items())
    assert described(stamped.model, stamped.parameters) == described(whole.model, whole.parameters)


@pytest.mark.parametrize("family", ALTERNATING)
def test_kinds_are_those_that_a_family_has(family):
    changes, of, traced = ALTERNATING[family]
    found = kinds(family, changes)
    assert (found.of, found.traced) == (of, traced)


def test_layers_whose_numbers_enter_their_arithmetic_are_all_different():
    found = kinds("gpt2", {"n_layer": 4, "scale_attn_by_inverse_layer_idx": True})
    assert found.traced == [0, 1, 2, 3]


def test_a_layer_with_another_number_is_of_another_kind():
    def edit(model: Any) -> None:
        model.model.layers[3].self_attn.scaling *= 2
        model.model.layers[5].never_read = 7

    assert kinds("llama", {"num_hidden_layers": 7}, edit).of == [0, 0, 0, 1, 0, 2, 0]


def test_layers_that_share_a_weight_are_of_one_kind_if_they_share_all_of_them():
    def edit(model: Any) -> None:
        first, second, third = (layer.mlp for layer in [*model.model.layers][2:5])
        first.up_proj.weight = second.up_proj.weight = third.up_proj.weight
        first.down_proj.weight = second.down_proj.weight

    found = kinds("llama", {"num_hidden_layers": 6}, edit)
    assert (found.of, found.traced) == ([0, 0, 1, 1, 2, 0], [0, 2, 4])
    assert {name.split(".")[2] for name in found.shared} == {"2", "3", "4"}


# ONNX's text has no dots in names: they are written as two underscores.
LAYERS = """<ir_version: 10, opset_import: ["" : 21]>
toy (float[n, 2] x, float[n, 2] past_key_values__0__key, float[n, 2] past_key_values__1__key) => (float[n, 2] logits) {
    hook_embed = Abs (x)
    blocks__0__hook_resid_pre = Identity (hook_embed)
    blocks__0__hook_resid_post = Add (blocks__0__hook_resid_pre, past_key_values__0__key)
    blocks__1__hook_resid_pre = Identity (blocks__0__hook_resid_post)
    blocks__1__hook_resid_post = Add (blocks__1__hook_resid_pre, past_key_values__READ__key)
    logits = Neg (blocks__1__hook_resid_post)
}"""


@pytest.mark.parametrize(("read", "done"), [(1, True), (0, False)])
def test_a_layer_that_reads_the_past_of_another_is_not_copied(read, done):
    model = ir.from_onnx_text(LAYERS.replace("READ", str(read)))
    for value in [*model.graph.inputs, *(value for node in model.graph for value in node.outputs)]:
        value.name = str(value.name).replace("__", ".")
    before, hooks = len(list(model.graph)), ["blocks.0.hook_resid_pre", "blocks.1.hook_resid_pre"]
    assert stamp(model.graph, [], hooks, Kinds([0, 0, 0, 0], [0, 1]), "model.layers") is done
    assert len(list(model.graph)) == before + 4 * done
    layers = range(4 if done else 2)
    assert hooks == [f"blocks.{layer}.hook_resid_pre" for layer in layers]
    assert [value.name for value in model.graph.inputs][1:] == [f"past_key_values.{layer}.key" for layer in layers]
    (last,) = [node for node in model.graph if node.op_type == "Neg"]
    assert last.inputs[0].name == f"blocks.{layers[-1]}.hook_resid_post"


@pytest.mark.slow
def test_where_layers_cannot_be_copied_all_are_traced(monkeypatch):
    monkeypatch.setattr(hooked_graph, "stamp", lambda graph, parameters, hooks, kinds, blocks: kinds.of == kinds.traced)
    stages: list[str] = []
    made = make_graph(config_of("gpt2", {"num_hidden_layers": 3}), torch.float32, stages.append)
    assert [stage for stage in stages if "tracing" in stage] == ["tracing 1 of 3 layers", "tracing 3 of 3 layers"]
    assert "blocks.2.hook_resid_post" in made.hooks


@pytest.mark.slow
def test_stamped_layers_have_their_own_weights(tmp_path):
    model = make_checkpoint("gemma2", tmp_path / "checkpoint", num_hidden_layers=6)
    stamped = MIModel.from_pretrained(tmp_path / "checkpoint")
    tokens = np.random.default_rng(0).integers(3, 90, (2, 12))
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens), output_hidden_states=True)
    logits, cache = stamped.run_with_cache(tokens, "*.hook_resid_pre")
    assert np.abs(logits - expected.logits.numpy()).max() < 5e-5
    for layer in range(6):
        found = cache[f"blocks.{layer}.hook_resid_pre"]
        assert np.abs(found - expected.hidden_states[layer].numpy()).max() < 5e-5
