"""Sweeps over many pairs: each pair equals a loop in eager torch; the mean, the spread, and positions by name."""

import json

import numpy as np
import pytest
import torch
from command_line import LLAMA, mionnx, succeeded
from sweep_pairs import difference

from mionnx.analysis.sweep.result import SweepResult
from mionnx.errors import InputError

LENGTHS, SUBJECTS = (5, 8, 6), ([1, 2], 4, [3])
POSITIONS = {"subject": SUBJECTS, "last": -1}


def pairs():
    draw = np.random.default_rng(8)
    clean = [draw.integers(3, 101, length) for length in LENGTHS]
    corrupted = [ids.copy() for ids in clean]
    for ids, subject in zip(corrupted, SUBJECTS, strict=True):
        ids[subject] = (ids[subject] + 11) % 98 + 3
    return clean, corrupted


def by_torch(reference, clean, corrupted, answer, versus):
    """[layer, name] of one pair: the stream before each layer is put from the clean into the corrupted run."""
    layers = reference.model.layers
    with torch.no_grad():
        streams = reference(torch.from_numpy(clean[None]), output_hidden_states=True).hidden_states
    return lambda layer, places: _patched(reference, layers[layer], streams[layer], corrupted, places, answer, versus)


def _patched(reference, module, stream, corrupted, places, answer, versus):
    def put(module, given, named):
        value = given[0].clone()
        value[:, places] = stream[:, places]
        return (value, *given[1:]), named

    handle = module.register_forward_pre_hook(put, with_kwargs=True)
    with torch.no_grad():
        logits = reference(torch.from_numpy(corrupted[None])).logits[0, -1].numpy()
    handle.remove()
    return difference(logits, answer, versus)


def test_pairs_of_several_lengths_equal_a_loop_in_torch(models, references):
    (clean, corrupted), model = pairs(), models("llama")
    answers, others = [5, 6, 7], [9, 8, 4]
    found = model.patch_sweep(clean, corrupted, answer=answers, versus=others, positions=POSITIONS)
    assert found.labels["position"] == ["subject", "last"]
    expected = np.empty((3, 2, 2))
    for pair in range(3):
        effect = by_torch(references("llama"), clean[pair], corrupted[pair], answers[pair], others[pair])
        for layer in range(2):
            expected[pair, layer] = [effect(layer, np.atleast_1d(SUBJECTS[pair])), effect(layer, [LENGTHS[pair] - 1])]
    np.testing.assert_allclose(found.by_pair, expected, atol=5e-5)
    np.testing.assert_allclose(found.values, expected.mean(axis=0), atol=5e-5)
    plain = [model.forward(ids).output()[0, -1] for ids in corrupted]
    bases = np.array([difference(*row) for row in zip(plain, answers, others, strict=True)])
    effects = expected - bases[:, None, None]
    np.testing.assert_allclose(found.effect_by_pair, effects, atol=1e-4)
    np.testing.assert_allclose(found.std, effects.std(axis=0, ddof=1), atol=1e-4)
    np.testing.assert_allclose(found.sem, effects.std(axis=0, ddof=1) / np.sqrt(3), atol=1e-4)
    assert found.n == 3
    assert found.std.max() > 1e-3


def test_estimates_and_ablations_take_named_positions(models):
    (clean, corrupted), model = pairs(), models("llama")
    over = ("layer", "position", "head")
    exact = model.patch_sweep(clean, corrupted, "z", over, answer=5, versus=9, positions=POSITIONS)
    found = model.attribute_patch(clean, corrupted, "z", over, answer=5, versus=9, positions=POSITIONS, confirm=16)
    np.testing.assert_allclose(found.exact, exact.values, atol=1e-5)
    assert found.agreement(exact).pearson > 0.95
    singles = [
        model.attribute_patch(*pair, "z", over, answer=5, versus=9) for pair in zip(clean, corrupted, strict=True)
    ]
    for pair, one in enumerate(singles):
        summed = [one.effect[:, np.atleast_1d(place)].sum(axis=1) for place in (SUBJECTS[pair], LENGTHS[pair] - 1)]
        np.testing.assert_allclose(found.effect_by_pair[pair], np.stack(summed, axis=1), atol=1e-5)
    ablated = model.ablation_sweep(clean, "z", over, positions=POSITIONS)
    alone = model.ablation_sweep(clean[1], "z", over)
    np.testing.assert_allclose(ablated.by_pair[1], alone.values[:, [4, 7]], atol=1e-6)


