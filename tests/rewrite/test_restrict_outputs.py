"""Only what is asked for leaves the graph: parts of logits and captures, and no more layers than they need."""

import numpy as np
import pytest

from mionnx import HookError, HookSpec, InputError, Intervention, InterventionError, Logits, MIModel

VOCAB = 471


def test_the_cache_comes_without_logits_when_it_is_asked_for(shipped):
    model = shipped
    found = model.forward([[3, 4, 5]], use_cache=True, logits=False)
    whole = model.forward([[3, 4, 5]], use_cache=True)
    for one, other in zip(found.kv_cache.layers, whole.kv_cache.layers, strict=True):
        assert np.array_equal(one[0], other[0])


def test_a_spec_file_keeps_the_parts(tmp_path):
    spec = HookSpec().capture("*.hook_z", positions=[0, -1], heads=[1]).capture("hook_embed")
    spec.intervene("hook_embed", Intervention.Zero(positions="generated"))
    spec.save(tmp_path / "spec.safetensors")
    again = HookSpec.load(tmp_path / "spec.safetensors")
    assert again.captures == spec.captures
    assert again.interventions[0][1].positions == "generated"


WRONG = {
    "nothing": (HookSpec(), {"logits": False}, InputError, "nothing would be computed"),
    "idle": (
        HookSpec().capture("blocks.0.hook_resid_pre").intervene("blocks.1.hook_mlp_out", Intervention.Zero()),
        {"logits": False},
        InterventionError,
        "zero at blocks.1.hook_mlp_out",
    ),
    "position": (HookSpec(), {"logits": Logits(positions=5)}, InterventionError, "position 5"),
    "no positions": (HookSpec(), {"logits": Logits(positions=[])}, InputError, "no positions"),
    "token": (HookSpec(), {"logits": Logits(token_ids=VOCAB)}, InputError, f"0 to {VOCAB - 1}"),
    "k": (HookSpec(), {"logits": Logits(k=VOCAB + 1)}, InputError, "k="),
    "k of tokens": (HookSpec(), {"logits": Logits(token_ids=[1, 2], k=3)}, InputError, "of 2 logits"),
    "no k": (HookSpec(), {"logits": Logits(k=0)}, InputError, "k="),
    "capture position": (HookSpec().capture("hook_embed", positions=-6), {}, InterventionError, "position -6"),
    "capture head": (HookSpec().capture("*.hook_z", heads=8), {}, InterventionError, "head 8 of 8"),
    "no heads": (HookSpec().capture("hook_embed", heads=0), {}, InterventionError, "no heads"),
    "two parts": (
        HookSpec().capture("hook_embed", positions=0).capture("hook_embed", positions=1),
        {},
        HookError,
        "captured twice",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_parts_that_are_none_are_refused(what, shipped):
    spec, how, kind, named = WRONG[what]
    with pytest.raises(kind) as caught:
        shipped.forward([[3, 4, 5, 6, 7]], spec, **how)
    assert named in str(caught.value)


def test_a_generation_has_no_parts(shipped):
    with pytest.raises(InterventionError, match="choose them in `forward`"):
        shipped.generate([[3, 4]], HookSpec().capture("hook_embed", positions=0))


def test_right_padding_has_another_last_column(shipped):
    model: MIModel = shipped
    mask = [[1, 1, 1], [1, 1, 0]]
    last = model.forward([[3, 4, 5], [6, 7, 0]], attention_mask=mask, logits=Logits(positions=-1)).output()
    found = model.forward([[3, 4, 5], [6, 7, 0]], attention_mask=mask, logits=Logits(positions=[-1, -1])).output()
    whole = model.forward([[3, 4, 5], [6, 7, 0]], attention_mask=mask).output()
    assert np.abs(found[:, 0] - whole[[0, 1], [2, 1]]).max() < 1e-6
    assert np.abs(last[:, 0] - whole[[0, 1], [2, 1]]).max() < 1e-6
