"""Path patching through streams that are normed after each addition: beside frozen runs, and plain patching."""

import numpy as np
import pytest
import torch
from encoders import make_encoder

from exporters.transformers import export
from exporters.transformers.heads import head_of
from exporters.transformers.trace import run_once
from mionnx import HookError, HookPoint, MIModel

RANDOM = np.random.default_rng(0)
CLEAN = RANDOM.integers(5, 98, 8)
CORRUPTED = CLEAN.copy()
CORRUPTED[6], CORRUPTED[1] = CLEAN[6] // 2 + 5, CLEAN[1] // 3 + 5  # before and behind the place that is read
LAYERS, HEADS = 3, 4
READS = {"classes": {"answer": 2, "versus": 0}, "masked_lm": {"answer": 5, "versus": 9, "position": 3}}
Values = dict[str, np.ndarray]


@pytest.fixture(scope="module", params=["classes", pytest.param("masked_lm", marks=pytest.mark.slow)])
def both(request, tmp_path_factory):
    """A BERT of three layers, the same in torch, and what a metric reads."""
    folder = tmp_path_factory.mktemp(request.param)
    reference = make_encoder("bert", folder / "checkpoint", request.param, num_hidden_layers=LAYERS)
    export(folder / "checkpoint", folder / "hooked")
    return MIModel.from_pretrained(folder / "hooked", threads=1), reference.double(), READS[request.param]


def run(reference, ids: np.ndarray, put: Values, reads: dict) -> tuple[float, Values]:
    """The metric of an eager pass in float64 with some values put in, and every hook point."""
    values: Values = {}

    def listen(name: str, value: torch.Tensor, stream: bool) -> torch.Tensor:
        if name in put:
            new = torch.from_numpy(put[name]).to(value.dtype)
            value = value.copy_(new) if stream else new
        values[name] = value.numpy().copy()
        return value

    ids = torch.from_numpy(ids[None])
    inputs = ids, torch.ones_like(ids), torch.arange(ids.shape[1])[None], torch.zeros_like(ids)
    logits = run_once(reference, head_of(reference.config), listen, inputs)[0][0].numpy()
    row = logits[reads["position"]] if "position" in reads else logits
    return float(row[reads["answer"]] - row[reads["versus"]]), values


@pytest.mark.parametrize(
    ("receiver", "heads"),
    [
        *(("blocks.2.attn.hook_q", [1]), ("blocks.2.attn.hook_v", None), ("blocks.1.mlp.hook_pre", None)),
        *(("blocks.2.mlp.hook_pre", None), ("blocks.2.hook_resid_post", None)),
    ],
)
@pytest.mark.slow_beyond(2)
def test_a_path_to_one_receiver_is_that_of_frozen_runs(both, receiver, heads):
    """All other heads and MLPs keep their outputs; the norms between are computed anew. Then that input is put in."""
    model, reference, reads = both
    _, old = run(reference, CORRUPTED, {}, reads)
    _, new = run(reference, CLEAN, {}, reads)
    asked = [receiver if heads is None else (receiver, heads)]
    found = model.path_patch(CLEAN, CORRUPTED, asked, **reads)
    mlps = model.path_patch(CLEAN, CORRUPTED, asked, "hook_mlp_out", ("layer",), **reads)
    outputs = [str(point(layer)) for layer in range(LAYERS) for point in (HookPoint.AttnZ, HookPoint.MlpOut)]
    frozen = {name: old[name] for name in outputs}
    final, effects = receiver.endswith("resid_post"), []
    for layer, head in [(layer, head) for layer in range(LAYERS) for head in (*range(HEADS), None)]:
        sender = str((HookPoint.MlpOut if head is None else HookPoint.AttnZ)(layer))
        sent = old[sender].copy()
        if head is None:
            sent = new[sender]
        else:
            sent[:, :, head] = new[sender][:, :, head]
        expected, seen = run(reference, CORRUPTED, {**frozen, sender: sent}, reads)
        if not final:
            read = old[receiver].copy()
            chosen = slice(None) if heads is None else heads
            read[:, chosen] = seen[receiver][:, chosen]  # heads stand behind the batch; of an MLP's input all positions
            expected, _ = run(reference, CORRUPTED, {receiver: read}, reads)
        value = mlps.values[layer] if head is None else found.values[layer, head]
        assert value == pytest.approx(expected, abs=2e-6)
        effects.append(abs(value - found.corrupted))
    assert max(effects) > 5e-5


@pytest.mark.parametrize("sender", ["z", "v", "mlp.hook_act", "resid_pre", "resid_mid_sum", "resid_post"])
def test_a_path_to_all_receivers_is_plain_patching(both, sender):
    model, _, reads = both
    over = ("layer", "head") if sender in ("z", "v") else ("layer", "position")
    swept = model.patch_sweep(CLEAN, CORRUPTED, sender, over, **reads)
    path = model.path_patch(CLEAN, CORRUPTED, "all", sender, over, **reads)
    assert np.abs(path.values - swept.values).max() < 1e-6
    assert np.abs(path.effect).max() > 1e-3


def test_what_receives_is_named(both):
    model, _, reads = both
    with pytest.raises(HookError, match=r"mlp\.hook_pre of a layer, and blocks\.2\.hook_resid_post"):
        model.path_patch(CLEAN, CORRUPTED, "hook_final_norm", **reads)
