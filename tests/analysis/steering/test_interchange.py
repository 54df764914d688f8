"""Subspaces put into another run against interventions by hand, beside moves of equal length; damage of steering."""

import numpy as np
import pytest

from mionnx import Direction, HookSpec, InputError, Intervention, InterventionError, Subspace
from mionnx.analysis.steering.damage import largest_within, random_direction

HOOK = "blocks.2.hook_resid_post"
COUNTRIES = {"France": "Paris", "Germany": "Berlin", "Spain": "Madrid", "Italy": "Rome"}
CLEAN = [f"The capital of {country} is" for country in COUNTRIES]
CORRUPTED = [*CLEAN[1:], CLEAN[0]]
RIGHT, WRONG = [*COUNTRIES.values()], [*[*COUNTRIES.values()][1:], "Paris"]


@pytest.fixture(scope="module")
def capitals(shipped):
    """The directions between the four prompts' last streams."""
    streams = shipped.forward(CLEAN, HookSpec().capture(HOOK, positions=-1))[HOOK][:, 0]
    return Subspace.mean_differences(streams, [0, 1, 2, 3])


@pytest.fixture(scope="module")
def effect(shipped, capitals):
    return shipped.subspace_interchange(CLEAN, CORRUPTED, capitals, HOOK, answer=RIGHT, versus=WRONG, placebos=6)


def test_an_interchange_is_the_intervention(shipped, capitals, effect):
    for number, (clean, corrupted) in enumerate(zip(CLEAN, CORRUPTED, strict=True)):
        own, other = (
            shipped.forward(text, HookSpec().capture(HOOK, positions=-1))[HOOK][0, 0] for text in (clean, corrupted)
        )
        right, wrong = shipped.token_id(RIGHT[number]), shipped.token_id(WRONG[number])

        def lead(spec=None, text=clean, right=right, wrong=wrong):
            logits = shipped.forward(text, spec).output()[0, -1]
            return float(logits[right] - logits[wrong])

        edit = capitals.interchange(other, positions=-1)
        changed = lead(HookSpec().intervene(HOOK, edit)) - lead()
        assert effect.by_pair[number] == pytest.approx(changed, abs=2e-3)
        placebo = capitals.placebo(own, other, seed=0, positions=-1)
        assert effect.placebos[0, number] == pytest.approx(lead(HookSpec().intervene(HOOK, placebo)) - lead(), abs=2e-3)
        assert effect.clean[number] == pytest.approx(lead(), abs=1e-4)
        assert effect.corrupted[number] == pytest.approx(lead(text=corrupted), abs=1e-4)


def test_capitals_move_the_answer_and_random_moves_do_not(effect, tmp_path):
    assert effect.normalized > 0.9  # these four streams lie in the span
    assert effect.shares == pytest.approx(np.ones(4), abs=1e-5)
    assert np.abs(effect.placebos.mean(axis=1)).max() < 0.3 * abs(effect.effect)
    assert effect.p_value == pytest.approx(1 / 7)
    low, high = effect.interval()
    assert low <= effect.effect <= high < 0
    assert "random moves of equal length" in str(effect)
    assert "Subspace interchange" in effect.page()
    again = type(effect).load(effect.save(tmp_path / "effect.safetensors"))
    np.testing.assert_array_equal(again.placebos, effect.placebos)


def test_several_positions_and_strengths(shipped, capitals):
    both = shipped.subspace_interchange(
        CLEAN[0],
        CORRUPTED[0],
        capitals,
        HOOK,
        answer="Paris",
        versus="Berlin",
        positions=[3, 4],
        placebos=0,
        strength=0.5,
    )
    other = shipped.forward(CORRUPTED[0], HookSpec().capture(HOOK))[HOOK][0, [3, 4]]
    spec = HookSpec().intervene(HOOK, capitals.interchange(other, 0.5, positions=[3, 4]))
    logits = shipped.forward(CLEAN[0], spec).output()[0, -1]
    paris, berlin = shipped.token_id("Paris"), shipped.token_id("Berlin")
    assert both.by_pair[0] + both.clean[0] == pytest.approx(float(logits[paris] - logits[berlin]), abs=2e-3)
    assert both.placebos.shape == (0, 1)
    assert both.p_value == 1


