"""A small ONNX model spliced in at a hook point: equal to numpy and to torch, in every kind of call."""

import json
import subprocess
import sys

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx.numpy_helper import from_array
from repository import SHARED

from mionnx import HookError, HookPoint, HookSpec, Intervention, InterventionError, MIModel, ModelError
from mionnx.graph.fragment import Fragment, written

PROMPT = "The capital of France is"
HOOK = "blocks.1.hook_resid_post"
WIDTH, FEATURES = 128, 48
TOLERANCE = 5e-5

AUTOENCODER = """<ir_version: 10, opset_import: ["": {opset}]>
autoencoder (float[batch, seq, {width}] x, float[{width}, {features}] W) => (float[batch, seq, {width}] y) {{
  Wt = Transpose<perm = [1, 0]>(W)
  pre = MatMul(x, W)
  hook_acts = Relu(pre)
  hook_unused = Neg(hook_acts)
  back = MatMul(hook_acts, Wt)
  y = Add(x, back)
}}"""


def autoencoder(seed: int = 0, width: int = WIDTH, opset: int = 23) -> tuple[Fragment, np.ndarray]:
    weight = np.random.default_rng(seed).normal(size=(width, FEATURES)).astype(np.float32) * 0.1
    return written(AUTOENCODER.format(width=width, features=FEATURES, opset=opset), {"W": weight}), weight


