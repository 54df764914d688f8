"""A hooked model's description: hook points in execution order, their axes and dtypes."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from repository import REPOSITORY
from toy import HOOKS, Z, toy

from mionnx import MIModel
from mionnx.errors import HookError, ModelError
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.metadata import Metadata

MODELS = REPOSITORY / "models"


def test_hook_points_are_in_execution_order_derived_ones_behind_their_source():
    names = [*toy().order]
    assert [name for name in names if not HookPoint.parse(name).derived] == [*HOOKS]
    assert names[names.index(Z) + 1] == "blocks.0.attn.hook_result"


def test_axes_are_numbers_where_they_are_fixed():
    model = toy()
    assert model.axes(HookPoint.AttnZ(0)) == ["batch", "seq", 2, 2]
    assert model.axes(HookPoint.AttnResult(0)) == ["batch", "seq", 2, 4]
    with pytest.raises(HookError, match="this toy model has no hook point"):
        model.axes(HookPoint.AttnZ(1))


def test_a_name_has_no_key_of_the_store():
    folders = {"gpt2-0123456789abcdef": "gpt2", "gpt2-1234": "gpt2-1234", "0123456789abcdef": "0123456789abcdef"}
    assert [replace(toy(), folder=Path("/store") / folder).name for folder in folders] == [*folders.values()]


def test_a_recurrence_is_float32():
    model = HookedModel.open(MODELS / "world-rwkv7")
    assert model.dtype(HookPoint.RwkvK(0)) == np.float32
    assert model.metadata.carries_state
    assert not HookedModel.open(MODELS / "world-llama").metadata.carries_state


def test_end_tokens_are_those_of_the_generation_config(copy):
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9999, "x"]}))
    assert HookedModel.open(copy).end_tokens() == [7]
    (copy / "generation_config.json").write_text("{")
    (copy / "config.json").write_text(json.dumps({"eos_token_id": 3}))
    assert HookedModel.open(copy).end_tokens() == [3]
    (copy / "config.json").unlink()
    assert HookedModel.open(copy).end_tokens() == []


def test_attention_in_another_number_of_layers_is_refused(copy):
    import onnx

    proto = onnx.load(copy / "model.onnx", load_external_data=False)
    (entry,) = [entry for entry in proto.metadata_props if entry.key == "mionnx.attention"]
    for kept in (json.loads(entry.value)[:2], []):
        entry.value = json.dumps(kept)
        (copy / "model.onnx").write_bytes(proto.SerializeToString())
        with pytest.raises(ModelError, match=f"attention in {len(kept)} of 4 layers"):
            HookedModel.open(copy)


class TestContextLength:
    @pytest.mark.parametrize(("name", "length"), [("world-llama", 256), ("world-gpt2", 256), ("world-rwkv7", None)])
    def test_of_the_models_that_ship(self, name, length):
        """Older files, whose metadata do not say it: their config.json does."""
        assert MIModel.from_pretrained(REPOSITORY / "models" / name).cfg.n_ctx == length

    def test_without_a_config_it_is_not_known(self, copy):
        (copy / "config.json").unlink()
        assert MIModel.from_pretrained(copy).cfg.n_ctx is None
        (copy / "config.json").write_text('{"text_config": {"n_ctx": 77}}')
        assert MIModel.from_pretrained(copy).cfg.n_ctx == 77

    def test_it_is_part_of_the_metadata(self, shipped):
        metadata = replace(shipped.hooked.metadata, context_length=8192)
        assert Metadata.from_props(metadata.to_props()) == metadata
        assert replace(shipped.hooked, metadata=metadata).context_length == 8192
        with pytest.raises(ModelError, match="context_length 0"):
            Metadata.from_props(replace(metadata, context_length=0).to_props())
