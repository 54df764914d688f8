"""Runtimes beside one another: where they agree, and that a planted fault is found where it was planted."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from families import make_checkpoint
from faults import half_layer, longer_window, other_gelu, other_rope, perturbed_weight, plant
from repository import REPOSITORY
from safetensors.numpy import load_file

from exporters.transformers import export
from mionnx import HookError, HookSpec, InputError, Intervention, MIModel, ModelError, SpecFileError, StateKnockoutSpec
from mionnx.engine.openvino import OpenVino
from mionnx.verify.difference import Difference, ulp_distance
from mionnx.verify.recorded_values import RecordedValues

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
    return MIModel.from_pretrained(folder, check="none")


@pytest.fixture
def browser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """No runtime, or onnxruntime-web in Node."""
    if request.param:
        monkeypatch.setenv("MIONNX_NODE", str(request.getfixturevalue("web")))
    return request.param


with_and_without_web = pytest.mark.parametrize(
    "browser",
    [pytest.param([], id="native"), pytest.param(["onnxruntime-web"], id="web", marks=pytest.mark.slow)],
    indirect=True,
)


@with_and_without_web
@pytest.mark.parametrize(
    "name", ["world-llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("world-gpt2", "world-rwkv7"))]
)
@pytest.mark.slow
def test_the_runtimes_that_are_here_agree(name, browser):
    model = MIModel.from_pretrained(REPOSITORY / "models" / name)
    others = [f"ort-cpu:{level}" for level in ("none", "basic", "extended", "threads=1")]
    others += ["torch", "openvino", *browser, "reference", "TensorrtExecutionProvider"]
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


@with_and_without_web
def test_every_family_agrees_in_every_runtime(models, checkpoint, family, browser):
    ids = np.random.default_rng(0).integers(3, 100, (1, 12))
    runtimes = ["torch", "ort-cpu", "ort-cpu:none", "openvino", *browser, "reference"]
    if family == "mixtral":  # OpenVINO's frontend refuses a Scan without scanned outputs, which the experts are
        runtimes.remove("openvino")
    found = models(family).verify([ids], runtimes, checkpoint=checkpoint(family), local=False, greedy=0)
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
    wrong = MIModel.from_pretrained(tmp_path / "model", check="none")
    found = wrong.verify([ids], ["torch", "ort-cpu"], checkpoint=checkpoint(family), greedy=0)
    assert not found.agrees
    fault = found.besides[0].fault
    assert fault.hook == hook
    assert node in {name.split(" ")[0] for name in fault.nodes}
    assert len(fault.nodes) < 0.4 * len(wrong.hooked.proto.graph.node)


def test_a_spec_is_in_force_in_torch_too(llama, tmp_path):
    direction = np.linspace(-1, 1, llama.hidden_size, dtype=np.float32)
    spec = HookSpec().intervene("blocks.1.hook_resid_post", Intervention.Add(direction, positions=-1))
    spec.intervene("blocks.2.attn.hook_z", Intervention.Zero(heads=3))
    found = llama.verify([PROMPT], ["torch", "ort-cpu"], hooks=spec, greedy=0, record=tmp_path / "run.safetensors")
    assert found.agrees
    recorded = load_file(tmp_path / "run.safetensors")["0.hook_logits"]
    steered, plain = (llama.forward(PROMPT, hooks).output() for hooks in (spec, None))
    assert np.abs(recorded - steered).max() < TOLERANCE * np.abs(steered).max()
    assert np.abs(recorded - plain).max() > 0.1
    assert found.hashes["graph"] != llama.verify([PROMPT], ["ort-cpu", "ort-cpu:none"], greedy=0).hashes["graph"]


def test_a_glob_and_a_predicate_are_in_force_in_torch_too(llama, tmp_path):
    glob = HookSpec().intervene("blocks.*.attn.hook_z", Intervention.Zero(heads=3))
    found = llama.verify([PROMPT], ["torch", "ort-cpu"], hooks=glob, greedy=0, record=tmp_path / "run.safetensors")
    assert found.agrees
    assert "4 interventions" in found.title
    recorded = load_file(tmp_path / "run.safetensors")["0.hook_logits"]
    ablated, plain = (llama.forward(PROMPT, hooks).output() for hooks in (glob, None))
    assert np.abs(recorded - ablated).max() < TOLERANCE * np.abs(ablated).max()
    assert np.abs(recorded - plain).max() > 0.1
    predicate = HookSpec().intervene(lambda name: name.endswith("hook_z"), Intervention.Zero(heads=3))
    again = llama.verify([PROMPT], ["ort-cpu"], hooks=predicate, greedy=0, against=tmp_path / "run.safetensors")
    assert again.agrees
    assert again.hashes["spec"] == found.hashes["spec"]


def test_a_splice_is_compared_where_it_can_run(llama):
    """Values inside a splice are its own; torch, which cannot run it, is left out and named."""
    halved = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 23]>'
        "f (float[b, s, 128] x) => (float[b, s, 128] y) <float half = {0.5}>"
        "{ hook_in = Mul(x, half)  y = Add(hook_in, x) }"
    )
    spec = HookSpec().intervene("blocks.1.hook_resid_post", Intervention.Splice(halved))
    found = llama.verify([PROMPT], ["ort-cpu", "torch", "reference"], hooks=spec, greedy=2)
    assert found.agrees
    assert "splice" in found.skipped["torch"]
    names = [row.name for row in found.besides[0].rows]
    assert "blocks.1.hook_resid_post" in names
    assert not any("hook_in" in name for name in names)
    with pytest.raises(HookError, match="whole values"):
        llama.verify([PROMPT], points="blocks.1.hook_resid_post.hook_in", hooks=spec)


@pytest.mark.slow
def test_state_interventions_are_in_force(rwkv):
    model, ids = rwkv("6-pth"), np.arange(5, 17)[None]
    spec = HookSpec().set_state_knockout(StateKnockoutSpec().position(3).decay())
    found = model.verify([ids], ["ort-cpu", "ort-cpu:none", "openvino"], hooks=spec, greedy=2, repeat=True)
    assert found.agrees, found.failed
    assert np.abs(model.forward(ids, spec).output() - model.forward(ids).output()).max() > 1e-3


@pytest.mark.slow
def test_what_is_made_for_the_prompt_alone_is_not_continued(llama):
    ids = llama.tokenize(PROMPT).ids
    late = HookSpec().intervene("blocks.1.hook_resid_post", Intervention.Scale(2.0, positions="generated"))
    found = llama.verify([PROMPT], ["ort-cpu", "ort-cpu:none"], hooks=late, greedy=3, repeat=True)
    assert found.besides[0].greedy == 1
    assert not found.notes
    assert len(found.repeats) == 6
    held = llama.forward(ids, HookSpec().capture("blocks.1.hook_resid_post"))["resid_post", 1]
    whole = HookSpec().intervene("blocks.1.hook_resid_post", Intervention.Replace(held, rows=[0]))
    found = llama.verify([PROMPT], ["ort-cpu", "ort-cpu:none"], hooks=whole, greedy=0, repeat=True)
    assert found.agrees


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


@pytest.mark.slow
def test_a_recorded_run_says_what_is_another_here(llama, tmp_path):
    path = tmp_path / "run.safetensors"
    llama.verify([PROMPT], ["ort-cpu"], record=path, greedy=2)
    some = llama.verify((), ["ort-cpu"], against=path, points="blocks.*.hook_resid_post")
    assert some.notes == ["2 tokens were chosen after each prompt when it was recorded, and are here"]
    steered = HookSpec().intervene("blocks.1.hook_resid_post", Intervention.Scale(2.0))
    notes = " ".join(llama.verify((), ["ort-cpu"], against=path, hooks=steered, greedy=2).notes)
    assert "another graph" in notes
    assert "another spec" in notes
    with pytest.raises(HookError, match="was not recorded"):
        llama.verify((), ["ort-cpu"], against=path, hooks=HookSpec().capture("blocks.0.attn.hook_q"))
    tape = RecordedValues.open(path)
    elsewhere = {**tape.facts, "environment": {**tape.facts["environment"], "processor": "another"}}
    elsewhere["environment"]["versions"] = {**elsewhere["environment"]["versions"], "onnxruntime": "1.0"}
    tape.facts = {}
    copy = RecordedValues(tmp_path / "values")
    for name in elsewhere["names"]:
        copy.add(0, name, tape.get(0, name))
    copy.keep(tmp_path / "elsewhere.safetensors", elsewhere)
    notes = " ".join(llama.verify((), ["ort-cpu"], against=tmp_path / "elsewhere.safetensors", greedy=2).notes)
    assert "another processor" in notes
    assert "onnxruntime 1.0" in notes


@pytest.mark.parametrize("change", [(b"blocks.0.hook_resid_mid", b"blocks.0.hook_resid_xyz"), (b"[[[", b"[[9")])
def test_a_recorded_run_with_another_header_is_refused(llama, tmp_path, change):
    path = tmp_path / "run.safetensors"
    llama.verify([[5, 6, 7]], ["ort-cpu"], record=path, greedy=0)
    data = path.read_bytes()
    assert change[0] in data
    path.write_bytes(data.replace(*change, 1))
    with pytest.raises(SpecFileError):
        llama.verify((), ["ort-cpu"], against=path)


def test_nan_is_no_agreement(llama, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(llama.hooked.folder, folder)
    proto = onnx.load(folder / "model.onnx", load_external_data=False)
    tensor = next(tensor for tensor in proto.graph.initializer if tensor.name.endswith("2.mlp.up_proj.weight"))
    entry = {item.key: item.value for item in tensor.external_data}
    data = np.memmap(folder / entry["location"], np.float32, "r+", int(entry["offset"]), tuple(tensor.dims))
    data[3] = np.nan
    data.flush()
    found = MIModel.from_pretrained(folder, check="none").verify(
        [PROMPT], ["ort-cpu", "ort-cpu:none"], greedy=0, repeat=True
    )
    assert not found.agrees
    assert found.besides[0].trouble(found.tolerance).startswith("blocks.2.hook_resid_post has NaN")
    assert found.repeats[0].identical


def test_differences_that_add_up_are_said_to(llama):
    found = llama.verify([PROMPT], ["ort-cpu", "reference"], greedy=0)
    least = max(row.local for row in found.besides[0].rows)
    assert least < found.besides[0].worst.relative
    strict = llama.verify([PROMPT], ["ort-cpu", "reference"], greedy=0, tolerance=least)
    assert not strict.agrees
    assert "add up" in strict.besides[0].trouble(least)


@pytest.mark.slow
def test_masked_scores_of_half_precision_say_nothing(checkpoint, models, tmp_path):
    export(checkpoint("llama"), tmp_path / "half", "float16")
    half = MIModel.from_pretrained(tmp_path / "half")
    ids = np.random.default_rng(0).integers(3, 100, (1, 12))
    found = models("llama").verify([ids], ["ort-cpu"], other=half, points="*", greedy=0)
    assert found.agrees
    scores = [row for row in found.besides[0].rows if row.name.endswith("hook_scores")]
    assert all(row.scale < 1000 for row in scores)


def test_a_provider_that_runs_nothing_does_not_agree(llama):
    found = llama.verify([PROMPT], ["ort-cpu", "AzureExecutionProvider"], greedy=0)
    assert "takes no part of this model" in found.failed["AzureExecutionProvider"]


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
@pytest.mark.slow
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
    assert 1 <= beside.worst.mean_ulp < 256  # numbers near 0 are many units off; how many is the CPU's: 20 to 110
    own = half.verify([ids], ["torch", runtime], checkpoint=checkpoint("llama"), greedy=0)
    assert own.agrees
    assert not own.skipped


@pytest.mark.slow
def test_a_provider_without_kernels_for_a_dtype_is_said_to_fail(checkpoint, tmp_path):
    export(checkpoint("llama"), tmp_path / "half", "bfloat16")
    ids = np.random.default_rng(0).integers(3, 100, (1, 12))
    half = MIModel.from_pretrained(tmp_path / "half")
    found = half.verify([ids], ["openvino", "ort-cpu"], greedy=0)
    assert "Could not find an implementation" in found.failed["ort-cpu"]


def test_a_runtime_that_fails_takes_nothing_from_the_others(llama, monkeypatch):
    def fails(*_: object, **__: object) -> None:
        raise ModelError("out of order")

    monkeypatch.setattr(OpenVino, "open", fails)
    found = llama.verify([PROMPT], ["ort-cpu", "openvino", "ort-cpu:none"], greedy=0)
    assert [beside.title for beside in found.besides] == ["ort-cpu:none"]
    assert found.failed == {"openvino": "out of order"}
    assert not found.agrees
    assert "openvino FAILED" in found.summary()


def test_torch_has_no_value_at_a_derived_hook_point(llama):
    found = llama.verify([PROMPT], ["ort-cpu", "torch"], points="blocks.1.attn.hook_result", greedy=0)
    assert "no value at blocks.1.attn.hook_result" in found.failed["torch"]


@pytest.mark.parametrize(
    ("titles", "message"),
    [
        (["ort-gpu"], "did you mean"),
        (["ort-cpu:al"], "no setting"),
        (["ort-cpu", "ort-cpu"], "twice"),
        ([], "a list"),
        (["ort-cpu:none:all"], "another setting"),
        (["TensorRTExecutionProvider"], "did you mean 'TensorrtExecutionProvider'"),
    ],
)
def test_bad_runtimes_are_refused(llama, titles, message):
    with pytest.raises(InputError, match=message):
        llama.verify([PROMPT], titles)


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        ({"positions": []}, InputError, "at least one"),
        ({"positions": [1.5]}, InputError, "integers"),
        ({"positions": 2}, InputError, "list"),
        ({"positions": [9]}, InputError, "5 tokens"),
        ({"checkpoint": "."}, InputError, "for torch"),
        ({"points": "blocks.*.attn.hook_result"}, HookError, "full names"),
        ({"tolerance": float("nan")}, InputError, "tolerance"),
        ({"record": "/nowhere/at/all.safetensors"}, SpecFileError, "no folder"),
        ({"against": ""}, SpecFileError, "no recorded run"),
        ({"greedy": -1}, InputError, "greedy must be 0 or above"),
    ],
)
def test_what_would_have_no_effect_is_refused(llama, asked, error, message):
    with pytest.raises(error, match=message):
        llama.verify([PROMPT], ["ort-cpu", "ort-cpu:none"], **asked)


def test_differences_are_numpys():
    rng = np.random.default_rng(0)
    one = rng.normal(size=(3, 5)).astype(np.float32)
    other = np.nextafter(one, np.float32(np.inf))
    found = Difference()
    found.add(one, other)
    assert found.max_abs == np.abs(one.astype(float) - other).max()
    assert found.max_ulp == found.at("x", None).mean_ulp == 1
    assert ulp_distance(np.float32([1e-45]), np.float32([-1e-45])) == 2
    assert ulp_distance(np.float32([1]), np.float32([1.0078125]), "bfloat16") == 1


@pytest.mark.slow
def test_the_page_shows_a_curve_a_runtime(llama, faulty, chromium, tmp_path):
    found = llama.verify([PROMPT], ["ort-cpu", "ort-cpu:none"], other=faulty, repeat=True)
    page = chromium(found.save(tmp_path / "verify.html"))
    assert not page.troubles
    assert page.locator("svg path:not(.dotted)").count() == len(found.besides)
    page.locator("svg").hover()
    assert "blocks." in page.locator("#tip").inner_text()
    assert found.besides[-1].fault.nodes[0] in page.locator("td.fault").all_inner_texts()[-1]
    found.save(tmp_path / "verify.png")
    assert json.loads(Path(found.save(tmp_path / "verify.json")).read_text())["agrees"] is False


MEMORY = """
import resource, sys
import numpy as np
from mionnx import HookSpec, MIModel
from mionnx.inputs.token_batch import make_token_batch
from mionnx.verify.graph_under_test import GraphUnderTest
from mionnx.verify.runtimes import runtime_of

model = MIModel.from_pretrained(sys.argv[1])
ids = np.random.default_rng(0).integers(3, 100, (1, 640))
if sys.argv[2] == "alone":
    call = make_token_batch(ids, None, None, model.hooked)
    subject = GraphUnderTest(model.hooked, HookSpec(), ["hook_logits"], [call])
    with runtime_of("ort-cpu:none").passes(subject, ["hook_logits"]) as run:
        run(call, lambda name, value: None)
    compared = 0
else:
    found = model.verify([ids], ["ort-cpu", "ort-cpu:none"], points="*", greedy=0)
    assert found.agrees
    compared = len(found.besides[0].rows)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, compared)
"""


@pytest.mark.slow
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


def test_two_models_are_compared_in_one_runtime_unless_others_are_named(llama):
    alone = llama.verify(PROMPT, greedy=0, local=False, other=llama)
    assert len(alone.besides) == 1
    named = llama.verify(PROMPT, ("ort-cpu", "ort-cpu:none", "reference"), greedy=0, local=False, other=llama)
    assert len(named.besides) > 1
