"""Runtimes beside one another: where they agree, and that a planted fault is found where it was planted."""

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import REPOSITORY

from mionnx import HookSpec, InputError, Intervention, MIModel, SpecFileError
from mionnx.verify.difference import Difference, ulp_distance

PROMPT = "The capital of France is"
TOLERANCE = 5e-5
WEIGHT = "model.layers.2.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def llama() -> MIModel:
    return MIModel.from_pretrained(REPOSITORY / "models" / "world-llama")


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> MIModel:
    """world-llama, one neuron of layer 2's MLP reading half as much again."""
    folder = tmp_path_factory.mktemp("faulty") / "model"
    shutil.copytree(REPOSITORY / "models" / "world-llama", folder)
    graph = onnx.load(folder / "model.onnx", load_external_data=False)
    tensor = next(tensor for tensor in graph.graph.initializer if tensor.name == WEIGHT)
    entry = {item.key: item.value for item in tensor.external_data}
    data = np.memmap(folder / entry["location"], np.float32, "r+", int(entry["offset"]), tuple(tensor.dims))
    data[7] *= np.float32(1.5)
    data.flush()
    return MIModel.from_pretrained(folder)


@pytest.mark.parametrize("name", ["world-llama", "world-gpt2"])
def test_the_runtimes_that_are_here_agree(name):
    model = MIModel.from_pretrained(REPOSITORY / "models" / name)
    titles = ["ort-cpu", "ort-cpu:none", "ort-cpu:threads=1", "torch", "openvino", "reference", "ort-cuda"]
    found = model.verify([PROMPT], titles, greedy=2)
    assert found.agrees
    assert {beside.title for beside in found.besides} | {*found.skipped} == {*titles[1:]}
    assert "onnxruntime-gpu" in found.skipped["ort-cuda"]
    for beside in found.besides:
        assert beside.worst.relative < TOLERANCE
        assert beside.fault is None
        assert beside.greedy == 1


def test_a_recurrent_model_agrees_at_every_level():
    model = MIModel.from_pretrained(REPOSITORY / "models" / "world-rwkv7")
    found = model.verify([PROMPT], ["ort-cpu", "ort-cpu:none", "reference", "torch"], greedy=2)
    assert found.agrees
    assert [*found.skipped] == ["reference", "torch"]


def test_a_spec_is_in_force_in_torch_too(llama):
    direction = np.linspace(-1, 1, llama.hidden_size, dtype=np.float32)
    spec = HookSpec().intervene("blocks.1.hook_resid_post", Intervention.Add(direction, positions=-1))
    spec.intervene("blocks.2.attn.hook_z", Intervention.Zero(heads=3))
    found = llama.verify([PROMPT], ["torch", "ort-cpu"], spec=spec, greedy=0)
    assert found.agrees
    assert not llama.verify([PROMPT], ["ort-cpu"], spec=spec, other=llama, greedy=0).besides[0].worst.max_abs


def test_a_perturbed_weight_is_found_at_its_node(llama, faulty):
    found = llama.verify([PROMPT], ["ort-cpu"], other=faulty)
    (beside,) = found.besides
    assert not found.agrees
    assert beside.fault.hook == "blocks.2.hook_resid_post"
    readers = {node.name for node in llama.hooked.proto.graph.node if WEIGHT in node.input}
    assert {node.split(" ")[0] for node in beside.fault.nodes} == readers
    assert all(row.identical for row in beside.rows if row.name.startswith(("blocks.0", "blocks.1")))


def test_a_recorded_run_is_compared_with(llama, faulty, tmp_path):
    path = tmp_path / "run.safetensors"
    llama.verify([PROMPT], ["ort-cpu"], record=path)
    again = llama.verify((), ["ort-cpu"], against=path)
    assert again.agrees
    assert not again.notes
    assert all(row.identical for row in again.besides[0].rows)
    other = faulty.verify((), ["ort-cpu"], against=path)
    assert not other.agrees
    assert "another weights" in " ".join(other.notes)
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(SpecFileError, match="damaged"):
        llama.verify((), ["ort-cpu"], against=path)


def test_what_is_repeated_says_which_bits_are_the_same(llama):
    found = llama.verify([PROMPT], ["ort-cpu"], repeat=True, greedy=0).repeats
    assert [one.what for one in found] == ["the same run twice", "1 thread and all", "row alone and in a batch"]
    assert found[0].identical


@pytest.mark.parametrize(
    ("titles", "message"),
    [(["ort-gpu"], "did you mean"), (["ort-cpu:al"], "no setting"), (["ort-cpu", "ort-cpu"], "twice"), ([], "a list")],
)
def test_bad_runtimes_are_refused(llama, titles, message):
    with pytest.raises(InputError, match=message):
        llama.verify([PROMPT], titles)


def test_differences_are_numpys():
    rng = np.random.default_rng(0)
    one = rng.normal(size=(3, 5)).astype(np.float32)
    other = np.nextafter(one, np.float32(np.inf))
    found = Difference()
    found.add(one, other)
    assert found.max_abs == np.abs(one.astype(float) - other).max()
    assert found.max_ulp == found.mean_ulp == 1
    assert ulp_distance(np.float32([1e-45]), np.float32([-1e-45])) == 2


def test_the_page_shows_a_curve_a_runtime(llama, faulty, chromium, tmp_path):
    found = llama.verify([PROMPT], ["ort-cpu", "ort-cpu:none"], other=faulty, repeat=True)
    page = chromium(found.save(tmp_path / "verify.html"))
    assert not page.troubles
    assert page.locator("svg path:not(.local)").count() == len(found.besides)
    page.locator("#curves").hover()
    assert "blocks." in page.locator("#tip").inner_text()
    assert found.besides[-1].fault.nodes[0] in page.locator("#notes").inner_text()
    found.save(tmp_path / "verify.png")
    assert json.loads(Path(found.save(tmp_path / "verify.json")).read_text())["agrees"] is False
