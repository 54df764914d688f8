"""Rooms ask a layer what it carries: a hybrid of a recurrence, attention and an MLP, beside the same in numpy."""

import re
import runpy
from pathlib import Path

import numpy as np
import pytest
from toy_hybrid import VOCAB, logits_of, write_hybrid

from mionnx import (
    HookCache,
    HookError,
    HookPoint,
    HookSpec,
    InputError,
    Intervention,
    InterventionError,
    KVCache,
    LayerCache,
    MIModel,
    ModelError,
    StateKnockoutSpec,
)
from mionnx.playground.folder import playground

IDS = np.random.default_rng(0).integers(0, VOCAB, 9)
TOLERANCE = 5e-5
PARTS = [{"conv", "state"}, {"key", "value"}, set()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> MIModel:
    return MIModel.from_pretrained(write_hybrid(tmp_path_factory.mktemp("hybrid") / "toy-hybrid"), threads=1)


def test_a_pass_and_what_it_leaves(model):
    found = model.forward(IDS, use_cache=True)
    np.testing.assert_allclose(found.output()[0], logits_of(IDS), atol=TOLERANCE)
    past = found.kv_cache
    assert type(past) is LayerCache
    assert found.state is past
    assert [{*layer} for layer in past.layers] == PARTS
    assert past.layers[1]["key"].shape == (1, 2, 9, 4)
    assert past.layers[0]["state"].shape == (1, 2, 4, 4)
    assert model.forward(IDS).kv_cache is None
    assert model.forward(IDS).state is None  # as in a transformer


def test_calls_of_any_widths_are_one_pass(model):
    past, logits = None, []
    for part in np.split(IDS, [1, 2, 6]):
        found = model.forward(part, cache=past, use_cache=True)
        past = found.kv_cache
        logits.append(found.output()[0])
    np.testing.assert_allclose(np.concatenate(logits), logits_of(IDS), atol=TOLERANCE)


def test_rows_of_unequal_length_are_as_alone(model):
    rows = [IDS.tolist(), IDS[:4].tolist(), IDS[2:8].tolist()]
    for size in (None, 1):
        found = model.forward(rows, use_cache=True, batch_size=size)
        for row, ids in enumerate(rows):
            np.testing.assert_allclose(found.output()[row, -len(ids) :], logits_of(np.array(ids)), atol=TOLERANCE)
            own, alone = found.kv_cache.row(row), model.forward(ids, use_cache=True).kv_cache
            for layer, other in zip(own.layers, alone.layers, strict=True):
                assert layer.keys() == other.keys()
                for name, value in layer.items():
                    np.testing.assert_allclose(value, other[name], atol=TOLERANCE)


def test_generation_and_its_cache(model):
    found = model.generate([IDS.tolist(), IDS[:4].tolist()], max_new_tokens=4)
    for prompt, new in zip((IDS, IDS[:4]), found.new_ids, strict=True):
        ids = prompt
        for token in new:
            assert token == logits_of(ids)[-1].argmax()
            ids = np.append(ids, token)
    again = model.generate([[int(row[-1])] for row in found.ids], cache=found.cache, max_new_tokens=2)
    whole = model.generate([row.tolist() for row in found.ids], max_new_tokens=2)
    assert [row.tolist() for row in again.new_ids] == [row.tolist() for row in whole.new_ids]


def test_a_prefix_of_one_row_serves_several_prompts(model):
    prefix = model.forward(IDS[:5], use_cache=True).kv_cache
    found = model.generate([[3], [7]], cache=prefix, max_new_tokens=2)
    for end, new in zip(([3], [7]), found.new_ids, strict=True):
        assert new[0] == logits_of(np.append(IDS[:5], end))[-1].argmax()


def test_layers_are_transplanted_by_layer(model):
    past, donor = (model.forward(ids, use_cache=True).kv_cache for ids in (IDS[:5], IDS[1:6]))
    clean = past.layers[0]["state"].copy()
    past.clone_layer_from(donor, 0)
    assert (past.layers[0]["state"] == donor.layers[0]["state"]).all()
    past.set_parts(0, state=clean)
    assert (past.layers[0]["state"] == clean).all()
    assert (past.layers[0]["conv"] == donor.layers[0]["conv"]).all()
    past.clone_layer_position_range(donor, 1, 2, 4)
    assert (past.layers[1]["key"][:, :, 2:4] == donor.layers[1]["key"][:, :, 2:4]).all()
    past.clear_layer(0)
    assert not past.layers[0]["conv"].any()
    with pytest.raises(InputError, match="positions apart"):
        past.clone_layer_position_range(donor, 0, 2, 4)
    with pytest.raises(InputError, match=r"in layer 0 .* cannot go back to 2"):
        past.trim_to(2)
    with pytest.raises(InputError, match="layer 0 has no part 'key', only conv, state"):
        past.set_parts(0, key=clean)
    with pytest.raises(InputError, match=r"state of layer 0 must be \[1, 2, 4, 4\]"):
        past.set_parts(0, state=clean[..., :2])


def test_a_saved_cache_goes_on(model, tmp_path):
    found = model.forward(IDS[:5], use_cache=True)
    found.kv_cache.save(tmp_path / "past.safetensors")
    found.save(tmp_path / "pass.safetensors")
    for past in (LayerCache.load(tmp_path / "past.safetensors"), HookCache.load(tmp_path / "pass.safetensors").state):
        assert [{*layer} for layer in past.layers] == PARTS
        np.testing.assert_allclose(model.forward(IDS[5:], cache=past).output()[0], logits_of(IDS)[5:], atol=TOLERANCE)
    with pytest.raises(InputError, match="it is a saved LayerCache"):
        KVCache.load(tmp_path / "past.safetensors")


def test_another_past_is_refused(model):
    past = model.forward(IDS[:5], use_cache=True).kv_cache
    with pytest.raises(InputError, match="continues from a LayerCache"):
        model.forward(IDS, cache=KVCache.empty(3, 1, 2, 4, np.float32))
    for layers, message in (
        ([{}, past.layers[1], {}], r"layer 0 of the cache holds \[\], that of the model \['conv', 'state'\]"),
        ([past.layers[0], past.layers[1], past.layers[0]], r"layer 2 of the cache holds \['conv', 'state'\]"),
        ([*past.layers[:1]], "the cache has 1 layers, the model 2"),
        ([{**past.layers[0], "state": past.layers[0]["state"] * np.nan}, past.layers[1], {}], "layer 0 has NaN"),
    ):
        with pytest.raises(InputError, match=message):
            model.forward(IDS, cache=LayerCache(layers, past.attention_mask))


def test_a_sweep_computes_whole_texts(model):
    other = IDS.copy()
    other[2] = (IDS[2] + 1) % VOCAB
    swept = model.patch_sweep(IDS, other, "resid_post", answer=3, versus=5, over=("layer", "position"))
    for layer in range(3):
        point = HookPoint.ResidPost(layer)
        clean = model.forward(IDS, HookSpec().capture(point))[point]
        for position in (2, 5, 8):
            patch = HookSpec().intervene(point, Intervention.Replace(clean, positions=[position]))
            logits = model.forward(other, patch).output()[0, -1]
            np.testing.assert_allclose(swept.values[layer, position], logits[3] - logits[5], atol=TOLERANCE)


def test_patterns_are_those_of_the_layers_with_attention(model):
    patterns = model.attention(IDS)
    assert patterns.layers == [1]
    assert patterns.patterns.shape == (1, 2, 9, 9)
    with pytest.raises(InputError, match="layers with patterns 1"):
        model.attention(IDS, layers=0)


def test_weights_by_name_are_those_of_the_layers_that_have_them(model):
    hooks = model.forward(IDS, HookSpec().capture(HookPoint.AttnZ(1)).capture(HookPoint.AttnOut(1)))
    own = np.einsum("bshd,hdm->bsm", hooks[HookPoint.AttnZ(1)], model.W_O[1]) + model.weights.b_O[1]
    np.testing.assert_allclose(own, hooks[HookPoint.AttnOut(1)], atol=TOLERANCE)
    with pytest.raises(HookError, match="no W_O in layer 0"):
        _ = model.W_O[0]
    with pytest.raises(HookError, match="no W_O in layer 0"):
        np.asarray(model.W_O)


def test_a_state_knockout_needs_a_gate_in_its_layer(model):
    with pytest.raises(InterventionError, match="layer 1 of this toy_hybrid model has no recurrent state"):
        model.forward(IDS, HookSpec().set_state_knockout(StateKnockoutSpec().position(2).layer(1)))
    with pytest.raises(InterventionError, match="no term of it can be turned"):
        model.forward(IDS, HookSpec().set_state_knockout(StateKnockoutSpec().position(2)))


def test_a_compiled_hybrid_and_the_loop_on_its_card(model, tmp_path, monkeypatch, capsys):
    spec = HookSpec().intervene(HookPoint.ResidPost(0), Intervention.Scale(0.5, positions=[1]))
    folder = model.compile(spec, tmp_path / "out")
    card = (folder / "README.md").read_text()
    assert "past_state.{i}.conv" in card
    assert "present.{i}.key" in card
    loop = re.search(r"```python\n(.*?)```", card, re.DOTALL)[1]
    prompt = IDS[:4].tolist()
    loop = re.sub(r"tokenizer = .*\n", "", loop).replace("from tokenizers import Tokenizer\n", "")
    loop = re.sub(r"np\.array\(\[tokenizer\.encode\(.*?\)\.ids\]\)", f"np.array([{prompt}])", loop)
    loop = loop.replace("tokenizer.decode([int(new[0, 0])])", "int(new[0, 0])")
    (folder / "loop.py").write_text(loop)
    monkeypatch.chdir(folder)
    runpy.run_path(str(folder / "loop.py"))
    expected = model.generate([prompt], spec, max_new_tokens=16, eos_token_id=[]).new_ids[0]
    assert [int(line) for line in capsys.readouterr().out.split()] == expected.tolist()
    for layout, why in (("genai", "eos_token_id"), ("transformers.js", "no config.json"), ("optimum", "conv, state")):
        with pytest.raises(InputError, match=why):
            model.compile(spec, tmp_path / layout, layout=layout)


def test_a_playground_is_refused(model, tmp_path: Path):
    with pytest.raises(ModelError, match="recurrent layers too"):
        playground(model, tmp_path / "page")
