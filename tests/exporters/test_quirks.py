"""Taps of single families: a row of the table says which and why; taps are found by the module that runs."""

import pytest
import torch
from families import make_model

from exporters.transformers.attention import ATTENTION_FUNCTION, TappedCache
from exporters.transformers.encoder_families import ENCODERS
from exporters.transformers.families import FAMILIES, layout_of
from exporters.transformers.quirks import QUIRKS, attachment_of
from exporters.transformers.taps import Attachment
from exporters.transformers.trace import attached, prepare
from mionnx import ExportError

IDS = torch.tensor([[3, 4, 5]])


def test_a_quirk_overrides_a_kind_of_tap_of_a_family_in_the_table():
    for family, (attachment, why) in QUIRKS.items():
        assert family in {*FAMILIES, *ENCODERS}
        assert issubclass(attachment, Attachment)
        assert any(name in vars(Attachment) for name in vars(attachment) if not name.startswith("__"))
        assert len(why.split()) > 5


def test_a_family_without_a_row_has_the_taps_of_all():
    assert attachment_of(make_model("llama").config) is Attachment


def test_taps_of_two_models_at_once_stay_apart():
    models, caches, seen = [make_model("llama"), make_model("gpt2")], [], []
    for model in models:
        prepare(model.config)
        names: set[str] = set()
        seen.append(names)

        def listen(name, value, stream, names=names):
            names.add(name)
            return value

        caches.append(TappedCache([], listen, layout_of(model.config)))
    llama, llama_cache = models[0], caches[0]
    with attached(llama, llama_cache.taps), attached(models[1], caches[1].taps), torch.no_grad():
        llama(IDS, past_key_values=llama_cache, use_cache=True)
    assert "blocks.1.attn.hook_pattern" in seen[0]
    assert seen[1] == set()


def test_attention_outside_of_taps_is_refused():
    model = make_model("llama")
    model.config._attn_implementation = ATTENTION_FUNCTION
    with pytest.raises(ExportError, match="run only inside `attached`"):
        model(IDS)
