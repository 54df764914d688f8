"""Families that are not exported are refused in one sentence that says why; others pass."""

import pytest
from tiny_configs import tiny_config
from transformers import AutoConfig

from exporters.transformers.heads import head_of
from exporters.transformers.refused import REASONS, refuse
from mionnx import ExportError


@pytest.mark.parametrize("family", ["llama", "laguna", "doge", "gpt_oss", "lfm2", "mamba2", "qwen3_next"])
def test_a_decoder_of_the_table_passes(family):
    refuse(AutoConfig.for_model(family, **tiny_config(family)))


@pytest.mark.parametrize("family", ["falcon_h1", "minimax", "recurrent_gemma", "zamba2"])
def test_layers_that_carry_a_state_are_recognised_by_their_modules(family):
    with pytest.raises(ExportError, match=f"^a '{family}' model has state-space, .* does not export such models$"):
        refuse(AutoConfig.for_model(family, **tiny_config(family)))


def test_layers_with_different_numbers_of_heads_are_refused():
    with pytest.raises(ExportError, match=r"'laguna' model has layers with different numbers of heads \(4, 8\)"):
        refuse(AutoConfig.for_model("laguna", **{**tiny_config("laguna"), "num_attention_heads_per_layer": [4, 8]}))


@pytest.mark.parametrize("family", ["bert-generation", "hrm_text", "xlm"])
def test_each_family_of_the_table_is_refused_by_its_reason(family):
    with pytest.raises(ExportError) as refusal:
        refuse(AutoConfig.for_model(family))
    assert REASONS[family] in str(refusal.value)


@pytest.mark.parametrize(
    ("family", "architecture", "words"),
    [
        ("llama", "LlamaForSequenceClassification", "such a head of encoders alone"),
        ("electra", "ElectraForPreTraining", "tells replaced tokens"),
    ],
)
def test_a_head_that_has_no_oracle_is_refused(family, architecture, words):
    config = AutoConfig.for_model(family, architectures=[architecture])
    with pytest.raises(ExportError, match=words):
        refuse(config, head_of(config))
