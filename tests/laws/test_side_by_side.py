"""Verbs on a model with attention and a mixer side by side in each layer (Falcon-H1): right, or refused by name."""

import numpy as np
import pytest
from compiled_steps import logits_in_calls

from mionnx import HookError, HookPoint, HookSpec, InputError, Intervention, MIModel, StateSteeringSpec

pytestmark = pytest.mark.slow
TOLERANCE = 5e-5
CLEAN, CORRUPTED = np.random.default_rng(0).integers(3, 101, (2, 14))
TOKENS = {"answer": 5, "versus": 9}
LAYERS = range(3)


@pytest.fixture
def model(hybrid) -> MIModel:
    return hybrid("falcon_h1")


def logit_diff(logits: np.ndarray) -> float:
    return float(logits[0, -1, 5] - logits[0, -1, 9])


def test_attention_and_the_mixer_are_parts_of_the_stream(model):
    stacked, labels = model.decompose_resid(CLEAN)
    assert labels == ["embed", *(f"{layer}_{what}_out" for layer in LAYERS for what in ("attn", "ssm", "mlp"))]
    end, middle = HookPoint.ResidPost(2), HookPoint.ResidMid(1)
    streams = model.forward(CLEAN, HookSpec().capture([end, middle]))
    np.testing.assert_allclose(stacked.sum(0), streams[end], atol=TOLERANCE)
    parts, labels = model.decompose_resid(CLEAN, layer=1, mlp_input=True)
    assert labels[-2:] == ["1_attn_out", "1_ssm_out"]
    np.testing.assert_allclose(parts.sum(0), streams[middle], atol=TOLERANCE)
    parts, labels = model.decompose_resid(CLEAN, mode="attn", incl_embeds=False)
    assert labels == [f"{layer}_{what}_out" for layer in LAYERS for what in ("attn", "ssm")]


def test_an_attribution_has_heads_and_mixers_and_sums_to_the_logit(model):
    found = model.attribute(CLEAN, 5, 9)
    assert found.total == pytest.approx(logit_diff(model.forward(CLEAN).output()), abs=1e-3)
    expected = ["embed"]
    for layer in LAYERS:
        expected += [f"L{layer}H{head}" for head in range(4)]
        expected += [f"{layer}_attn_bias", f"{layer}_ssm_out", f"{layer}_mlp_out"]
    assert found.labels == [*expected, "final_norm_bias", "head_bias"]
    shares = dict(zip(found.labels, found.values, strict=True))
    # no bias in this attention: heads' shares, through its factor, are all of it
    assert max(abs(shares[f"{layer}_attn_bias"]) for layer in LAYERS) < TOLERANCE
    point = HookPoint.SsmOut(2)  # in the last layer, in front of an MLP: its direct share alone
    stream, norm = (model.forward(CLEAN, HookSpec().capture(one))[one][0, -1] for one in (point, HookPoint.FinalNorm))
    last = model.forward(CLEAN, HookSpec().capture(HookPoint.ResidPost(2)))[HookPoint.ResidPost(2)][0, -1]
    direction = model.weights.W_U[:, 5] - model.weights.W_U[:, 9]
    product = float((stream * norm / last) @ direction) * 0.75  # lm_head_multiplier
    assert shares["2_ssm_out"] == pytest.approx(product, abs=1e-3)


@pytest.mark.parametrize("short", ["hook_ssm_out", "hook_attn_out"])
def test_a_sweep_over_one_of_the_two_is_its_patch_alone(model, short):
    swept = model.patch_sweep(CLEAN, CORRUPTED, short.removeprefix("hook_"), over=("layer", "position"), **TOKENS)
    clean = model.forward(CLEAN, HookSpec().capture(f"blocks.*.{short}"))
    other = "hook_attn_out" if short == "hook_ssm_out" else "hook_ssm_out"
    kept = model.forward(CORRUPTED, HookSpec().capture(f"blocks.0.{other}"))[f"blocks.0.{other}"]
    for layer, position in ((0, 3), (1, 13), (2, 13)):
        point = f"blocks.{layer}.{short}"
        patch = HookSpec().intervene(point, Intervention.Replace(clean[point], positions=[position]))
        found = model.forward(CORRUPTED, patch.capture(f"blocks.0.{other}"))
        assert swept.values[layer, position] == pytest.approx(logit_diff(found.output()), abs=TOLERANCE)
        assert (found[f"blocks.0.{other}"] == kept).all()


