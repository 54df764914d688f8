"""Compiled graphs in the hands of others: optimum, onnxruntime-web under Node, OpenVINO. None of them has mionnx."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

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


@pytest.fixture(params=NAMES)
def steered(request: pytest.FixtureRequest) -> tuple[MIModel, HookSpec]:
    model = MIModel.from_pretrained(REPOSITORY / "models" / request.param)
    return model, steering(model)


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


@pytest.fixture(scope="session")
def optimum(environment: Callable[[str], Path]) -> Callable[..., str]:
    """Runs a script in a virtual environment that has optimum-onnx and the older transformers it needs."""
    python = environment("optimum-onnx==0.1.0")

    def run(script: str, *arguments: object) -> str:
        ran = subprocess.run([python, "-c", script, *map(str, arguments)], capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    return run


GENERATE = """
import sys
from optimum.onnxruntime import ORTModelForCausalLM
from transformers import AutoTokenizer
model = ORTModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], padding_side="left")
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
inputs = tokenizer(sys.argv[2:], return_tensors="pt", padding=True, return_token_type_ids=False)
ids = model.generate(**inputs, max_new_tokens=6, do_sample=False, use_cache=True)
print("\\n".join(tokenizer.batch_decode(ids[:, inputs.input_ids.shape[1]:], skip_special_tokens=True)))
assert "mionnx" not in sys.modules
"""


@pytest.mark.slow
def test_optimum_generates_with_a_compiled_graph(steered, optimum, tmp_path):
    """As it is, from the cache, a padded batch too: the steered texts, and they are other texts."""
    model, spec = steered
    folder = model.compile(spec, tmp_path / "steered", layout="optimum", captures=False)
    prompts = [PROMPT, "one two three"]
    texts = optimum(GENERATE, folder, *prompts).splitlines()
    expected = model.generate(prompts, spec, max_new_tokens=6)
    assert [text.split() for text in texts] == [text.split() for text in expected.new_texts]
    assert texts[0].split()[0] == "Berlin"
    assert model.generate(PROMPT, max_new_tokens=1).new_texts[0].split() == ["Paris"]


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
