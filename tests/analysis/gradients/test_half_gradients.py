"""Gradients of float16 models, beside torch's own float16: both against float64 with the weights as they are stored."""

import numpy as np
import pytest
import torch
from families import VOCAB
from gradient_oracle import gradients as by_autograd
from oracle import Inputs
from rwkv_autograd import gradients as by_loop
from rwkv_checkpoints import write

from exporters import rwkv
from exporters.transformers import export
from mionnx import HookSpec, MIModel

TIMES = 3.0  # of torch's own float16 error
LENGTH = 16


def worst(found, exact):
    """The largest difference at any hook point, relative to the largest number there."""
    pairs = [(found[name].reshape(exact[name].shape), exact[name]) for name in exact if name in found]
    assert len(pairs) > 20
    return max(float(np.abs(one - other).max() / max(np.abs(other).max(), 1e-12)) for one, other in pairs)


def compare(folder, by_torch):
    """Compare a float16 model with torch in float16 and float64."""
    random = np.random.default_rng(0)
    ids, seed = random.integers(3, VOCAB, LENGTH), random.normal(size=(1, LENGTH, VOCAB))
    model = MIModel.from_pretrained(folder, threads=1)
    grad = model.forward(ids, HookSpec().gradient("*").set_metric("cotangent", cotangent=seed), logits=False).grad
    assert {value.dtype.name for value in grad.values()} <= {"float16", "float32"}
    exact, own = (by_torch(ids, seed, dtype) for dtype in (torch.float64, torch.float16))
    assert worst(grad, exact) < TIMES * worst(own, exact)


@pytest.mark.parametrize("version", [6, 7])
@pytest.mark.slow_beyond(1)
def test_float16_of_a_recurrent_model(version, tmp_path):
    (tmp_path / "checkpoint").mkdir()
    write(f"{version}-pth", tmp_path / "checkpoint")
    rwkv.export(tmp_path / "checkpoint", tmp_path / "hooked", "float16")
    compare(tmp_path / "hooked", lambda ids, seed, dtype: by_loop(version, ids.tolist(), seed[0], dtype, stored=True))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_float16_of_a_family(family, checkpoint, references, tmp_path):
    export(checkpoint(family), tmp_path / "hooked", "float16")
    stored = type(references(family)).from_pretrained(checkpoint(family), attn_implementation="eager").half()
    whole = np.ones((1, LENGTH), np.int64)
    compare(
        tmp_path / "hooked",
        lambda ids, seed, dtype: by_autograd(stored, Inputs(ids[None], whole), seed, dtype),
    )
