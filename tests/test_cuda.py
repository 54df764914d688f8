"""The CUDA execution provider gives what the CPU gives, up to the arithmetic of the device."""

import numpy as np
import onnxruntime
import pytest

from mionnx import HookPoint, HookSpec, Intervention, MIModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        "CUDAExecutionProvider" not in onnxruntime.get_available_providers(),
        reason="needs onnxruntime-gpu and a CUDA device",
    ),
]


def test_captures_and_interventions_equal_the_cpus(family, hooked, models):
    ids = np.arange(3, 15)[None]
    spec = HookSpec().capture("*").intervene(HookPoint.ResidPost(0), Intervention.Scale(1.1, positions=[3, -1]))
    found = MIModel.from_pretrained(hooked(family), provider="cuda").forward(ids, spec)
    expected = models(family).forward(ids, spec)
    for name in expected:
        seen = expected[name] > np.finfo(np.float32).min / 2
        assert np.abs(found[name] - expected[name])[seen].max() < 2e-3, name  # TF32 in the matrix products
    assert np.abs(found.output() - expected.output()).max() < 2e-3


def test_verify_beside_the_cpu(models):
    found = models("llama").verify([np.arange(3, 15)], ["ort-cpu", "ort-cuda"], tolerance=2e-3, greedy=4, repeat=True)
    assert found.agrees
    assert not found.skipped
