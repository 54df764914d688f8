"""Attribution patching against a computation by hand, and against the exact sweep."""

import numpy as np
import pytest

from mionnx import GradientError, HookSpec, Intervention, MIModel
from mionnx.errors import HookError, InputError

GIFT = "When Mary and John went to the store , {} gave a drink to"
CLEAN, CORRUPTED = GIFT.format("John"), GIFT.format("Mary")
OVER = {"z": ("layer", "head", "position")}
PLAIN = ("layer", "position")
# hook point -> Pearson with the exact sweep (gradients at corrupted, at clean, the mean), leading cells in common
MEASURED = {
    "z": ((0.983, 0.871, 0.981), (9, 8, 9)),
    "resid_pre": ((0.929, 0.878, 0.942), (10, 8, 10)),
    "resid_mid": ((0.921, 0.898, 0.927), (10, 8, 10)),
    "mlp_out": ((0.984, 0.912, 0.969), (10, 9, 10)),
    "attn_out": ((0.996, 0.958, 0.990), (10, 8, 9)),
}


@pytest.fixture(scope="module")
def swept(shipped):
    return {hook: shipped.patch_sweep(CLEAN, CORRUPTED, hook, OVER.get(hook, PLAIN)) for hook in MEASURED}


@pytest.fixture(scope="module")
def recurrent():
    return MIModel.from_pretrained("models/world-rwkv7")


@pytest.fixture(scope="module")
def by_hand(shipped):
    """Make (clean - corrupted) * gradient at one hook point, [seq, ...]."""
    hooks, both = ["blocks.*.attn.hook_z", "blocks.*.hook_resid_mid"], [CORRUPTED, CLEAN]
    values = shipped.forward(both, HookSpec().capture(hooks))
    grad = shipped.gradients(both, hooks, "logit_diff", "Mary", "John").grad

    def make(hook, at, layer):
        rows = {"corrupted": [0], "clean": [1], "mean": [0, 1]}[at]
        corrupted, clean = values[hook, layer].astype(np.float64)
        return (clean - corrupted) * grad[hook, layer][rows].mean(axis=0, dtype=np.float64)

    return make


@pytest.mark.parametrize("at", ["corrupted", "clean", "mean"])
def test_a_cell_is_the_difference_times_the_gradient(shipped, by_hand, at):
    over = ("position", "layer", "head")
    found = shipped.attribute_patch(CLEAN, CORRUPTED, "z", over, linearize_at=at)
    assert found.values.shape == (14, 4, 8)
    for layer in range(4):
        expected = by_hand("z", at, layer).sum(axis=-1)
        np.testing.assert_allclose(found.effect[:, layer], expected, rtol=1e-4, atol=1e-4)
    assert not found.effect[:9].any()  # before the giver both prompts are the same
    stream = shipped.attribute_patch(CLEAN, CORRUPTED, "resid_mid", "layer", linearize_at=at, layers=[1, 3])
    expected = [by_hand("resid_mid", at, layer).sum() for layer in (1, 3)]
    np.testing.assert_allclose(stream.effect, expected, rtol=1e-4)


@pytest.mark.parametrize("hook", MEASURED)
def test_the_exact_sweep_is_told_as_well_as_measured_before(shipped, swept, hook):
    pearson, shared = MEASURED[hook]
    for at, expected, common in zip(("corrupted", "clean", "mean"), pearson, shared, strict=True):
        found = shipped.attribute_patch(CLEAN, CORRUPTED, hook, OVER.get(hook, PLAIN), linearize_at=at)
        agreement = found.agreement(swept[hook])
        assert agreement.pearson > expected - 0.001
        assert agreement.shared >= common
        assert (found.clean, found.corrupted) == pytest.approx((swept[hook].clean, swept[hook].corrupted), abs=1e-4)


def test_steps_along_the_path_are_closer_than_one_gradient(shipped, swept):
    hooks = ["resid_pre", "z"]
    for hook in hooks:
        one = shipped.attribute_patch(CLEAN, CORRUPTED, hook, OVER.get(hook, PLAIN))
        more = shipped.attribute_patch(CLEAN, CORRUPTED, hook, OVER.get(hook, PLAIN), steps=8)
        assert more.agreement(swept[hook]).pearson > max(0.99, one.agreement(swept[hook]).pearson)
    whole = shipped.attribute_patch(CLEAN, CORRUPTED, "blocks.3.hook_resid_post", "layer", steps=64)
    assert whole.effect == pytest.approx(whole.clean - whole.corrupted, rel=1e-3)  # the path ends at the clean prompt


