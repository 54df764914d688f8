"""Runtimes beside one another: where they agree, and that a planted fault is found where it was planted."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import REPOSITORY
from families import make_checkpoint
from faults import half_layer, longer_window, other_gelu, other_rope, perturbed_weight, plant

from exporters.transformers import export
from mionnx import HookSpec, InputError, Intervention, MIModel, ModelError, SpecFileError
from mionnx.verify.difference import Difference, ulp_distance
from mionnx.verify.openvino import OpenVino

PROMPT = "The capital of France is"
TOLERANCE = 5e-5


@pytest.fixture(scope="module")
def llama() -> MIModel:
    return MIModel.from_pretrained(REPOSITORY / "models" / "world-llama")


@pytest.fixture(scope="module")
def faulty(llama, tmp_path_factory: pytest.TempPathFactory) -> MIModel:
    """world-llama, one neuron of layer 1's MLP reading half as much again."""
    folder = tmp_path_factory.mktemp("faulty") / "model"
    plant(llama.hooked.folder, folder, perturbed_weight)
    return MIModel.from_pretrained(folder)


@pytest.mark.parametrize("name", ["world-llama", "world-gpt2", "world-rwkv7"])
def test_the_runtimes_that_are_here_agree(name, web, monkeypatch):
    monkeypatch.setenv("MIONNX_NODE", str(web))
    model = MIModel.from_pretrained(REPOSITORY / "models" / name)
    others = [f"ort-cpu:{level}" for level in ("none", "basic", "extended", "threads=1")]
    others += ["torch", "openvino", "onnxruntime-web", "reference", "TensorrtExecutionProvider"]
    found = model.verify([PROMPT], ["ort-cpu", *others], greedy=1)
    assert found.agrees
    assert not found.failed
    assert {beside.title for beside in found.besides} | {*found.skipped} == {*others}
    recurrent = {"torch", "reference"} if name == "world-rwkv7" else set()
    assert {*found.skipped} == {"TensorrtExecutionProvider", *recurrent}
    assert "a build of ONNX Runtime that has this provider" in found.skipped["TensorrtExecutionProvider"]
    for beside in found.besides:
        assert beside.worst.relative < TOLERANCE
        assert beside.fault is None
        assert beside.greedy == 1
        assert beside.logits["top_1"] == 1


def test_every_family_agrees_in_every_runtime(models, checkpoint, family):
    ids = np.random.default_rng(0).integers(3, 100, (1, 12))
    runtimes = ["torch", "ort-cpu", "openvino", "reference"]
    found = models(family).verify([ids], runtimes, checkpoint=checkpoint(family), local=False, greedy=2)
    assert found.agrees, found.summary()
    assert not found.skipped
    assert all(beside.worst.max_abs < TOLERANCE * max(1.0, beside.worst.scale) for beside in found.besides)


@pytest.mark.parametrize(
    ("family", "fault"),
    [
        ("llama", perturbed_weight),
        ("gpt_neox", other_gelu),
        ("gemma2", other_gelu),
        ("mistral", longer_window),
        ("llama", other_rope),
        ("qwen3", half_layer),
    ],
)
def test_a_planted_fault_is_found_beside_torch(hooked, checkpoint, tmp_path, family, fault):
    node, hook = plant(hooked(family), tmp_path / "model", fault)
    ids = np.random.default_rng(0).integers(3, 100, (1, 24))
    wrong = MIModel.from_pretrained(tmp_path / "model")
    found = wrong.verify([ids], ["torch", "ort-cpu"], checkpoint=checkpoint(family), greedy=0)
    assert not found.agrees
    fault = found.besides[0].fault
    assert fault.hook == hook
    assert node in {name.split(" ")[0] for name in fault.nodes}


def test_a_spec_is_in_force_in_torch_too(llama):
    direction = np.linspace(-1, 1, llama.hidden_size, dtype=np.float32)
    spec = HookSpec().intervene("blocks.1.hook_resid_post", Intervention.Add(direction, positions=-1))
    spec.intervene("blocks.2.attn.hook_z", Intervention.Zero(heads=3))
    found = llama.verify([PROMPT], ["torch", "ort-cpu"], spec=spec, greedy=0)
    assert found.agrees
    assert not llama.verify([PROMPT], ["ort-cpu"], spec=spec, other=llama, greedy=0).besides[0].worst.max_abs


