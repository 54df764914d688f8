"""The logit lens against transformers' own final norm and head, its numbers against numpy, its page in Chromium."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from command_line import succeeded
from families import make_checkpoint
from nasty import NASTY
from repository import REPOSITORY
from safetensors.numpy import load_file
from scipy.special import log_softmax, softmax
from stream_oracle import Stream

from exporters.transformers import export
from mionnx import HookError, HookPoint, HookSpec, InputError, Intervention, MIError, MIModel, TokenizerError

FAMILIES = ("gpt2", "llama", "gemma2")
LLAMA = REPOSITORY / "models" / "world-llama"
PROMPT = "The capital of France is"
IDS = np.random.default_rng(3).integers(3, 101, 11)


@pytest.fixture(scope="module")
def world() -> MIModel:
    return MIModel.from_pretrained(LLAMA, threads=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_is_read_as_transformers_would(models, references, family):
    stream = Stream.of(references(family), IDS)
    found = models(family).logit_lens(IDS, k=7, token_ids=[5, 9])
    streams = np.stack([stream.values[f"blocks.{i}.hook_resid_post"] for i in range(2)])
    logs = log_softmax(stream.read(streams).astype(np.float64), axis=-1)
    assert found.points == ["blocks.0.hook_resid_post", "blocks.1.hook_resid_post"]
    assert np.abs(-np.sort(-logs, axis=-1)[..., :7] - found.readout.top).max() < 5e-5
    assert np.abs(np.take_along_axis(logs, found.top_ids, -1) - found.readout.top).max() < 5e-5
    assert np.abs(-(np.exp(logs) * logs).sum(-1) - found.entropy).max() < 5e-5
    assert np.abs((np.exp(logs[-1]) * (logs[-1] - logs)).sum(-1) - found.divergence).max() < 5e-5
    for token in (5, 9, 40):
        assert np.abs(np.exp(logs[..., token]) - found.probability_of(token)).max() < 5e-5
        assert np.abs(logs[..., token] - found.log_probability_of(token)).max() < 5e-5
        close = np.abs(logs - logs[..., [token]]) < 5e-5  # what rounding may put either way
        above = logs > logs[..., [token]]
        assert ((above & ~close).sum(-1) <= found.rank_of(token)).all()
        assert (found.rank_of(token) <= (above | close).sum(-1)).all()
    assert np.array_equal(found.answers, stream.logits.argmax(-1))
    assert np.abs(found.answer_probability[-1] - softmax(stream.logits, axis=-1).max(-1)).max() < 5e-5
    assert (found.answer_rank[-1] == 0).all()


@pytest.mark.parametrize("name", ["world-llama", "world-gpt2", "world-rwkv7"])
def test_at_the_last_layer_the_lens_is_the_model(name):
    model = MIModel.from_pretrained(REPOSITORY / "models" / name, threads=1)
    found = model.logit_lens(PROMPT, k=model.vocab_size, layers=[model.num_layers - 1])
    logits = model.forward(PROMPT).output()[0]
    read = np.empty_like(logits)
    np.put_along_axis(read, found.top_ids[0], found.readout.top[0], axis=-1)
    assert np.abs(read - log_softmax(logits.astype(np.float64), axis=-1)).max() < 5e-5
    assert np.abs(found.divergence).max() < 1e-6
    assert found.converged == ["blocks.3.hook_resid_post"] * 5


def test_the_lens_converges_on_the_answer_layer_by_layer(world):
    countries = {"France": "Paris", "Japan": "Tokyo", "Italy": "Rome", "Germany": "Berlin", "Spain": "Madrid"}
    found = {name: world.logit_lens(f"The capital of {name} is", positions=-1) for name in countries}
    assert [found[name].spell(int(found[name].answers[0])) for name in countries] == list(countries.values())
    chances = np.mean([result.answer_probability[:, 0] for result in found.values()], axis=0)
    assert (np.diff(chances) > 0).all()
    assert chances[-1] > 0.9 > 0.2 > chances[-2]
    assert (np.diff(np.mean([result.divergence[:, 0] for result in found.values()], axis=0)) < 0).all()
    assert {result.converged[0] for result in found.values()} == {"blocks.3.hook_resid_post"}


def test_streams_layers_and_positions_are_chosen(world):
    cache = world.forward(PROMPT, HookSpec().capture("blocks.*"))
    found = world.logit_lens(PROMPT, k=3, layers=[2, 1], points=["resid_post", "resid_mid"], positions=[-1, 1])
    assert found.points == [f"blocks.{i}.hook_resid_{point}" for i in (1, 2) for point in ("mid", "post")]
    assert (found.positions, found.tokens) == ([4, 1], ["is", "capital"])
    for i, point in enumerate(found.points):
        chances = softmax(world.project_to_vocab(cache[point][0, [4, 1]]).astype(np.float64), axis=-1)
        assert np.abs(np.take_along_axis(chances, found.top_ids[i], -1) - found.top_probs[i]).max() < 5e-5


def test_interventions_are_in_force(world):
    steer = HookSpec().intervene(HookPoint.ResidPost(1), Intervention.Scale(-1))
    plain, steered = world.logit_lens(PROMPT), world.logit_lens(PROMPT, steer)
    assert np.array_equal(plain.readout.top[0], steered.readout.top[0])
    assert np.abs(plain.readout.top[1] - steered.readout.top[1]).max() > 0.1
    assert world.track_token(PROMPT, "Paris", hooks=steer)[-1] < 0.5


def test_residuals_are_read_like_prompts(world):
    residuals = world.forward(PROMPT, HookSpec().capture("blocks.*.hook_resid_post")).stack("resid_post")[:, 0, -1]
    chances = softmax(world.project_to_vocab(residuals).astype(np.float64), axis=-1)
    for layer, found in enumerate(world.logit_lens(residuals, k=4)):
        assert [token for token, _ in found] == np.argsort(-chances[layer])[:4].tolist()
        assert np.abs([chance for _, chance in found] - np.sort(chances[layer])[::-1][:4]).max() < 5e-5
        assert dict(world.logit_lens(residuals[layer], k=4)) == pytest.approx(dict(found), abs=5e-5)
    paris = world.token_id("Paris")
    ranks = (chances > chances[:, [paris]]).sum(axis=-1)
    assert np.array_equal(world.logit_lens(PROMPT).rank_of("Paris")[:, -1], ranks)
    tracked = world.track_token(PROMPT, "Paris")
    assert np.abs(tracked - chances[:, paris]).max() < 5e-5
    assert world.track_token_at(residuals[2], paris) == pytest.approx(chances[2, paris], abs=5e-5)
    race = world.track_race(PROMPT, k=2)
    given = world.track_race({layer: residuals[layer] for layer in (3, 1)}, k=2)
    assert [*race] == [0, 1, 2, 3]
    assert [*given] == [3, 1]
    assert race[3][0] == (paris, pytest.approx(chances[3, paris], abs=5e-5))
    for layer in given:
        assert [token for token, _ in given[layer]] == [token for token, _ in race[layer]]


def test_tokens_are_vectors_and_vectors_tokens(world, models, references):
    weights = load_file(LLAMA / "model.safetensors")
    table = weights["model.embed_tokens.weight"].astype(np.float64)
    paris = world.token_id("Paris")
    assert np.array_equal(world.embedding_for("Paris"), table[paris].astype(np.float32))
    lengths = np.linalg.norm(table, axis=1)
    cosines = table @ table[paris] / np.where(lengths == 0, 1, lengths) / lengths[paris]  # padding's row is zero
    near = world.embedding_neighbors(world.embedding_for(paris), k=5)
    assert near == world.embedding_neighbors("Paris", k=5)
    assert [token for token, _ in near] == np.argsort(-cosines)[:5].tolist()
    assert [cosine for _, cosine in near] == pytest.approx(np.sort(cosines)[::-1][:5].tolist(), abs=1e-6)
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).astype(np.float64)
    vector = np.random.default_rng(0).normal(0, 1, 128)
    raw = world.project_through_unembed(vector, k=3)
    assert [token for token, _ in raw] == np.argsort(-(head @ vector))[:3].tolist()
    assert [value for _, value in raw] == pytest.approx(np.sort(head @ vector)[::-1][:3].tolist(), abs=1e-6)
    assert np.array_equal(world.unembedding_for("Paris"), head[paris].astype(np.float32))
    gemma, reference = models("gemma2"), references("gemma2")
    row = reference.model.embed_tokens.weight.detach().numpy()[7]
    assert np.array_equal(gemma.embedding_for(7, scaled=False), row)
    assert np.abs(gemma.embedding_for(7) - row * 8).max() < 5e-6  # sqrt(hidden = 64)


@pytest.mark.parametrize(("family", "scaled"), [("llama", False), ("cohere", True)])
def test_unembedding_directions_give_logits_before_bias_scale_and_cap(models, references, family, scaled):
    model = models(family)
    cache = model.forward(IDS, HookSpec().capture(HookPoint.FinalNorm))
    product = cache[HookPoint.FinalNorm][0] @ model.unembedding_for(7)
    scale = references(family).config.logit_scale if scaled else 1.0
    assert (scale != 1.0) == scaled
    assert np.abs(scale * product - cache.output()[0, :, 7]).max() < 5e-5


MEASURE = """
import json, re, sys
from pathlib import Path
import numpy as np
from mionnx import MIModel

