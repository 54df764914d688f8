"""Verbs on a model whose layers are a mixer, attention, an MLP or experts alone (Nemotron-H): right, or refused."""

from dataclasses import replace

import numpy as np
import pytest
from compiled_steps import logits_in_calls

from mionnx import HookError, HookPoint, HookSpec, InputError, Intervention, MIModel

pytestmark = pytest.mark.slow
TOLERANCE = 5e-5
CLEAN, CORRUPTED = np.random.default_rng(0).integers(3, 101, (2, 14))
TOKENS = {"answer": 5, "versus": 9}
MIXERS, ATTENDS, NEURONS = [0, 4], [2], [1, 3, 5]  # of the neurons those of layers 3 and 5 are experts'
OUTPUTS = [f"blocks.{layer}.hook_{'mlp' if layer in NEURONS else 'attn'}_out" for layer in range(6)]


@pytest.fixture
def model(hybrid) -> MIModel:
    return hybrid("nemotron_h")


def logit_diff(logits: np.ndarray) -> float:
    return float(logits[0, -1, 5] - logits[0, -1, 9])


def test_a_layer_has_the_hook_points_of_its_half(model):
    kinds = {layer: {point.short for point in model.hook_points() if point.layer == layer} for layer in range(6)}
    for layer, own in kinds.items():
        assert {"resid_pre", "resid_post", "mlp_out" if layer in NEURONS else "attn_out"} <= own
        assert ("state" in own, "pattern" in own, "up" in own) == (layer in MIXERS, layer in ATTENDS, layer in NEURONS)
        assert "resid_mid" not in own
    carried = [(port.layer, port.part) for port in model.hooked.metadata.ports]
    assert carried == [*((0, one) for one in ("conv", "state")), (2, "key"), (2, "value"), (4, "conv"), (4, "state")]


def test_the_stream_is_the_sum_of_what_layers_add(model):
    stacked, labels = model.decompose_resid(CLEAN)
    assert labels == ["embed", *(f"{i}_{'mlp' if i in NEURONS else 'attn'}_out" for i in range(6))]
    end = HookPoint.ResidPost(5)
    cache = model.forward(CLEAN, HookSpec().capture(end))
    np.testing.assert_allclose(stacked.sum(0), cache[end], atol=TOLERANCE)
    found = model.attribute(CLEAN, 5, 9)
    assert found.total == pytest.approx(logit_diff(cache.output()), abs=1e-3)
    heads = [*(f"L2H{head}" for head in range(4)), "2_attn_bias"]
    assert found.labels == [*labels[:3], *heads, *labels[4:], "final_norm_bias", "head_bias"]
    assert model.decompose_resid(CLEAN, layer=3, mlp_input=True)[1] == ["embed", *labels[1:4]]
    with pytest.raises(InputError, match="mlp_input: layer 2 of nemotron_h has no MLP"):
        model.decompose_resid(CLEAN, layer=2, mlp_input=True)
    assert model.stack_head_results(CLEAN)[1] == [f"L2H{head}" for head in range(4)]


@pytest.mark.parametrize("short", ["attn_out", "mlp_out", "resid_pre"])
def test_a_sweep_goes_over_the_layers_that_have_the_hook_point(model, short):
    swept = model.patch_sweep(CLEAN, CORRUPTED, short, over=("layer", "position"), **TOKENS)
    points = [point for point in model.hook_points() if point.short == short]
    assert len(swept.values) == len(points)
    clean = model.forward(CLEAN, HookSpec().capture(points))
    for row, point in enumerate(points):
        patch = HookSpec().intervene(point, Intervention.Replace(clean[point], positions=[11]))
        expected = logit_diff(model.forward(CORRUPTED, patch).output())
        assert swept.values[row, 11] == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("hook", "head", "receiver"),
    [
        (HookPoint.SsmZ(0), 1, HookPoint.MlpPre(1)),
        (HookPoint.SsmZ(0), 2, HookPoint.AttnK(2)),
        (HookPoint.MlpOut(1), None, HookPoint.AttnV(2)),
        (HookPoint.MlpOut(1), None, HookPoint.MlpPre(3)),
        (HookPoint.AttnZ(2), 3, HookPoint.SsmPre(4)),
        (HookPoint.MlpOut(3), None, HookPoint.FinalNorm),
    ],
    ids=str,
)
def test_a_path_is_that_of_frozen_runs(model, hook, head, receiver):
    """All else keeps its output, and norms between are computed anew; then what the receiver reads is put in."""
    over = ("layer",) if head is None else ("layer", "head")
    found = model.path_patch(CLEAN, CORRUPTED, [receiver], hook.name, over, layers=[hook.layer], **TOKENS)
    spec = HookSpec().capture([hook, receiver, *OUTPUTS])
    old, new = (model.forward(ids, spec) for ids in (CORRUPTED, CLEAN))
    sent, at = np.array(old[hook]), () if head is None else (slice(None), slice(None), head)
    sent[at] = new[hook][at]
    frozen = HookSpec().capture(receiver).intervene(hook, Intervention.Replace(sent))
    for layer in range(hook.layer + 1, 6):  # layers before it are as they were
        frozen.intervene(OUTPUTS[layer], Intervention.Replace(old[OUTPUTS[layer]]))
    read = model.forward(CORRUPTED, frozen)[receiver]
    expected = model.forward(CORRUPTED, HookSpec().intervene(receiver, Intervention.Replace(read))).output()
    value = float(found.values.ravel()[head or 0])
    assert value == pytest.approx(logit_diff(expected), abs=TOLERANCE)
    assert abs(value - found.corrupted) > 1e-4


