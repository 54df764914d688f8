"""A `Comparison` in the place of the clean prompt: the same numbers as its fields, and nothing of it unread."""

from inspect import getdoc, signature

import numpy as np
import pytest
from sweep_pairs import prompts

from mionnx import Comparison, HookSpec, Intervention, MIModel
from mionnx.errors import InputError

VERBS = ("patch_sweep", "path_patch", "attribute_patch", "edge_attribution", "circuit")
FIELDS = {"metric": "probability", "answer": 5, "position": -1}
FEW = {"edge_attribution": {}, "circuit": {"edges": [0, 80], "steps": 1}}


def numbers(result: object) -> np.ndarray:
    return np.asarray(getattr(result, "values", getattr(result, "scores", None)))


@pytest.mark.parametrize("verb", VERBS)
def test_a_comparison_gives_the_numbers_of_its_fields(models, verb: str) -> None:
    clean, corrupted = prompts()
    options = FEW.get(verb, {"layers": [1]})
    run = getattr(models("llama"), verb)
    expected = numbers(run(clean, corrupted, **FIELDS, **options))
    assert np.ptp(expected) > 0
    np.testing.assert_array_equal(numbers(run(Comparison(clean, corrupted, **FIELDS), **options)), expected)
    np.testing.assert_array_equal(numbers(run(clean=Comparison(clean, corrupted, **FIELDS), **options)), expected)


def test_fields_that_are_left_out_have_the_defaults_of_the_verb(models) -> None:
    clean, corrupted = prompts()
    model, comparison = models("llama"), Comparison(clean, corrupted)
    assert model.edge_attribution(comparison).patching == "noising"
    assert model.patch_sweep(comparison, layers=[1]).patching == "denoising"
    assert model.patch_sweep(Comparison(clean, corrupted, patching="noising"), layers=[1]).patching == "noising"
    assert model.ablation_sweep(Comparison(clean), "z", layers=[1]).metric == "kl"


def test_names_of_positions_and_specs_are_part_of_a_comparison(models) -> None:
    clean, _ = prompts()
    spec = HookSpec().intervene("hook_embed", Intervention.Zero(positions=1))
    comparison = Comparison(clean, spec, "probability", answer=5, positions={"first": 0, "second": 1})
    result = models("llama").patch_sweep(comparison, layers=[0, 1])
    assert result.labels["position"] == ["first", "second"]
    assert result.effect[0, 0] == 0 != result.effect[0, 1]


@pytest.mark.parametrize(
    ("verb", "comparison", "options", "message"),
    [
        ("patch_sweep", Comparison([1, 2], [3, 2]), {"metric": "kl"}, "metric=.*stands beside a Comparison"),
        ("ablation_sweep", Comparison([1, 2], [3, 2]), {}, "reads no corrupted"),
        ("circuit", Comparison([1, 2], [3, 2], patching="denoising"), {}, "reads no patching"),
        ("edge_attribution", Comparison([1, 2], [3, 2], positions={"last": -1}), {}, "reads no positions"),
        ("circuit", Comparison([1, 2], HookSpec()), {}, "interventions"),
        ("patch_sweep", Comparison([1, 2]), {}, "compares two runs"),
        ("patch_sweep", [1, 2], {}, "compares two runs"),
    ],
)
def test_what_a_verb_does_not_read_is_refused(models, verb, comparison, options, message) -> None:
    with pytest.raises(InputError, match=message):
        getattr(models("llama"), verb)(comparison, **options)


def test_other_arguments_go_by_name(models) -> None:
    with pytest.raises(InputError, match=r"corrupted=.*by name"):
        models("llama").patch_sweep(Comparison([1, 2], [3, 2]), "z")
    assert models("llama").ablation_sweep(Comparison([1, 2, 3]), "z", "layer").over == ("layer",)


@pytest.mark.parametrize("fields", [{"metric": "logits"}, {"patching": "noise"}, {"metric": "kl", "answer": 3}])
def test_a_comparison_that_says_nothing_is_refused_when_it_is_made(fields) -> None:
    with pytest.raises(InputError):
        Comparison([1, 2], [3, 2], **fields)


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_has_its_fields(verb: str) -> None:
    function = getattr(MIModel, verb)
    text = getdoc(function) or ""
    for name in ("clean", "corrupted", "metric", "answer", "versus", "position"):
        assert name in signature(function).parameters
        assert len([line for line in text.splitlines() if f"{name}:" in line or f"{name}, " in line[:40]]) >= 1, name
    assert text.count("metric: ") == 1
