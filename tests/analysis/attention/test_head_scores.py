"""Kinds of attention heads: what the scores are of, and that the heads found do what their kind is known for."""

import json
from fractions import Fraction

import numpy as np
import pytest
from command_line import succeeded
from oracle import Inputs, run
from repository import REPOSITORY
from typer.testing import CliRunner

from mionnx import HeadScores, HookError, HookPoint, HookSpec, InputError, Intervention, InterventionError, MIModel
from mionnx.analysis.attention import head_scores
from mionnx.analysis.attention.head_scores import HEAD_KINDS, repeat_sequences
from mionnx.cli.main import app
from mionnx.machine.progress import reported_to

LLAMA = REPOSITORY / "models" / "world-llama"


@pytest.fixture(scope="module")
def llama() -> MIModel:
    return MIModel.from_pretrained(LLAMA)


def test_sequences_are_random_and_given_twice():
    made = repeat_sequences(np.arange(3, 40), [1], 5, 10, seed=0)
    assert made.ids.shape == (5, 21)
    assert (made.ids[:, 0] == 1).all()
    assert np.array_equal(made.ids[:, 1:11], made.ids[:, 11:])
    assert all(len(set(row.tolist())) == 11 for row in made.ids)
    assert list(made.queries) == list(range(11, 21))
    assert made.chance == pytest.approx(float(sum(Fraction(1, n) for n in range(12, 22)) / 10))
    assert np.array_equal(made.ids, repeat_sequences(np.arange(3, 40), [1], 5, 10, seed=0).ids)
    assert not np.array_equal(made.ids, repeat_sequences(np.arange(3, 40), [1], 5, 10, seed=1).ids)


