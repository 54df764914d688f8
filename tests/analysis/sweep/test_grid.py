"""What a sweep may be asked: hooks, layers and arguments that mean something, and what is said of all others."""

import numpy as np
import pytest
from sweep_metrics import of_token
from sweep_pairs import prompts

from mionnx import HookPoint
from mionnx.analysis.sweep.grid import Grid
from mionnx.errors import HookError, InputError


@pytest.mark.parametrize(
    ("hook", "layers"),
    [
        ("resid_pre", [0, 1, 2, 3]),
        ("blocks.{i}.hook_resid_pre", [0, 1, 2, 3]),
        ("blocks.*.hook_resid_pre", [0, 1, 2, 3]),
        (HookPoint.ResidPre(3), [3]),
        ("blocks.3.hook_resid_pre", [3]),
        ("blocks.[12].hook_resid_pre", [1, 2]),
    ],
)
def test_a_hook_says_the_layers_too(shipped, hook, layers):
    found = shipped.patch_sweep([5, 6, 7], [5, 8, 7], hook, answer=5, versus=9)
    assert found.labels["layer"] == [str(layer) for layer in layers]
    whole = shipped.patch_sweep([5, 6, 7], [5, 8, 7], answer=5, versus=9)
    np.testing.assert_allclose(found.values, whole.values[layers], atol=1e-5)
    with pytest.raises(InputError, match="layers"):
        shipped.patch_sweep([5, 6, 7], [5, 8, 7], hook, answer=5, versus=9, layers={*range(5)} - {*layers})


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        ("blocks.99.hook_resid_pre", "did you mean 'blocks"),
        ("mlp.hook_z", "no hook point"),
        ("blocks.*.mlp.hook_z", "no hook point"),
        ("nonsense_hook_resid_pre", "no hook point"),
        ("blocks.0.attn.hook_zz", "did you mean 'blocks.0.attn.hook_z'"),
        ("blocks.*.hook_resid_p*", "several hook points"),
        ("hook_embed", "no hook point"),
        ("hook_result", "no hook point"),
    ],
)
def test_a_hook_that_is_not_there_is_said(shipped, hook, message):
    with pytest.raises(HookError, match=message):
        shipped.patch_sweep([5, 6, 7], [5, 8, 7], hook, answer=5, versus=9)


CLEAN, CORRUPTED = prompts(14)
WRONG = {
    "hook": (HookError, "did you mean", {"hook": "hook_resid_pra"}),
    "axis of the hook": (InputError, "no axis 'head'", {"over": ("layer", "head")}),
    "axis": (InputError, "did you mean 'position'", {"over": ("layer", "positon")}),
    "no layer": (InputError, "the layer among them", {"over": ("position",)}),
    "twice": (InputError, "each axis once", {"over": ("layer", "layer")}),
    "layers": (InputError, "layers 0 to 1", {"layers": [2]}),
    "metric": (InputError, "did you mean 'logit_diff'", {"metric": "logit_dif"}),
    "patching": (InputError, "did you mean 'noising'", {"patching": "noise"}),
    "same answers": (InputError, "and itself", {"answer": 5, "versus": 5}),
    "answer": (InputError, "vocabulary is 0 to 100", {"answer": 101, "versus": 5}),
    "answers": (InputError, "2 tokens for 1 prompts", {"answer": [1, 2], "versus": 5}),
    "useless answer": (InputError, "reads no answer", {"metric": "kl", "answer": 5}),
    "useless versus": (InputError, "reads no `versus`", {"metric": "rank", "versus": 5}),
    "position": (InputError, "the prompt has 7 tokens", {"position": 7}),
    "fractional layers": (InputError, "integers are expected", {"layers": [1.7]}),
    "a layer that is a truth": (InputError, "integers are expected", {"layers": [True]}),
    "layers as text": (InputError, "integers are expected", {"layers": "01"}),
    "fractional answers": (InputError, "or an integer", {"answer": [5.7], "versus": 9}),
    "fractional answer": (InputError, "or an integer", {"answer": 5.7, "versus": 9}),
    "three arguments": (InputError, "not 3 values", {"metric": lambda logits, pair, more: logits[:, 0]}),
    "function": (InputError, "one number a row", {"metric": lambda logits: logits}),
    "lengths": (InputError, "the corrupted one 6", {"corrupted": CORRUPTED[:-1]}),
    "counts": (InputError, "come in pairs", {"corrupted": [CORRUPTED, CORRUPTED]}),
    "same": (InputError, "are the same", {"corrupted": CLEAN}),
}


