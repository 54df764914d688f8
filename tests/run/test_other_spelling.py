"""An answer without its space: the warning names the spelling to which the model itself gives more."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from mionnx import Direction, HookSpec, MIModel, OtherSpellingWarning
from mionnx.run.tokenizing import other_spelling

WORDS = ["<unk>", "When", " Mary", " John", " and", " went", "Mary", "John", " it"]
CLEAN, CORRUPTED = "When Mary and John", "When John and Mary"


@pytest.fixture(scope="module")
def spaced(hooked: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> MIModel:
    """A random Llama whose tokenizer has words with and without a space, as GPT-2's has."""
    folder = tmp_path_factory.mktemp("spaced") / "llama"
    shutil.copytree(hooked("llama"), folder)
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, "<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = Split(Regex(" ?[A-Za-z]+"), "isolated"), Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    return MIModel.from_pretrained(folder, threads=1)


@pytest.fixture(scope="module")
def spellings(spaced: MIModel) -> tuple[str, str]:
    """A name as the model does not mean it after the clean prompt, and as it does."""
    logits = spaced.forward(CLEAN).output()[0, -1]
    with_space, without = (logits[spaced.token_id(text)] for text in (" Mary", "Mary"))
    return ("Mary", " Mary") if with_space > without else (" Mary", "Mary")


def steered(m: MIModel, name: str) -> Any:
    return m.dose_response(CLEAN, Direction("blocks.0.hook_resid_post", np.ones(64, np.float32)), [0, 1], target=name)


VERBS: dict[str, Callable[[MIModel, str], Any]] = {
    "patch_sweep": lambda m, name: m.patch_sweep(CLEAN, CORRUPTED, "resid_pre", answer=name, versus=4),
    "path_patch": lambda m, name: m.path_patch(CLEAN, CORRUPTED, "hook_final_norm", answer=name, versus=4),
    "ablation_sweep": lambda m, name: m.ablation_sweep(CLEAN, "z", metric="probability", answer=name),
    "attribute_patch": lambda m, name: m.attribute_patch(CLEAN, CORRUPTED, answer=name, versus=4),
    "edge_attribution": lambda m, name: m.edge_attribution(CLEAN, CORRUPTED, answer=name, versus=4),
    "circuit": lambda m, name: m.circuit(CLEAN, CORRUPTED, [1], answer=name, versus=4),
    "gradients": lambda m, name: m.gradients(CLEAN, "blocks.0.hook_resid_post", answer=name),
    "gradients of rows": lambda m, name: m.gradients([CORRUPTED, CLEAN], "*.hook_resid_mid", answer=[3, name]),
    "gradients in batches": lambda m, name: m.gradients([CLEAN], "*.hook_mlp_out", answer=[name], batch_size=1),
    "forward": lambda m, name: m.forward(CLEAN, HookSpec().gradient("*.hook_mlp_out").set_metric("logit", answer=name)),
    "integrated_gradients": lambda m, name: m.integrated_gradients(CLEAN, answer=name, steps=2),
    "gradient_times_input": lambda m, name: m.gradient_times_input(CLEAN, answer=name),
    "attribute": lambda m, name: m.attribute(CLEAN, name),
    "attribute a list": lambda m, name: m.attribute([CLEAN, CLEAN], [name, 4], batch_size="auto"),
    "get_logit_diff": lambda m, name: m.get_logit_diff(CLEAN, name, 4),
    "dose_response": steered,
    "run_with_hooks": lambda m, name: m.run_with_hooks(
        CLEAN, bwd_hooks=[("blocks.0.hook_resid_post", lambda value, hook: None)], metric="logit", answer=name
    ),
}


def said(call: Callable[[], Any]) -> set[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return {str(one.message) for one in caught if one.category is OtherSpellingWarning}


@pytest.mark.parametrize("verb", VERBS)
def test_the_spelling_that_the_model_means_is_named(spaced: MIModel, spellings: tuple[str, str], verb: str) -> None:
    """FINDINGS, part 2, 14."""
    wrong, meant = spellings
    (message,) = said(lambda: VERBS[verb](spaced, wrong))
    assert f"={wrong!r} is another token than {meant!r}" in message
    assert not said(lambda: VERBS[verb](spaced, meant))


def test_it_points_to_the_line_that_was_written(spaced: MIModel, spellings: tuple[str, str]) -> None:
    with pytest.warns(OtherSpellingWarning) as caught:
        spaced.attribute(CLEAN, spellings[0])
    assert caught[0].filename == __file__


def test_words_of_one_spelling(spaced: MIModel, shipped: MIModel) -> None:
    assert other_spelling(spaced, "Mary") == (" Mary", 2)
    assert other_spelling(spaced, " it") is None  # no token is "it"
    assert other_spelling(shipped, "Paris") is None  # words with and without a space are one token
    assert not said(lambda: spaced.attribute(CLEAN, spaced.token_id("Mary")))


@pytest.mark.slow
def test_of_smollm2() -> None:
    model = MIModel.from_pretrained("smollm2")
    prompt = "When Mary and John went to the store, John gave a drink to"
    with pytest.warns(OtherSpellingWarning, match="answer='Mary' is another token than ' Mary'"):
        model.attribute(prompt, "Mary", " John")