def encode(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return np.maximum(x @ weight, 0)


@pytest.fixture(scope="module")
def model() -> MIModel:
    return MIModel.from_pretrained("models/world-llama", threads=1)


def replaced(model: MIModel, value: np.ndarray, tokens=PROMPT, **limits) -> np.ndarray:
    """The logits where a value was put there by `Replace`, which has nothing to do with splices."""
    return model.forward(tokens, HookSpec().intervene(HOOK, Intervention.Replace(value, **limits))).output()


def test_a_splice_is_the_function_that_it_holds(model):
    fragment, weight = autoencoder()
    spec = HookSpec().intervene(HOOK, Intervention.Splice(fragment))
    spec.capture(HOOK, before=True).capture(HOOK).capture(f"{HOOK}.hook_acts")
    cache = model.forward(PROMPT, spec)
    x = cache[f"{HOOK}.before"]
    acts = encode(x, weight)
    assert list(cache) == [f"{HOOK}.before", HOOK, f"{HOOK}.hook_acts"]
    assert np.abs(cache["acts", 1] - acts).max() < TOLERANCE
    assert (acts > 0).any()
    assert np.abs(cache[HOOK] - (x + acts @ weight.T)).max() < TOLERANCE
    assert np.abs(cache.output() - replaced(model, x + acts @ weight.T)).max() < TOLERANCE


def test_the_identity_changes_no_bit(model):
    text = """<ir_version: 10, opset_import: ["": 23]>
    nothing (float[batch, seq, 128] hook_in) => (float[batch, seq, 128] hook_out) { hook_out = Identity(hook_in) }"""
    spec = HookSpec().intervene(HOOK, Intervention.Splice(written(text, {}))).capture(f"{HOOK}.hook_in")
    cache = model.forward(PROMPT, spec)
    plain = model.forward(PROMPT, HookSpec().capture(HOOK))
    assert (cache.output() == plain.output()).all()
    assert (cache[f"{HOOK}.hook_in"] == plain[HOOK]).all()


def test_limits_and_order_are_those_of_other_interventions(model):
    fragment, weight = autoencoder()
    vector = np.linspace(-1, 1, WIDTH).astype(np.float32)
    for first in (True, False):
        edits = [Intervention.Add(vector), Intervention.Splice(fragment, positions=[1, -1], rows=1)]
        spec = HookSpec().capture(HOOK, before=True).capture(HOOK)
        for edit in edits if first else edits[::-1]:
            spec.intervene(HOOK, edit)
        cache = model.forward([PROMPT, "The capital of Germany is"], spec)
        value = cache[f"{HOOK}.before"].copy()
        value += vector if first else 0
        value[1, [1, -1]] += encode(value[1, [1, -1]], weight) @ weight.T
        value += 0 if first else vector
        assert np.abs(cache[HOOK] - value).max() < TOLERANCE


def test_hook_points_inside_can_be_changed_limited_and_captured_in_part(model):
    fragment, weight = autoencoder()
    inside = f"{HOOK}.hook_acts"
    spec = HookSpec().intervene(inside, Intervention.Scale(3.0, positions=-1)).capture(HOOK, before=True)
    spec.intervene(HOOK, Intervention.Splice(fragment)).capture(inside, positions=[-1, 0]).capture(HOOK)
    cache = model.forward(PROMPT, spec)
    x = cache[f"{HOOK}.before"]
    acts = encode(x, weight)
    acts[:, -1] *= 3
    assert np.abs(cache[inside] - acts[:, [-1, 0]]).max() < TOLERANCE
    assert np.abs(cache[HOOK] - (x + acts @ weight.T)).max() < TOLERANCE
    everything = model.forward(PROMPT, HookSpec().extend(spec).capture("*"))
    assert f"{HOOK}.hook_unused" not in everything  # a pattern must name it
    assert f"{HOOK}.hook_unused" in model.forward(PROMPT, HookSpec().extend(spec).capture("blocks.*.hook_unused"))


def test_weights_are_inputs_so_that_one_graph_serves_all_of_one_structure(model):
    specs = [HookSpec().intervene(HOOK, Intervention.Splice(autoencoder(seed)[0])) for seed in (1, 2)]
    graphs = [model.compile_graph(spec) for spec in specs]
    assert graphs[0] is graphs[1]
    assert not np.allclose(*(model.forward(PROMPT, spec).output() for spec in specs))
    other = AUTOENCODER.format(width=WIDTH, features=FEATURES, opset=23).replace("Relu", "Abs")
    third = HookSpec().intervene(HOOK, Intervention.Splice(written(other, {"W": autoencoder(1)[1]})))
    assert model.compile_graph(third) is not graphs[0]


def test_two_splices_in_one_spec_do_not_collide(model):
    first, one = autoencoder(1)
    second, two = autoencoder(2)
    later = "blocks.2.hook_resid_post"
    spec = HookSpec().intervene(HOOK, Intervention.Splice(first)).intervene(later, Intervention.Splice(second))
    spec.capture(HOOK, before=True).capture(HOOK).capture(later, before=True).capture(later)
    cache = model.forward(PROMPT, spec)
    for hook, weight in ((HOOK, one), (later, two)):
        x = cache[f"{hook}.before"]
        assert np.abs(cache[hook] - (x + encode(x, weight) @ weight.T)).max() < TOLERANCE
    spec = HookSpec().intervene(HOOK, Intervention.Splice(first)).intervene(HOOK, Intervention.Splice(second))
    with pytest.raises(InterventionError, match="another splice"):
        model.forward(PROMPT, spec)


def test_a_second_input_reads_an_earlier_hook_point(model):
    text = """<ir_version: 10, opset_import: ["": 23]>
    sum (float[b, s, 128] x, float[b, s, 128] other) => (float[b, s, 128] y) { y = Sub(x, other) }"""
    splice = Intervention.Splice(written(text, {}), reads=HookPoint.ResidPre(1))
    spec = HookSpec().intervene(HOOK, splice).capture(HOOK, before=True).capture(HOOK).capture(HookPoint.ResidPre(1))
    cache = model.forward(PROMPT, spec)
    assert (cache[HOOK] == cache[f"{HOOK}.before"] - cache["resid_pre", 1]).all()
    late = Intervention.Splice(written(text, {}), reads=HookPoint.ResidPre(2))
    with pytest.raises(InterventionError, match="comes before"):
        model.forward(PROMPT, HookSpec().intervene(HOOK, late))
    with pytest.raises(InterventionError, match="2 inputs"):
        model.forward(PROMPT, HookSpec().intervene(HOOK, Intervention.Splice(written(text, {}))))


def test_generation_equals_one_pass_over_the_finished_text(model):
    fragment, _ = autoencoder()
    for limits in ({}, {"positions": "generated"}, {"positions": [0, -1]}):
        splice = Intervention.Splice(fragment, **limits)
        spec = HookSpec().intervene(HOOK, splice).capture(f"{HOOK}.hook_acts").capture(HOOK)
        made = model.generate(PROMPT, spec, max_new_tokens=6, eos_token_id=[])
        length = len(model.tokenize(PROMPT))
        whole = model.forward(made.ids[0][:-1], spec, prompt_length=length)
        for hook in (HOOK, f"{HOOK}.hook_acts"):
            assert np.abs(made.captured(hook) - whole[hook]).max() < TOLERANCE


def test_a_spec_with_splices_is_saved_and_read(model, tmp_path):
    fragment, _ = autoencoder()
    spec = HookSpec().intervene(HOOK, Intervention.Splice(fragment, positions=[-1]))
    spec.intervene(f"{HOOK}.hook_acts", Intervention.Add(1.0, positions=[-1]))
    spec.save(tmp_path / "a.safetensors")
    again = HookSpec.load(tmp_path / "a.safetensors")
    assert (model.forward(PROMPT, again).output() == model.forward(PROMPT, spec).output()).all()
    assert model.compile_graph(again) is model.compile_graph(spec)
    assert again.interventions[0][1].fragment.sha256 == fragment.sha256


def test_a_compiled_graph_has_the_fragment_baked_in(model, tmp_path):
    fragment, _ = autoencoder()
    spec = HookSpec().intervene(HOOK, Intervention.Splice(fragment, positions=-1)).capture(f"{HOOK}.hook_acts")
    spec.intervene(f"{HOOK}.hook_acts", Intervention.Scale(2.0))
    folder = model.compile(spec, tmp_path / "compiled", knobs={"strength": None})
    ids = model.tokenize(PROMPT).ids[None]
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(ids.shape[1])[None]}
    past = np.zeros((1, model.num_kv_heads, 0, model.head_dim), np.float32)
    feeds |= {f"past_key_values.{i}.{part}": past for i in range(model.num_layers) for part in ("key", "value")}
    np.savez(tmp_path / "feeds.npz", **feeds)
    runner = SHARED / "runner.py"
    files = [str(tmp_path / name) for name in ("compiled/model.onnx", "feeds.npz", "out.npz")]
    subprocess.run([sys.executable, "-I", str(runner), *files], check=True, timeout=60)
    out = np.load(tmp_path / "out.npz")
    cache = model.forward(PROMPT, spec)
    found = {name.rpartition("/")[2]: out[name] for name in out.files}
    assert np.abs(found[next(n for n in found if n.endswith("logits"))] - cache.output()).max() < TOLERANCE
    assert np.abs(found[next(n for n in found if n.endswith("hook_acts"))] - cache["acts", 1]).max() < TOLERANCE
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    (none,) = session.run(["logits"], {**feeds, "strength": np.array(0, np.float32)})
    assert np.abs(none - model.forward(PROMPT).output()).max() < TOLERANCE
    assert "ONNX fragment" in (folder / "README.md").read_text()


