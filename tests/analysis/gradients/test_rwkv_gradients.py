"""Gradients of RWKV-6 and RWKV-7 against central differences of a float64 loop, in every form of the recurrence."""

import numpy as np
import pytest
from rwkv_checkpoints import VOCAB, blinkdl
from rwkv_loop import Loop

from mionnx import GradientError, HookSpec

LENGTHS = (1, 15, 16, 40, pytest.param(130, marks=pytest.mark.slow))  # one step, steps, one chunk, chunks with padding
STEP = 1e-5
NOTHING = 1e-6  # of one token the decay, and what is erased, changes nothing
WORST = 2e-4  # relative to the largest term of the sum along a direction


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("version", [6, 7])
def test_every_gradient_is_that_of_the_recurrence(rwkv, version, length):
    model = rwkv(f"{version}-pth")
    oracle = Loop({name: tensor.numpy().astype(np.float64) for name, tensor in blinkdl(version).items()}, version)
    random = np.random.default_rng(length)
    ids = random.integers(0, VOCAB, length)
    seed = random.normal(size=(1, length, VOCAB))
    grad = model.forward(ids, HookSpec().gradient("*").set_metric("seed", seed=seed), logits=False).grad
    assert {name.rpartition("hook_")[2] for name in grad} >= {"r", "k", "v", "decay", "resid_pre", "attn_out"}
    off = {}
    for name in grad:
        direction = random.normal(size=grad[name].shape[1:])
        ends = []
        for sign in (1, -1):
            moved = oracle.run(ids.tolist(), edit=along(name, sign * STEP * direction))
            ends.append((moved * seed[0]).sum())
        if name not in oracle.values:
            continue  # the loop does not show every value between
        terms = grad[name][0] * direction
        off[name] = abs(terms.sum() - (ends[0] - ends[1]) / (2 * STEP)) / max(np.abs(terms).sum(), NOTHING)
    assert len(off) > len(grad) / 2
    assert {name: d for name, d in off.items() if not d < WORST} == {}


def along(name, steps):
    """Move the value at a hook point, a token after the other."""
    return lambda at, t, value: value + steps[t].reshape(np.shape(value)) if at == name else value


def test_the_last_state_has_no_gradient_and_a_glob_leaves_it_out(recurrent):
    with pytest.raises(GradientError, match="the logits do not depend on it"):
        recurrent.gradients([5, 6, 7], "blocks.0.rwkv.hook_state", answer=7)
    grad = recurrent.gradients([5, 6, 7], "*", answer=7).grad
    assert "blocks.0.rwkv.hook_state" not in grad
    assert "blocks.0.rwkv.hook_k" in grad
