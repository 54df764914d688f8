"""The CUDA provider gives what the CPU gives: float32 within 5e-4 at every hook point, TF32 off, and the null law.

Every test runs on the CPU provider too, so that its own code is tested where there is no GPU.
"""

import pickle
import warnings

import numpy as np
import onnxruntime
import pytest
from repository import REPOSITORY
from rescaled import TEXTS, loud_model

from exporters.transformers import export
from mionnx import (
    FallbackWarning,
    HookCache,
    HookPoint,
    HookSpec,
    Intervention,
    KnockoutSpec,
    MIModel,
    ModelError,
    StateKnockoutSpec,
    create_knockout_mask,
)
from mionnx.engine.device import DeviceArray
from mionnx.engine.onnx_runtime import OrtProgram

HERE = "CUDAExecutionProvider" in onnxruntime.get_available_providers()
CUDA = [pytest.mark.gpu, pytest.mark.skipif(not HERE, reason="needs onnxruntime-gpu and a CUDA device")]
CLOSE = 5e-4  # of the largest value at a hook point, at least of 1
HALF = {"float16": 2e-2, "bfloat16": 1e-1}
IDS = np.arange(3, 15)[None]
only_cuda = pytest.mark.parametrize("provider", [pytest.param("cuda", marks=CUDA)])


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=CUDA)])
def provider(request):
    """The provider under test; the CPU is the other side of every comparison."""
    return request.param


@pytest.fixture
def opened(hooked, provider):
    """A family's model on the provider under test."""
    return lambda family, **options: MIModel.from_pretrained(hooked(family), provider=provider, **options)


def steering(model):
    """Captures everywhere, and interventions on a part of the positions and heads."""
    spec = HookSpec().capture("*").intervene(HookPoint.ResidPost(0), Intervention.Scale(1.1, positions=[3, -1]))
    vector = np.cos(np.arange(model.hidden_size)) / 2
    return spec.intervene(HookPoint.MlpOut(1), Intervention.Add(vector, positions=-1))


def assert_close(found, expected, bound=CLOSE):
    """Compare two passes at every hook point; masked scores are the least number in both."""
    assert [*found] == [*expected]
    for name in expected:
        ours, theirs = np.asarray(found[name], np.float32), np.asarray(expected[name], np.float32)
        seen = theirs > np.finfo(np.float16).min * 0.9
        assert ours.shape == theirs.shape, name
        assert np.abs(ours - theirs)[seen].max(initial=0) <= bound * max(1, np.abs(theirs[seen]).max(initial=0)), name
    ours, theirs = (np.asarray(one.output(), np.float32) for one in (found, expected))
    assert np.abs(ours - theirs).max() <= bound * max(1, np.abs(theirs).max())


def test_every_hook_point_equals_the_cpus(family, opened, models):
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        found = opened(family).forward(IDS, steering(models(family)))
    assert_close(found, models(family).forward(IDS, steering(models(family))))


def test_the_null_law_bit_for_bit(family, opened):
    """Captures, Add(0), Scale(1) and a Replace by what was there change no bit."""
    model = opened(family)
    plain = model.forward(IDS).output()
    captured = model.forward(IDS, HookSpec().capture("*"))
    assert np.array_equal(captured.output(), plain)
    for hook in (HookPoint.ResidPost(0), HookPoint.AttnZ(1)):
        value = captured[hook]
        for edit in (
            Intervention.Add(np.zeros(value.shape[-1])),
            Intervention.Scale(1.0, positions=[0, -1]),
            Intervention.Replace(value),
        ):
            assert np.array_equal(model.forward(IDS, HookSpec().intervene(hook, edit)).output(), plain), (hook, edit)


def test_padding_and_lists_in_batches(opened, models):
    texts = [[3, 4, 5], [6, 7, 8, 9, 10, 11], [12, 13]]
    spec = HookSpec().capture("*.hook_resid_post")
    found, expected = opened("llama").forward(texts, spec), models("llama").forward(texts, spec)
    assert_close(found, expected)
    parts = opened("llama").forward(texts, spec, batch_size=2)
    for row, text in enumerate(texts):
        alone = models("llama").forward([text], spec)
        logits = parts.output()[[row], -len(text) :]
        assert_close(HookCache(logits, {name: parts[name][[row], -len(text) :] for name in parts}), alone)


