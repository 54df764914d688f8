"""What is causal in an encoder: an edit anywhere is seen everywhere, padding on either side changes nothing."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mionnx import (
    GradientError,
    HookSpec,
    Intervention,
    InterventionError,
    KnockoutSpec,
    Logits,
    create_knockout_mask,
)

ATOL = 5e-5
IDS = [5, 12, 7, 22, 9, 31, 14]
LAYERS = 2


@pytest.fixture(scope="module")
def model(text_encoder):
    return text_encoder("masked_lm")[0]


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edited=st.integers(0, 6), seen=st.integers(0, 6), hook=st.sampled_from(["resid_pre", "mlp_out", "resid_mid"]))
def test_an_edit_anywhere_is_seen_everywhere(model, edited, seen, hook):
    """Before, `min(changed) < max(shown)` refused half of these: a text was taken to be read from the left."""
    spec = HookSpec().intervene(f"blocks.0.hook_{hook}", Intervention.Scale(0.5, positions=edited))
    part = Logits(positions=seen)
    plain, changed = (model.forward(IDS, one, logits=part).output() for one in (None, spec))
    assert np.abs(plain - changed).max() > 1e-6


def test_behind_the_last_attention_a_position_changes_itself_alone(model):
    spec = HookSpec().intervene(f"blocks.{LAYERS - 1}.hook_mlp_out", Intervention.Zero(positions=4))
    model.forward(IDS, spec, logits=Logits(positions=4))
    with pytest.raises(InterventionError, match="changes nothing that is asked for"):
        model.forward(IDS, spec, logits=Logits(positions=1))


def test_padding_on_either_side_leaves_real_tokens(model):
    spec = (
        HookSpec().capture("*.hook_resid_post").intervene("blocks.0.attn.hook_z", Intervention.Scale(0.5, positions=2))
    )
    alone = model.forward([IDS[:4]], spec)
    for ids, mask, columns in (
        ([[*IDS[:4], 0, 0, 0], IDS], [[1, 1, 1, 1, 0, 0, 0], [1] * 7], slice(0, 4)),
        ([[0, 0, 0, *IDS[:4]], IDS], [[0, 0, 0, 1, 1, 1, 1], [1] * 7], slice(3, 7)),
    ):
        both = model.forward(np.array(ids), spec, attention_mask=np.array(mask))
        assert np.abs(both.output()[0, columns] - alone.output()[0]).max() < ATOL
        for name in alone:
            assert np.abs(both[name][0, columns] - alone[name][0]).max() < ATOL
    own = model.forward([IDS[:4], IDS], spec)  # padded by mionnx: on the right, since heads read the first column
    assert np.abs(own.output()[0, :4] - alone.output()[0]).max() < ATOL


def test_a_sum_in_front_of_a_norm_is_what_it_adds_up(model):
    cache = model.forward(IDS, HookSpec().capture("*"))
    for layer in range(LAYERS):
        mid = cache["resid_pre", layer] + cache["attn_out", layer]
        assert np.abs(cache["resid_mid_sum", layer] - mid).max() < 1e-5
        assert np.abs(cache["resid_post_sum", layer] - cache["resid_mid", layer] - cache["mlp_out", layer]).max() < 1e-5


def test_edges_to_later_tokens_are_cut(model):
    """Before, `create_knockout_mask` refused every edge to a later key."""
    cut = create_knockout_mask(KnockoutSpec().edge(1, 4), model.num_heads, 7, both=True)
    spec = HookSpec().intervene("blocks.0.attn.hook_scores", Intervention.Knockout(cut)).capture("*.hook_pattern")
    pattern = model.forward(IDS, spec)["pattern", 0]
    assert pattern[0, :, 1, 4].max() == 0
    assert np.abs(pattern.sum(axis=-1) - 1).max() < 1e-5
    off = create_knockout_mask(KnockoutSpec().from_position(3), model.num_heads, 7, both=True)
    assert (np.isneginf(off[0, 0, 3]) == (np.arange(7) != 3)).all()
    into = create_knockout_mask(KnockoutSpec().to_position(6), model.num_heads, 7, both=True)
    assert (np.isneginf(into[0, 0, :, 6]) == (np.arange(7) != 6)).all()
    with pytest.raises(InterventionError, match="both=True"):
        create_knockout_mask(KnockoutSpec().edge(1, 4), model.num_heads, 7)


def test_a_window_holds_on_both_sides(model):
    spec = HookSpec().intervene("blocks.0.attn.hook_scores", Intervention.Window(1)).capture("*.hook_pattern")
    pattern = model.forward(IDS, spec)["pattern", 0][0, 0]
    near = np.abs(np.arange(7)[:, None] - np.arange(7)) <= 1
    assert pattern[~near].max() == 0
    assert pattern[near].min() > 0


def test_metrics_ask_for_the_head(model):
    with pytest.raises(InterventionError, match="no mask tokens"):
        model.gradients(IDS, "blocks.0.hook_resid_pre", answer=7)
    with pytest.raises(GradientError, match="give them as answer="):
        model.gradients(IDS, "blocks.0.hook_resid_pre", "loss")
