"""The table of engines: the same verbs in each of them, and clear refusals of settings that one does not have."""

from pathlib import Path

import numpy as np
import pytest

from mionnx import HookSpec, InputError, Intervention, MIModel, Options, RuntimeMissingError
from mionnx.engine import engines
from mionnx.engine.engines import ENGINES, engine_of

LLAMA = Path(__file__).parents[2] / "models" / "world-llama"
PROMPT = "The capital of France is"


@pytest.mark.parametrize("engine", ["reference", pytest.param("onnxruntime-web", marks=pytest.mark.slow)])
def test_every_engine_runs_forward(engine, request, monkeypatch):
    if engine == "onnxruntime-web":
        monkeypatch.setenv("MIONNX_NODE", str(request.getfixturevalue("web")))
    spec = HookSpec().capture("blocks.1.*").intervene("blocks.1.hook_resid_post", Intervention.Scale(0.5))
    expected, found = (
        MIModel.from_pretrained(LLAMA, engine=name).forward(PROMPT, spec) for name in ("onnxruntime", engine)
    )
    assert np.allclose(expected.output(), found.output(), atol=5e-5)
    names = [name for name in expected if not name.endswith("hook_scores")]  # masked ones are the least number
    assert all(np.allclose(expected[name], found[name], atol=5e-5) for name in names)


def test_an_unknown_engine_is_named_beside_the_nearest():
    with pytest.raises(InputError, match=r"no engine 'openvno'.*did you mean 'openvino'"):
        MIModel.from_pretrained(LLAMA, engine="openvno")


@pytest.mark.parametrize(
    "setting",
    [
        {"provider": "cuda"},
        {"prepack": True},
        {"base": False},
        {"provider_options": {"device_id": 1}},
        {"provider": "cuda", "cuda_graphs": True},
    ],
    ids=lambda setting: ",".join(setting),
)
def test_a_setting_that_an_engine_lacks_is_refused(setting):
    with pytest.raises(InputError, match=r"engine='openvino' has no .*use engine='onnxruntime'"):
        MIModel.from_pretrained(LLAMA, engine="openvino", **setting)


def test_settings_that_an_engine_has_are_taken():
    for name, engine in ENGINES.items():
        assert engine_of(Options(engine=name, max_graphs=3, max_bytes=2**20)) is engine
    assert engine_of(Options(engine="openvino", threads=1, fast=True))
    with pytest.raises(InputError, match="has no threads=2"):
        engine_of(Options(engine="reference", threads=2))


def test_a_base_is_for_onnx_runtime():
    assert not MIModel.from_pretrained(LLAMA, engine="openvino").prepare()


def test_an_engine_that_is_not_installed_is_named_with_its_command(monkeypatch):
    monkeypatch.setattr("mionnx.engine.openvino.find_spec", lambda name: None)
    with pytest.raises(RuntimeMissingError, match="pip install openvino"):
        MIModel.from_pretrained(LLAMA, engine="openvino")


def test_a_new_engine_is_one_entry(monkeypatch):
    """Whatever implements `Engine` serves forward, generate and sweeps."""

    class Counting(type(ENGINES["reference"])):
        name = "counting"
        opened = 0

        def open(self, *arguments, **settings):
            self.opened += 1
            return super().open(*arguments, **settings)

    counting = Counting()
    monkeypatch.setitem(engines.ENGINES, "counting", counting)
    model = MIModel.from_pretrained(LLAMA, engine="counting")
    assert model.generate(PROMPT, max_new_tokens=2).new_texts
    assert counting.opened == 1