def test_verify_beside_the_cpu_and_torch(models, checkpoint, provider):
    runtimes = ["ort-cpu", *([f"ort-{provider}"] if provider != "cpu" else []), "torch"]
    found = models("llama").verify(
        [IDS[0]], runtimes, checkpoint=checkpoint("llama"), tolerance=CLOSE, greedy=4, repeat=True
    )
    assert found.agrees
    assert not found.skipped


def test_captures_and_caches_stay_on_the_device(opened, models, provider):
    model = opened("llama")
    found = model.forward(IDS[:, :8], HookSpec().capture("*"), use_cache=True)
    held = [*found._captured.values(), *(part for layer in found.kv_cache.device_parts() for part in layer.values())]
    if provider == "cuda":
        assert all(isinstance(one, DeviceArray) for one in held)
        assert {one.value.device_name() for one in held} == {"cuda"}
    expected = models("llama").forward(IDS).output()[:, 8:]
    assert np.abs(model.forward(IDS[:, 8:], cache=found.kv_cache).output() - expected).max() < CLOSE
    again = pickle.loads(pickle.dumps(found.kv_cache))  # as arrays
    assert np.abs(model.forward(IDS[:, 8:], cache=again).output() - expected).max() < CLOSE


def test_a_changed_cache_goes_on(opened, models, tmp_path):
    outputs = []
    for model in (opened("llama"), models("llama")):
        cache = model.forward(IDS[:, :8], use_cache=True).kv_cache
        cache.clear_layer(1)
        outputs.append(model.forward(IDS[:, 8:], cache=cache).output())
    assert np.abs(outputs[0] - outputs[1]).max() < CLOSE


def test_generation_equals_the_cpus(family, opened, models):
    ids, vector = [[3, 4, 5, 6, 7], [8, 9, 10]], np.cos(np.arange(models(family).hidden_size)) / 2
    spec = HookSpec().capture("*.hook_resid_post").intervene(HookPoint.ResidPost(0), Intervention.Add(vector))
    spec.intervene(HookPoint.MlpOut(1), Intervention.Scale(0.5, positions="generated"))
    settings = {"max_new_tokens": 6, "eos_token_id": [], "output_logits": True}
    found, expected = (model.generate(ids, spec, **settings) for model in (opened(family), models(family)))
    assert [row.tolist() for row in found.new_ids] == [row.tolist() for row in expected.new_ids]
    for ours, theirs in zip(found.steps, expected.steps, strict=True):
        assert_close(ours, theirs)
    after = opened(family).forward([row[-1:] for row in found.ids], cache=found.cache).output()
    assert after.shape[:2] == (2, 1)


def test_attention_knockouts(opened, models):
    model = models("llama")
    mask = create_knockout_mask(KnockoutSpec().edge(11, 2).edge(7, 3), model.num_heads, IDS.shape[1])
    spec = HookSpec().capture("*.hook_pattern").intervene(HookPoint.AttnScores(1), Intervention.Knockout(mask))
    found = opened("llama").forward(IDS, spec)
    assert not found["pattern", 1][:, :, 11, 2].any()
    assert_close(found, model.forward(IDS, spec))


def test_derived_hook_points(opened, models):
    spec = HookSpec().capture("*.hook_result")
    assert_close(opened("llama").forward(IDS, spec), models("llama").forward(IDS, spec))


@pytest.mark.parametrize("layout", ["6-hf", "7-fla"])
def test_a_recurrent_model_equals_the_cpus(layout, rwkv, provider):
    """Its Scan, a prompt in chunks, states carried on, decoding, a knockout of writes."""
    theirs = rwkv(layout)
    ours = MIModel.from_pretrained(theirs.hooked.folder, provider=provider)
    ids = np.arange(1, 41)[None]
    spec = HookSpec().capture("*").intervene(HookPoint.ResidPost(0), Intervention.Scale(1.1, positions=[3, -1]))
    spec.set_state_knockout(StateKnockoutSpec().position(2))
    assert_close(ours.forward(ids, spec), theirs.forward(ids, spec))
    after = [one.forward(ids[:, 20:], initial_state=one.forward(ids[:, :20]).state).output() for one in (ours, theirs)]
    assert np.abs(after[0] - after[1]).max() < CLOSE * max(1, np.abs(after[1]).max())
    made = [one.generate(ids[:, :9], max_new_tokens=5, eos_token_id=[]).new_ids[0].tolist() for one in (ours, theirs)]
    assert made[0] == made[1]
    plain = ours.forward(ids).output()
    assert np.array_equal(ours.forward(ids, HookSpec().capture("*.hook_resid_post")).output(), plain)


