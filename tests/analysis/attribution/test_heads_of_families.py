"""Direct attribution where the final norm's output is scaled, or transformed, before the unembedding reads it."""

import numpy as np
import pytest
import torch
from families import make_checkpoint
from tiny_configs import tiny_config

from exporters.transformers import export
from mionnx import HookSpec, MIModel

pytestmark = pytest.mark.slow

IDS = [5, 9, 33, 70]


@pytest.fixture
def made(tmp_path):
    """Family and changes of its config -> its hooked model, and the same in torch."""

    def make(family, **changes):
        reference = make_checkpoint(family, tmp_path / "checkpoint", **{**tiny_config(family), **changes})
        export(tmp_path / "checkpoint", tmp_path / "hooked")
        return MIModel.from_pretrained(tmp_path / "hooked", threads=1), reference

    return make


def logit_of(reference):
    with torch.no_grad():
        return float(reference(torch.tensor([IDS])).logits[0, -1, 7])


def test_a_factor_in_front_of_the_head_counts(made):
    """MiniCPM divides the final norm's output by a width."""
    model, reference = made("minicpm3")
    found, logit = model.attribute(IDS, 7), logit_of(reference)
    with torch.no_grad():
        own = float(reference.model(torch.tensor([IDS])).last_hidden_state[0, -1] @ reference.lm_head.weight[7])
    assert found.total == pytest.approx(logit, abs=2e-5)
    assert abs(own - logit) > 0.1  # without the factor
    cache = model.forward([IDS], HookSpec().capture(["blocks.1.hook_mlp_out", "blocks.1.hook_resid_post"]))
    norm, stream = reference.model.norm, cache["resid_post", 1][0, -1]
    scale = float(np.sqrt((stream**2).mean() + norm.variance_epsilon))
    weight = (norm.weight * reference.lm_head.weight[7]).detach().numpy() * logit / own
    assert found["1_mlp_out"] == pytest.approx(float(cache["mlp_out", 1][0, -1] @ weight) / scale, abs=1e-5)


@pytest.mark.parametrize(
    ("family", "changes"), [("modernbert-decoder", {}), ("opt", {"word_embed_proj_dim": 32})], ids=lambda one: str(one)
)
def test_a_head_with_a_transform_is_passed_by_relp(made, family, changes):
    """ModernBERT's decoder, OPT with a narrower table: parts add up, each by its product with one direction."""
    model, reference = made(family, **changes)
    found = model.attribute(IDS, 7)
    assert found.total == pytest.approx(logit_of(reference), abs=2e-5)
    end = f"blocks.{model.num_layers - 1}.hook_resid_post"
    direction = model.gradients(IDS, end, answer=7, rules="relp").grad[end][0, -1]
    part = model.forward([IDS], HookSpec().capture("blocks.1.hook_mlp_out"))["mlp_out", 1][0, -1]
    assert found["1_mlp_out"] == pytest.approx(float(part @ direction), abs=1e-5)
    assert abs(found["1_mlp_out"]) > 1e-4
