"""Sweeps and paths of families whose layers read the stream, or one another, in other ways than Llama's."""

import numpy as np
import pytest
from families import make_checkpoint
from oracle import Inputs, run
from sweep_pairs import difference
from tiny_configs import tiny_config

from exporters.transformers import export
from mionnx import HookPoint, HookSpec, InputError, Intervention, MIModel

RANDOM = np.random.default_rng(8)
CLEAN, CORRUPTED = (RANDOM.integers(5, 80, 9) for _ in range(2))
GIVEN = {"answer": 5, "versus": 9}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Family -> its hooked model and the same in torch."""

    def make(family):
        folder = tmp_path_factory.mktemp(family)
        reference = make_checkpoint(family, folder / "checkpoint", **tiny_config(family))
        export(folder / "checkpoint", folder / "hooked")
        return MIModel.from_pretrained(folder / "hooked", threads=1), reference

    return make


@pytest.mark.parametrize(
    "family", ["youtu", *(pytest.param(name, marks=pytest.mark.slow) for name in ("deepseek_v2", "minicpm3"))]
)
def test_keys_of_latent_attention_receive_behind_their_rotation(made, family):
    model, _ = made(family)
    for hook, over in (("hook_resid_pre", ("layer", "position")), ("hook_z", ("layer", "head"))):
        plain = model.patch_sweep(CLEAN, CORRUPTED, hook, over, **GIVEN)
        path = model.path_patch(CLEAN, CORRUPTED, "all", hook, over, **GIVEN)
        np.testing.assert_allclose(path.values, plain.values, atol=1e-5)
    # the keys' own path: all else frozen, then what they would be is put in
    sender, receiver = HookPoint.MlpOut(0), HookPoint.AttnRotK(1)
    own = model.path_patch(CLEAN, CORRUPTED, receiver, sender, ("layer",), layers=[0], **GIVEN)
    sent = model.forward([CLEAN], HookSpec().capture(sender))[sender]
    keys = model.forward([CORRUPTED], HookSpec().intervene(sender, Intervention.Replace(sent)).capture(receiver))
    spec = HookSpec().intervene(receiver, Intervention.Replace(keys[receiver]))
    logits = model.forward([CORRUPTED], spec).output()[0, -1]
    assert own.values[0] == pytest.approx(difference(logits, 5, 9), abs=1e-5)
    assert abs(own.values[0] - own.corrupted) > 1e-4
    labels = model.edge_attribution(CLEAN, CORRUPTED, **GIVEN).to_frame()["receiver"]
    assert {"a1.h0<q>", "a1.h0<k>", "a1.h0<v>"} <= {*labels}


@pytest.mark.slow
def test_sweeps_over_layers_that_read_the_keys_and_values_of_another_equal_torch(made):
    model, reference = made("gemma4_text")
    found = model.patch_sweep(CLEAN, CORRUPTED, "resid_pre", **GIVEN)
    inputs = Inputs(CORRUPTED[None], np.ones((1, 9), int))
    new = run(reference, Inputs(CLEAN[None], np.ones((1, 9), int))).values
    for layer in range(model.num_layers):
        point = HookPoint.ResidPre(layer)
        for position in (2, 8):
            edit = Intervention.Replace(new[str(point)][:, [position]], positions=[position])
            logits = run(reference, inputs, [(point, edit)]).logits[0, -1]
            assert found.values[layer, position] == pytest.approx(difference(logits, 5, 9), abs=5e-5)
    with pytest.raises(InputError, match=r"layer . of this gemma4_text reads .* besides"):
        model.path_patch(CLEAN, CORRUPTED, "all", **GIVEN)


@pytest.mark.slow
def test_all_receivers_are_refused_where_a_layer_reads_the_stream_by_another_way(made):
    """JetMoE's routers choose the projections of heads."""
    model, _ = made("jetmoe")
    with pytest.raises(InputError, match=r"blocks\.0\.hook_attn_out depends on blocks\.0\.hook_resid_pre by another"):
        model.path_patch(CLEAN, CORRUPTED, "all", "resid_pre", ("layer",), **GIVEN)
    assert model.path_patch(CLEAN, CORRUPTED, "blocks.1.mlp.hook_pre", "resid_pre", ("layer",), **GIVEN).n == 1