def test_confirmed_cells_are_those_of_the_sweep(shipped, swept):
    found = shipped.attribute_patch(CLEAN, CORRUPTED, "z", OVER["z"], confirm=10)
    known = np.isfinite(found.exact)
    assert known.sum() == 10
    leading = np.argsort(-np.abs(found.effect), axis=None)[:10]
    assert {*np.flatnonzero(known)} == {*leading}
    np.testing.assert_allclose(found.exact[known], swept["z"].values[known], atol=1e-4)
    agreement = found.agreement()
    expected = np.corrcoef(found.effect[known], swept["z"].effect[known])[0, 1]
    assert (agreement.cells, agreement.top) == (10, 5)
    assert agreement.pearson == pytest.approx(expected, abs=1e-6)
    assert str(agreement) in found.facts()
    assert found.confirmed().row_count == 10


def test_several_kinds_come_from_one_call(shipped, monkeypatch):
    calls = []
    forward = type(shipped).forward
    monkeypatch.setattr(type(shipped), "forward", lambda *given, **more: calls.append(1) or forward(*given, **more))
    tokens = {"answer": "Mary", "versus": "John"}
    found = shipped.attribute_patch(CLEAN, CORRUPTED, "blocks.[12].*", ("head", "layer"), **tokens)
    assert len(calls) == 1
    assert "blocks.{i}.attn.hook_z" in found
    assert "blocks.{i}.hook_resid_pre" not in found  # it has no heads
    for kind, result in found.items():
        assert result.labels["layer"] == ["1", "2"]
        alone = shipped.attribute_patch(CLEAN, CORRUPTED, kind, ("head", "layer"), layers=[1, 2], **tokens)
        np.testing.assert_allclose(result.effect, alone.effect, rtol=1e-3, atol=1e-4)
    both = shipped.attribute_patch(CLEAN, CORRUPTED, ["mlp_out", "resid_mid"], "layer")
    assert [*both] == ["blocks.{i}.hook_mlp_out", "blocks.{i}.hook_resid_mid"]


METRICS = ("probability", "log_probability", "kl", "logit_diff")


@pytest.mark.parametrize("metric", METRICS)
def test_pairs_and_metrics_are_those_of_the_sweep(shipped, metric):
    clean = ["The capital of France is", CLEAN]
    corrupted = ["The capital of Germany is", CORRUPTED]
    over, hook = ("layer", "head"), "z"
    found = shipped.attribute_patch(clean, corrupted, hook, over, metric)
    exact = shipped.patch_sweep(clean, corrupted, hook, over, metric)
    assert found.by_pair.shape == exact.by_pair.shape == (2, 4, 8)
    assert (found.clean, found.corrupted) == pytest.approx((exact.clean, exact.corrupted), abs=1e-4)
    for number in range(2):
        alone = shipped.attribute_patch(clean[number], corrupted[number], hook, over, metric)
        np.testing.assert_allclose(found.by_pair[number], alone.values, atol=1e-5)


def test_a_small_change_is_told_exactly(shipped):
    """Prompts that differ little at a hook point: the first order is all there is."""
    ids = np.array(shipped.tokenize(CLEAN).ids)
    other = np.array(shipped.tokenize(CORRUPTED).ids)
    near = shipped.attribute_patch(ids, other, "mlp_out", layers=[3], answer="Mary", versus="John")
    spec = HookSpec().capture("blocks.3.hook_mlp_out")
    values = [shipped.forward(one[None], spec)["mlp_out", 3][0, -1] for one in (ids, other)]
    share = 0.01
    moved = HookSpec().intervene(
        "blocks.3.hook_mlp_out", Intervention.Add(share * (values[0] - values[1]), positions=-1)
    )
    logits = [shipped.forward(other[None], hooks).output()[0, -1] for hooks in (None, moved)]
    answer, versus = shipped.token_id("Mary"), shipped.token_id("John")
    change = (logits[1] - logits[0]).astype(np.float64)
    assert near.effect[0, -1] == pytest.approx((change[answer] - change[versus]) / share, rel=0.05)