@only_cuda
def test_cuda_graphs_are_refused_with_the_operator(provider, recurrent):
    model = MIModel.from_pretrained(recurrent.hooked.folder, provider=provider, cuda_graphs=True)
    with pytest.raises(ModelError, match=r"cannot be one CUDA graph: .*Scan .* is control flow"):
        model.forward([[3, 4]])


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_cuda_graphs_give_what_runs_give(family, opened, provider, monkeypatch):
    """Other values, other shapes, captures; on the CPU the same buffers are used again by ordinary runs."""
    if provider == "cpu":
        monkeypatch.setattr(OrtProgram, "compute", lambda program, outputs, feeds: _replayed(program, outputs, feeds))
    graphs = opened(family, **({"cuda_graphs": True} if provider == "cuda" else {}))
    plain = opened(family)
    for length in (5, 9, 5):
        for strength in (0.5, 1.0, 2.0):
            spec = HookSpec().capture("*.hook_pattern").capture("*.hook_resid_post")
            spec.intervene(HookPoint.ResidPost(0), Intervention.Scale(strength, positions=[1, -1]))
            one, other = (model.forward(IDS[:, :length], spec) for model in (plain, graphs))
            assert np.array_equal(one.output(), other.output())
            assert all(np.array_equal(one[name], other[name]) for name in one)


@only_cuda
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_generation_by_cuda_graphs(family, provider, opened, models):
    """Steps are replays: the same texts, twice, with captures and steering; patterns take the other way."""
    vector = np.cos(np.arange(models(family).hidden_size)) / 2
    spec = HookSpec().capture("*.hook_resid_post").intervene(HookPoint.ResidPost(0), Intervention.Add(vector))
    settings = {"max_new_tokens": 6, "eos_token_id": [], "output_logits": True}
    model, ids = opened(family, cuda_graphs=True), [[3, 4, 5, 6, 7], [8, 9, 10]]
    expected = models(family).generate(ids, spec, **settings)
    for _ in range(2):
        found = model.generate(ids, spec, **settings)
        assert [row.tolist() for row in found.new_ids] == [row.tolist() for row in expected.new_ids]
        for ours, theirs in zip(found.steps, expected.steps, strict=True):
            assert_close(ours, theirs)
    patterns = HookSpec().capture("*.hook_pattern")
    found, expected = (one.generate(ids, patterns, **settings) for one in (model, models(family)))
    for ours, theirs in zip(found.steps, expected.steps, strict=True):
        assert_close(ours, theirs)


def _replayed(program, outputs, feeds):
    return program.cuda_graphs.run(outputs, {name: value for name, value in feeds.items() if name in program.inputs})


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_half_precision(dtype, family, checkpoint, models, provider, shared):
    folder = shared / "half" / f"{family}-{dtype}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        export(checkpoint(family), folder, dtype)
    if (dtype, provider) == ("bfloat16", "cpu"):
        pytest.skip("the CPU provider has no products of bfloat16")
    model, spec = MIModel.from_pretrained(folder, provider=provider), HookSpec().capture("*.hook_resid_post")
    found, expected = model.forward(IDS, spec, use_cache=True), models(family).forward(IDS, spec)
    assert str(found["resid_post", 0].dtype) == dtype
    assert_close(found, expected, HALF[dtype])
    again = model.forward(IDS[:, -1:], cache=model.forward(IDS[:, :-1], use_cache=True).kv_cache).output()
    scale = np.abs(expected.output()).max()
    assert np.abs((again[:, -1] - found.output()[:, -1]).astype(np.float32)).max() < HALF[dtype] * scale
    vector = np.cos(np.arange(model.hidden_size)) / 2
    steer = HookSpec().intervene(HookPoint.ResidPost(0), Intervention.Add(vector))
    moved = [one.forward(IDS, steer).output().astype(np.float32) for one in (model, models(family))]
    assert np.abs(moved[0] - moved[1]).max() < HALF[dtype] * scale
    assert len(model.generate(IDS, steer, max_new_tokens=4, eos_token_id=[]).new_ids[0]) == 4
    if provider == "cuda":
        assert np.array_equal(found.output(), model.forward(IDS).output())


