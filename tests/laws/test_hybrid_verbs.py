"""Verbs on hybrids, of convolutions and of gated DeltaNet beside attention: right, or refused by name."""

from dataclasses import replace

import numpy as np
import pytest
from compiled_steps import logits_in_calls

from mionnx import HookError, HookPoint, HookSpec, InputError, Intervention, MIModel, StateKnockoutSpec

TOLERANCE = 5e-5
CLEAN, CORRUPTED = np.random.default_rng(0).integers(3, 101, (2, 14))
TOKENS = {"answer": 5, "versus": 9}
EACH = ["lfm2", pytest.param("qwen3_5_text", marks=pytest.mark.slow)]  # layers 0 and 2 are recurrent, layer 1 attends


@pytest.fixture(params=EACH)
def model(hybrid, request: pytest.FixtureRequest) -> MIModel:
    return hybrid(request.param)


def test_a_sweep_an_attribution_and_a_lens_are_those_of_single_passes(model):
    swept = model.patch_sweep(CLEAN, CORRUPTED, "attn_out", over=("layer", "position"), **TOKENS)
    points = [HookPoint.AttnOut(layer) for layer in range(3)]
    clean = model.forward(CLEAN, HookSpec().capture("blocks.*.hook_attn_out"))
    for layer, position in ((0, 3), (1, 13), (2, 12)):
        patch = Intervention.Replace(clean[points[layer]], positions=[position])
        logits = model.forward(CORRUPTED, HookSpec().intervene(points[layer], patch)).output()[0, -1]
        assert swept.values[layer, position] == pytest.approx(float(logits[5] - logits[9]), abs=TOLERANCE)
    logits = clean.output()[0, -1]
    found = model.attribute(CLEAN, 5, 9)
    assert found.total == pytest.approx(float(logits[5] - logits[9]), abs=1e-3)
    heads = found.heads  # those of the layer that attends
    assert np.isnan(heads).tolist() == [[layer != 1] * 4 for layer in range(3)]
    assert heads[1].tolist() == [found[f"L1H{head}"] for head in range(4)]
    shares = model.forward(CLEAN, HookSpec().capture(HookPoint.AttnResult(1)))[HookPoint.AttnResult(1)][0, -1]
    ends = model.forward(CLEAN, HookSpec().capture([HookPoint.ResidPost(2), HookPoint.FinalNorm]))
    scale = ends[HookPoint.FinalNorm][0, -1] / ends[HookPoint.ResidPost(2)][0, -1]  # of a norm without a bias
    direction = scale * (model.weights.W_U[:, 5] - model.weights.W_U[:, 9])
    np.testing.assert_allclose(heads[1], shares @ direction, atol=TOLERANCE)
    assert model.logit_lens(CLEAN).answers[-1] == logits.argmax()


@pytest.mark.slow
def test_a_state_at_the_end_of_a_call_is_not_swept_over(hybrid):
    model = hybrid("qwen3_5_text")
    for verb in (model.patch_sweep, model.attribute_patch):
        with pytest.raises(HookError, match=r"no logits of this one depend on it: sweep over blocks.\{i\}.ssm.hook_v"):
            verb(CLEAN, CORRUPTED, "ssm.hook_state", over=("layer", "head"), **TOKENS)


def test_transformer_lens_names_of_a_mixer_read_and_change_it(model):
    read, ours = "blocks.2.linear_attn.hook_in", HookPoint.SsmPre(2)
    found, same = (
        model.forward(CLEAN, HookSpec().capture(one).intervene(one, Intervention.Scale(0.5))) for one in (read, ours)
    )
    assert (found[read] == same[ours]).all()
    assert (found.output() == same.output()).all()
    with pytest.raises(HookError, match=r"of TransformerLens: here is blocks.2.ssm.hook_q, after norm and scale"):
        model.forward(CLEAN, HookSpec().capture("blocks.2.linear_attn.hook_q"))


