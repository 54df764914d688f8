"""Path patching: who receives, and that it equals frozen runs, plain patching and direct effects."""

import numpy as np
import pytest
from oracle import Inputs, run
from sweep_pairs import HEADS, SEQ, difference, prompts

from mionnx import HookPoint, HookSpec, Intervention
from mionnx.errors import HookError, InputError, InterventionError

CLEAN, CORRUPTED = prompts(14)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "gpt_neox"])
@pytest.mark.parametrize("hook", ["hook_z", "hook_pattern", "hook_v", "mlp.hook_act", "hook_resid_pre"])
def test_a_path_to_all_receivers_is_plain_patching(models, name, hook):
    model, (clean, corrupted) = models(name), prompts(15)
    over = ("layer", "head") if hook in HEADS else ("layer", "position")
    plain = model.patch_sweep(clean, corrupted, hook, over, answer=5, versus=9)
    path = model.path_patch(clean, corrupted, "all", hook, over, answer=5, versus=9)
    np.testing.assert_allclose(path.values, plain.values, atol=1e-5)
    assert np.abs(path.effect).max() > 1e-3


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
def test_a_path_to_one_receiver_is_that_of_frozen_runs(models, references, name):
    """Wang et al.: record what the receiver reads with all other heads and MLPs frozen, then put in just that."""
    model, (clean, corrupted) = models(name), prompts(16)
    receiver, heads = HookPoint.AttnQ(1), [1, 3]
    found = model.path_patch(clean, corrupted, [(receiver, heads)], answer=5, versus=9)
    old = run(references(name), Inputs(corrupted[None], np.ones((1, SEQ), int))).values
    new = run(references(name), Inputs(clean[None], np.ones((1, SEQ), int))).values
    for head in range(4):
        z = old[str(HookPoint.AttnZ(0))].copy()
        z[:, :, head] = new[str(HookPoint.AttnZ(0))][:, :, head]
        frozen = [
            (HookPoint.AttnZ(0), Intervention.Replace(z)),
            (HookPoint.MlpOut(0), Intervention.Replace(old[str(HookPoint.MlpOut(0))])),
        ]
        inputs = Inputs(corrupted[None], np.ones((1, SEQ), int))
        queries = run(references(name), inputs, frozen).values[str(receiver)]
        logits = run(references(name), inputs, [(receiver, Intervention.Replace(queries, heads=heads))]).logits[0, -1]
        assert found.values[0, head] == pytest.approx(difference(logits, 5, 9), abs=5e-5)
    assert (found.effect[1] == 0).all()  # layer 1 sends nothing to its own queries
    assert np.abs(found.effect[0]).max() > 1e-4


def test_a_path_to_the_end_is_the_direct_effect(models):
    model, (clean, corrupted) = models("llama"), prompts(17)
    found = model.path_patch(clean, corrupted, "hook_final_norm", answer=5, versus=9)
    wanted = HookSpec().capture("blocks.*.hook_resid_post").capture("blocks.*.attn.hook_result")
    old, new = (model.forward(ids, wanted) for ids in (corrupted, clean))
    for layer, head in np.ndindex(2, 4):
        moved = new["result", layer][0, -1, head] - old["result", layer][0, -1, head]
        logits = model.project_to_vocab(old["resid_post", 1][0, -1] + moved)
        assert found.values[layer, head] == pytest.approx(difference(logits, 5, 9), abs=2e-5)


@pytest.mark.parametrize(
    ("kind", "message", "receivers"),
    [
        (HookError, "receives nothing", "blocks.1.attn.hook_z"),
        (HookError, "did you mean 'blocks.1.attn.hook_q'", "blocks.1.attn.hook_qq"),
        (InputError, "has 4", [("blocks.1.attn.hook_q", 4)]),
        (InputError, "no heads", [("blocks.1.mlp.hook_pre", 0)]),
        (InputError, "nothing would read", []),
        (InputError, "nothing would read", 5),
        (InputError, "a pair of one and its heads", [("blocks.1.attn.hook_q", 0, 1)]),
        (InputError, "read by none of the receivers blocks.0.attn.hook_q", "blocks.0.attn.hook_q"),
        (InterventionError, "heads must be one or more integers", [("blocks.1.attn.hook_q", 1.5)]),
        (InterventionError, "heads are counted from 0", [("blocks.1.attn.hook_q", -1)]),
    ],
)
def test_what_receives_nothing_is_said(models, kind, message, receivers):
    with pytest.raises(kind, match=message):
        models("llama").path_patch(CLEAN, CORRUPTED, receivers)


@pytest.mark.parametrize(
    ("given", "heads"),
    [
        ([("k", 0), ("k", 1)], [0, 1]),
        ([("k", np.int64(1))], 1),
        (["k", ("k", 1)], None),
        ([("k", 1), "k"], None),
        ([("k", [1, 0]), ("k", 1)], [0, 1]),
    ],
)
def test_receivers_named_twice_receive_with_the_heads_of_both(models, given, heads):
    model, (clean, corrupted), k = models("llama"), prompts(16), "blocks.1.attn.hook_k"
    receivers = [(k, entry[1]) if isinstance(entry, tuple) else k for entry in given]
    found = model.path_patch(clean, corrupted, receivers, answer=5, versus=9)
    expected = model.path_patch(clean, corrupted, k if heads is None else [(k, heads)], answer=5, versus=9)
    single = model.path_patch(clean, corrupted, [(k, 0)], answer=5, versus=9)
    assert (found.values == expected.values).all()
    assert (found.values[0] != single.values[0]).all()


def test_paths_of_several_pairs_of_unequal_length_the_other_way(shipped):
    pairs = [prompts(20), prompts(21, seq=9)]
    clean, corrupted = [list(side) for side in zip(*pairs, strict=True)]
    given = {"answer": 5, "versus": 9, "patching": "noising"}
    receivers = [("blocks.2.attn.hook_q", [1, 6]), "blocks.3.mlp.hook_pre"]
    found = shipped.path_patch(clean, corrupted, receivers, **given)
    assert found.by_pair.shape == (2, 4, 8)
    for number, (one, other) in enumerate(pairs):
        alone = shipped.path_patch(one, other, receivers, **given)
        np.testing.assert_allclose(found.by_pair[number], alone.values, atol=1e-5)
    assert (found.effect[3] != 0).all()  # layer 3's heads send to its MLP
    every = shipped.path_patch(clean, corrupted, "all", **given)
    plain = shipped.patch_sweep(clean, corrupted, "z", ("layer", "head"), **given)
    np.testing.assert_allclose(every.by_pair, plain.by_pair, atol=2e-5)
    assert np.abs(found.effect).max() > 1e-3


def test_a_recurrent_model_has_no_paths(rwkv):
    with pytest.raises(HookError, match="attention heads"):
        rwkv("7-fla").path_patch(CLEAN, CORRUPTED, "all", "resid_pre", ("layer",))
