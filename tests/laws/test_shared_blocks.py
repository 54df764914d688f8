"""Verbs on a model whose attention, shared between layers, goes into mixers (Zamba2): right, or refused by name."""

import numpy as np
import pytest
from compiled_steps import logits_in_calls

from mionnx import HookError, HookPoint, HookSpec, InputError, Intervention, MIModel

pytestmark = pytest.mark.slow
TOLERANCE = 5e-5
CLEAN, CORRUPTED = np.random.default_rng(0).integers(3, 101, (2, 14))
TOKENS = {"answer": 5, "versus": 9}
SHARED = [0, 2, 3]  # the layers with a transformer block in front of their mixer


@pytest.fixture
def model(hybrid) -> MIModel:
    return hybrid("zamba2")


def test_mixers_alone_add_to_the_stream(model):
    stacked, labels = model.decompose_resid(CLEAN)
    assert labels == ["embed", *(f"{layer}_attn_out" for layer in range(4))]
    end = HookPoint.ResidPost(3)
    stream = model.forward(CLEAN, HookSpec().capture(end))[end]
    np.testing.assert_allclose(stacked.sum(0), stream, atol=TOLERANCE)
    logits = model.forward(CLEAN).output()[0, -1]
    assert model.attribute(CLEAN, 5, 9).total == pytest.approx(float(logits[5] - logits[9]), abs=1e-3)


def test_what_a_shared_block_gives_is_read_by_the_mixer_of_its_layer(model):
    """The same weights in each of these layers: an edit in one is of that layer alone."""
    given = [HookPoint.SsmShared(layer) for layer in SHARED]
    swept = model.patch_sweep(CLEAN, CORRUPTED, "ssm.hook_shared", over=("layer", "position"), **TOKENS)
    clean = model.forward(CLEAN, HookSpec().capture(given))
    patch = HookSpec().intervene(given[1], Intervention.Replace(clean[given[1]], positions=[3]))
    logits = model.forward(CORRUPTED, patch).output()[0, -1]
    assert swept.values[1, 3] == pytest.approx(float(logits[5] - logits[9]), abs=TOLERANCE)
    first = str(HookPoint.AttnPattern(0))
    same = model.forward(CORRUPTED, patch.capture(first))[first]
    assert (same == model.forward(CORRUPTED, HookSpec().capture(first))[first]).all()


def test_heads_and_edges_are_refused_by_name(model):
    for verb in (
        lambda: model.path_patch(CLEAN, CORRUPTED, "all", "ssm.hook_z", over=("layer", "head"), **TOKENS),
        lambda: model.edge_attribution(CLEAN, CORRUPTED, **TOKENS),
    ):
        with pytest.raises(HookError, match="attention of layer 0 adds to what its mixer reads"):
            verb()
    with pytest.raises(HookError, match="no layer before 4 has heads with shares in the stream"):
        model.stack_head_results(CLEAN)
    with pytest.raises(HookError, match=r"no W_Q in layer 0: the product behind .* reads no hook point"):
        model.weights.W_Q[0]
    with pytest.raises(HookError, match=r"no W_in in layer 2: .* is a sum of several parts"):  # a weight and an adapter
        model.weights.W_in[2]


def test_weights_have_names_where_one_product_gives_a_value(model):
    layer = 3
    read, given = HookPoint.MlpAct(layer), HookPoint.MlpPost(layer)
    found = model.forward(CLEAN, HookSpec().capture([read, given, HookPoint.SsmShared(layer)]))
    np.testing.assert_allclose(found[read] @ model.weights.W_out[layer], found[given], atol=TOLERANCE)
    behind = model.weights.behind(HookPoint.SsmShared(layer)).weight()
    np.testing.assert_allclose(found[given] @ behind, found[HookPoint.SsmShared(layer)], atol=TOLERANCE)
    assert (model.weights.W_out[0] == model.weights.W_out[layer]).all()  # two blocks by turns
    assert (model.weights.W_out[0] != model.weights.W_out[2]).any()


def test_patterns_and_effective_attention_are_of_the_same_layers(model):
    assert model.attention(CLEAN).layers == SHARED
    assert model.attention(CLEAN, effective=True).layers == [0, 1, 2, 3]


def test_a_compiled_model_hands_keys_and_states_on(model, tmp_path):
    spec = HookSpec().intervene(HookPoint.SsmShared(2), Intervention.Scale(0.5, positions=[1, 10]))
    graph = model.compile(spec, tmp_path / "out") / "model.onnx"
    logits = logits_in_calls(model, graph, CLEAN, ((0, 9), (9, 10), (10, 14)))
    np.testing.assert_allclose(logits, model.forward(CLEAN, spec).output(), atol=TOLERANCE)
    with pytest.raises(InputError, match="conv"):  # others: tests/compile/test_clients.py
        model.compile(spec, tmp_path / "optimum", layout="optimum")