@pytest.mark.parametrize("family", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_scores_are_means_of_the_eager_models_attention(models, references, family, monkeypatch):
    """Written out token by token on torch's patterns; and the same however the rows are batched."""
    model, period = models(family), 7
    found = model.head_scores(batch=3, period=period, seed=5, token_ids=range(3, 60))
    ids = repeat_sequences(np.arange(3, 60), head_scores.special_tokens(model)[0], 3, period, 5).ids
    values = run(references(family), Inputs(ids, np.ones_like(ids))).values
    expected = np.zeros_like(found.values)
    for layer in range(model.num_layers):
        pattern = values[str(HookPoint.AttnPattern(layer))]
        for token in range(ids.shape[1] - period, ids.shape[1]):
            for kind, target in enumerate((token - 1, token - period, token - period + 1)):
                expected[kind, layer] += pattern[:, :, token, target].mean(axis=0) / period
    assert np.abs(found.values - expected).max() < 5e-6
    monkeypatch.setattr(head_scores, "CAPTURED", 1)
    seen = []
    with reported_to(lambda *state: seen.append(state)):
        single = model.head_scores(batch=3, period=period, seed=5, token_ids=range(3, 60))
    assert seen == [("attention patterns", done, 3) for done in range(4)]
    assert np.abs(single.values - found.values).max() < 1e-6


def accuracy(model: MIModel, ids: np.ndarray, period: int, heads: list[tuple[int, int]]) -> float:
    """How often the next token of the second half is foreseen with these heads zeroed."""
    spec = HookSpec()
    for layer, head in heads:
        spec.intervene(HookPoint.AttnZ(layer), Intervention.Zero(heads=head))
    best = model.forward(ids, spec).output()[:, period:-1].argmax(-1)
    return float((best == ids[:, period + 1 :]).mean())


@pytest.mark.parametrize("name", ["world-llama", "world-gpt2"])
def test_without_its_induction_heads_a_model_cannot_repeat(name):
    model, period = MIModel.from_pretrained(REPOSITORY / "models" / name), 16
    scores = model.head_scores("induction", period=period)
    induction = [(layer, head) for layer, head, score in scores.top("induction", 8) if score > 0.5]
    assert 1 <= len(induction) <= 3
    ids = repeat_sequences(np.arange(20, 400), [], 16, period, seed=9).ids  # others than those that were scored
    others = [at for at in np.ndindex(model.num_layers, model.num_heads) if at not in induction]
    random = np.random.default_rng(0)
    draws = [[others[i] for i in random.choice(len(others), len(induction), replace=False)] for _ in range(8)]
    whole = accuracy(model, ids, period, [])
    without = [accuracy(model, ids, period, heads) for heads in draws]
    assert whole > 0.9
    assert accuracy(model, ids, period, induction) < 0.1
    assert np.mean(without) > 0.5


def test_interventions_are_in_force(llama):
    """Without the heads that look one token back, induction heads find nothing."""
    spec = HookSpec()
    for layer, head, _ in llama.head_scores("previous_token").top("previous_token", 4):
        spec.intervene(HookPoint.AttnZ(layer), Intervention.Zero(heads=head))
    assert llama.head_scores("induction", hooks=spec)["induction"].max() < 0.3
    assert llama.head_scores("induction")["induction"].max() > 0.9


def test_a_recurrent_model_is_scored_by_its_effective_attention():
    model = MIModel.from_pretrained(REPOSITORY / "models" / "world-rwkv7")
    found = model.head_scores(batch=2, period=8)
    ids = repeat_sequences(
        np.setdiff1d(np.arange(model.vocab_size), head_scores.special_tokens(model)[1]), [], 2, 8, 0
    ).ids
    cache = model.forward(ids, HookSpec().capture("*hook_effective_attn"))
    at = np.arange(8, 16)
    assert np.allclose(found["previous_token"], cache.stack("effective_attn")[:, :, :, at, at - 1].mean((1, 3)))


def test_results_are_read_and_shown(llama, tmp_path, chromium):
    found = llama.head_scores(("induction", "previous_token"), batch=2)
    assert found.values.shape == (2, 4, 8)
    assert np.array_equal(found["induction"], found.values[0])
    top = found.top("induction", 32)
    assert [score for _, _, score in top] == sorted(found["induction"].ravel().tolist(), reverse=True)
    assert all(found["induction"][layer, head] == score for layer, head, score in top)
    for wrong in (
        lambda: found["duplicate_token"],
        lambda: found.top("induction", 0),
        lambda: found.top("induction", 33),
    ):
        with pytest.raises(InputError):
            wrong()
    assert json.loads(found.save(tmp_path / "a.json").read_text())["values"] == found.values.tolist()
    page = chromium(found.save(tmp_path / "a.html"))
    assert page.troubles == []
    assert page.locator("h2").all_text_contents() == ["Induction", "Previous token", "The heads that score highest"]
    assert page.locator(".heat td").count() == 2 * 32
    layer, head, score = top[0]
    page.locator(".heat").first.locator("tr:has(td)").nth(layer).locator("td").nth(head).hover()
    assert page.locator("#tip").text_content().startswith(f"layer {layer}\nhead {head}\n")
    assert page.locator("#tip").text_content().endswith(f"mean attention: {score:.4g}")
    figure = found.figure()
    images = [axes.get_images()[0].get_array() for axes in figure.axes if axes.get_images()]
    assert np.array_equal(np.stack(images[:2]), found.values)


def test_a_large_model_is_shown_whole(chromium, tmp_path):
    values = np.random.default_rng(0).beta(0.3, 3, (3, 80, 64))
    found = HeadScores(HEAD_KINDS, values, 0.03, 24, 8, "<b>large</b>")
    page = chromium(found.save(tmp_path / "large.html"))
    assert page.troubles == []
    assert page.locator("h1").text_content() == "Heads of <b>large</b>"
    assert page.locator(".heat td").count() == 3 * 80 * 64
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert max(found.figure().get_size_inches()) < 24


@pytest.mark.slow
def test_the_command_line(llama, tmp_path):
    shown = succeeded("heads", LLAMA, "--batch", 2, "--html", tmp_path / "a.html", "--png", tmp_path / "a.png")
    layer, head, score = llama.head_scores("induction", batch=2).top("induction", 1)[0]
    assert f"{layer}.{head}  {score:.3f}" in shown
    assert (tmp_path / "a.html").stat().st_size > 1000
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    run = CliRunner().invoke(app, ["heads", str(LLAMA), "--kinds", "induction", "--batch", "2", "--json"])
    assert json.loads(run.output)["kinds"] == ["induction"]
    assert np.allclose(json.loads(run.output)["values"], llama.head_scores("induction", batch=2).values)


OF_ROWS = {
    "rows": HookSpec().intervene("blocks.0.attn.hook_z", Intervention.Zero(rows=0)),
    "positions": HookSpec().intervene("blocks.0.attn.hook_z", Intervention.Zero(positions=[[0]] * 8)),
    "values": HookSpec().intervene("blocks.0.attn.hook_z", Intervention.Scale(np.arange(8).reshape(8, 1, 1, 1))),
}


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"kinds": "inductoin"}, InputError, "did you mean 'induction'"),
        ({"kinds": ()}, InputError, "different ones"),
        ({"kinds": ("induction", "induction")}, InputError, "different ones"),
        ({"batch": 0}, InputError, "batch must be 1 or above"),
        ({"period": 1}, InputError, "period must be 2 or above"),
        ({"period": 1000}, InputError, "tokens to draw from"),
        ({"token_ids": [3, 9999]}, InputError, "vocabulary"),
        ({"token_ids": "abc"}, InputError, "are integers"),
        ({"token_ids": [3.5, 4.5]}, InputError, "are integers"),
        ({"seed": -1}, InputError, "seed must be 0 or above, got -1"),
        ({"batch": 2.5}, InputError, "batch must be an integer"),
        ({"period": "2"}, InputError, "period must be an integer"),
        ({"hooks": OF_ROWS["rows"]}, InterventionError, "each row"),
        ({"hooks": OF_ROWS["positions"]}, InterventionError, "each row"),
        ({"hooks": OF_ROWS["values"]}, InterventionError, "each row"),
        ({"hooks": HookSpec().capture("hook_embed")}, HookError, "interventions"),
        ({"hooks": HookSpec().intervene("blocks.9.attn.hook_z", Intervention.Zero())}, HookError, "no hook point"),
    ],
)
def test_wrong_arguments(llama, arguments, kind, message):
    with pytest.raises(kind, match=message):
        llama.head_scores(**arguments)


def test_sequences_longer_than_the_model_can_read():
    with pytest.raises(InputError, match="positions for 256 only"):
        MIModel.from_pretrained(REPOSITORY / "models" / "world-gpt2").head_scores(period=129)
