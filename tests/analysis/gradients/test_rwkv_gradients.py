"""Gradients of RWKV against torch's autograd in float64, in every form of the recurrence."""

import numpy as np
import pytest
import torch
from rwkv_autograd import gradients as by_autograd
from rwkv_checkpoints import HIDDEN, LAYERS, VOCAB
from rwkv_loop import state_sizes

from mionnx import GradientError, HookSpec

SLOW = pytest.mark.slow
LENGTHS = (1, 15, 16, pytest.param(40, marks=SLOW), pytest.param(130, marks=SLOW))  # steps, one chunk, chunks, padding
TIMES = 3.0  # of torch's own float32 error
DRAWS = 4  # of that error: a head's norm takes most of a short text's gradient away, and magnifies any rounding
LEAST = 2e-6  # relative: some roundings of float32
WRITES = ("k", "v")


def worst(found, expected):
    """The largest difference at any hook point, relative to the largest number there."""
    assert not {*expected} - {*found} - {name for name in expected if name.endswith("hook_states")}
    assert all(not found[name].any() for name in {*found} - {*expected})
    both = {name: (found[name].reshape(expected[name].shape), expected[name]) for name in {*found} & {*expected}}
    return max(float(np.abs(one - other).max() / max(np.abs(other).max(), 1e-12)) for one, other in both.values())


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("version", [4, 6, 7])
def test_every_gradient_equals_that_of_torch_in_float64(rwkv, version, length):
    model, random = rwkv(f"{version}-pth"), np.random.default_rng(length)
    ids, seed = random.integers(0, VOCAB, length), random.normal(size=(1, length, VOCAB))
    grad = model.forward(ids, HookSpec().gradient("*").set_metric("cotangent", cotangent=seed), logits=False).grad
    assert {name.rpartition("hook_")[2] for name in grad} >= {"r", "k", "v", "decay", "act", "resid_pre", "embed"}
    exact = by_autograd(version, ids.tolist(), seed[0])
    runs = [by_autograd(version, ids.tolist(), seed[0], torch.float32, draw=draw) for draw in range(DRAWS)]
    own = max(worst(run, exact) for run in runs)
    assert worst({name: value[0] for name, value in grad.items()}, exact) < max(TIMES * own, LEAST)


@pytest.mark.parametrize("version", [4, 6, 7])
def test_the_gradient_of_the_state_tells_which_write_it_keeps(rwkv, version):
    """By each token's key and value, of the last state times numbers: the same as torch's, in one pass."""
    model, random = rwkv(f"{version}-pth"), np.random.default_rng(7)
    ids, last = random.integers(0, VOCAB, 20), LAYERS - 1
    numbers = random.normal(size=(1, *state_sizes(version, HIDDEN)))
    hooks = ["hook_embed", *(f"blocks.{last}.rwkv.hook_{write}" for write in WRITES)]
    found = model.gradients(ids, hooks, of=f"blocks.{last}.rwkv.hook_state", cotangent=numbers).grad
    exact = by_autograd(version, ids.tolist(), numbers[0], state=last)
    for name in hooks:
        expected = exact[name]
        value = found[name][0].reshape(expected.shape)
        np.testing.assert_allclose(value, expected, atol=5e-6 * np.abs(expected).max(), rtol=0, err_msg=name)
    assert np.abs(found["k", last][0]).max(axis=(-2, -1)).all()  # each token's write has a share


@pytest.mark.slow_beyond(1)
def test_the_last_state_has_no_gradient_and_a_glob_leaves_it_out(recurrent):
    with pytest.raises(GradientError, match="the logits do not depend on it"):
        recurrent.gradients([5, 6, 7], "blocks.0.rwkv.hook_state", answer=7)
    grad = recurrent.gradients([5, 6, 7], "*", answer=7).grad
    assert "blocks.0.rwkv.hook_state" not in grad
    assert "blocks.0.rwkv.hook_k" in grad