def test_negative_positions_count_from_the_end_of_a_text_that_is_read_before_it(shipped, capitals):
    asked = {"hook": HOOK, "metric": "logit", "answer": "Paris", "placebos": 0}
    longer = [[f"{text} the city of Paris" for text in texts] for texts in (CLEAN, CORRUPTED)]
    plain, cut = (
        shipped.subspace_interchange(*texts, capitals, **asked, **places).by_pair
        for texts, places in (((CLEAN, CORRUPTED), {}), (longer, {"position": 4, "positions": -5}))
    )
    np.testing.assert_allclose(cut, plain, atol=1e-4)
    with pytest.raises(InputError, match="position -1 is token 8, behind token 4, whose logits are read"):
        shipped.subspace_interchange(*longer, capitals, **asked, position=4)


def test_what_cannot_be_interchanged_is_refused(shipped, capitals):
    for arguments, error, message in (
        ({"subspace": None}, InputError, "say what is interchanged"),
        ({"hook": ""}, InputError, "say what is interchanged"),
        ({"hook": "blocks.2.attn.hook_z"}, InputError, "one vector a token"),
        ({"subspace": Subspace(np.eye(2, 64))}, InterventionError, "width 64"),
        ({"positions": 0}, InterventionError, "equal within the subspace"),
        ({"placebos": -1}, InputError, "placebos must be 0"),
    ):
        asked = {"clean": CLEAN[0], "corrupted": CORRUPTED[0], "subspace": capitals, "hook": HOOK} | arguments
        with pytest.raises(error, match=message):
            shipped.subspace_interchange(**asked, answer="Paris", versus="Berlin")


def test_the_damage_of_a_direction_is_what_texts_lose(shipped):
    stream = shipped.forward(CLEAN[:2], HookSpec().capture(HOOK, positions=-1))[HOOK][:, 0]
    direction, neutral = Direction(HOOK, stream[1] - stream[0]), ["Mary and John went to the store", "three four five"]
    strengths = [-4.0, 0.0, 0.25, 1.0, 4.0]
    dose = shipped.dose_response(CLEAN[0], direction, strengths, target="Berlin", damage_texts=neutral, within=0.5)
    damage = dose.damage
    for strength, found in zip(strengths, damage.losses, strict=True):
        means = []
        for factor in (0.0, strength):
            losses = []
            for text in neutral:
                ids = shipped.tokenize(text).ids
                spec = HookSpec().intervene(HOOK, Intervention.Add(factor * direction.vector))
                logits = shipped.forward(text, spec).output()[0].astype(np.float64)
                logs = (
                    logits
                    - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
                    - logits.max(-1, keepdims=True)
                )
                losses.append(-logs[np.arange(len(ids) - 1), ids[1:]].mean())
            means.append(np.mean(losses))
        assert found == pytest.approx(means[1] - means[0], abs=1e-4)
    assert damage.losses[1] == 0
    assert damage.probabilities.shape == (1, 5)
    assert abs(random_direction(direction).norm - direction.norm) < 1e-4
    assert "harmless to 0.5 nats up to strength" in str(dose)
    assert "loss of neutral texts" in dose.page()
    assert shipped.dose_response(CLEAN[0], direction, strengths, target="Berlin").damage is None
    assert largest_within(np.array([-2.0, -1, 1, 2, 3]), np.array([0.2, 0, 0, 0.2, 0.05]), 0.1) in (-1, 1)
    assert np.isnan(largest_within(np.array([0.0, 1]), np.array([0, 1.0]), 0.1))
    for arguments, message in (
        ({"damage_texts": ["three"]}, "one token"),
        ({"damage_texts": neutral, "within": 0.0}, "nats a token"),
        ({"damage_texts": neutral, "positions": [[0]]}, "say nothing of damage_texts"),
        ({"damage_texts": []}, "one or more texts"),
    ):
        with pytest.raises(InputError, match=message):
            shipped.dose_response(CLEAN[0], direction, strengths, target="Berlin", **arguments)
