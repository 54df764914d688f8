"""Direct attribution where the final norm's output is scaled, or transformed, before the unembedding reads it."""

import numpy as np
import pytest
import torch
from families import make_checkpoint
from tiny_configs import tiny_config

from exporters.transformers import export
from mionnx import HookSpec, MIModel

pytestmark = pytest.mark.slow


def test_a_factor_in_front_of_the_head_counts(tmp_path):
    """MiniCPM divides the final norm's output by a width."""
    reference = make_checkpoint("minicpm3", tmp_path / "checkpoint", **tiny_config("minicpm3"))
    export(tmp_path / "checkpoint", tmp_path / "hooked")
    model, ids = MIModel.from_pretrained(tmp_path / "hooked", threads=1), [5, 9, 33, 70]
    found = model.attribute(ids, 7)
    with torch.no_grad():
        output = reference.model(torch.tensor([ids])).last_hidden_state[0, -1]
        logit = reference(torch.tensor([ids])).logits[0, -1, 7]
    own = float(output @ reference.lm_head.weight[7].detach())
    assert found.total == pytest.approx(float(logit), abs=2e-5)
    assert abs(own - float(logit)) > 0.1  # without the factor
    cache = model.forward([ids], HookSpec().capture("blocks.1.hook_mlp_out"))
    norm = reference.model.norm
    stream = model.forward([ids], HookSpec().capture("blocks.1.hook_resid_post"))["blocks.1.hook_resid_post"][0, -1]
    scale = float(np.sqrt((stream**2).mean() + norm.variance_epsilon))
    weight = (norm.weight * reference.lm_head.weight[7]).detach().numpy() * float(logit) / own
    assert found["1_mlp_out"] == pytest.approx(float(cache["mlp_out", 1][0, -1] @ weight) / scale, abs=1e-5)


def test_a_head_with_a_transform_is_passed_by_relp(tmp_path):
    """ModernBERT's decoder: parts add up, and each counts by its product with one direction."""
    reference = make_checkpoint("modernbert-decoder", tmp_path / "checkpoint", **tiny_config("modernbert-decoder"))
    export(tmp_path / "checkpoint", tmp_path / "hooked")
    model, ids = MIModel.from_pretrained(tmp_path / "hooked", threads=1), [5, 9, 33, 70]
    found = model.attribute(ids, 7)
    with torch.no_grad():
        logit = float(reference(torch.tensor([ids])).logits[0, -1, 7])
    assert found.total == pytest.approx(logit, abs=2e-5)
    end = f"blocks.{model.num_layers - 1}.hook_resid_post"
    direction = model.gradients(ids, end, answer=7, rules="relp").grad[end][0, -1]
    part = model.forward([ids], HookSpec().capture("blocks.1.hook_mlp_out"))["mlp_out", 1][0, -1]
    assert found["1_mlp_out"] == pytest.approx(float(part @ direction), abs=1e-5)
    assert abs(found["1_mlp_out"]) > 1e-4