def test_a_share_of_the_difference_has_the_error_of_a_ratio(models):
    """The jackknife of the ratio of means agrees with the delta method; the same share in every pair has no error."""
    draw, model = np.random.default_rng(1), models("llama")
    clean = draw.integers(3, 101, (24, 6))
    corrupted = clean.copy()
    corrupted[:, 2] = (clean[:, 2] + 7) % 101
    found = model.patch_sweep(clean, corrupted, "resid_post", answer=5, versus=9)
    difference = (found.clean_by_pair - found.corrupted_by_pair)[:, None, None]
    left = (found.effect_by_pair.sum(axis=0) - found.effect_by_pair) / (difference.sum() - difference)
    jackknife = np.sqrt(23 / 24 * ((left - left.mean(axis=0)) ** 2).sum(axis=0))
    _, error = found.shown_spread
    np.testing.assert_allclose(error, jackknife, rtol=0.5, atol=1e-9)
    assert error[-1, -1] < 1e-6
    assert error.max() > 1e-3


def test_pages_pictures_and_files_hold_the_spread(shipped, chromium, tmp_path):
    clean, corrupted = (
        [f"The capital of {one} is" for one in some] for some in (("France", "Spain"), ("Italy", "Peru"))
    )
    found = shipped.patch_sweep(clean, corrupted, "resid_mid")
    page = chromium(found.save(tmp_path / "pairs.html"))
    page.locator("table.heat td").nth(3).hover()
    told = page.locator("body").inner_text()
    assert "standard error: " in told
    assert "n: 2" in told
    assert page.troubles == []
    assert [axes.get_title() for axes in found.figure().axes[:2]] == ["mean", "standard error"]
    loaded = SweepResult.load(found.save(tmp_path / "pairs.safetensors"))
    assert (loaded.sem == found.sem).all()
    assert json.loads(found.to_json())["n"] == 2
    assert "±" in str(found)
    one = shipped.patch_sweep(clean[0], corrupted[0])
    assert np.isnan(one.std).all()
    assert "±" not in str(one)


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (None, "name the positions of each prompt"),
        ({}, "names none"),
        ({"last": 9}, r"prompt 0: position 'last': 9 of 5 tokens \(0 to 4\)"),
        ({"last": [1, 2]}, "2 entries for 3 prompts"),
        ({"country": "France"}, "this prompt came as ids"),
        ({"last": 1.5}, "1.5 of 5 tokens"),
    ],
)
def test_positions_that_do_not_align_are_said(models, positions, message):
    clean, corrupted = pairs()
    with pytest.raises(InputError, match=message):
        models("llama").patch_sweep(clean, corrupted, answer=5, versus=9, positions=positions)


def test_positions_in_an_encoding_of_as_many_entries_as_prompts(shipped):
    """Of two padded prompts: its entries, ids and mask, are no texts."""
    texts = [np.array([5, 6, 7, 8, 9]), np.array([10, 11, 12])]
    ids, mask = np.zeros((2, 5), np.int64), np.zeros((2, 5), np.int64)
    for row, text in enumerate(texts):
        ids[row, : len(text)], mask[row, : len(text)] = text, 1
    asked = {"metric": "logit", "answer": 5, "over": ("layer", "position"), "positions": {"some": [[0, 3], [-1]]}}
    encoding = {"input_ids": ids, "attention_mask": mask}
    one, other = (shipped.ablation_sweep(given, "resid_mid", **asked) for given in (texts, encoding))
    np.testing.assert_allclose(one.by_pair, other.by_pair, atol=1e-6)
    with pytest.raises(InputError, match="this prompt came as ids"):
        shipped.ablation_sweep(encoding, "resid_mid", **{**asked, "positions": {"some": "input"}})


def test_names_without_their_axis_and_strings_that_are_not_there_are_said(shipped):
    texts = "The capital of France is", "The capital of Peru is"
    with pytest.raises(InputError, match="an axis 'position'"):
        shipped.patch_sweep(*texts, "z", ("layer", "head"), positions={"last": -1})
    with pytest.raises(InputError, match="'Spain' does not occur"):
        shipped.patch_sweep(*texts, positions={"country": "Spain"})


def test_a_file_of_pairs(tmp_path):
    lines = [
        {"clean": "The capital of France is", "corrupted": "The capital of Italy is", "answer": "Paris"},
        {"clean": "The capital of Spain is", "corrupted": "The capital of Peru is", "answer": "Madrid"},
    ]
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    found = json.loads(succeeded("sweep", LLAMA, "--pairs", file, "--hook", "z", "--over", "layer,head", "--json"))
    assert found["n"] == 2
    assert np.shape(found["by_pair"]) == (2, 4, 8)
    file.write_text(json.dumps(lines[0]) + "\n" + json.dumps({"clean": "The"}))
    assert "record 2 has clean" in " ".join(mionnx("sweep", LLAMA, "--pairs", file).stderr.split())
    file.write_text("{")
    assert "line 1 is no JSON" in " ".join(mionnx("sweep", LLAMA, "--pairs", file).stderr.split())