def test_files_with_weights_beside_them_functions_and_older_opsets(model, tmp_path):
    fragment, weight = autoencoder(opset=17)
    proto, copy = (onnx.load_from_string(fragment.to_bytes()) for _ in range(2))  # saving empties what it saves
    onnx.save(copy, tmp_path / "fragment.onnx", save_as_external_data=True, size_threshold=16)
    assert (tmp_path / "fragment.onnx").stat().st_size < weight.nbytes
    expected = model.forward(PROMPT, HookSpec().intervene(HOOK, Intervention.Splice(autoencoder()[0]))).output()
    body = """<ir_version: 10, opset_import: ["": 23, "own": 1]>
    outer (float[b, s, 128] x, float[128, 48] W) => (float[b, s, 128] y) { y = own.auto(x, W) }
    <domain: "own", opset_import: ["": 23]>
    auto (x, W) => (y) { Wt = Transpose<perm = [1, 0]>(W)
      pre = MatMul(x, W)
      acts = Relu(pre)
      back = MatMul(acts, Wt)
      y = Add(x, back) }"""
    for source in (tmp_path / "fragment.onnx", fragment.to_bytes(), proto, written(body, {"W": weight})):
        found = model.forward(PROMPT, HookSpec().intervene(HOOK, Intervention.Splice(source))).output()
        assert np.abs(found - expected).max() < TOLERANCE


