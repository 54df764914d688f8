"""Verbs on the shipped hybrid, three layers of gated DeltaNet and one of gated attention: right, or refused by name."""

import numpy as np
import onnxruntime
import pytest
from repository import REPOSITORY

from mionnx import (
    HookError,
    HookPoint,
    HookSpec,
    InputError,
    MIModel,
    StateKnockoutSpec,
)

CLEAN, CORRUPTED = (f"The capital of {country} is" for country in ("France", "Germany"))
GIVEN = "When Mary and John went to the store , John gave a drink to"
TOLERANCE = 5e-5
TOKENS = {"answer": "Paris", "versus": "Berlin"}


@pytest.fixture(scope="module")
def model() -> MIModel:
    return MIModel.from_pretrained(REPOSITORY / "models" / "world-hybrid", threads=1)


def test_layers_and_what_they_carry(model):
    layers = model.hooked.metadata.layers
    assert [(layer.has_state, layer.attention is not None) for layer in layers] == [(True, False)] * 3 + [(False, True)]
    past = model.forward(CLEAN, use_cache=True).kv_cache
    assert [{*layer} for layer in past.layers] == [{"conv", "state"}] * 3 + [{"key", "value"}]


def test_patterns_and_effective_attention_stand_beside_each_other(model, tmp_path):
    patterns, effective = model.attention(CLEAN), model.attention(CLEAN, effective=True)
    assert (patterns.layers, effective.layers) == ([3], [0, 1, 2])
    assert (patterns.view().title, effective.view().title) == ("Attention patterns", "Effective attention")
    assert effective.patterns.shape == (3, 4, 5, 5)
    assert (effective.patterns >= 0).all()
    total = effective.patterns.sum(-1)
    assert (np.isclose(total, 1, atol=1e-5) | (total == 0)).all()
    assert effective.save(tmp_path / "page.html").exists()
    silenced = HookSpec().set_state_knockout(StateKnockoutSpec().position(3))
    assert not model.attention(CLEAN, effective=True, hooks=silenced).patterns[:, :, :, 3].any()
    with pytest.raises(InputError, match=r"layers 3: the model has the layers 0 to 2"):
        model.attention(CLEAN, 3, effective=True)


def test_a_sweep_a_lens_and_an_attribution_add_up(model):
    swept = model.patch_sweep(CLEAN, CORRUPTED, "resid_pre", **TOKENS)
    assert swept.normalized[0, 3] == pytest.approx(1, abs=1e-3)  # the country before the first layer is all
    assert model.logit_lens(CLEAN).answers[-1] == model.token_id("Paris")
    lead = model.attribute(CLEAN, **TOKENS)
    logits = model.forward(CLEAN).output()[0, -1]
    paris, berlin = (model.token_id(one) for one in ("Paris", "Berlin"))
    assert lead.total == pytest.approx(float(logits[paris] - logits[berlin]), abs=1e-3)


def test_moments_and_shards_are_those_of_forward(model, tmp_path):
    point = "blocks.1.ssm.hook_y"
    found = model.statistics([CLEAN, GIVEN], point, batch_size=1)
    values = np.concatenate(
        [model.forward(text, HookSpec().capture(point))[point][0].astype(np.float64) for text in (CLEAN, GIVEN)]
    )
    np.testing.assert_allclose(found.mean(point), values.mean(0), atol=TOLERANCE)
    made = model.harvest([CLEAN, GIVEN], [point], tmp_path / "shards", batch_size=1)
    assert made is not None


def test_the_best_receivers_of_a_path_may_be_mixers(model):
    found = model.path_patch(
        CLEAN, CORRUPTED, ["blocks.2.ssm.hook_pre"], "resid_pre", over="layer", layers=[0], patching="noising", **TOKENS
    )
    assert np.isfinite(found.values).all()
    with pytest.raises(InputError, match=r"edges: 'qwen3_5_text', blocks.3.attn.hook_z depends on the tokens by"):
        model.edge_attribution(CLEAN, CORRUPTED, **TOKENS)


def test_gradients_and_patches_to_first_order_reach_every_layer(model):
    found = model.gradients(CLEAN, "blocks.*.hook_resid_pre", answer="Paris").grad
    assert all(np.abs(found[HookPoint.ResidPre(layer)]).max() > 0 for layer in range(4))
    scores = model.attribute_patch(CLEAN, CORRUPTED, "resid_pre", steps=5, **TOKENS)
    assert np.isfinite(scores.values).all()


def test_heads_without_a_share_in_the_stream_are_refused(model):
    with pytest.raises(HookError):
        model.stack_head_results(CLEAN)


@pytest.mark.slow
def test_runtimes_agree(model):
    found = model.verify([CLEAN], ["ort-cpu", "ort-cpu:none", "torch"], greedy=2)
    assert found.agrees
    assert not found.failed
    assert all(beside.worst.relative < TOLERANCE for beside in found.besides)


@pytest.mark.parametrize("bits", [8, pytest.param(4, marks=pytest.mark.slow)])
def test_blocks_keep_what_it_knows(model, tmp_path, bits):
    small = MIModel.from_pretrained(model.quantise(tmp_path / "made", bits=bits), threads=1)
    assert small.hooked.metadata.quantised["bits"] == bits
    found = small.forward(CLEAN).output()[0, -1]
    assert small.tokenizer.decode([int(found.argmax())]) == "Paris"


def test_a_compiled_hybrid_goes_on_token_by_token(model, tmp_path):
    spec = HookSpec().set_state_knockout(StateKnockoutSpec().position(1).erase())
    folder = model.compile(spec, tmp_path / "out")
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    ids = model.tokenize(GIVEN).ids
    shapes = model.hooked.metadata.past_shapes(1, 0)
    past, logits = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, []
    names = [one.name for one in session.get_outputs()]
    for start, stop in ((0, 9), (9, 10), (10, len(ids))):
        feeds = {"input_ids": ids[None, start:stop], "attention_mask": np.ones((1, stop), np.int64)}
        feeds |= {"position_ids": np.arange(start, stop)[None], **past}
        found = dict(zip(names, session.run(None, feeds), strict=True))
        logits.append(found["logits"])
        past = {port.past: found[port.present] for port in model.hooked.metadata.ports}
    np.testing.assert_allclose(np.concatenate(logits, 1), model.forward(ids, spec).output(), atol=TOLERANCE)
    with pytest.raises(InputError, match="conv, state"):
        model.compile(spec, tmp_path / "genai", layout="genai")


def test_a_name_is_kept_where_knocking_out_loses_it(model):
    tokens = model.tokenize(GIVEN)
    (name,) = tokens.positions_of("Mary")
    mary = model.token_id("Mary")
    assert model.forward(tokens).output()[0, -1].argmax() == mary
    hidden = HookSpec().set_state_knockout(StateKnockoutSpec().position(name).invisible())
    assert model.forward(tokens, hidden).output()[0, -1].argmax() != mary
