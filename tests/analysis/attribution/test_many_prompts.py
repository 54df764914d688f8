"""Direct attribution and logit differences over many prompts: mean, spread, every form of an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import LLAMA, mionnx, succeeded

from mionnx import Attributions, InputError, LogitDiffs, MIModel

ANSWERS = {"France": "Paris", "Japan": "Tokyo", "Peru": "Lima", "Italy": "Rome"}
CLEAN = [f"The capital of {country} is" for country in ANSWERS]
CORRUPTED = [f"The capital of {country} is" for country in ("Spain", "Spain", "Egypt", "Egypt")]
WORDS = [*ANSWERS.values()]


@pytest.fixture(scope="module")
def logits(shipped: MIModel) -> np.ndarray:
    """[prompts, vocab] of the last position, one prompt at a time."""
    return np.stack([shipped.forward(prompt).output()[0, -1] for prompt in CLEAN]).astype(np.float64)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = zip(CLEAN, CORRUPTED, WORDS, strict=True)
    keys = ("clean", "corrupted", "answer")
    file.write_text("\n".join(json.dumps({**dict(zip(keys, row, strict=True)), "versus": "Berlin"}) for row in rows))
    return file


def test_contributions_over_prompts_have_a_mean_and_a_spread(shipped: MIModel, tmp_path: Path) -> None:
    """FINDINGS, part 2, 9: a list of 60 attributions, without a mean or a figure."""
    found = shipped.attribute(CLEAN, WORDS, "Berlin")
    alone = [shipped.attribute(*row, "Berlin") for row in zip(CLEAN, WORDS, strict=True)]
    each = np.stack([one.values for one in alone])
    assert isinstance(found, Attributions)
    assert found.n == len(found) == 4
    assert found[1].answer == "Tokyo"
    np.testing.assert_allclose(found.by_pair, each, atol=5e-5)
    np.testing.assert_allclose(found.values, each.mean(axis=0), atol=5e-5)
    np.testing.assert_allclose(found.sem, each.std(axis=0, ddof=1) / 2, atol=5e-5)
    np.testing.assert_allclose(found.heads, np.mean([one.heads for one in alone], axis=0), atol=5e-5)
    assert found.top(1)[0][0] == "3_mlp_out"
    assert "±" in str(found)
    assert "ErrorbarContainer" in {type(one).__name__ for one in found.figure().axes[0].containers}
    again = Attributions.load(found.save(tmp_path / "found.safetensors"))
    assert (again.by_pair == found.by_pair).all()
    assert again.to_json() == found.to_json()
    assert "standard error" in found.page()


def test_differences_over_prompts(shipped: MIModel, logits: np.ndarray, tmp_path: Path) -> None:
    ids = [shipped.token_id(word) for word in WORDS]
    expected = logits[range(4), ids] - logits[:, shipped.token_id("Berlin")]
    found = shipped.get_logit_diff(CLEAN, WORDS, "Berlin")
    np.testing.assert_allclose(found.by_pair, expected, atol=5e-5)
    assert found.mean == pytest.approx(expected.mean())
    assert found.std == pytest.approx(expected.std(ddof=1), abs=1e-4)
    assert found.sem == pytest.approx(found.std / 2)
    assert found.accuracy == 1.0
    assert found.n == 4
    wrong = shipped.get_logit_diff(CLEAN, ["Berlin", *WORDS[1:]], [WORDS[0], "Berlin", "Berlin", "Berlin"])
    assert wrong.accuracy == 0.75
    assert wrong.by_pair[0] == pytest.approx(-found.by_pair[0], abs=1e-4)
    assert shipped.get_logit_diff(CLEAN[0], WORDS[0], "Berlin") == pytest.approx(expected[0], abs=5e-5)
    again = LogitDiffs.load(found.save(tmp_path / "found.safetensors"))
    assert again.to_json() == found.to_json()
    assert again.prompts[0] == CLEAN[0]
    assert "accuracy 100.0 % of 4 prompts" in found.facts()
    assert found.save(tmp_path / "found.png").stat().st_size > 5000
    assert "Lima" in found.page()


def test_logits_of_parts_take_texts(shipped: MIModel) -> None:
    """FINDINGS, part 2, 10: they had to be ids."""
    cache = shipped.forward(CLEAN, shipped.decomposition_hooks())
    stack, _ = shipped.decompose_resid(cache, pos_slice=-1)
    ids = [shipped.token_id(word) for word in WORDS]
    by_id = shipped.logit_attrs(stack, cache, ids, [shipped.token_id("Berlin")] * 4, pos_slice=-1)
    by_text = shipped.logit_attrs(stack, cache, WORDS, ["Berlin"] * 4, pos_slice=-1)
    assert (by_id == by_text).all()
    assert by_id.shape[1] == 4
    np.testing.assert_allclose(by_text.sum(axis=0), shipped.attribute(CLEAN, WORDS, "Berlin").logits, atol=1e-4)
    whole = shipped.logit_attrs(stack, cache, ids, pos_slice=-1)
    for other in (np.array(WORDS), tuple(WORDS)):
        assert (shipped.logit_attrs(stack, cache, other, pos_slice=-1) == whole).all()
    with pytest.raises(InputError, match="not in the vocabulary"):
        shipped.logit_attrs(stack, cache, ["Pari"] * 4, pos_slice=-1)


FORMS: dict[str, Any] = {
    "texts": lambda ids: WORDS,
    "tuple": lambda ids: tuple(WORDS),
    "ids": lambda ids: ids,
    "array": np.array,
    "numpy integers": lambda ids: [*np.array(ids)],
    "mixed": lambda ids: [WORDS[0], *ids[1:]],
}


@pytest.mark.parametrize("form", FORMS)
def test_an_answer_has_the_same_forms_everywhere(shipped: MIModel, form: str) -> None:
    ids = [shipped.token_id(word) for word in WORDS]
    given = FORMS[form](ids)
    expected = shipped.get_logit_diff(CLEAN, ids, "Berlin").by_pair
    assert (shipped.get_logit_diff(CLEAN, given, "Berlin").by_pair == expected).all()
    np.testing.assert_allclose(shipped.attribute(CLEAN, given, "Berlin").logits, expected, atol=1e-4)
    asked = {"answer": given, "versus": "Berlin"}
    swept = shipped.patch_sweep(CLEAN, CORRUPTED, "resid_pre", "layer", **asked)
    np.testing.assert_allclose(swept.clean_by_pair, expected, atol=1e-4)
    edges = shipped.edge_attribution(CLEAN, CORRUPTED, **asked)
    assert edges.clean == pytest.approx(expected.mean(), abs=1e-4)
    cache = shipped.gradients(CLEAN, "blocks.0.hook_mlp_out", "logit_diff", **asked)
    np.testing.assert_allclose(cache.metric, expected, atol=1e-4)
    saliency = shipped.gradient_times_input(CLEAN, metric="logit_diff", **asked)
    np.testing.assert_allclose([one.metric for one in saliency.texts], expected, atol=1e-4)


@pytest.mark.slow
def test_a_circuit_of_many_pairs(shipped: MIModel, pairs: Path) -> None:
    """FINDINGS, part 2, 11: `--pairs` was missing; a circuit over pairs is the mean of those of each pair."""
    found = json.loads(succeeded("circuit", LLAMA, "--pairs", pairs, "--edges", "40", "--steps", "1", "--json"))
    ranked = shipped.edge_attribution(CLEAN, CORRUPTED, answer=WORDS, versus="Berlin")
    alone = [
        shipped.circuit(clean, corrupted, [40], answer=word, versus="Berlin", scores=ranked).values[0]
        for clean, corrupted, word in zip(CLEAN, CORRUPTED, WORDS, strict=True)
    ]
    np.testing.assert_allclose(np.array(found["by_pair"])[:, 0], alone, atol=1e-3)
    assert found["values"][0] == pytest.approx(np.mean(alone), abs=1e-3)


def test_commands_over_pairs(shipped: MIModel, pairs: Path) -> None:
    """FINDINGS, part 2, 11 and section 6: accuracy and mean difference of a file of pairs."""
    found = shipped.get_logit_diff(CLEAN, WORDS, "Berlin")
    printed = succeeded("logit-diff", LLAMA, pairs)
    assert found.facts()[:60] in " ".join(printed.split())
    assert json.loads(succeeded("logit-diff", LLAMA, pairs, "--json"))["mean"] == pytest.approx(found.mean)
    other = json.loads(succeeded("logit-diff", LLAMA, pairs, "--corrupted", "--json"))
    assert other["mean"] == pytest.approx(shipped.get_logit_diff(CORRUPTED, WORDS, "Berlin").mean, abs=1e-4)
    table = succeeded("attribute", LLAMA, "--pairs", pairs, "--k", "3")
    assert "3_mlp_out" in table
    assert "standard error" in table
    assert "4 prompts" in table
    for arguments, said in (
        (("attribute", LLAMA, CLEAN[0], "--pairs", pairs), "give a clean prompt, or --pairs"),
        (("circuit", LLAMA, CLEAN[0]), "give a corrupted prompt"),
    ):
        refused = mionnx(*arguments)
        assert refused.returncode == 2
        assert said in " ".join(refused.stderr.replace("│", " ").split())