def test_moments_and_shards_are_those_of_forward(model, tmp_path):
    point, texts = "blocks.2.ssm.hook_conv", [CLEAN.tolist(), CORRUPTED[:9].tolist()]
    found = model.statistics(texts, point, batch_size=2)
    values = np.concatenate([model.forward(text, HookSpec().capture(point))[point][0] for text in texts])
    np.testing.assert_allclose(found.mean(point), values.astype(np.float64).mean(0), atol=TOLERANCE)
    made = model.harvest(texts, [point], tmp_path / "shards", batch_size=2)
    np.testing.assert_allclose(made[point], values, atol=TOLERANCE)


def test_attribution_patching_is_a_change_times_its_gradient(model):
    scores = model.attribute_patch(CLEAN, CORRUPTED, "resid_pre", over=("layer", "position"), **TOKENS).effect
    grad = model.gradients(CORRUPTED, "blocks.*.hook_resid_pre", "logit_diff", **TOKENS).grad
    clean, corrupted = (model.forward(ids, HookSpec().capture("blocks.*.hook_resid_pre")) for ids in (CLEAN, CORRUPTED))
    for layer in range(3):
        point = HookPoint.ResidPre(layer)
        expected = ((clean[point] - corrupted[point]) * grad[point])[0].sum(-1)
        np.testing.assert_allclose(scores[layer], expected, atol=TOLERANCE * max(1, np.abs(expected).max()))


def test_runtimes_agree(model):
    found = model.verify([CLEAN], ["ort-cpu", "ort-cpu:none"], greedy=1)
    assert found.agrees
    assert not found.failed
    assert all(beside.worst.relative < TOLERANCE for beside in found.besides)


@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_are_of_every_projection(model, tmp_path, bits):
    small = MIModel.from_pretrained(model.quantise(tmp_path / "made", bits=bits), threads=1)
    assert small.hooked.metadata.quantised["bits"] == bits
    products = [node for node in small.hooked.proto.graph.node if node.op_type == "MatMulNBits"]
    assert {f"layers.{layer}." in str([*node.input]) for node in products for layer in (0, 1, 2)} == {True, False}
    one, other = (each.forward(CLEAN).output()[0, -1] for each in (small, model))
    assert np.corrcoef(one, other)[0, 1] > (0.99 if bits == 8 else 0.8)
    calls = [small.forward(CLEAN[:9], use_cache=True)]
    calls.append(small.forward(CLEAN[9:], cache=calls[0].kv_cache))
    np.testing.assert_allclose(calls[1].output()[0, -1], one, atol=TOLERANCE)


def test_a_compiled_hybrid_goes_on_token_by_token(model, tmp_path):
    spec = HookSpec().intervene(HookPoint.SsmConv(2), Intervention.Scale(0.5, positions=[1, 10]))
    folder = model.compile(spec, tmp_path / "out")
    logits = logits_in_calls(model, folder / "model.onnx", CLEAN, ((0, 9), (9, 10), (10, 14)))
    np.testing.assert_allclose(logits, model.forward(CLEAN, spec).output(), atol=TOLERANCE)
    for layout in ("genai", "transformers.js"):
        assert any(model.compile(spec, tmp_path / layout, layout=layout).rglob("*.onnx"))
    with pytest.raises(InputError, match="conv"):
        model.compile(spec, tmp_path / "optimum", layout="optimum")


def test_patterns_are_those_of_the_layers_that_attend(model):
    assert model.attention(CLEAN).layers == [1]
    if not model.hooked.metadata.layers[0].has_state:
        with pytest.raises(InputError, match=r"attention\(effective=True\): no layer of the model has state"):
            model.attention(CLEAN, effective=True)


@pytest.mark.slow
def test_effective_attention_stands_beside_patterns(hybrid, tmp_path):
    model = hybrid("qwen3_5_text")
    found = model.attention(CLEAN, effective=True)
    assert (found.layers, found.view().title) == ([0, 2], "Effective attention")
    assert found.patterns.shape == (2, 4, 14, 14)
    total = found.patterns.sum(-1)
    assert (np.isclose(total, 1, atol=1e-5) | (total == 0)).all()
    assert found.save(tmp_path / "page.html").exists()
    silenced = HookSpec().set_state_knockout(StateKnockoutSpec().position(3))
    assert not model.attention(CLEAN, effective=True, hooks=silenced).patterns[:, :, :, 3].any()
    with pytest.raises(InputError, match="layers 1: the model has the layers with patterns 0, 2"):
        model.attention(CLEAN, 1, effective=True)