@pytest.mark.parametrize("case", list(WRONG))
def test_what_cannot_be_swept_is_said(models, case):
    kind, message, change = WRONG[case]
    with pytest.raises(kind, match=message):
        models("llama").patch_sweep(**{"clean": CLEAN, "corrupted": CORRUPTED, **change})


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("did you mean 'mean'", {"kind": "means"}),
        ("no use for reference", {"reference": CLEAN}),
        ("needs `versus=`", {"metric": "logit_diff"}),
        ("no mean", {"kind": "mean", "hook": "hook_pattern"}),
        ("no other reference prompt has 7", {"kind": "resample"}),
        ("draws nothing", {"seed": 9}),
        ("draws nothing", {"kind": "mean", "seed": 0}),
        ("names no axes", {"over": 5}),
        ("did you mean 'token'", {"kind": "mean", "by": "tokn"}),
        ("no use for classes", {"by": "position"}),
        ("repeats=2 would have no effect", {"repeats": 2}),
        ("is in none of the reference prompts", {"kind": "mean", "by": "position", "reference": CLEAN[:3]}),
        ("repeats must be 1,000 or below", {"kind": "resample", "reference": [CORRUPTED], "repeats": 10**12}),
        ("seed=-1", {"kind": "resample", "seed": -1}),
        ("seed=1.5", {"kind": "resample", "seed": 1.5}),
    ],
)
def test_what_cannot_be_ablated_is_said(models, message, change):
    with pytest.raises(InputError, match=message):
        models("llama").ablation_sweep(CLEAN, **change)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["zero", "mean"])
def test_numbers_of_experts_have_no_zero_and_no_mean(models, kind):
    hook = "mlp.hook_expert_indices"
    with pytest.raises(HookError, match=f"{hook} holds the numbers of experts"):
        models("mixtral").ablation_sweep(
            CLEAN, hook, "layer", kind=kind, reference=CORRUPTED if kind == "mean" else None
        )
    resampled = models("mixtral").ablation_sweep(CLEAN, hook, "layer", kind="resample", reference=[CLEAN, CORRUPTED])
    assert np.isfinite(resampled.values).all()


def test_a_state_at_the_end_of_a_call_is_not_swept_over(rwkv):
    with pytest.raises(HookError, match=r"no logits of this one depend on it: sweep over blocks.\{i\}.rwkv.hook_v"):
        rwkv("7-fla").ablation_sweep(CLEAN, "blocks.*.rwkv.hook_state", kind="mean")


def test_one_layer_may_be_given_as_a_number_and_keywords_are_no_second_argument(models):
    model = models("llama")
    found = model.patch_sweep(CLEAN, CORRUPTED, metric=lambda logits, **named: logits[:, 3] + len(named), layers=1)
    assert (found.values == model.patch_sweep(CLEAN, CORRUPTED, metric=of_token(3), layers=[1]).values).all()


@pytest.mark.parametrize("places", [None, ((0,), (1, 3), (6,))])
@pytest.mark.parametrize("over", [("layer", "position"), ("position", "head", "layer"), ("layer",), ("head", "layer")])
@pytest.mark.parametrize("combine", [np.sum, np.any])
def test_numbers_by_cell_are_those_of_a_loop_over_cells(over, places, combine):
    """Positions beyond the value count for nothing; without "head", layers may differ in their heads."""
    draw, axes = np.random.default_rng(0), ("batch", "n_heads", "seq", "head_dim")
    heads = (3, 3) if "head" in over else (3, 2)
    values = [draw.integers(0, 2, (count, 4, 2)) for count in heads]
    sizes = {"layer": 2, "position": len(places or range(6)), "head": 3}
    grid = Grid(over, "blocks.{i}.attn.hook_z", (0, 1), axes, tuple(sizes[name] for name in over), places)
    found = grid.by_cell(values, combine)
    assert found.shape == grid.sizes
    for cell in np.ndindex(grid.sizes):
        at = dict(zip(over, cell, strict=True))
        positions = range(4) if "position" not in at else places[at["position"]] if places else (at["position"],)
        chosen = values[at["layer"]][:, [position for position in positions if position < 4]]
        chosen = chosen[[at["head"]]] if "head" in at else chosen
        assert found[cell] == combine(chosen)
