"""ONNX Runtime's WebGPU plug-in, by Mesa's lavapipe where there is no graphics processor."""

import numpy as np
import pytest
from repository import REPOSITORY

from mionnx import MIModel, RuntimeMissingError
from mionnx.engine import webgpu
from mionnx.engine.engines import ENGINES
from mionnx.engine.options import Options

PROMPT, TEXT = "The capital of France is", "The capital of France is Paris ."
ENGINE = ENGINES["ort-webgpu"]
WHY = ENGINE.missing(Options(engine="ort-webgpu"))
needs_webgpu = pytest.mark.skipif(WHY is not None, reason=f"ort-webgpu: {WHY}")


@pytest.mark.skipif(WHY is None, reason="the plug-in and a driver are here")
def test_what_is_missing_is_named_with_its_install(shipped):
    assert "onnxruntime-ep-webgpu" in WHY or "mesa-vulkan-drivers" in WHY
    with pytest.raises(RuntimeMissingError, match="ort-webgpu: "):
        shipped.verify(PROMPT, ["ort-cpu", "ort-webgpu"])


def test_large_weights_are_cut_off(shipped, monkeypatch):
    from mionnx.graph import onnx_file
    from mionnx.rewrite import rewrite
    from mionnx.rewrite.plan import Outputs, Plan

    written, _ = rewrite(shipped.hooked.proto, Plan(outputs=Outputs(carried=False)), shipped.hooked.metadata)
    proto = onnx_file.parse(written)
    assert [device for _, device in webgpu.parts_of(proto)] == ["webgpu"]
    monkeypatch.setattr(webgpu, "BUFFER", 2**16)  # the table of tokens is larger, and nothing else
    largest = max(webgpu._bytes(tensor) for tensor in proto.graph.initializer)
    monkeypatch.setattr(webgpu, "BUFFER", largest - 1)
    parts = webgpu.parts_of(proto)
    assert [device for _, device in parts] == ["CPU", "webgpu", "CPU"]
    body = {one.name for one in parts[1][0].graph.output}
    assert "hook_final_norm" in body


@needs_webgpu
@pytest.mark.slow
def test_float32_and_float16_beside_the_cpu(shipped, tmp_path):
    result = shipped.verify(PROMPT, ["ort-cpu", "ort-webgpu"], greedy=0, local=False)
    assert result.agrees
    half = MIModel.from_pretrained(shipped.narrow(tmp_path / "half", texts=PROMPT), threads=1)
    assert half.hooked.metadata.dtype == "float16"


@needs_webgpu
@pytest.mark.slow
@pytest.mark.parametrize("name", ["world-llama", "world-gpt2", "world-bert"])
def test_the_forecast_is_within_a_factor_of_what_webgpu_gives(name):
    model = MIModel.from_pretrained(REPOSITORY / "models" / name, threads=1)
    diagnosis = model.doctor(TEXT, target="webgpu")
    forecast, (check,) = diagnosis.after.all, diagnosis.checks
    assert check.distance is not None, check.why
    measured = check.distance
    assert measured.sound
    assert measured.top_1 >= forecast.top_1 - 0.25
    # distances go with the root of KL: a factor of 1.5 of the one is one of 2.25 of the other
    assert 1 / 1.5 < np.sqrt(measured.kl / forecast.kl) < 1.5