def test_python_functions_between_segments(opened, models):
    def halve(value, hook):
        return value * 0.5

    hooks = [("blocks.0.hook_resid_post", halve), ("blocks.1.attn.hook_z", halve)]
    for family in ("llama", "gpt2"):
        found, expected = (one.run_with_hooks(IDS, hooks) for one in (opened(family), models(family)))
        assert np.abs(found - expected).max() < CLOSE * max(1, np.abs(expected).max())
        settings = {"max_new_tokens": 4, "eos_token_id": [], "fwd_hooks": hooks}
        made = [one.generate(IDS, **settings).new_ids[0].tolist() for one in (opened(family), models(family))]
        assert made[0] == made[1]


@pytest.mark.parametrize(
    ("what", "over"),
    [("z", ("layer", "head")), ("resid_pre", ("layer", "position")), ("z", ("layer", "position", "head"))],
)
def test_sweeps_equal_the_cpus(what, over, opened, models):
    other = IDS.copy()
    other[0, 4] = 30
    found, expected = (
        one.patch_sweep(IDS, other, what, over, answer=7, versus=9) for one in (opened("llama"), models("llama"))
    )
    assert np.abs(found.values - expected.values).max() < CLOSE


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_gradients_equal_the_cpus(family, opened, models):
    found, expected = (one.gradients(IDS, "*.hook_resid_post", answer=7) for one in (opened(family), models(family)))
    assert np.abs(found.metric - expected.metric).max() < CLOSE
    for name in expected.grad:
        scale = np.abs(expected.grad[name]).max()
        assert np.abs(found.grad[name] - expected.grad[name]).max() < 1e-3 * scale, name


def test_attribution_patching_with_confirmed_cells(opened, models):
    other = IDS.copy()
    other[0, 4] = 30
    found, expected = (
        one.attribute_patch(IDS, other, confirm=3, answer=7, versus=9) for one in (opened("llama"), models("llama"))
    )
    assert np.abs(found.values - expected.values).max() < CLOSE


def test_the_lens_equals_the_cpus(opened, models):
    found, expected = (one.logit_lens(IDS, token_ids=[7]) for one in (opened("llama"), models("llama")))
    assert np.abs(found.probability_of(7) - expected.probability_of(7)).max() < CLOSE


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_in_blocks(bits, models, provider, tmp_path):
    folder = models("llama").quantise(tmp_path / "blocks", bits=bits)
    ours, theirs = (MIModel.from_pretrained(folder, provider=one, accuracy_level=0) for one in (provider, "cpu"))
    spec = HookSpec().capture("*.hook_resid_post").intervene(HookPoint.ResidPost(0), Intervention.Scale(1.1))
    assert_close(ours.forward(IDS, spec), theirs.forward(IDS, spec), 2e-3)
    assert np.array_equal(ours.forward(IDS, HookSpec().capture("*")).output(), ours.forward(IDS).output())
    made = [one.generate(IDS, max_new_tokens=4, eos_token_id=[]).new_ids[0].tolist() for one in (ours, theirs)]
    assert made[0] == made[1]


def test_a_compiled_model_runs_by_itself(models, provider, tmp_path):
    """A file that ONNX Runtime optimised for the provider: the model's own inputs, the steered model's logits."""
    model, spec = models("llama"), HookSpec().intervene(HookPoint.ResidPost(0), Intervention.Scale(0.5))
    model.compile(spec, tmp_path / "made", target=f"ort-{provider}")
    name = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}[provider]
    whole = {"cpu": {}, "cuda": {"use_tf32": "0"}}[provider]  # by itself it computes in TF32 on a GPU
    session = onnxruntime.InferenceSession(tmp_path / "made" / "model.onnx", providers=[(name, whole)])
    feeds = {"input_ids": IDS, "attention_mask": np.ones_like(IDS), "position_ids": np.arange(IDS.shape[1])[None]}
    shapes = model.hooked.metadata.past_shapes(1, 0)
    assert {one.name for one in session.get_inputs()} == {*feeds, *shapes}
    assert not session.get_overridable_initializers()
    found = session.run(["logits"], feeds | {one: np.zeros(shape, np.float32) for one, shape in shapes.items()})[0]
    assert np.abs(found - model.forward(IDS, spec).output()).max() < CLOSE


