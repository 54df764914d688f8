"""Directions from contrasting prompts, and what they do: equal to transformers with hooks of its own."""

import json
import re
import shlex
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from command_line import mionnx
from repository import REPOSITORY
from rich.console import Console
from scipy.special import log_softmax
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from mionnx import (
    Direction,
    Directions,
    HookError,
    HookSpec,
    InputError,
    Intervention,
    InterventionError,
    MIModel,
    RuntimeMissingError,
    SpecFileError,
)
from mionnx.analysis.steering.dose_response import DoseTrial, brackets
from mionnx.cli.demos import methods
from mionnx.cli.main import app

FRAMES = (
    "The capital of {} is",
    "The capital city of {} is called",
    "{} has its capital in",
    "{} is governed from",
    "In {} the seat of power is",
    "People from {} call",
    "Ask for the capital of {} and hear",
)
POSITIVE, NEGATIVE = ([frame.format(country) for frame in FRAMES] for country in ("Germany", "France"))
PROMPT = "The capital of France is"
TOLERANCE = 5e-5


@pytest.fixture(scope="module")
def model() -> MIModel:
    return MIModel.from_pretrained("models/world-llama", threads=1)


@pytest.fixture(scope="module")
def reference():
    return AutoModelForCausalLM.from_pretrained("models/world-llama", attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def directions(model) -> Directions:
    return model.contrast(POSITIVE, NEGATIVE)


def last_states(model, reference, texts) -> np.ndarray:
    """[layers, texts, hidden]: what each block of the torch model gives at the last token."""
    rows = []
    for text in texts:
        seen = []
        handles = [
            block.register_forward_hook(lambda _m, _i, out, seen=seen: seen.append(out))
            for block in reference.model.layers
        ]
        with torch.no_grad():
            reference(torch.from_numpy(model.tokenize(text).ids[None]))
        for handle in handles:
            handle.remove()
        rows.append(np.stack([(one[0] if isinstance(one, tuple) else one)[0, -1].numpy() for one in seen]))
    return np.stack(rows, axis=1).astype(np.float64)


def steered_logits(model, reference, text, layer, vector, positions=None) -> np.ndarray:
    """[vocab]: the torch model's last logits, a vector added to a block's output."""
    chosen = slice(None) if positions is None else positions

    def add(_module, _inputs, out):
        value = out[0] if isinstance(out, tuple) else out
        value[:, chosen] += torch.from_numpy(vector)
        return out

    handle = reference.model.layers[layer].register_forward_hook(add)
    with torch.no_grad():
        logits = reference(torch.from_numpy(model.tokenize(text).ids[None])).logits[0, -1].numpy()
    handle.remove()
    return logits


def test_mean_differences_are_those_of_the_torch_model(model, reference, directions):
    plus, minus = (last_states(model, reference, texts) for texts in (POSITIVE, NEGATIVE))
    expected = (plus - minus).mean(axis=1)
    assert np.abs(directions.vectors - expected).max() < TOLERANCE * np.abs(expected).max()
    assert np.allclose(directions.norms, np.linalg.norm(expected, axis=1), rtol=1e-4)


def test_the_principal_axis_maximises_the_squared_differences(model, reference):
    found = model.contrast(POSITIVE, NEGATIVE, method="pca", layers=[2, 3])
    plus, minus = (last_states(model, reference, texts)[2:] for texts in (POSITIVE, NEGATIVE))
    for vector, differences in zip(found.vectors.astype(np.float64), plus - minus, strict=True):
        values, axes = np.linalg.eigh(differences.T @ differences)
        unit = vector / np.linalg.norm(vector)
        assert abs(unit @ axes[:, -1]) > 1 - 1e-6
        assert np.isclose(np.linalg.norm(vector), (differences @ unit).mean(), rtol=1e-4)
        assert (differences @ unit).mean() > 0
        assert np.isclose(((differences @ unit) ** 2).sum(), values[-1], rtol=1e-4)


def test_separation_counts_pairs(model, reference, directions):
    plus, minus = (last_states(model, reference, texts) for texts in (POSITIVE, NEGATIVE))
    for layer in (2, 3):
        vector, difference = directions[layer].vector.astype(np.float64), plus[layer] - minus[layer]
        pairs = (plus[layer] @ vector)[:, None] - (minus[layer] @ vector)[None]
        assert np.isclose(directions.separation.auc[layer], (pairs > 0).mean() + 0.5 * (pairs == 0).mean())
        held_out = [difference[i] @ np.delete(difference, i, 0).mean(0) > 0 for i in range(len(difference))]
        assert directions.separation.held_out[layer] == np.mean(held_out)
        unit = vector / np.linalg.norm(vector)
        share = ((difference @ unit) ** 2).sum() / (difference**2).sum()
        assert np.isclose(directions.separation.explained[layer], share, rtol=1e-4)
    cosine = [np.dot(a, b) / np.linalg.norm(a) / np.linalg.norm(b) for a, b in pairwise(directions.vectors)]
    assert np.allclose(directions.convergence(), cosine, atol=1e-5)
    assert directions.best_layer == int(np.argmax(directions.separation.explained))


def test_the_mean_over_several_positions(model):
    found = model.contrast(POSITIVE[:1], NEGATIVE[:1], "mlp_out", positions=[-1, -2], layers=[2])
    spec = HookSpec().capture("blocks.2.hook_mlp_out")
    plus, minus = (model.forward(texts[0], spec)["mlp_out", 2][0, -2:].mean(0) for texts in (POSITIVE, NEGATIVE))
    assert np.abs(found.vectors[0] - (plus - minus)).max() < TOLERANCE * np.abs(plus).max()
    assert np.isnan(found.separation.held_out[0])
    assert list(found.spec().interventions[0][0].name.split(".")) == ["blocks", "2", "hook_mlp_out"]


@pytest.mark.parametrize("positions", [None, -1])
def test_a_dose_response_is_that_of_the_torch_model(model, reference, directions, positions):
    strengths = [2.0, -0.5, 0.0, 0.4, 1.0]
    before = len(model.compiled)
    found = model.dose_response(NEGATIVE[:3], directions[2], strengths, target="Berlin", positions=positions)
    assert len(model.compiled) - before <= 2  # the steered graph, and the one that measures the stream
    assert found.strengths.tolist() == sorted(strengths)
    berlin = model.token_id("Berlin")
    at = None if positions is None else [positions]
    for i, text in enumerate(NEGATIVE[:3]):
        base = log_softmax(steered_logits(model, reference, text, 2, 0 * directions[2].vector).astype(np.float64))
        for n, strength in enumerate(found.strengths):
            vector = directions[2].vector * np.float32(strength)
            logits = steered_logits(model, reference, text, 2, vector, at)
            after = log_softmax(logits.astype(np.float64))
            assert np.isclose(found.probabilities[i, n], np.exp(after[berlin]), atol=TOLERANCE)
            assert np.isclose(found.kl[i, n], (np.exp(base) * (base - after)).sum(), atol=1e-3, rtol=1e-4)
            assert found.answers.top[i, n] == logits.argmax()
    assert (found.kl[:, found.strengths == 0] < 1e-9).all()


def test_the_answer_flips_to_berlin_at_the_strength_that_bisection_finds(model, directions):
    coarse = model.dose_response(NEGATIVE, directions[2], [0, 0.5, 1], target="Berlin", positions=-1)
    fine = model.dose_response(NEGATIVE, directions[2], [0, 0.5, 1], target="Berlin", positions=-1, bisect=1e-3)
    assert set(coarse.flips) <= {0.5, 1.0}
    assert (fine.flips <= coarse.flips).all()
    for text, flip in zip(NEGATIVE, fine.flips, strict=True):
        answers = []
        for strength in (flip, flip - 1.1e-3):
            spec = directions.spec(2, strength, positions=-1)
            answers.append(model.tokenizer.decode([int(model.forward(text, spec).output()[0, -1].argmax())]))
        assert answers == ["Berlin", "Paris"]
    back = model.dose_response(PROMPT, directions[2], [-1, -2], target="Berlin", positions=-1)
    assert np.isnan(back.flips).all()
    assert model.dose_response(PROMPT, directions[2], [0, 1], positions=-1).names[int(fine.targets[0])] == "Berlin"


def test_negative_strengths_flip_on_their_side(model, directions):
    turned = Direction(directions[2].hook, -directions[2].vector)
    up = model.dose_response(PROMPT, directions[2], [0.5, 1], target="Berlin", positions=-1, bisect=1e-2)
    down = model.dose_response(PROMPT, turned, [-0.5, -1], target="Berlin", positions=-1, bisect=1e-2)
    assert down.flips[0] == -up.flips[0]


def test_a_target_that_is_the_answer_already_is_never_flipped_to(model, directions):
    found = model.dose_response([PROMPT, POSITIVE[0]], directions[2], [-1, 0.5, 1], target="Berlin", positions=-1)
    assert [found.names[int(token)] for token in found.baseline] == ["Paris", "Berlin"]
    assert found.flips[0] == 1.0
    assert np.isnan(found.flips[1])
    unmoved = model.dose_response(PROMPT, directions[0], [0.25, 0.5], positions=-1, bisect=1e-2)
    assert unmoved.targets == unmoved.baseline
    assert np.isnan(unmoved.flips).all()


@pytest.mark.parametrize("bisect", [None, 1e-2])
def test_flips_are_looked_for_on_both_sides(model, directions, bisect):
    ask = {"target": "Paris", "positions": -1, "bisect": bisect}
    alone = model.dose_response(POSITIVE[0], directions[2], [-2, -1, 0], **ask).flips[0]
    assert -1 <= alone < 0
    assert model.dose_response(POSITIVE[0], directions[2], [-2, -1, 0, 0.1], **ask).flips[0] == alone
    turned = Direction(directions[2].hook, -directions[2].vector)
    assert model.dose_response(POSITIVE[0], turned, [-0.1, 0, 1, 2], **ask).flips[0] == -alone


def test_of_two_flips_the_one_nearest_0_is_given():
    strengths, hit = np.array([-2.0, -1.0, 0.5, 3.0]), np.array([[True, True, False, True], [False, False, True, True]])
    found = [*brackets(strengths, hit)]
    assert found == [(0, 0.5, 3.0), (1, 0.0, 0.5), (0, 0.0, -1.0)]
    trial = DoseTrial.__new__(DoseTrial)
    trial.texts = [None, None]
    assert trial.flips(found, np.zeros(2, int), None).tolist() == [-1.0, 0.5]


def test_one_pair_steers_in_the_middle_layer(model, directions):
    one = model.contrast(POSITIVE[3], NEGATIVE[3])
    assert np.allclose(one.separation.explained, 1)
    assert one.best_layer == 2
    assert one.only([1, 2, 3]).best_layer == 2
    assert directions.best_layer == int(np.argmax(directions.separation.explained))


README = REPOSITORY / "mionnx" / "analysis" / "steering" / "README.md"


def test_the_command_in_the_readme_steers(monkeypatch, tmp_path):
    monkeypatch.chdir(REPOSITORY)
    (line,) = re.findall(r"^mionnx (steer models/.*)$", README.read_text().replace("\\\n", ""), re.M)
    asked = [str(tmp_path / part) if part.endswith(".html") else part for part in shlex.split(line)]
    made = CliRunner().invoke(app, [*asked, "--json"])
    assert made.exit_code == 0, made.output
    (found,) = json.loads(made.stdout)["prompts"]
    assert (found["baseline"], found["target"]) == ("Paris", "Berlin")
    assert 0 < found["flip"] < 1
    assert len([*tmp_path.iterdir()]) == 1


def test_a_target_that_is_not_in_the_vocabulary_is_refused(model, directions):
    for target in ("Atlantisxyz", ["Atlantisxyz"]):
        with pytest.raises(InputError, match=r"'Atlantisxyz' is not in the vocabulary.*<unk>"):
            model.dose_response(PROMPT, directions[2], [1], target=target)
    with pytest.raises(InputError, match="Atlantisxyz"):
        model.token_id("Atlantisxyz")
    with pytest.raises(InputError, match="Atlantisxyz"):
        model.ablation_sweep(PROMPT, metric="probability", answer="Atlantisxyz")
    assert model.token_id(" Paris ") == model.token_id("Paris")
    assert model.tokenizer.decode([model.token_id("<unk>")], skip_special_tokens=False) == "<unk>"


def test_steering_generates_the_other_capital(model, directions):
    steer = directions.spec(2, 1.0, positions=-1)
    assert model.generate(PROMPT, max_new_tokens=1).new_texts == ["Paris"]
    assert model.generate(PROMPT, steer, max_new_tokens=1).new_texts == ["Berlin"]


def test_projecting_the_country_out_of_every_layer_removes_the_answer(model, directions):
    paris = model.token_id("Paris")
    spec = directions.ablation_spec()
    assert [point.name for point, _ in spec.interventions] == [f"blocks.{i}.hook_resid_post" for i in range(4)]
    found = model.forward(PROMPT, spec).output()[0, -1]
    before = np.exp(log_softmax(model.forward(PROMPT).output()[0, -1]))[paris]
    assert before > 0.99
    assert found.argmax() != paris
    assert np.exp(log_softmax(found))[paris] < 0.5
    one = directions.ablation_spec(layer=2, layers=[2, 3], positions=-1)
    manual = HookSpec()
    for layer in (2, 3):
        manual.intervene(f"blocks.{layer}.hook_resid_post", Intervention.ProjectOut(directions[2].vector, positions=-1))
    assert (model.forward(PROMPT, one).output() == model.forward(PROMPT, manual).output()).all()
    everywhere = directions.only([2]).ablation_spec(layer=2, layers=range(4))
    manual = HookSpec()
    for layer in range(4):
        manual.intervene(f"blocks.{layer}.hook_resid_post", Intervention.ProjectOut(directions[2].vector))
    assert (model.forward(PROMPT, everywhere).output() == model.forward(PROMPT, manual).output()).all()
    with pytest.raises(HookError, match="no direction for layer 0"):
        directions.only([2]).ablation_spec(layers=[0])
    with pytest.raises(HookError):
        model.forward(PROMPT, directions.ablation_spec(layer=2, layers=[9]))
    other = model.forward("three four five", spec).output()[0, -1]
    assert model.tokenizer.decode([int(other.argmax())]) == "six"  # what has nothing to do with countries stays


def test_calibration_measures_the_stream(model, reference, directions):
    found = model.calibrate(directions, NEGATIVE, positions=-1)
    norms = np.median(np.linalg.norm(last_states(model, reference, NEGATIVE), axis=-1), axis=1)
    assert np.allclose(found.stream_norms, norms, rtol=1e-4)
    assert np.isclose(found.strength(2, 0.5) * directions.norms[2], 0.5 * norms[2], rtol=1e-4)
    assert np.isclose(found.share(2, found.strength(2, 0.3)), 0.3)
    everywhere = model.calibrate(directions, NEGATIVE)
    cache = [model.forward(text, HookSpec().capture("blocks.1.hook_resid_post")) for text in NEGATIVE]
    lengths = np.concatenate([np.linalg.norm(one["resid_post", 1][0, 1:], axis=-1) for one in cache])
    assert np.isclose(everywhere.stream_norms[1], np.median(lengths), rtol=1e-5)
    with pytest.raises(HookError, match="0, 1, 2, 3"):
        found.share(9, 1)
    assert (model.calibrate(directions, NEGATIVE, "prompt").stream_norms == everywhere.stream_norms).all()
    ends = [np.linalg.norm(cache[0]["resid_post", 1][0, at]) for at in (0, -1)]
    assert np.isclose(model.calibrate(directions, NEGATIVE[:1], [0, -1]).stream_norms[1], ends[1], rtol=1e-5)
    assert np.isclose(model.calibrate(directions, NEGATIVE[:1], 0).stream_norms[1], ends[0], rtol=1e-5)


def test_the_first_token_is_measured_where_there_is_no_other(model, directions):
    """A prompt of one token counts by itself, and not beside longer ones."""
    alone, text = model.calibrate(directions, "France").stream_norms, "France is"
    spec = HookSpec().capture("blocks.1.hook_resid_post")
    assert np.isclose(alone[1], np.linalg.norm(model.forward("France", spec)["resid_post", 1][0, 0]), rtol=1e-5)
    beside = model.calibrate(directions, ["France", text]).stream_norms
    assert (beside == model.calibrate(directions, text).stream_norms).all()
    assert not np.isclose(beside, alone).any()


@pytest.mark.parametrize("positions", [None, [0, 1, 4], [[0, 2, 4]]])
def test_a_dose_is_a_share_of_the_median_length_without_the_first_token(model, reference, directions, positions):
    with torch.no_grad():
        states = reference(torch.tensor(model.tokenize(PROMPT).ids[None]), output_hidden_states=True).hidden_states
    lengths = np.linalg.norm(states[3][0].numpy(), axis=-1)
    chosen = lengths[1:] if positions is None else lengths[np.ravel(positions)[1:]]
    dose = model.dose_response(PROMPT, directions[2], [0, 1], positions=positions)
    assert np.isclose(dose.share, directions[2].norm / np.median(chosen), rtol=1e-4)
    assert not np.isclose(dose.share, directions[2].norm / lengths.mean(), rtol=0.02)


@pytest.mark.slow
def test_a_share_of_smollm2_is_not_that_of_its_massive_first_token():
    """FINDINGS, part 2, 6: lengths at layer 16 are 22650, 205 and 188, and strength 1 was said to add 0.3 %."""
    smollm = MIModel.from_pretrained("smollm2")
    found = smollm.contrast("The keys are", "The key is")
    shares = smollm.calibrate(found, "The keys are")
    spec = HookSpec().capture("blocks.16.hook_resid_post")
    lengths = np.linalg.norm(smollm.forward("The keys are", spec)["resid_post", 16][0], axis=-1)
    assert lengths[0] > 50 * lengths[1:].max()
    assert np.isclose(shares.share(16, 1), found[16].norm / np.median(lengths[1:]), rtol=1e-4)


@pytest.mark.parametrize("positions", ["generated", "the last", 0.5, [[0], [1]], ["prompt"], True, [True]])
def test_calibration_takes_no_other_positions(model, directions, positions):
    with pytest.raises(InputError, match="positions are integers"):
        model.calibrate(directions, NEGATIVE[:2], positions)


def test_calibration_at_a_token_that_is_not_there_is_an_error(model, directions):
    with pytest.raises(InterventionError, match=r"position 50"):
        model.calibrate(directions, NEGATIVE, 50)


@pytest.mark.parametrize("hook", ["post", "hook_post", "mlp.hook_post", "blocks.{i}.mlp.hook_post"])
def test_kinds_of_hook_points_are_spelled_in_four_ways(model, hook):
    found = model.contrast(POSITIVE[:2], NEGATIVE[:2], hook, layers=[2])
    assert (found.hook, found.point(2)) == ("post", "blocks.2.mlp.hook_post")


def test_directions_are_saved_and_read(directions, tmp_path):
    again = Directions.load(directions.save(tmp_path / "a.safetensors"))
    assert (again.vectors == directions.vectors).all()
    assert (again.layers, again.hook, again.method, again.pairs) == ((0, 1, 2, 3), "resid_post", "mean_difference", 7)
    assert np.allclose(again.separation.explained, directions.separation.explained)
    (tmp_path / "a.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes()[:-9])
    for name in ("a.safetensors", "missing.safetensors"):
        with pytest.raises(SpecFileError, match="no directions"):
            Directions.load(tmp_path / name)
    HookSpec().save(tmp_path / "spec.safetensors")
    with pytest.raises(SpecFileError, match="it is a saved HookSpec"):
        Directions.load(tmp_path / "spec.safetensors")


def test_what_cannot_steer_is_refused(model, directions):
    with pytest.raises(InputError, match="make no pairs"):
        model.contrast(POSITIVE, NEGATIVE[:2])
    with pytest.raises(InputError, match="did you mean 'pca'"):
        model.contrast(POSITIVE, NEGATIVE, method="pcb")
    with pytest.raises(InterventionError, match=r"layer 0.*do not differ"):
        model.contrast("The capital of Germany is", PROMPT, "resid_pre")
    with pytest.raises(HookError, match="resid_post"):
        model.contrast(POSITIVE, NEGATIVE, "resid_pots")
    with pytest.raises(HookError, match="one vector a token"):
        model.contrast(POSITIVE, NEGATIVE, "hook_pattern")
    with pytest.raises(HookError, match=r"one layer.*layers=\[3\]"):
        model.contrast(POSITIVE, NEGATIVE, "blocks.3.hook_resid_post")
    for wrong in ("blocks.3.mlp.nonsense_hook_resid_post", "nonsense_hook_resid_post", "mlp.hook_resid_post", "embed"):
        with pytest.raises(HookError):
            model.contrast(POSITIVE, NEGATIVE, wrong)
    with pytest.raises(HookError):
        model.contrast(POSITIVE, NEGATIVE, layers=[7])
    with pytest.raises(HookError, match="no direction for layer 9"):
        directions[9]
    narrow = Direction("blocks.2.hook_resid_post", np.ones(7))
    with pytest.raises(InterventionError, match=r"width 7.*128"):
        model.dose_response(PROMPT, narrow, [1])
    for strengths, message in (([], "one or more"), ([np.nan], "finite"), (["a"], "numbers")):
        with pytest.raises(InputError, match=message):
            model.dose_response(PROMPT, directions[2], strengths)
    for bisect in (0, -1, 1e-9, np.nan):
        with pytest.raises(InputError, match="bisect"):
            model.dose_response(PROMPT, directions[2], [0, 1], bisect=bisect)
    with pytest.raises(InputError, match="target= has 2 tokens for 1"):
        model.dose_response(PROMPT, directions[2], [1], target=["Paris", "Berlin"])
    with pytest.raises(InterventionError, match="position 9"):
        model.dose_response(PROMPT, directions[2], [1], positions=9)
    with pytest.raises(InterventionError, match="NaN"):
        Direction("blocks.2.hook_resid_post", [np.nan])
    with pytest.raises(InterventionError, match="zero"):
        Directions(np.zeros((2, 3)), [0, 1])


NASTY = "</script><script>alert(1)</script>"


@pytest.mark.slow
def test_the_pages_and_pictures(model, directions, chromium, tmp_path):
    found = model.dose_response([*NEGATIVE, NASTY], directions[2], np.linspace(0, 2, 9), positions=-1, bisect=0.01)
    page = chromium(found.save(tmp_path / "dose.html"))
    assert page.troubles == []
    assert page.locator(".choices tr").count() == len(NEGATIVE) + 2
    assert page.locator("table:not(.choices):visible tr").count() == 10
    assert page.locator("svg path").count() == 2 * (len(NEGATIVE) + 1)
    page.locator(".choices tr").nth(len(NEGATIVE) + 1).click()
    assert NASTY in page.locator("h2:visible").last.text_content()
    page.locator("svg circle").last.hover()
    assert "strength" in page.locator("#tip").text_content()
    many = Directions(np.random.default_rng(0).normal(size=(24, 16)), range(24))
    page = chromium(many.save(tmp_path / "many.html"))
    assert page.troubles == []
    assert page.locator("table.heat td").count() == 24 * 24
    for result in (found, directions, many):
        assert result.save(tmp_path / "a.png").stat().st_size > 5000
        json.loads(result.to_json())
    assert json.loads(found.to_json())["prompts"][0]["flip"] == found.flips[0]


def test_the_command_line(tmp_path):
    pairs = [
        part
        for plus, minus in zip(POSITIVE, NEGATIVE, strict=True)
        for part in ("--positive", plus, "--negative", minus)
    ]
    names = {"--html": "a.html", "--png": "a.png", "--save-directions": "d.safetensors"}
    files = [part for option, name in names.items() for part in (option, str(tmp_path / name))]
    made = CliRunner().invoke(
        app,
        [
            "steer",
            "models/world-llama",
            *pairs,
            "--prompt",
            PROMPT,
            "--positions=-1",
            "--bisect",
            "0.01",
            *files,
            "--json",
        ],
    )
    assert made.exit_code == 0, made.output
    (one,) = json.loads(made.stdout)["prompts"]
    assert (one["baseline"], one["target"]) == ("Paris", "Berlin")
    assert 0.5 < one["flip"] < 0.75
    assert (tmp_path / "a.html").stat().st_size > 5000
    again = CliRunner().invoke(
        app,
        ["steer", "models/world-llama", "--load", str(tmp_path / "d.safetensors"), "--prompt", PROMPT, "--layer", "2"],
    )
    assert again.exit_code == 0
    assert "'Berlin'" in again.stdout
    assert CliRunner().invoke(app, ["steer", "models/world-llama", "--prompt", PROMPT]).exit_code == 2


def test_the_command_line_writes_and_reads_control_vectors(tmp_path):
    pytest.importorskip("gguf")
    made = ["steer", "models/world-llama", "--prompt", PROMPT, "--json"]
    file = tmp_path / "vector.gguf"
    pair = ["--positive", POSITIVE[0], "--negative", NEGATIVE[0], "--hook", "resid_post", "--method", "pca"]
    wrote = mionnx(*made, *pair, "--save-directions", file)
    assert wrote.returncode == 0, wrote.stderr
    assert "note: " in wrote.stderr
    assert "holds layers 1 to 3: a control vector has no direction for layer 0" in " ".join(wrote.stderr.split())
    assert Directions.from_gguf(file).layers == (1, 2, 3)
    read = CliRunner().invoke(app, [*made, "--gguf", str(file)])
    assert read.exit_code == 0, read.output
    assert json.loads(read.stdout) == json.loads(wrote.stdout)
    for option in (["--hook", "resid_post"], ["--method", "pca"]):
        for source in ("--gguf", "--load"):
            refused = CliRunner().invoke(app, [*made, source, str(file), *option])
            assert refused.exit_code == 2
            assert "--hook and --method" in " ".join(refused.output.split())


def test_the_demo_says_what_happened(model, tmp_path):
    console = Console(record=True, width=100, file=(tmp_path / "out.txt").open("w"))
    methods.steering(model, console, tmp_path)
    said = console.export_text()
    assert "Berlin" in said
    assert "Paris" in said
    assert {path.suffix for path in tmp_path.iterdir()} >= {".html", ".png"}


def test_without_the_gguf_package_it_is_named(directions, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(RuntimeMissingError, match=r"\.\[gguf\]"):
        directions.only([1]).to_gguf(tmp_path / "a.gguf")
    with pytest.raises(RuntimeMissingError, match=r"\.\[gguf\]"):
        Directions.from_gguf(tmp_path / "a.gguf")
