"""`bisect` returns the node at which a fault was planted, and a model that shows it alone."""

import json
import subprocess
import sys

import numpy as np
import onnx
import pytest
from conftest import REPOSITORY
from faults import half_layer, longer_window, other_gelu, other_rope, perturbed_weight, plant

from mionnx import HookSpec, InputError, Intervention, MIModel, ModelError

PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def llama() -> MIModel:
    return MIModel.from_pretrained(REPOSITORY / "models" / "world-llama")


@pytest.mark.parametrize(
    ("family", "runtime", "fault", "hook", "most"),
    [
        ("llama", "ort-cpu", perturbed_weight, "blocks.1.hook_resid_post", 1),
        ("gpt_neox", "ort-cpu", other_gelu, "blocks.1.hook_resid_post", 1),
        ("gemma2", "openvino", other_gelu, "blocks.1.hook_resid_post", 1),
        ("mistral", "ort-cpu", longer_window, "blocks.0.hook_resid_mid", 1),
        ("llama", "ort-cpu", other_rope, "blocks.0.hook_resid_mid", 1),
        ("qwen3", "reference", half_layer, "blocks.1.hook_resid_post", 4),  # two casts, the product, the cast back
        ("qwen3", "ort-cpu", half_layer, "blocks.1.hook_resid_post", 6),  # it drops the casts of a product alone
    ],
)
def test_a_planted_node_is_returned(models, hooked, tmp_path, family, runtime, fault, hook, most):
    node, _ = plant(hooked(family), tmp_path / "model", fault)
    wrong = MIModel.from_pretrained(tmp_path / "model")
    ids = np.random.default_rng(0).integers(3, 100, (1, 24))
    found = models(family).bisect(ids, [runtime], other=wrong)
    assert found.hook == hook
    assert node in {name.split(" ")[0] for name in found.nodes}
    assert len(found.nodes) <= most


def test_the_report_shows_the_fault_alone(llama, tmp_path):
    plant(llama.hooked.folder, tmp_path / "model", other_rope)
    report = tmp_path / "report"
    wrong = MIModel.from_pretrained(tmp_path / "model")
    found = llama.bisect(PROMPT, ["ort-cpu"], other=wrong, folder=report)
    ran = subprocess.run([sys.executable, report / "reproduce.py"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "found.npz: largest difference 0" in ran.stdout
    assert f"expected.npz: largest difference {found.max_abs:.3g}" in ran.stdout
    onnx.checker.check_model(report / "model.onnx")
    assert str(found.value) in (report / "README.md").read_text()
    with pytest.raises(ModelError, match="exists already"):
        llama.bisect(PROMPT, ["ort-cpu"], other=wrong, folder=report)


def test_the_first_bits_that_differ_between_levels_are_found(llama, tmp_path):
    """ONNX Runtime fuses nothing at level none: some node gives other last bits, on the same inputs, and is written."""
    report = tmp_path / "report"
    found = llama.bisect(PROMPT, ["ort-cpu", "reference"], tolerance=0, folder=report)
    assert found.nodes
    assert 0 < found.relative < 5e-5
    ran = subprocess.run([sys.executable, report / "reproduce.py"], capture_output=True, text=True)
    lines = ran.stdout.splitlines()
    onnxruntimes, references = ([line for line in lines if line.startswith(name)] for name in ("onnxr", "onnx."))
    assert "expected.npz: largest difference 0" in "".join(onnxruntimes)
    assert "found.npz: largest difference 0" in "".join(references)


def test_a_spec_is_in_force_in_both(llama):
    spec = HookSpec().intervene("blocks.1.hook_resid_post", Intervention.Scale(3.0))
    assert llama.bisect(PROMPT, ["ort-cpu", "ort-cpu:none"], spec=spec).hook is None
    text = json.dumps(llama.bisect(PROMPT, ["ort-cpu", "ort-cpu:none"], spec=spec).to_dict())
    assert "ort-cpu:none" in text


def test_runtimes_that_agree_have_no_such_part(llama):
    found = llama.bisect(PROMPT, ["ort-cpu", "reference"])
    assert found.hook is None
    assert found.largest[0] < 5e-5


def test_torch_runs_no_part_of_a_graph(llama):
    with pytest.raises(InputError, match="as a whole"):
        llama.bisect(PROMPT, ["ort-cpu", "torch"])
