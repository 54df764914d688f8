"""A spliced fragment is the same function in torch, at every kind of hook point."""

import numpy as np
import pytest
import torch
from oracle import Inputs, run

from mionnx import HookPoint, HookSpec, Intervention, MIModel
from mionnx.graph.fragment import written

TOLERANCE = 5e-5


@pytest.fixture(scope="module")
def model() -> MIModel:
    return MIModel.from_pretrained("models/world-llama", threads=1)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_it_equals_torch_at_every_kind_of_hook_point(models, references, family):
    model, reference = models(family), references(family)
    text = """<ir_version: 10, opset_import: ["": 23]>
    bend (float[{shape}] x) => (float[{shape}] y) {{ half = Constant<value = float {{0.5}}>()
      bent = Tanh(x)
      y = Mul(bent, half) }}"""
    ids = np.random.default_rng(0).integers(3, 101, (2, 7))
    mask = np.array([[1] * 7, [0, 0] + [1] * 5])
    inputs = Inputs(ids, mask)
    for point in (HookPoint.ResidPost(0), HookPoint.AttnQ(1), HookPoint.AttnZ(0), HookPoint.AttnPattern(1)):
        shape = ", ".join(f"d{i}" for i in range(len(point.axes)))
        splice = Intervention.Splice(written(text.format(shape=shape), {}))
        found = model.forward(ids, HookSpec().intervene(point, splice), attention_mask=mask).output()
        before = run(reference, inputs).values[point.name]
        bent = torch.tanh(torch.from_numpy(before)).numpy() * 0.5
        expected = run(reference, inputs, [(point, Intervention.Replace(bent))]).logits
        assert np.abs(found - expected)[inputs.real].max() < TOLERANCE, point
