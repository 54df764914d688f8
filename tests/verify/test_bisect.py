"""`bisect` returns the node at which a fault was planted, and a model that shows it alone."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
from faults import half_layer, longer_window, other_gelu, other_rope, perturbed_weight, plant
from repository import REPOSITORY

from exporters.transformers import export
from mionnx import HookSpec, InputError, Intervention, MIModel, ModelError
from mionnx.graph.weight_value import weight_numbers

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
    wrong = MIModel.from_pretrained(tmp_path / "model", check="none")
    ids = np.random.default_rng(0).integers(3, 100, (1, 24))
    found = models(family).bisect(ids, [runtime], other=wrong)
    assert found.hook == hook
    assert node in {name.split(" ")[0] for name in found.nodes}
    assert len(found.nodes) <= most


def reproduced(report: Path) -> dict[str, float]:
    """What the report's program prints: "side and file" -> largest difference."""
    ran = subprocess.run([sys.executable, report / "reproduce.py"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    lines = [line.split(": largest difference ") for line in ran.stdout.splitlines()]
    return {what: float(apart) for what, apart in lines}


def test_the_report_shows_the_fault_alone(llama, tmp_path):
    plant(llama.hooked.folder, tmp_path / "model", other_rope)
    report = tmp_path / "report"
    wrong = MIModel.from_pretrained(tmp_path / "model", check="none")
    found = llama.bisect(PROMPT, ["ort-cpu"], other=wrong, folder=report)
    shown = reproduced(report)
    this, other = "ort-cpu, this model", "ort-cpu, other model"
    assert shown[f"{this} and expected.npz"] == shown[f"{other} and found.npz"] == 0
    assert shown[f"{other} and expected.npz"] == pytest.approx(found.max_abs, rel=1e-2)
    onnx.checker.check_model(report / "model.onnx")
    assert str(found.value) in (report / "README.md").read_text()
    with pytest.raises(ModelError, match="exists already"):
        llama.bisect(PROMPT, ["ort-cpu"], other=wrong, folder=report)


@pytest.mark.parametrize("runtimes", [["ort-cpu:threads=1", "reference"], ["openvino", "ort-cpu:none"]])
def test_the_first_bits_that_differ_are_found(llama, tmp_path, runtimes):
    """Some node gives other last bits on the same inputs, and the report runs both runtimes as they were compared."""
    found = llama.bisect(PROMPT, runtimes, tolerance=0, folder=tmp_path / "report")
    assert found.nodes
    assert 0 < found.relative < 5e-5
    shown = reproduced(tmp_path / "report")
    assert shown[f"{runtimes[0]} and expected.npz"] == shown[f"{runtimes[1]} and found.npz"] == 0
    assert shown[f"{runtimes[0]} and found.npz"] > 0


@pytest.mark.slow
def test_a_report_of_two_dtypes_runs(checkpoint, models, tmp_path):
    export(checkpoint("llama"), tmp_path / "half", "float16")
    half = MIModel.from_pretrained(tmp_path / "half")
    ids = np.random.default_rng(0).integers(3, 100, (1, 12))
    models("llama").bisect(ids, ["ort-cpu"], other=half, tolerance=1e-4, folder=tmp_path / "report")
    shown = reproduced(tmp_path / "report")
    assert shown["ort-cpu, this model and expected.npz"] == shown["ort-cpu, other model and found.npz"] == 0


def test_a_spec_is_in_force_in_both(llama, tmp_path):
    """A fault before a value that is replaced cannot be seen; the same without the spec is found."""
    plant(llama.hooked.folder, tmp_path / "model", perturbed_weight)
    wrong = MIModel.from_pretrained(tmp_path / "model", check="none")
    spec = HookSpec().intervene("blocks.1.hook_resid_post", Intervention.Zero())
    assert llama.bisect(PROMPT, ["ort-cpu"], other=wrong, hooks=spec).hook is None
    found = llama.bisect(PROMPT, ["ort-cpu"], other=wrong)
    assert found.hook == "blocks.1.hook_resid_post"
    assert "ort-cpu" in json.dumps(found.to_dict())


def test_runtimes_that_agree_have_no_such_part(llama):
    found = llama.bisect(PROMPT, ["ort-cpu", "reference"])
    assert found.hook is None
    assert found.largest[0] < 5e-5


def test_torch_runs_no_part_of_a_graph(llama):
    with pytest.raises(InputError, match="as a whole"):
        llama.bisect(PROMPT, ["ort-cpu", "torch"])


@pytest.fixture(scope="module")
def blocks(llama, tmp_path_factory):
    """Settings -> world-llama in blocks of 4 bits, its token table in floats."""

    @cache
    def find(**settings) -> MIModel:
        folder = tmp_path_factory.mktemp("blocks") / "made"
        return MIModel.from_pretrained(llama.quantise(folder, embedding=False, **settings), threads=1)

    return find


@pytest.mark.slow
def test_blocks_and_their_floats_part_at_the_first_product_in_blocks(llama, blocks, tmp_path):
    """From either side; the report runs both models."""
    made = blocks(keep=("*layers.[013]*", "*self_attn*", "*gate_proj*", "*up_proj*", "lm_head*"))
    for one, other in ((llama, made), (made, llama)):
        found = one.bisect(PROMPT, ["ort-cpu"], other=other)
        assert found.value == "blocks.2.mlp.hook_post"
        operators = [node.split(" ")[1] for node in found.nodes]
        assert operators == (["(MatMulNBits)"] if other is made else ["(Transpose)", "(MatMul)"])
    found = llama.bisect(PROMPT, ["ort-cpu"], other=made, folder=tmp_path / "report")
    shown = reproduced(tmp_path / "report")
    assert shown["ort-cpu, this model and expected.npz"] == shown["ort-cpu, other model and found.npz"] == 0
    assert shown["ort-cpu, other model and expected.npz"] == pytest.approx(found.max_abs, rel=1e-2)
    assert llama.bisect(PROMPT, ["ort-cpu"], other=made, tolerance=0.5).hook is None


@pytest.mark.slow
def test_two_models_of_blocks_part_where_their_bits_do(llama, blocks):
    """By what numpy makes of the two matrices' numbers."""
    name = "model.layers.2.mlp.down_proj.weight"
    one, other = blocks(), blocks(in_8_bits=(name,))
    found = one.bisect(PROMPT, ["ort-cpu"], other=other)
    assert (found.value, found.after) == ("blocks.2.mlp.hook_post", ["blocks.2.mlp.hook_act"])
    assert [node.split(" ")[1] for node in found.nodes] == ["(MatMulNBits)"]
    act = one.forward(PROMPT, HookSpec().capture("blocks.2.mlp.hook_act"))["blocks.2.mlp.hook_act"].astype(np.float64)
    here, there = (weight_numbers(each.hooked.proto, each.hooked.folder, f"{name}_blocks") for each in (one, other))
    assert found.max_abs == pytest.approx(np.abs(act @ (here - there).T).max(), rel=1e-4)
    assert one.bisect(PROMPT, ["ort-cpu"], other=one).hook is None