@pytest.mark.slow
def test_gates_of_heads_are_receivers(hybrid):
    """A circuit without one edge is path patching of that one, into a head's gate too; all edges are the model."""
    model = hybrid("qwen3_5_text")
    ranking = model.edge_attribution(CLEAN, CORRUPTED, **TOKENS)
    assert [one for one in ranking.receivers if "<g>" in one] == [f"a1.h{head}<g>" for head in range(4)]
    whole = model.circuit(CLEAN, CORRUPTED, [0, ranking.count], scores=ranking, **TOKENS)
    assert whole.values == pytest.approx([whole.corrupted, whole.clean], abs=TOLERANCE)
    point, sender = HookPoint.AttnGate(1), ranking.senders.index("r0.h1")
    for head in range(4):
        scores = np.ones(ranking.scores.shape)
        scores[sender, ranking.receivers.index(f"a1.h{head}<g>")] = 0
        chosen = replace(ranking, scores=scores)
        found = model.circuit(CLEAN, CORRUPTED, ranking.count - 1, scores=chosen, **TOKENS)
        exact = model.path_patch(CLEAN, CORRUPTED, [(point, head)], "ssm.hook_z", patching="noising", **TOKENS)
        assert found.values[0] == pytest.approx(float(exact.values[0, 1]), abs=TOLERANCE)
        assert abs(float(exact.effect[0, 1])) > TOLERANCE


@pytest.mark.slow
def test_a_score_into_a_gate_is_a_change_times_the_gradient_through_that_head_s_gate(hybrid):
    """The gradient by the stream as one head's gate reads it: beside a difference quotient of two passes."""
    model, step = hybrid("qwen3_5_text"), 1e-2
    ranking = model.edge_attribution(CLEAN, CORRUPTED, **TOKENS)
    stream, gate, out = HookPoint.ResidPre(1), HookPoint.AttnGate(1), HookPoint.MlpOut(0)
    captured = HookSpec().capture([stream, gate, out])
    clean, corrupted = (model.forward(ids, captured) for ids in (CLEAN, CORRUPTED))
    ends = []
    for sign in (1, -1):  # what the gate reads moves by a part of what layer 0's MLP sends
        moved = clean[stream] + sign * step * (corrupted[out] - clean[out])
        gates = model.forward(CLEAN, HookSpec().capture(gate).intervene(stream, Intervention.Replace(moved)))[gate]
        mixed = np.array(clean[gate])
        mixed[:, :, 2] = gates[:, :, 2]
        logits = model.forward(CLEAN, HookSpec().intervene(gate, Intervention.Replace(mixed))).output()[0, -1]
        ends.append(float(logits[5] - logits[9]))
    score = ranking.scores[ranking.senders.index("m0"), ranking.receivers.index("a1.h2<g>")]
    assert score == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=2e-3)
    assert abs(score) > 1e-3


def test_the_name_of_another_shape_is_told(hybrid):
    with pytest.raises(HookError, match=r"of TransformerLens: here is blocks.1.attn.hook_gate, by head"):
        hybrid("lfm2").forward(CLEAN, HookSpec().capture("blocks.1.attn.hook_q_gate"))


def test_shares_of_heads_are_those_of_the_layers_that_attend(model):
    shares, labels = model.stack_head_results(CLEAN)
    assert labels == [f"L1H{head}" for head in range(4)]
    out = model.forward(CLEAN, HookSpec().capture(HookPoint.AttnOut(1)))[HookPoint.AttnOut(1)]
    np.testing.assert_allclose(shares.sum(0), out, atol=TOLERANCE)
    with pytest.raises(HookError, match="no layer before 1 has heads with shares"):
        model.stack_head_results(CLEAN, 1)
