"""Families that are not exported are refused in one sentence that says why; others pass."""

import pytest
from repository import REPOSITORY
from tiny_configs import tiny_config
from transformers import AutoConfig

from exporters.transformers.encoder_families import ENCODERS
from exporters.transformers.heads import TaskHead, head_of
from exporters.transformers.refused import REASONS, refuse
from mionnx import ExportError


@pytest.mark.parametrize("family", ["llama", "laguna", "doge", "gpt_oss", "lfm2", "mamba2", "qwen3_next"])
def test_a_decoder_of_the_table_passes(family):
    refuse(AutoConfig.for_model(family, **tiny_config(family)))


@pytest.mark.parametrize("family", ["inkling_text", "xlstm"])
def test_layers_that_carry_a_state_are_recognised_by_their_modules(family, monkeypatch):
    monkeypatch.delitem(REASONS, family)  # as a family that nobody has looked at
    with pytest.raises(ExportError, match=f"^a '{family}' model has state-space, .* does not export such models$"):
        refuse(AutoConfig.for_model(family, **tiny_config(family)))


def test_other_heads_of_models_with_states_are_refused():
    config = AutoConfig.for_model("jamba", **tiny_config("jamba"), architectures=["JambaForSequenceClassification"])
    with pytest.raises(ExportError, match="'jamba' model with JambaForSequenceClassification: of models whose layers"):
        refuse(config, head_of(config))
    config = AutoConfig.for_model("llama", **tiny_config("llama"), architectures=["LlamaForSequenceClassification"])
    refuse(config, head_of(config))


def test_layers_with_different_numbers_of_heads_are_refused():
    with pytest.raises(ExportError, match=r"'laguna' model has layers with different numbers of heads \(4, 8\)"):
        refuse(AutoConfig.for_model("laguna", **{**tiny_config("laguna"), "num_attention_heads_per_layer": [4, 8]}))


def test_the_table_in_the_readme_is_that_of_the_code():
    text = (
        (REPOSITORY / "exporters" / "README.md").read_text().partition("## Refused families")[2].partition("\n## ")[0]
    )
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    told = {family.strip("`"): why for families, why in rows for family in families.split(", ")}
    assert told == REASONS
    assert not {*told} & {*ENCODERS}


@pytest.mark.parametrize("family", ["bert-generation", "hrm_text", "xlnet"])
def test_each_family_of_the_table_is_refused_by_its_reason(family):
    with pytest.raises(ExportError) as refusal:
        refuse(AutoConfig.for_model(family))
    assert REASONS[family] in str(refusal.value)


@pytest.mark.parametrize(
    ("family", "word", "value", "what"),
    [
        ("xlm", "causal", True, "to the left alone: its config says causal; mionnx takes False"),
        ("convbert", "head_ratio", 4, "another share than half of its heads"),
        ("flaubert", "asm", True, "adaptive softmax"),
        ("mobilebert", "use_bottleneck", False, "layers without bottlenecks"),
        ("squeezebert", "post_attention_groups", 4, "outputs of its heads in groups"),
        ("ibert", "quant_mode", True, "simulated integers"),
    ],
)
def test_a_setting_that_is_not_taken_is_named(family, word, value, what):
    refuse(AutoConfig.for_model(family), TaskHead("masked_lm"))
    with pytest.raises(ExportError, match=what):
        refuse(AutoConfig.for_model(family, **{word: value}), TaskHead("masked_lm"))


def test_a_head_of_a_family_that_is_not_taken_is_refused_by_the_family():
    config = AutoConfig.for_model("mamba2", **tiny_config("mamba2"), architectures=["OtherForSequenceClassification"])
    with pytest.raises(ExportError, match=r"'mamba2' model with OtherFor.*whose layers carry a state"):
        refuse(config, head_of(config))