def test_a_function_is_attributed_by_its_seed(shipped):
    answer, versus = shipped.token_id("Mary"), shipped.token_id("John")

    def lead(logits):
        return logits[:, answer] - logits[:, versus]

    def seed(logits):
        made = np.zeros_like(logits)
        made[:, answer], made[:, versus] = 1, -1
        return made

    expected = shipped.attribute_patch(CLEAN, CORRUPTED, "z", "layer", answer="Mary", versus="John", steps=3)
    found = shipped.attribute_patch(CLEAN, CORRUPTED, "z", "layer", lead, cotangent=seed, steps=3)
    np.testing.assert_allclose(found.values, expected.values, rtol=1e-4)


def test_a_position_is_what_the_sweep_reads(shipped):
    given = (CLEAN + " Mary", CORRUPTED + " John")
    found = shipped.attribute_patch(*given, "z", OVER["z"], position=-2)
    assert found.values.shape == (4, 8, 15)
    assert not found.effect[..., -1].any()
    plain = shipped.attribute_patch(CLEAN, CORRUPTED, "z", OVER["z"])
    np.testing.assert_allclose(found.effect[..., :-1], plain.effect, atol=1e-4)


def test_propagation_rules_tell_the_stream_better(shipped, swept):
    plain, relp = (
        shipped.attribute_patch(CLEAN, CORRUPTED, "resid_pre", rules=method).agreement(swept["resid_pre"])
        for method in ("gradient", "relp")
    )
    assert relp.pearson > plain.pearson + 0.03


def test_what_cannot_be_attributed_is_refused_before_anything_runs(shipped, monkeypatch):
    monkeypatch.setattr(type(shipped), "forward", None)
    cases = {
        "a rank changes in steps": (GradientError, {"metric": "rank"}),
        "cotangent= takes its derivative": (GradientError, {"metric": lambda logits: logits[:, 0]}),
        "cotangent= is the derivative of": (GradientError, {"cotangent": np.ones(471)}),
        "least at the clean prompt": (GradientError, {"metric": "kl", "linearize_at": "clean"}),
        "no hook point 'result'": (HookError, {"hook": "result", "over": ("layer", "head")}),
        "no rules 'rel'": (GradientError, {"rules": "rel"}),
        "no metric 'logit_dif'": (GradientError, {"metric": "logit_dif"}),
        "linearize_at='end'": (InputError, {"linearize_at": "end"}),
        "along the whole path": (InputError, {"linearize_at": "mean", "steps": 3}),
        "has 4 cells": (InputError, {"over": "layer", "confirm": 5}),
        "names no hook point": (InputError, {"hook": []}),
        "a gradient and the axes layer, head": (InputError, {"hook": "*.mlp.*", "over": ("layer", "head")}),
        "no axis 'head'": (InputError, {"over": ("layer", "head")}),
        "no hook point 'zz'": (HookError, {"hook": "zz"}),
        "13 tokens, the corrupted one 14": (InputError, {"clean": CLEAN.removesuffix(" to")}),
        "the same up to": (InputError, {"corrupted": CLEAN}),
    }
    for message, (kind, given) in cases.items():
        with pytest.raises(kind, match=message):
            shipped.attribute_patch(**{"clean": CLEAN, "corrupted": CORRUPTED, **given})


def test_what_a_recurrent_model_cannot_tell_is_refused(recurrent):
    with pytest.raises(HookError, match=r"sweep over blocks\.\{i\}\.rwkv\.hook_v, what tokens write into it"):
        recurrent.attribute_patch("The capital of France is", "The capital of Germany is", "state", "layer")
    with pytest.raises(InputError, match="this model has no attention patterns"):
        recurrent.attribute_patch("The", "A", "k", rules="relp_frozen_pattern")


def test_hook_points_that_the_rules_take_for_constant_are_refused(shipped):
    with pytest.raises(GradientError, match=r"take all by which .* depends on blocks\.0\.attn\.hook_q, and 3 more"):
        shipped.attribute_patch(CLEAN, CORRUPTED, "q", rules="relp_frozen_pattern")
