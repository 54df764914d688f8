"""Compiled graphs with a metric and its gradients: plain onnxruntime, onnx's evaluator and onnxruntime-web run them."""

import json
import subprocess
import sys

import numpy as np
import onnx
import pytest
from node_runner import run_in_web
from onnx.reference import ReferenceEvaluator
from repository import REPOSITORY

from mionnx import GradientError, HookSpec, Intervention, MIModel
from mionnx.errors import InputError

TEXTS = ["The capital of France is", "one two three"]
HOOKS = ["blocks.1.hook_mlp_out", "blocks.2.attn.hook_z", "hook_embed"]
REFERENCE = np.linspace(0, 5, 471)
METRICS = {
    "logit": {"answer": "Paris"},
    "logit_diff": {"answer": "Paris", "versus": "Madrid", "position": 1},
    "probability": {"answer": "Paris", "position": -2},
    "kl": {"reference": REFERENCE},
    "loss": {},
    "cotangent": {"cotangent": REFERENCE - 2},
}
RUN = """
import sys
import numpy as np
import onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1])
names = [output.name for output in session.get_outputs() if "present" not in output.name]
np.savez(sys.argv[3], **dict(zip(names, session.run(names, dict(np.load(sys.argv[2]))))))
assert "mionnx" not in sys.modules
"""


def spec_of(name: str = "logit") -> HookSpec:
    """Gradients of a metric, of a model that is changed."""
    spec = HookSpec().intervene("blocks.1.attn.hook_z", Intervention.Scale(0.5, heads=[1]))
    return spec.gradient(HOOKS).set_metric(name, **METRICS[name])


def feeds_of(model: MIModel, texts: list[str]) -> dict[str, np.ndarray]:
    """What the graph of a prompt is fed, padded on the left."""
    rows = [model.tokenize(text).ids for text in texts]
    ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
    mask = np.zeros_like(ids)
    for row, own in enumerate(rows):
        ids[row, -len(own) :], mask[row, -len(own) :] = own, 1
    if model.hooked.metadata.carries_state:
        shapes = model.hooked.metadata.past_shapes(1, 0)
        start = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        return {"input_ids": ids, "mionnx.token_positions": np.arange(ids.shape[1])[None]} | start
    feeds = {"input_ids": ids, "attention_mask": mask, "position_ids": np.maximum(mask.cumsum(1) - 1, 0)}
    empty = np.zeros((len(ids), model.num_kv_heads, 0, model.head_dim), np.float32)
    return feeds | {f"past_key_values.{i}.{part}": empty for i in range(model.num_layers) for part in ("key", "value")}


def compare(found, expected, hooks=HOOKS) -> None:
    """The metric and every gradient of a compiled graph, with those of `forward`."""
    np.testing.assert_allclose(found["mionnx.metric"], expected.metric, rtol=1e-4, atol=1e-5)
    assert {name for name in found if name.endswith(".gradient")} == {f"{hook}.gradient" for hook in hooks}
    for hook in hooks:
        largest = np.abs(expected.grad[hook]).max()
        np.testing.assert_allclose(found[f"{hook}.gradient"], expected.grad[hook], rtol=0, atol=2e-5 * largest)


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.slow_beyond(2)
def test_plain_onnxruntime_gives_the_gradients(shipped, name, tmp_path):
    folder = shipped.compile(spec_of(name), tmp_path / "compiled")
    proto = onnx.load(folder / "model.onnx", load_external_data=False)
    assert {node.domain for node in proto.graph.node} <= {"", "ai.onnx"}
    assert [value.name for value in proto.graph.input if "past" not in value.name] == [
        "input_ids",
        "attention_mask",
        "position_ids",
    ]
    np.savez(tmp_path / "feeds.npz", **feeds_of(shipped, TEXTS))
    files = [folder / "model.onnx", tmp_path / "feeds.npz", tmp_path / "out.npz"]
    ran = subprocess.run([sys.executable, "-I", "-c", RUN, *files], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    compare(dict(np.load(tmp_path / "out.npz")), shipped.forward(TEXTS, spec_of(name)))


def test_the_last_logits_alone_have_the_same_gradients_and_the_folder_says_what_it_is(shipped, tmp_path):
    folder = shipped.compile(spec_of().gradient("blocks.3.*mlp_out"), tmp_path / "compiled", last_logits=True)
    session = onnx.load(folder / "model.onnx")
    facts = json.loads(next(one.value for one in session.metadata_props if one.key == "mionnx.compiled"))
    assert facts["metric"] == f"logit(answer={shipped.token_id('Paris')})"
    assert "`mionnx.metric` is logit(answer=" in (folder / "README.md").read_text()
    again = HookSpec.load(folder / "spec.safetensors")
    assert {request.text for request in again.gradients} == {*HOOKS, "blocks.3.hook_mlp_out"}
    found = ReferenceEvaluator(session).run(None, feeds_of(shipped, TEXTS))
    named = dict(zip([value.name for value in session.graph.output], found, strict=True))
    assert named["logits"].shape[1] == 1
    hooks = [*HOOKS, "blocks.3.hook_mlp_out"]
    compare(named, shipped.forward(TEXTS, spec_of().gradient(hooks[-1])), hooks)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["world-llama", "world-gpt2", "world-rwkv7"])
def test_onnxruntime_web_gives_the_gradients(name, web, tmp_path):
    model = MIModel.from_pretrained(REPOSITORY / "models" / name)
    hooks = ["blocks.1.hook_mlp_out", "blocks.1.rwkv.hook_k" if "rwkv" in name else "blocks.1.attn.hook_z"]
    spec = HookSpec().gradient(hooks).set_metric("logit", answer=7)
    folder = model.compile(spec, tmp_path / "compiled", target="web")
    found = run_in_web(web, folder / "model.onnx", feeds_of(model, TEXTS[:1]), tmp_path)
    compare(
        found,
        model.forward(TEXTS[0], spec),
        hooks,
    )


def test_what_only_one_call_can_have_is_refused(shipped, tmp_path):
    cases = {
        "a token a row is a matter of one call": {"name": "logit", "answer": [7, 8]},
        "serves any batch, \\[471\\]": {"name": "kl", "reference": np.ones((2, 471))},
        "compiled graphs serve any length": {"name": "cotangent", "cotangent": np.ones((1, 5, 471))},
        "has 1 along those": {"name": "cotangent", "cotangent": np.ones((5, 128)), "of": "blocks.2.hook_resid_pre"},
    }
    for message, given in cases.items():
        with pytest.raises(GradientError, match=message):
            shipped.compile(HookSpec().gradient("hook_embed").set_metric(**given), tmp_path / "no")
    for message, given in {
        "position 2": {"answer": 7, "name": "logit", "position": 2},
        "every": {"name": "loss"},
    }.items():
        with pytest.raises(GradientError, match=f"reads {message}.*computes the last alone"):
            shipped.compile(HookSpec().gradient("hook_embed").set_metric(**given), tmp_path / "no", last_logits=True)
    with pytest.raises(InputError, match="vocabulary"):
        shipped.compile(HookSpec().gradient("hook_embed").set_metric("logit", answer=9999), tmp_path / "no")
    assert not (tmp_path / "no").exists()
