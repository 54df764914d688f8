"""onnxruntime-web's WebGPU in headless Chromium, by its own software driver where there is no graphics processor."""

import pytest

from mionnx import HookSpec, Intervention, RuntimeMissingError
from mionnx.engine import browser
from mionnx.engine.engines import ENGINES
from mionnx.engine.options import Options

PROMPT = "The capital of France is"
NAME = "onnxruntime-web-webgpu"
ENGINE, OPTIONS = ENGINES[NAME], Options(engine=NAME)


@pytest.fixture
def chromium(web, monkeypatch):
    """Skips where Chromium is missing, or has no adapter."""
    monkeypatch.setenv("MIONNX_NODE", str(web))
    if why := ENGINE.missing(OPTIONS):
        pytest.skip(f"{NAME}: {why}")


def test_what_is_missing_is_named_with_its_install(shipped, monkeypatch, tmp_path):
    monkeypatch.setattr(browser, "_browser", lambda: None)
    assert ENGINE.missing(OPTIONS) == "no Chromium is installed: apt-get install chromium"
    with pytest.raises(RuntimeMissingError, match=f"{NAME}: no Chromium"):
        shipped.verify(PROMPT, ["ort-cpu", NAME])
    monkeypatch.setattr(browser, "_browser", lambda: "/usr/bin/false")
    monkeypatch.setenv("MIONNX_NODE", str(tmp_path))
    assert "npm install" in ENGINE.missing(OPTIONS)


@pytest.mark.slow
def test_float32_in_a_page_beside_the_cpu(shipped, chromium):
    spec = HookSpec().intervene("blocks.1.hook_resid_post", Intervention.Scale(0.5))
    result = shipped.verify(PROMPT, ["ort-cpu", NAME], hooks=spec, greedy=0, local=False)
    assert result.agrees
    assert result.besides[0].environment["options"]["adapter"]


@pytest.mark.slow
def test_numbers_that_a_page_leaves_to_the_processor_are_refused(chromium, recurrent):
    """A loop over tokens has no kernel there."""
    result = recurrent.verify(PROMPT, ["ort-cpu", NAME], greedy=0, local=False)
    assert "WebGPU leaves If" in result.failed[NAME]
    assert "to the CPU" in result.failed[NAME]
