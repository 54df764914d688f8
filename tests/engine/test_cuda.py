"""The CUDA execution provider gives what the CPU gives, up to the arithmetic of the device."""

import numpy as np
import onnxruntime
import pytest

from exporters.transformers import export
from mionnx import HookPoint, HookSpec, Intervention, MIModel, ModelError
from mionnx.engine.device import DeviceArray

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


def test_captures_and_caches_stay_on_the_device(hooked, models):
    model, ids = MIModel.from_pretrained(hooked("llama"), provider="cuda"), np.arange(3, 15)[None]
    found = model.forward(ids[:, :8], HookSpec().capture("*"), use_cache=True)
    held = [*found._captured.values(), *(part for layer in found.kv_cache.held() for part in layer)]
    assert {one.value.device_name() for one in held if isinstance(one, DeviceArray)} == {"cuda"}
    assert all(isinstance(one, DeviceArray) for one in held)
    after = model.forward(ids[:, 8:], cache=found.kv_cache).output()
    assert np.abs(after - models("llama").forward(ids).output()[:, 8:]).max() < 2e-3


def test_generation_equals_the_cpus(family, hooked, models):
    ids, vector = np.arange(3, 10)[None].repeat(2, 0), np.cos(np.arange(models(family).hidden_size)) / 2
    spec = HookSpec().capture("*.hook_resid_post").intervene(HookPoint.ResidPost(0), Intervention.Add(vector))
    found = MIModel.from_pretrained(hooked(family), provider="cuda").generate(ids, spec, max_new_tokens=6)
    expected = models(family).generate(ids, spec, max_new_tokens=6)
    for ours, theirs in zip(found.steps, expected.steps, strict=True):
        assert all(np.abs(ours[name] - theirs[name]).max() < 5e-3 for name in theirs)


def test_cuda_graphs_give_what_runs_give(hooked):
    plain, graphs = (
        MIModel.from_pretrained(hooked("llama"), provider="cuda", cuda_graphs=how) for how in (False, True)
    )
    for length in (5, 9, 5):
        for strength in (0.5, 1.0, 2.0):
            spec = HookSpec().capture("*.hook_pattern")
            spec.intervene(HookPoint.ResidPost(0), Intervention.Scale(strength, positions=[1, -1]))
            ids = np.arange(3, 3 + length)[None]
            one, other = plain.forward(ids, spec), graphs.forward(ids, spec)
            assert np.abs(one.output() - other.output()).max() < 1e-5
            assert all(np.abs(one[name] - other[name]).max() < 1e-5 for name in one)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 2e-2), ("bfloat16", 1e-1)])
def test_half_precision(dtype, tolerance, checkpoint, models, tmp_path):
    export(checkpoint("llama"), tmp_path / "half", dtype)
    model, ids = MIModel.from_pretrained(tmp_path / "half", provider="cuda"), np.arange(3, 15)[None]
    found = model.forward(ids, HookSpec().capture("*.hook_resid_post"), use_cache=True)
    expected = models("llama").forward(ids, HookSpec().capture("*.hook_resid_post"))
    scale = np.abs(expected.output()).max()
    assert np.abs(found.output().astype(np.float32) - expected.output()).max() < tolerance * scale
    again = model.forward(ids[:, -1:], cache=model.forward(ids[:, :-1], use_cache=True).kv_cache)
    assert np.abs((again.output()[:, -1] - found.output()[:, -1]).astype(np.float32)).max() < tolerance * scale


def test_a_device_that_is_not_there(hooked):
    with pytest.raises(ModelError, match="cannot open"):
        MIModel.from_pretrained(hooked("llama"), provider="cuda", provider_options={"device_id": 99}).forward([[3]])
