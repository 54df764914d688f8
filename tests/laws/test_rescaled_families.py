"""A rescaled graph of every family computes the same bits, with captures and edits, alone and in padded batches."""

import numpy as np
import pytest
from families import CONFIGS, make_checkpoint
from rescaled import rescaled

from mionnx import HookSpec, Intervention, MIModel

PROMPTS = [[5, 9, 2, 7, 11], [3, 8]]
# Families of other forms: latents, parallel halves, experts, biases by distance, norms behind sums, relative positions,
# states. All families of the table: benchmarks/rescaled_families.py.
OTHERS = ("deepseek_v3", "phi", "jetmoe", "bloom", "gemma3n_text")
ENCODERS, RECURRENT = ("bert", "modernbert", "deberta-v2", "t5"), ("lfm2", "mamba2", "qwen3_next", "kimi_linear")


def bits(array):
    return np.asarray(array).view(np.int32)


def same_bits(model, other):
    """Run both alone and in a batch with padding, with captures of the stream, untouched and with an edit."""
    points = other.hooked.metadata.exponents
    assert points
    last = list(points)[-1]
    spec = HookSpec().capture("*hook_resid*").capture(last).intervene(next(iter(points)), Intervention.Scale(1.5))
    for prompt in (PROMPTS[0], PROMPTS):
        for hooks in (None, spec):
            one, two = (each.forward(prompt, hooks, batch_size=None) for each in (model, other))
            assert np.array_equal(bits(one.output()), bits(two.output()))
    assert np.array_equal(bits(one[last]), bits(two[last]))


@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_types(family, models, tmp_path):
    model = models(family)
    same_bits(model, rescaled(model, -4, tmp_path / "rescaled"))


@pytest.mark.slow
@pytest.mark.parametrize("family", [*OTHERS, *ENCODERS, *RECURRENT])
def test_families_of_other_forms_type(family, tmp_path):
    from encoders import make_encoder, usual_head
    from recurrent_families import make_recurrent
    from tiny_configs import tiny_config

    from exporters.transformers import export

    if family in ENCODERS:
        make_encoder(family, tmp_path / "checkpoint", usual_head(family))
    elif family in RECURRENT:
        make_recurrent(family, tmp_path / "checkpoint")
    else:
        make_checkpoint(family, tmp_path / "checkpoint", **tiny_config(family))
    export(tmp_path / "checkpoint", tmp_path / "hooked")
    model = MIModel.from_pretrained(tmp_path / "hooked", threads=1)
    same_bits(model, rescaled(model, -4, tmp_path / "rescaled"))