def test_control_flow_inside_is_renamed_too(model):
    proto = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 23]>
    choose (float[b, s, 128] x, float[128] v) => (float[b, s, 128] y) {
      total = ReduceSum(x)
      zero = Constant<value = float {0.0}>()
      positive = Greater(total, zero)
      y = If (positive) <
        then_branch = yes () => (float[b, s, 128] one) { moved = Add(x, v)
          one = Identity(moved) },
        else_branch = no () => (float[b, s, 128] two) { moved2 = Sub(x, v)
          two = Identity(moved2) }>
    }""")
    vector = np.linspace(0, 1, WIDTH).astype(np.float32)
    splice = Intervention.Splice(Fragment(proto, {"v": vector}))
    spec = HookSpec().intervene(HOOK, splice).intervene("blocks.2.hook_resid_post", splice)
    spec.capture(HOOK, before=True).capture(HOOK)
    cache = model.forward(PROMPT, spec)
    x = cache[f"{HOOK}.before"]
    assert np.abs(cache[HOOK] - (x + vector * np.sign(x.sum()))).max() < TOLERANCE


def test_a_fragment_of_another_dtype_is_cast_in_and_out(model):
    text = """<ir_version: 10, opset_import: ["": 23]>
    exact (double[b, s, 128] x) => (double[b, s, 128] y) { hook_sine = Sin(x)
      y = Add(x, hook_sine) }"""
    spec = HookSpec().intervene(HOOK, Intervention.Splice(written(text, {}))).capture(HOOK, before=True)
    cache = model.forward(PROMPT, spec.capture(HOOK).capture(f"{HOOK}.hook_sine"))
    x = cache[f"{HOOK}.before"]
    assert cache[HOOK].dtype == np.float32
    assert cache["sine", 1].dtype == np.float64
    assert np.abs(cache[HOOK] - (x + np.sin(x))).max() < TOLERANCE


def test_a_recurrent_model_takes_splices_too():
    model = MIModel.from_pretrained("models/world-rwkv7", threads=1)
    fragment, weight = autoencoder(width=model.hidden_size)
    spec = HookSpec().intervene(HOOK, Intervention.Splice(fragment)).capture(HOOK, before=True).capture(HOOK)
    cache = model.forward(PROMPT, spec)
    x = cache[f"{HOOK}.before"]
    assert np.abs(cache[HOOK] - (x + encode(x, weight) @ weight.T)).max() < TOLERANCE


def test_a_prepared_base_serves_splices(model, tmp_path, monkeypatch):
    monkeypatch.setenv("MIONNX_CACHE", str(tmp_path))
    based = MIModel.from_pretrained("models/world-llama", threads=1)
    assert based.prepare()
    for seed in (1, 2):
        spec = HookSpec().intervene(HOOK, Intervention.Splice(autoencoder(seed)[0])).capture(f"{HOOK}.hook_acts")
        found, expected = based.forward(PROMPT, spec), model.forward(PROMPT, spec)
        assert np.abs(found.output() - expected.output()).max() < TOLERANCE
        assert np.abs(found["acts", 1] - expected["acts", 1]).max() < TOLERANCE
    assert len([*(tmp_path / "graphs").glob("*/model.onnx")]) == 1


SHAPES = '<ir_version: 10, opset_import: ["": 23]>\n'
BAD = {
    "narrower": ("f (float[b, s, 128] x) => (float[b, s, 64] y) { i = Constant<value = int64[1] {64}>()\n"
                 "z = Constant<value = int64[1] {0}>()\n a = Constant<value = int64[1] {2}>()\n"
                 "y = Slice(x, z, i, a) }",
                 r"\[\?, \?, 64\]"),
    "undeclared": ("f (float[b, s, 128] x) => (float[b, s, c] y) { a = Constant<value = int64[1] {2}>()\n"
                   "y = ReduceSum(x, a) }", "takes the place"),
    "rank": ("f (float[b, 128] x) => (float[b, 128] y) { y = Relu(x) }", r"\[\?, 128\]"),
    "dtype": ("f (int64[b, s, 128] x) => (int64[b, s, 128] y) { y = Abs(x) }", "floating-point"),
    "outputs": ("f (float[b, s, 128] x) => (float[b, s, 128] y, float[b, s, 128] z) { y = Relu(x)\n z = Neg(x) }",
                "one output"),
    "domain": ("f (float[b, s, 128] x) => (float[b, s, 128] y) { y = com.microsoft.FastGelu(x) }", "microsoft"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused(model, name):
    text, message = BAD[name]
    header = SHAPES.replace('["": 23]', '["": 23, "com.microsoft": 1]')
    with pytest.raises(InterventionError, match=message):
        model.forward(PROMPT, HookSpec().intervene(HOOK, Intervention.Splice(written(header + text, {}))))


def test_bad_sources_and_places_are_refused(model, tmp_path):
    fragment, weight = autoencoder()
    (tmp_path / "cut.onnx").write_bytes(fragment.to_bytes()[:-700])
    with pytest.raises(ModelError, match="corrupt"):
        Intervention.Splice(tmp_path / "cut.onnx")
    with pytest.raises(ModelError, match="cannot read"):
        Intervention.Splice(tmp_path / "missing.onnx")
    with pytest.raises(InterventionError, match="no ONNX"):
        Intervention.Splice(b"not a model")
    with pytest.raises(InterventionError, match="NaN"):
        written(AUTOENCODER.format(width=WIDTH, features=FEATURES, opset=23), {"W": weight * np.nan})
    outside = onnx.load_from_string(fragment.to_bytes())
    onnx.save(outside, tmp_path / "f.onnx", save_as_external_data=True, location="w.bin", size_threshold=16)
    moved = onnx.load(tmp_path / "f.onnx", load_external_data=False)
    moved.graph.initializer[0].external_data[0].value = "../w.bin"
    (tmp_path / "f.onnx").write_bytes(moved.SerializeToString())
    with pytest.raises(ModelError, match="outside"):
        Intervention.Splice(tmp_path / "f.onnx")
    with pytest.raises(HookError, match="hook_resid_post"):
        model.forward(PROMPT, HookSpec().intervene("blocks.1.hook_resid_pots", Intervention.Splice(fragment)))
    with pytest.raises(InterventionError, match="derived"):
        model.forward(PROMPT, HookSpec().intervene(HookPoint.AttnResult(0), Intervention.Splice(fragment)))


def test_what_would_do_nothing_inside_is_refused(model):
    splice = Intervention.Splice(autoencoder()[0], positions=[0, 1])
    for hook, edit, message in (
        (f"{HOOK}.hook_unused", Intervention.Zero(), "does not depend on it"),
        (f"{HOOK}.hook_acts", Intervention.Zero(positions=2), "limited to other"),
        (f"{HOOK}.hook_acts", Intervention.Add(np.ones(7)), r"width|shape \[7\]"),
        (f"{HOOK}.hook_acts", Intervention.Zero(heads=0), "no heads"),
    ):
        with pytest.raises(InterventionError, match=message):
            model.forward(PROMPT, HookSpec().intervene(HOOK, splice).intervene(hook, edit))
    with pytest.raises(HookError, match="hook_acts"):
        model.forward(PROMPT, HookSpec().intervene(HOOK, splice).capture(f"{HOOK}.hook_act"))
    with pytest.raises(HookError):
        model.forward(PROMPT, HookSpec().capture(f"{HOOK}.hook_acts"))  # nothing brings it here


def test_a_constant_in_the_file_is_part_of_the_structure(model):
    """A threshold that is one number is no input: two that differ in it are two graphs."""
    proto = onnx.parser.parse_model(SHAPES + "f (float[b, s, 128] x) => (float[b, s, 128] y) { y = Add(x, c) }")
    graphs = []
    for value in (0.5, 1.5):
        own = onnx.ModelProto()
        own.CopyFrom(proto)
        own.graph.initializer.append(from_array(np.array(value, np.float32), "c"))
        spec = HookSpec().intervene(HOOK, Intervention.Splice(own)).capture(HOOK, before=True).capture(HOOK)
        cache = model.forward(PROMPT, spec)
        assert np.allclose(cache[HOOK] - cache[f"{HOOK}.before"], value, atol=1e-6)
        graphs.append(model.compile_graph(spec))
    assert graphs[0] is not graphs[1]
    json.loads(graphs[0].report.to_json())
