"""Monitors: outputs of a compiled graph are what `forward` captures, read by the probe's own library."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from command_line import PROMPT

from mionnx import SAE, HookError, HookPoint, HookSpec, InputError, Intervention, InterventionError, MIModel
from mionnx.analysis.features.config import Config

HOOK = HookPoint.ResidPost(2)
STEER = HookSpec().intervene(HookPoint.ResidPost(1), Intervention.Add(2 * np.cos(np.arange(128))))


def read(model: MIModel, spec: HookSpec, monitors: Mapping[str, Any], folder: Path) -> dict[str, np.ndarray]:
    """The outputs of a compiled graph, for one prompt."""
    compiled = model.compile(spec, folder, monitors=monitors, plain=False)
    session = onnxruntime.InferenceSession(str(compiled / "model.onnx"))
    ids = model.tokenize(PROMPT).ids[None]
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(ids.shape[1])[None]}
    feeds |= {
        one.name: np.zeros((1, 4, 0, 16), np.float32) for one in session.get_inputs() if one.name.startswith("past")
    }
    return dict(zip([one.name for one in session.get_outputs()], session.run(None, feeds), strict=True))


@pytest.mark.parametrize("spec", [STEER, HookSpec()], ids=["steered", "plain"])
def test_probe_direction_and_lens_are_what_forward_and_the_probe_say(spec, shipped, tmp_path):
    """With interventions and without; probabilities are scikit-learn's own, the lens is `logit_lens`."""
    linear = pytest.importorskip("sklearn.linear_model")
    cache = shipped.forward(PROMPT, HookSpec().extend(spec).capture(HOOK))
    activations = cache[HOOK][0]
    labels = np.arange(len(activations)) % 2
    probe = linear.LogisticRegression().fit(activations, labels)
    several = linear.LogisticRegression().fit(activations, np.arange(len(activations)) % 3)
    ridge = linear.Ridge().fit(activations, labels)
    direction = shipped.contrast(["The capital of France is"], ["The capital of Germany is"])[2]
    found = read(
        shipped,
        spec,
        {
            "refusal": (HOOK, probe),
            "country": (HOOK, several),
            "value": (HOOK, ridge),
            "sea": direction,
            "lens": shipped.lens_monitor(2, 3),
        },
        tmp_path / "out",
    )
    assert np.abs(found["refusal"][0, :, 0] - probe.predict_proba(activations)[:, 1]).max() < 1e-5
    assert np.abs(found["country"][0] - several.predict_proba(activations)).max() < 1e-5
    assert np.abs(found["value"][0, :, 0] - ridge.predict(activations)).max() < 1e-5
    assert np.abs(found["sea"][0, :, 0] - activations @ direction.vector / direction.norm).max() < 1e-4
    logits = shipped.project_to_vocab(activations)
    likely = np.argsort(-logits, axis=-1)[:, :3]
    assert np.array_equal(found["lens.ids"][0], likely)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert np.abs(found["lens"][0] - np.take_along_axis(log_probs, likely, -1)).max() < 5e-5
    assert np.abs(found["logits"] - shipped.forward(PROMPT, spec).output()).max() < 5e-5
    card = (tmp_path / "out" / "README.md").read_text()
    assert "- `refusal`: sigmoid of 1 product at blocks.2.hook_resid_post" in card


def test_features_of_an_sae_are_its_own(shipped, tmp_path):
    rng = np.random.default_rng(0)
    shapes = {"W_enc": (128, 16), "W_dec": (16, 128), "b_dec": 128, "b_enc": 16}
    for kind in ("standard", "jumprelu", "topk", "topk by norm"):
        weights = {name: rng.normal(size=shape) for name, shape in shapes.items()}
        if kind == "jumprelu":
            weights["threshold"] = np.abs(rng.normal(size=16))
        kept = {"k": 4, "by_decoder_norm": "norm" in kind} if "topk" in kind else {}
        sae = SAE(Config(kind.partition(" ")[0], hook=str(HOOK), subtracts_bias=True, **kept), weights)
        spec = HookSpec().extend(STEER).intervene(sae.hook, sae.splice()).capture(sae.acts)
        expected = shipped.forward(PROMPT, spec)[sae.acts][0][:, [7, 3]]
        found = read(shipped, STEER, {"latents": sae.monitor([7, 3])}, tmp_path / kind)["latents"][0]
        assert np.abs(found - expected).max() < 1e-4
        assert (expected > 0).any()
        assert (expected == 0).any()


@pytest.mark.parametrize(
    ("monitor", "kind", "message"),
    [
        (np.ones(128), HookError, "say where it reads"),
        ((HOOK, np.ones(7)), InterventionError, r"weights are \[1, 7\]"),
        (("blocks.2.attn.hook_q", np.ones(16)), HookError, "a vector a token"),
        (("blocks.2.hook_resid_pots", np.ones(128)), HookError, "hook_resid_post"),
        ((HOOK, "refusal"), InterventionError, "no linear probe"),
    ],
)
def test_what_is_no_monitor_is_refused(monitor, kind, message, shipped, tmp_path):
    with pytest.raises(kind, match=message):
        shipped.compile(STEER, tmp_path / "out", monitors={"x": monitor})
    with pytest.raises(InterventionError, match="of a value of the graph"):
        shipped.compile(STEER, tmp_path / "out", monitors={"logits": (HOOK, np.ones(128))})
    with pytest.raises(InputError, match="layer"):
        shipped.lens_monitor(4)
    assert not (tmp_path / "out").exists()