def memory(kind):  # of this process; getrusage's peak would begin with that of the process that started it
    return 1024 * int(re.search(kind + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

model, seq = MIModel.from_pretrained(sys.argv[1], threads=1), int(sys.argv[2])
ids = np.arange(3, 3 + seq)
model.logit_lens(ids[:2], k=5)  # the sessions are open now, and the weights are read
before = memory("VmRSS")
result = model.logit_lens(ids, k=5)
top = result.readout.top
print(json.dumps([memory("VmHWM") - before, list(top.shape), float(np.exp(top).sum())]))
"""


@pytest.mark.slow
def test_logits_of_all_layers_are_never_held(tmp_path):
    """A vocabulary of 128k: what the lens takes beyond an open model, beside [layers, seq, vocab] in float32."""
    changes = {"vocab_size": 131072, "hidden_size": 32, "max_position_embeddings": 256, "intermediate_size": 32}
    make_checkpoint("llama", tmp_path / "checkpoint", **changes)
    export(tmp_path / "checkpoint", tmp_path / "hooked")
    command = [sys.executable, "-c", MEASURE, tmp_path / "hooked", "192"]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    taken, shape, total = json.loads(run.stdout)
    whole = 2 * 192 * 131072 * 4
    assert shape == [2, 192, 5]
    assert 0 < total < 2 * 192
    assert taken < whole / 3, f"{taken / 2**20:.0f} MiB of {whole / 2**20:.0f}"


@pytest.mark.parametrize(
    ("ask", "error", "message"),
    [
        (lambda model: model.logit_lens(PROMPT, k=0), InputError, "from 1 to 471"),
        (lambda model: model.logit_lens(PROMPT, k=472), InputError, "from 1 to 471"),
        (lambda model: model.logit_lens(PROMPT, positions=5), InputError, "position 5"),
        (lambda model: model.logit_lens(PROMPT, positions=[]), InputError, "no positions"),
        (lambda model: model.logit_lens(PROMPT, layers=[4]), InputError, "layers 0 to 3"),
        (lambda model: model.logit_lens(PROMPT, points="resid_pots"), HookError, "did you mean 'resid_post'"),
        (lambda model: model.logit_lens(PROMPT, token_ids=["Pari"]), InputError, "not in the vocabulary"),
        (lambda model: model.logit_lens(PROMPT, token_ids=[471]), InputError, "0 to 470"),
        (lambda model: model.logit_lens(PROMPT, HookSpec().capture("hook_embed")), InputError, "interventions"),
        (lambda model: model.logit_lens(np.full(128, np.nan)), InputError, "NaN"),
        (lambda model: model.logit_lens(np.ones(127)), InputError, "hidden=128"),
        (lambda model: model.logit_lens(np.ones(128), positions=1), InputError, "not to a residual"),
        (lambda model: model.logit_lens(np.ones((1, 2, 128))), InputError, r"\[n, hidden\]"),
        (lambda model: model.track_token_at(np.ones((2, 128)), 3), InputError, "must be"),
        (lambda model: model.track_race({}), InputError, "layer: residual"),
        (lambda model: model.embedding_neighbors(np.zeros(128)), InputError, "no direction"),
        (lambda model: model.embedding_neighbors(np.ones(128), k=1000), InputError, "from 1 to 471"),
        (lambda model: model.project_through_unembed(np.ones((2, 128))), InputError, "hidden=128"),
        (lambda model: model.unembedding_for(-1), InputError, "0 to 470"),
        (lambda model: model.embedding_for(True), InputError, "token must be an integer or a text, got True"),
        (lambda model: model.logit_lens(PROMPT).at(7), InputError, "were read"),
        (lambda model: model.logit_lens(PROMPT).probability_of(471), InputError, "0 to 470"),
        (lambda model: model.logit_lens(PROMPT).rank_of("Pari"), InputError, "not in the vocabulary"),
    ],
)
def test_what_cannot_be_read_is_an_error(world, ask, error, message):
    with pytest.raises(error, match=message):
        ask(world)


def test_an_intervention_behind_the_streams_is_an_error(world):
    for point in (HookPoint.FinalNorm, HookPoint.Logits):
        with pytest.raises(MIError, match="changes nothing"):
            world.logit_lens(PROMPT, HookSpec().intervene(point, Intervention.Scale(2)))


def test_without_a_tokenizer_tokens_are_numbers(models):
    found = models("llama").logit_lens(IDS, k=2)
    assert found.tokens == [str(token) for token in IDS]
    assert found.to_dict()["top"][0][0][0][1] == str(found.top_ids[0, 0, 0])
    with pytest.raises(TokenizerError):
        models("llama").logit_lens(IDS, token_ids=["Paris"])


def test_the_page_shows_the_table_and_executes_no_token(world, chromium, tmp_path):
    found = world.logit_lens(PROMPT, k=4, token_ids=["Berlin"])
    page = chromium(found.save(tmp_path / "lens.html"))
    cells = page.locator("td.token")
    assert cells.count() == 20
    assert cells.nth(19).text_content() == "Paris"
    assert page.locator("td.marked").count() == 5
    assert "is" in page.locator("h2:visible").text_content()
    page.locator("select").select_option(label="rank of the answer (0: top token)")
    cells.nth(3).click()
    assert "France" in page.locator("h2:visible").text_content()
    assert "Berlin" in page.locator(".legend:visible").text_content()
    cells.nth(19).hover()
    assert "Paris" in page.locator("#tip").text_content()
    assert page.troubles == []
    nasty = replace(found, tokens=[NASTY] * 5, spell=lambda token: f"{NASTY} {token}")
    page = chromium(nasty.save(tmp_path / "nasty.html"))
    assert page.locator("td.token").first.text_content() == f"{NASTY} {found.top_ids[0, 0, 0]}"
    assert page.locator("img").count() == 0
    assert page.troubles == []


def test_figure_and_json(world, tmp_path):
    found = world.logit_lens(PROMPT, k=2, token_ids=["Berlin"])
    assert found.save(tmp_path / "lens.png").stat().st_size > 5000
    assert repr(found) == "LensResult(4 points, 5 positions, top 2 tokens)"
    saved = json.loads(found.to_json())
    assert saved["answers"][4] == [world.token_id("Paris"), "Paris"]
    assert saved["top"][3][4][0][:2] == [world.token_id("Paris"), "Paris"]
    assert (
        np.abs(np.array(saved["tracked"][0]["probability"]) - found.probability_of(world.token_id("Berlin"))).max()
        < 1e-6
    )


def test_the_command(tmp_path):
    files = [tmp_path / "lens.html", tmp_path / "lens.png"]
    table = succeeded("lens", LLAMA, PROMPT, "--token-ids", "Berlin", "--html", files[0], "--png", files[1])
    assert all(path.stat().st_size > 5000 for path in files)
    assert "3 post" in table
    assert "'Paris' 1.000" in table
    saved = json.loads(succeeded("lens", LLAMA, PROMPT, "--layers", "2", "--layers", "3", "--json"))
    assert saved["points"] == ["blocks.2.hook_resid_post", "blocks.3.hook_resid_post"]


def test_a_number_in_the_place_of_hooks_is_told_what_is_meant(shipped):
    """FINDINGS, part 2, section 2: LARQL's `logit_lens(residual, k)` by position."""
    for source in ("The capital of France is", np.zeros(shipped.hidden_size, np.float32)):
        with pytest.raises(InputError, match=r"hooks must be a HookSpec, got 5.*k=5 asks for five.*layers=\[5\]"):
            shipped.logit_lens(source, 5)
    with pytest.raises(InputError, match=r"hooks must be a HookSpec, got 'blocks'"):
        shipped.logit_lens("The capital of France is", "blocks")
