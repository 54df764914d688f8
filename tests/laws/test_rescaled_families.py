"""A rescaled graph of every family computes the same bits, with captures and edits, alone and in padded batches."""

import numpy as np
import pytest
from families import CONFIGS
from rescaled import rescaled

from mionnx import HookSpec, Intervention

PROMPTS = [[5, 9, 2, 7, 11], [3, 8]]


def bits(array):
    return np.asarray(array).view(np.int32)


@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_types(family, models, tmp_path):
    model = models(family)
    other = rescaled(model, -4, tmp_path / "rescaled")
    assert other.hooked.metadata.exponents
    layer = model.num_layers - 1
    point = f"blocks.{layer}.hook_resid_post"
    spec = HookSpec().capture("*hook_resid*").intervene(f"blocks.{layer}.hook_resid_pre", Intervention.Scale(1.5))
    for prompt in (PROMPTS[0], PROMPTS):  # alone, and a batch with padding
        for hooks in (None, spec):
            one, two = (each.forward(prompt, hooks, batch_size=None) for each in (model, other))
            assert np.array_equal(bits(one.output()), bits(two.output()))
    assert np.array_equal(bits(one[point]), bits(two[point]))
