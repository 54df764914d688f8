"""Compiled graphs in other runtimes: onnxruntime-web under Node, OpenVINO. None of them has mionnx."""

import subprocess
import sys

import numpy as np
import pytest
from node_runner import run_in_web
from repository import REPOSITORY

from mionnx import HookPoint, HookSpec, Intervention, MIModel, StateKnockoutSpec

pytestmark = pytest.mark.slow
PROMPT = "The capital of France is"
NAMES = ["world-llama", "world-gpt2"]
TOLERANCE = 5e-5


def steering(model: MIModel) -> HookSpec:
    """From France to Germany, at the country's position: the answer becomes another one."""
    point, ends = HookPoint.ResidPost(0), {}
    for name in ("France", "Germany"):
        tokens = model.tokenize(f"The capital of {name} is")
        ends[name] = model.forward(tokens, HookSpec().capture(point))[point][0, tokens.positions_of(name)[0]]
    at = model.tokenize(PROMPT).positions_of("France")
    return HookSpec().intervene(point, Intervention.Add(ends["Germany"] - ends["France"], positions=at))


@pytest.fixture(params=[*NAMES, "world-rwkv7"])
def changed(request: pytest.FixtureRequest) -> tuple[MIModel, HookSpec, HookPoint]:
    """A model, what is baked into it, and what is captured; of an RWKV, a token that nobody can see."""
    model = MIModel.from_pretrained(REPOSITORY / "models" / request.param)
    if not model.hooked.metadata.carries_state:
        return model, steering(model), HookPoint.AttnPattern(1)
    at = model.tokenize(PROMPT).positions_of("France")
    return model, HookSpec().set_state_knockout(StateKnockoutSpec().positions(at).invisible()), HookPoint.RwkvWkv(1)


def feeds_of(model: MIModel) -> dict[str, np.ndarray]:
    ids = model.tokenize(PROMPT).ids[None]
    if model.hooked.metadata.carries_state:
        shapes = model.hooked.metadata.past_shapes(1, 0)
        start = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        positions = np.arange(ids.shape[1])[None]
        return {"input_ids": ids, "mionnx.token_positions": positions} | start
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(ids.shape[1])[None]}
    for i in range(model.num_layers):
        for part in ("key", "value"):
            empty = np.zeros((1, model.num_kv_heads, 0, model.head_dim), np.float32)
            feeds[f"past_key_values.{i}.{part}"] = empty
    return feeds


@pytest.mark.slow
def test_onnxruntime_web_gives_the_same_logits(changed, web, tmp_path):
    model, spec, point = changed
    spec.capture(point)
    folder = model.compile(spec, tmp_path / "steered", target="web")
    found = run_in_web(web, folder / "model.onnx", feeds_of(model), tmp_path)
    expected = model.forward(PROMPT, spec)
    scale = np.abs(expected.output()).max()
    assert np.abs(found["logits"] - expected.output()).max() / scale < TOLERANCE
    assert np.abs(found[str(point)] - expected[point]).max() < TOLERANCE
    assert np.abs(model.forward(PROMPT).output() - expected.output()).max() > 0.1


OPENVINO = """
import sys
import numpy as np
import openvino
feeds = dict(np.load(sys.argv[2]))
model = openvino.Core().compile_model(sys.argv[1], "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
np.save(sys.argv[3], model(feeds)["logits"])
assert "mionnx" not in sys.modules
"""


def test_openvino_gives_the_same_logits(changed, tmp_path):
    pytest.importorskip("openvino", reason="OpenVINO is not installed: pip install openvino")
    model, spec, _ = changed
    folder = model.compile(spec, tmp_path / "steered")
    np.savez(tmp_path / "feeds.npz", **feeds_of(model))
    files = [folder / "model.onnx", tmp_path / "feeds.npz", tmp_path / "logits.npy"]
    ran = subprocess.run([sys.executable, "-I", "-c", OPENVINO, *files], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    found, expected = np.load(tmp_path / "logits.npy"), model.forward(PROMPT, spec).output()
    assert np.abs(found - expected).max() / np.abs(expected).max() < TOLERANCE