def assert_same_class(theirs, provider, spec):
    """What a model's own provider of the other device gives, with captures and steering, and the null law."""
    ours = MIModel.from_pretrained(theirs.hooked.folder, provider=provider)
    ids = np.arange(1, 31)[None]
    assert_close(ours.forward(ids, spec), theirs.forward(ids, spec))
    captured = ours.forward(ids, HookSpec().capture("*"))
    assert np.array_equal(captured.output(), ours.forward(ids).output())
    return ours


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mamba", "mamba2", "qwen3_5_text", "lfm2"])
def test_layers_with_states_equal_the_cpus(family, hybrid, provider):
    """Scans, convolutions, states, a cache carried on, decoding."""
    theirs = hybrid(family)
    spec = HookSpec().capture("*").intervene(HookPoint.ResidPost(0), Intervention.Scale(1.1, positions=[3, -1]))
    ours, ids = assert_same_class(theirs, provider, spec), np.arange(1, 31)[None]
    if family != "lfm2":  # whose only state is what a convolution has read
        states = HookSpec().capture("*.hook_states")
        assert_close(ours.forward(ids, states), theirs.forward(ids, states))
    made = [one.generate(ids[:, :9], max_new_tokens=5, eos_token_id=[]).new_ids[0].tolist() for one in (ours, theirs)]
    assert made[0] == made[1]


@pytest.mark.parametrize("name", ["world-bert", "world-hybrid"])
def test_shipped_models_equal_the_cpus(name, provider):
    theirs = MIModel.from_pretrained(REPOSITORY / "models" / name, threads=1)
    assert_same_class(theirs, provider, steering(theirs))


def test_an_encoders_verbs_equal_the_cpus(text_encoder, provider):
    """Embeddings of a ragged batch, after a direction at one layer."""
    theirs = text_encoder("embedding")[0]
    ours = MIModel.from_pretrained(theirs.hooked.folder, provider=provider)
    texts = ["Music is loud", "Rome", "the capital of France is Paris"]
    spec = HookSpec().intervene(HookPoint.ResidPost(0), Intervention.Scale(0.5))
    for chosen in (None, spec):
        found, expected = (one.embed(texts, chosen) for one in (ours, theirs))
        assert np.abs(np.asarray(found) - np.asarray(expected)).max() < CLOSE


@pytest.mark.slow
def test_a_rescaled_model_in_half_precision(provider, tmp_path):
    """A stream past float16 stays finite on the device, and the steered logits are those of float32 on the CPU."""
    loud = loud_model(tmp_path / "loud")
    spec = HookSpec().intervene(HookPoint.ResidPost(1), Intervention.Scale(0.9)).capture("blocks.2.hook_resid_post")
    folder = loud.compile(spec, tmp_path / "half", dtype="float16", texts=TEXTS)
    name = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}[provider]
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=[name])
    ids = loud.tokenize(TEXTS).ids[None]
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(ids.shape[1])[None]}
    feeds["mionnx.token_positions"] = feeds["position_ids"]
    past = {one: np.zeros(shape, np.float16) for one, shape in loud.hooked.metadata.past_shapes(1, 0).items()}
    known = {one.name for one in session.get_inputs()}
    outputs = ["logits", "blocks.2.hook_resid_post"]
    logits, stream = session.run(outputs, {key: value for key, value in {**feeds, **past}.items() if key in known})
    expected = loud.forward(TEXTS, spec)
    assert np.abs(logits.astype(np.float32) - expected.output()).max() < 0.05
    assert np.abs(expected["blocks.2.hook_resid_post"]).max() > 65504
    assert np.abs(stream - expected["blocks.2.hook_resid_post"]).max() < 2e-3 * np.abs(stream).max()


def test_memory_is_given_back_and_models_open_again(opened):
    model = opened("llama")
    first = model.forward(IDS).output()
    model.give_back()
    assert np.array_equal(pickle.loads(pickle.dumps(model)).forward(IDS).output(), first)


@only_cuda
def test_a_device_that_is_not_there(hooked, provider):
    with pytest.raises(ModelError, match="cannot open"):
        MIModel.from_pretrained(hooked("llama"), provider=provider, provider_options={"device_id": 99}).forward([[3]])
