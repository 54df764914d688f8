"""One word, one meaning: a parameter has one type in each public verb, and words that have another name are gone."""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest

import mionnx

# word -> its annotations, as a regular expression
MEANS = {
    "tokens": r"Prompt|Prompt \| None",
    "prompt": r"Prompt|str \| Tokens",
    "hooks": r"HookSpec( \| None)?",
    "points": r"Hooks( \| None)?|Hook \| Iterable\[Hook\] \| None|str \| Sequence\[str\]|.*HookPoint.*"
    r"|(list|Sequence)\[str\] \| None",
    "position": r"int( \| None)?|int \| str( \| None)?|Place \| None",
    "patching": r"str",
    "linearize_at": r"str",
    "rules": r"str",
    "method": r"str",
    "direction": r"Direction",
    "cotangent": r"ArrayLike (\| Seed )?\| None",
    "seed": r"int( \| None)?",
    "k": r"int( \| None)?",
    "token_ids": r"TokenLike|Iterable\[int\] \| None|Sequence\[int \| str\]",
    "batch_size": r"BatchSize|int \| str \| None",
    "progress": r"bool \| None",
    "folder": r"str \| Path( \| None)?",
    "path": r"str \| Path( \| None)?",
}
DEFAULTS = {
    "hooks": {None},
    "position": {-1, None},
    "patching": {"denoising", "noising"},
    "linearize_at": {"corrupted"},
    "rules": {"gradient", "frozen_norm_pattern"},  # an attribution graph is of patterns held, as it is defined
    "cotangent": {None},
    "seed": {None, 0},
    "batch_size": {"auto"},
    "progress": {None},
}
# words that meant several things, and what they are called; but for names of the specification and of TransformerLens
INSTEAD = {"spec": "hooks or points", "at": "position", "top": "k", "hook_points": "points", "silent": "progress"}
SPECIFIED = {
    ("create_knockout_mask", "spec"),
    ("MIModel.to_string", "tokens"),
    ("MIModel.harvest", "batch_size"),  # a dataset has no single pass: no None
}
SEVERAL = {"prompts", "texts", "tokens"}
# each prompt runs by itself, or is cut into windows of one length, or nothing runs
NO_ROWS = {"ablation_sweep", "verify", "quantise", "to_string", "to_str_tokens"}
NO_ROWS |= {"check_range", "forecast", "narrow", "doctor", "compile"}
NO_ROWS |= {"fit_lens", "ridge_lens", "lens_vectors", "lens_transport"}  # a text is many rows by itself


def verbs() -> Iterator[tuple[str, Any]]:
    """Public functions, and methods of public classes."""
    for name in mionnx.__all__:
        value = getattr(mionnx, name)
        if inspect.isclass(value):
            for member in (member for member in dir(value) if not member.startswith("_")):
                static = inspect.getattr_static(value, member)
                function = getattr(static, "__func__", static)
                if inspect.isfunction(function):
                    yield f"{name}.{member}", function
        elif callable(value):
            yield name, value


VERBS = dict(verbs())


def parameters(name: str) -> list[inspect.Parameter]:
    return [*inspect.signature(VERBS[name]).parameters.values()]


def annotation(parameter: inspect.Parameter) -> str:
    """The annotation without the modules of its names."""
    text = parameter.annotation if isinstance(parameter.annotation, str) else str(parameter.annotation)
    text = re.sub(r"<class '([^']*)'>", r"\1", text)
    return re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", text)


@pytest.mark.parametrize("name", sorted(VERBS))
def test_a_word_has_its_meaning_and_no_other(name: str) -> None:
    for parameter in parameters(name)[1 if "." in name else 0 :]:
        word = parameter.name
        if (name, word) in SPECIFIED:
            continue
        assert word not in INSTEAD, f"{name}({word}=): {INSTEAD[word]}"
        if word in MEANS:
            assert re.fullmatch(MEANS[word], annotation(parameter)), f"{name}({word}: {annotation(parameter)})"
        if word in DEFAULTS and parameter.default is not parameter.empty:
            assert parameter.default in DEFAULTS[word], f"{name}({word}={parameter.default!r})"


@pytest.mark.parametrize("name", sorted(name for name in VERBS if name.startswith("MIModel.")))
def test_a_verb_of_several_prompts_says_how_many_run_together(name: str) -> None:
    words = {parameter.name for parameter in parameters(name)}
    if words & SEVERAL and name.removeprefix("MIModel.") not in NO_ROWS:
        assert "batch_size" in words, name