@pytest.mark.parametrize("hook", ["hook_resid_pre", "hook_mlp_out", "hook_attn_out"])
def test_a_path_to_all_receivers_is_plain_patching(model, hook):
    plain = model.patch_sweep(CLEAN, CORRUPTED, hook, ("layer", "position"), **TOKENS)
    path = model.path_patch(CLEAN, CORRUPTED, "all", hook, ("layer", "position"), **TOKENS)
    np.testing.assert_allclose(path.values, plain.values, atol=TOLERANCE)
    assert np.abs(path.effect).max() > 1e-3


def test_circuits_have_nodes_of_each_half_alone(model):
    ranking = model.edge_attribution(CLEAN, CORRUPTED, **TOKENS)
    heads = [*(f"r0.h{head}" for head in range(8)), "m1", *(f"a2.h{head}" for head in range(4)), "m3"]
    assert [*ranking.senders] == ["embed", *heads, *(f"r4.h{head}" for head in range(8)), "m5"]
    reads = [f"a2.{kind}<{role}>" for role, kinds in (("q", 4), ("k", 2), ("v", 2)) for kind in of_heads(kinds)]
    assert [*ranking.receivers] == ["r0", "m1", *reads, "m3", "r4", "m5", "logits"]
    whole = model.circuit(CLEAN, CORRUPTED, [0, ranking.count], scores=ranking, **TOKENS)
    assert whole.values == pytest.approx([whole.corrupted, whole.clean], abs=TOLERANCE)
    for ablation in ("zero", "mean"):
        ablated = model.circuit(CLEAN, CORRUPTED, [ranking.count], scores=ranking, ablation=ablation, **TOKENS)
        assert ablated.values == pytest.approx([whole.clean], abs=TOLERANCE)
    with pytest.raises(InputError, match=r"layer 0 of .* has a recurrent mixer: EAP-IG's files are of heads and MLPs"):
        ranking.to_importances("nowhere.json", model)
    for sender, receiver, point in (("r0.h1", "m1", HookPoint.MlpPre(1)), ("r0.h1", "r4", HookPoint.SsmPre(4))):
        scores = np.ones(ranking.scores.shape)
        scores[ranking.senders.index(sender), ranking.receivers.index(receiver)] = 0
        chosen = replace(ranking, scores=scores)
        found = model.circuit(CLEAN, CORRUPTED, ranking.count - 1, scores=chosen, **TOKENS)
        exact = model.path_patch(CLEAN, CORRUPTED, [point], "ssm.hook_z", patching="noising", **TOKENS)
        assert found.values[0] == pytest.approx(float(exact.values[0, 1]), abs=TOLERANCE)


def of_heads(count: int) -> list[str]:
    return [f"{'h' if count == 4 else 'kv'}{head}" for head in range(count)]


def test_scores_of_edges_are_a_change_times_its_gradient(model):
    """Into experts and the last norm; what a head sends is its share through the output projection."""
    ranking = model.edge_attribution(CLEAN, CORRUPTED, **TOKENS)
    out, end = HookPoint.MlpOut(1), HookPoint.ResidPost(5)
    clean, corrupted = (model.forward(ids, HookSpec().capture([out, end])) for ids in (CLEAN, CORRUPTED))
    base, other = (clean, corrupted) if ranking.patching == "noising" else (corrupted, clean)
    ids = CLEAN if ranking.patching == "noising" else CORRUPTED
    grad = model.gradients(ids, end, "logit_diff", **TOKENS).grad[end]
    expected = float(((other[out] - base[out]) * grad).sum())
    place = ranking.senders.index("m1"), ranking.receivers.index("logits")
    assert ranking.scores[place] == pytest.approx(expected, abs=TOLERANCE)


def test_weights_and_patterns_are_those_of_the_layers_that_have_them(model):
    assert model.attention(CLEAN).layers == ATTENDS
    assert model.attention(CLEAN, effective=True).layers == MIXERS
    z, act = HookPoint.AttnZ(2), HookPoint.MlpAct(1)
    cache = model.forward(CLEAN, HookSpec().capture([z, act, *OUTPUTS]))
    made = np.einsum("bshd,hdm->bsm", cache[z], model.weights.W_O[2])
    np.testing.assert_allclose(made, cache[OUTPUTS[2]], atol=TOLERANCE)
    np.testing.assert_allclose(cache[act] @ model.weights.W_out[1], cache[OUTPUTS[1]], atol=TOLERANCE)
    with pytest.raises(HookError, match=r"layer 1 has no blocks.1.attn.hook_q, and so no W_Q"):
        model.weights.W_Q[1]


def test_a_compiled_model_hands_keys_and_states_on(model, tmp_path):
    spec = HookSpec().intervene(HookPoint.MlpOut(3), Intervention.Scale(0.5, positions=[1, 10]))
    graph = model.compile(spec, tmp_path / "out") / "model.onnx"
    logits = logits_in_calls(model, graph, CLEAN, ((0, 9), (9, 10), (10, 14)))
    np.testing.assert_allclose(logits, model.forward(CLEAN, spec).output(), atol=TOLERANCE)


@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_are_of_every_projection(model, tmp_path, bits):
    small = MIModel.from_pretrained(model.quantise(tmp_path / "made", bits=bits), threads=1)
    one, other = (each.forward(CLEAN).output()[0, -1] for each in (small, model))
    assert np.corrcoef(one, other)[0, 1] > (0.99 if bits == 8 else 0.8)