def test_a_fault_beside_the_right_model_is_narrowed_to_its_node(llama, faulty):
    found = llama.verify([PROMPT], ["ort-cpu"], other=faulty)
    (beside,) = found.besides
    assert not found.agrees
    assert beside.fault.hook == "blocks.1.hook_resid_post"
    weight = "model.layers.1.mlp.up_proj.weight"
    readers = {node.name for node in llama.hooked.proto.graph.node if weight in node.input}
    assert {node.split(" ")[0] for node in beside.fault.nodes} == readers
    assert all(row.identical for row in beside.rows if row.name.startswith("blocks.0"))


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
    found = {one.what: one for one in llama.verify([PROMPT], ["ort-cpu"], repeat=True, greedy=0).repeats}
    names = [f"blocks.{layer}.hook_resid_{at}" for layer in range(4) for at in ("pre", "mid", "post")]
    ids = llama.tokenize(PROMPT).ids[None]
    here = llama.forward(ids, HookSpec().capture("blocks.*.hook_resid_*"))
    again = llama.forward(ids, HookSpec().capture("blocks.*.hook_resid_*"))
    alone = MIModel.from_pretrained(llama.hooked.folder, threads=1).forward(
        ids, HookSpec().capture("blocks.*.hook_resid_*")
    )
    both = llama.forward(np.concatenate([ids, ids[:, ::-1]]), HookSpec().capture("blocks.*.hook_resid_*"))
    for what, other in (("the same run twice", again), ("1 thread and all", alone), ("row alone and in a batch", both)):
        same = [np.array_equal(here[name][0], other[name][0]) for name in names]
        same.append(np.array_equal(here.output()[0], other.output()[0]))
        assert found[what].identical == all(same), what
        first = None if all(same) else [*names, "hook_logits"][same.index(False)]
        assert found[what].first == first
    assert found["the same run twice"].identical


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_dtypes_are_compared(checkpoint, models, tmp_path, dtype):
    export(checkpoint("llama"), tmp_path / dtype, dtype)
    half = MIModel.from_pretrained(tmp_path / dtype)
    ids = np.random.default_rng(0).integers(3, 100, (1, 12))
    runtime = {"float16": "ort-cpu", "bfloat16": "openvino"}[dtype]
    found = models("llama").verify([ids], [runtime], other=half, greedy=0)
    (beside,) = found.besides
    unit = {"float16": 2**-11, "bfloat16": 2**-8}[dtype]
    assert found.agrees
    assert unit / 8 < beside.worst.relative < 8 * unit  # it was computed in that dtype, and not much worse
    assert 1 <= beside.worst.mean_ulp < 64
    own = half.verify([ids], ["torch", runtime], checkpoint=checkpoint("llama"), greedy=0)
    assert own.agrees
    assert not own.skipped


def test_a_provider_without_kernels_for_a_dtype_is_said_to_fail(checkpoint, tmp_path):
    export(checkpoint("llama"), tmp_path / "half", "bfloat16")
    ids = np.random.default_rng(0).integers(3, 100, (1, 12))
    half = MIModel.from_pretrained(tmp_path / "half")
    found = half.verify([ids], ["openvino", "ort-cpu"], greedy=0)
    assert "Could not find an implementation" in found.failed["ort-cpu"]


def test_a_runtime_that_fails_takes_nothing_from_the_others(llama, monkeypatch):
    def fails(*_: object) -> None:
        raise ModelError("out of order")

    monkeypatch.setattr(OpenVino, "opened", fails)
    found = llama.verify([PROMPT], ["ort-cpu", "openvino", "ort-cpu:none"], greedy=0)
    assert [beside.title for beside in found.besides] == ["ort-cpu:none"]
    assert found.failed == {"openvino": "out of order"}
    assert not found.agrees
    assert "openvino FAILED" in found.summary()


def test_torch_has_no_value_at_a_derived_hook_point(llama):
    found = llama.verify([PROMPT], ["ort-cpu", "torch"], hooks="blocks.1.attn.hook_result", greedy=0)
    assert "no value at blocks.1.attn.hook_result" in found.failed["torch"]


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
    assert ulp_distance(np.float32([1]), np.float32([1.0078125]), "bfloat16") == 1


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


MEMORY = """
import resource, sys
import numpy as np
from mionnx import HookSpec, MIModel
from mionnx.call import make_call
from mionnx.verify.named import runtime_of
from mionnx.verify.subject import Subject

model = MIModel.from_pretrained(sys.argv[1])
ids = np.random.default_rng(0).integers(3, 100, (1, 640))
if sys.argv[2] == "alone":
    call = make_call(ids, None, None, model.hooked.metadata.sizes)
    subject = Subject(model.hooked, HookSpec(), ["hook_logits"], [call])
    with runtime_of("ort-cpu:none").passes(subject, ["hook_logits"]) as run:
        run(call, lambda name, value: None)
    compared = 0
else:
    found = model.verify([ids], ["ort-cpu", "ort-cpu:none"], hooks="*", greedy=0)
    assert found.agrees
    compared = len(found.besides[0].rows)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, compared)
"""


def test_the_comparison_streams(tmp_path):
    """All values together take more than twice what one runtime takes, the comparison does not."""
    make_checkpoint("llama", tmp_path / "checkpoint", num_attention_heads=16, num_key_value_heads=16,
                    num_hidden_layers=4, max_position_embeddings=1024)  # fmt: skip
    export(tmp_path / "checkpoint", tmp_path / "hooked")
    alone, whole = (
        subprocess.run(
            [sys.executable, "-c", MEMORY, tmp_path / "hooked", what], check=True, capture_output=True, text=True
        ).stdout.split()
        for what in ("alone", "verify")
    )
    maps = 2 * 4 * 16 * 640 * 640 * 4 / 2**20  # MiB of all scores and patterns of one runtime
    assert int(whole[1]) > 60
    assert float(whole[0]) < 2 * float(alone[0])
    assert float(whole[0]) - float(alone[0]) < maps / 2