def test_transformer_lens_names_of_the_mixer_read_it(model):
    read = "blocks.1.mamba.hook_in"
    found = model.forward(CLEAN, HookSpec().capture([read, HookPoint.SsmPre(1)]))
    assert (found[read] == found[HookPoint.SsmPre(1)]).all()
    with pytest.raises(HookError, match=r"of TransformerLens: here is blocks.1.hook_ssm_out, behind its factor"):
        model.forward(CLEAN, HookSpec().capture("blocks.1.mamba.hook_out"))
    for verb in (HookSpec().capture, lambda name: HookSpec().intervene(name, Intervention.Zero())):
        with pytest.raises(HookError, match=r"blocks.1.mixer.hook_out.* beside attention it is hook_ssm_out"):
            model.forward(CLEAN, verb("blocks.1.mixer.hook_out"))


def test_paths_and_edges_are_refused_by_name(model):
    for verb in (
        lambda: model.path_patch(CLEAN, CORRUPTED, "all", "attn.hook_z", over=("layer", "head"), **TOKENS),
        lambda: model.path_patch(CLEAN, CORRUPTED, "all", "hook_ssm_out", over=("layer",), **TOKENS),
        lambda: model.edge_attribution(CLEAN, CORRUPTED, **TOKENS),
    ):
        with pytest.raises(HookError, match="attention and a mixer of layer 0 add to it side by side: sweep over"):
            verb()
    with pytest.raises(HookError, match="layer 0 has a mixer beside its attention, whose bias has no name"):
        model.weights.accumulated_bias(3)


def test_weights_are_those_that_the_graph_multiplies_with(model):
    layer = 1
    z, out = HookPoint.AttnZ(layer), HookPoint.AttnOut(layer)
    found = model.forward(CLEAN, HookSpec().capture([z, out]))
    made = np.einsum("bshd,hdm->bsm", found[z], model.weights.W_O[layer])
    np.testing.assert_allclose(made, found[out], atol=TOLERANCE)
    z, out = HookPoint.SsmZ(layer), HookPoint.SsmOut(layer)
    found = model.forward(CLEAN, HookSpec().capture([z, out]))
    made = found[z].reshape(1, 14, -1) @ model.weights.behind(out).weight().reshape(-1, 64)
    np.testing.assert_allclose(made, found[out], atol=TOLERANCE)


def test_patterns_and_effective_attention_are_of_all_layers(model):
    assert model.attention(CLEAN).layers == [*LAYERS]
    assert model.attention(CLEAN, effective=True).layers == [*LAYERS]


def test_a_state_is_steered_by_head(model):
    value = HookPoint.SsmV(1)
    changed = HookSpec().intervene(value, Intervention.Scale(2.5, positions=[3], heads=[0]))
    steered = HookSpec().set_state_steering(StateSteeringSpec(2.5).layer(1).position(3).head(0))
    expected = model.forward(CLEAN, changed).output()
    assert np.abs(expected - model.forward(CLEAN).output()).max() > 1e-3
    np.testing.assert_allclose(model.forward(CLEAN, steered).output(), expected, atol=TOLERANCE)


def test_a_compiled_model_hands_keys_and_states_on(model, tmp_path):
    spec = HookSpec().intervene(HookPoint.SsmOut(1), Intervention.Scale(0.5, positions=[1, 10]))
    graph = model.compile(spec, tmp_path / "out") / "model.onnx"
    logits = logits_in_calls(model, graph, CLEAN, ((0, 9), (9, 10), (10, 14)))
    np.testing.assert_allclose(logits, model.forward(CLEAN, spec).output(), atol=TOLERANCE)
    with pytest.raises(InputError, match="conv"):
        model.compile(spec, tmp_path / "optimum", layout="optimum")
