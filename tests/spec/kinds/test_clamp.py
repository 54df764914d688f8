"""Clamp: in Python, in files, on the command line, compiled and in torch; `tests/laws/test_kinds.py` holds its law."""

import json
from inspect import signature

import numpy as np
import onnxruntime
import pytest
from command_line import LLAMA, PROMPT, mionnx, succeeded

from mionnx import HookPoint, HookSpec, Intervention, InterventionError, MIModel, SpecFileError
from mionnx.spec.kinds.clamp import Clamp

HOOK = "blocks.2.hook_resid_post"
BOUNDS = {
    "both": (-0.5, 0.25),
    "low": (0.0, None),
    "high": (None, 0.25),
    "arrays": (np.full(128, -0.5), np.ones((1, 1, 128))),
}


@pytest.fixture(scope="module")
def model() -> MIModel:
    return MIModel.from_pretrained(LLAMA, threads=1)


def clamp(low: object, high: object, **limits: object) -> HookSpec:
    return HookSpec().capture(HOOK).capture(HOOK, before=True).intervene(HOOK, Intervention.Clamp(low, high, **limits))


@pytest.mark.parametrize("bounds", BOUNDS)
def test_forward(model, bounds):
    low, high = BOUNDS[bounds]
    cache = model.forward(PROMPT, clamp(low, high))
    before = cache[f"{HOOK}.before"]
    expected = np.clip(before, *(None if bound is None else np.float32(bound) for bound in (low, high)))
    assert np.array_equal(cache[HOOK], expected)
    assert not np.array_equal(cache[HOOK], before)


def test_outside_the_limits_nothing_changes(model):
    cache = model.forward([PROMPT, PROMPT], clamp(0.0, 0.0, positions=[-1, 0], rows=1))
    assert not cache[HOOK][1, [0, -1]].any()
    assert np.array_equal(cache[HOOK][0], cache[f"{HOOK}.before"][0])
    assert np.array_equal(cache[HOOK][1, 1:-1], cache[f"{HOOK}.before"][1, 1:-1])


def test_heads(model):
    spec = HookSpec().capture("blocks.1.attn.hook_z")
    cache = model.forward(PROMPT, spec.intervene("blocks.1.attn.hook_z", Intervention.Clamp(high=0.0, heads=2)))
    assert cache["z", 1][:, :, 2].max() == 0
    assert cache["z", 1][:, :, 1].max() > 0


def test_masked_scores_stay_masked(model):
    point = HookPoint.AttnScores(1)
    spec = HookSpec().capture(point).capture(HookPoint.AttnPattern(1)).intervene(point, Intervention.Clamp(-0.1, 0.1))
    cache = model.forward(PROMPT, spec)
    later = np.triu(np.ones((5, 5), bool), 1)
    assert not cache["pattern", 1][..., later].any()
    assert np.abs(cache["scores", 1][..., ~later]).max() <= np.float32(0.1)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_scores_that_a_scale_has_shrunk_stay_masked(dtype):
    kind = Clamp().at(HookPoint.AttnScores(0), (), False)
    shrunk = np.array([np.finfo(dtype).min * dtype(0.1), -183, 3], dtype)
    assert kind.reference(shrunk, dtype(-1), dtype(1)).tolist() == [shrunk[0], -1, 1]


def test_masked_scores_stay_masked_after_a_scale(model):
    point = HookPoint.AttnScores(1)
    spec = HookSpec().capture(HookPoint.AttnPattern(1)).intervene(point, Intervention.Scale(0.1))
    cache = model.forward(PROMPT, spec.intervene(point, Intervention.Clamp(-0.1, 0.1)))
    assert not np.triu(cache["pattern", 1], 1).any()


def test_generation_equals_one_pass(model):
    spec = HookSpec().intervene(HOOK, Intervention.Clamp(-0.5, 0.25, positions="generated"))
    made = model.generate(PROMPT, spec, max_new_tokens=4, eos_token_id=[], output_logits=True)
    prompt = len(model.tokenize(PROMPT))
    whole = model.forward(made.ids[0][:-1], spec, prompt_length=prompt).output()
    ends = np.stack([cache.output()[0, -1] for cache in made.steps])
    assert np.abs(ends - whole[0, prompt - 1 :]).max() < 5e-5 * np.abs(whole).max()
    assert made.texts != model.generate(PROMPT, max_new_tokens=4, eos_token_id=[]).texts


def test_a_saved_spec_is_the_same_spec(tmp_path):
    path = str(tmp_path / "spec.safetensors")
    clamp(None, np.float16(2.0), positions=-1).save(path)
    ((point, found),) = HookSpec.load(path).interventions
    assert (point.name, found.kind, found.value, found.positions) == (HOOK, "clamp", None, (-1,))
    low, high = found.values
    assert (low, high, high.dtype) == (-np.inf, 2.0, np.float16)


def test_a_file_without_one_bound_is_refused(tmp_path):
    from mionnx.machine.tensor_file import write_tensors

    entry = {"hook": HOOK, "kind": "clamp", "positions": None, "heads": None, "rows": None}
    metadata = {"mionnx_spec": "1", "declaration": json.dumps({"captures": [], "interventions": [entry]})}
    write_tensors(tmp_path / "spec.safetensors", {"interventions.0.low": np.zeros(1)}, metadata)
    with pytest.raises(SpecFileError, match="damaged"):
        HookSpec.load(str(tmp_path / "spec.safetensors"))


@pytest.mark.parametrize(
    ("text", "bounds"), [("-0.5..0.25", (-0.5, 0.25)), ("..0.25", (None, 0.25)), ("0..", (0.0, None))]
)
def test_the_command_line(model, text, bounds):
    found = json.loads(succeeded("run", LLAMA, PROMPT, "--clamp", f"{HOOK}={text}@positions=-1", "--json"))
    logits = model.forward(PROMPT, clamp(*bounds, positions=-1)).output()[0, -1]
    assert found["top"][0][0] == model.tokenizer.decode([int(logits.argmax())])
    assert found["kl_divergence"] > 0


@pytest.mark.parametrize(
    ("text", "message"), [("=3", "no range"), ("=a..2", "neither a number"), ("=2..1", "above"), ("", "HOOK=VALUE")]
)
def test_the_command_line_refuses(text, message):
    run = mionnx("run", LLAMA, PROMPT, "--clamp", f"{HOOK}{text}")
    assert run.returncode == 1
    assert message in run.stderr


@pytest.mark.parametrize("bounds", ["both", "high"])
def test_a_compiled_graph_clamps(model, tmp_path, bounds):
    spec = clamp(*BOUNDS[bounds], positions=-1)
    folder = model.compile(spec, tmp_path / "clamped")
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    ids = model.tokenize(PROMPT).ids[None]
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(ids.shape[1])[None]}
    past = [one for one in session.get_inputs() if one.name.startswith("past")]
    feeds |= {one.name: np.zeros((1, one.shape[1], 0, one.shape[3]), np.float32) for one in past}
    found = dict(zip(names := ["logits", HOOK], session.run(names, feeds), strict=True))
    cache = model.forward(PROMPT, spec)
    assert np.array_equal(found[HOOK], cache[HOOK])
    assert np.array_equal(found["logits"], cache.output())
    assert "| clamp |" in (folder / "README.md").read_text()


def test_a_clamp_has_no_strength(model, tmp_path):
    with pytest.raises(InterventionError, match="has no strength"):
        model.compile(clamp(0.0, 1.0), tmp_path / "knob", knobs={"strength": HOOK})


def test_torch_agrees(model):
    spec = HookSpec().intervene(HOOK, Intervention.Clamp(-0.5, 0.25))
    spec.intervene("blocks.1.attn.hook_scores", Intervention.Clamp(high=0.1, heads=0))
    assert model.verify([PROMPT], ["torch", "ort-cpu"], hooks=spec, greedy=0).agrees


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ((None, None), "both sides are open"),
        ((-np.inf, np.inf), "both sides are open"),
        ((2.0, 1.0), "above"),
        (([0.0, 2.0], 1.0), r"above high at \[1\]"),
        ((np.nan, 1.0), "low has NaN"),
        ((0.0, "a"), "high must be numbers"),
        ((np.inf, None), "low is infinite"),
        ((np.zeros(3), np.ones(2)), "do not broadcast"),
    ],
)
def test_what_is_no_clamp_is_refused(bounds, message):
    with pytest.raises(InterventionError, match=message):
        Intervention.Clamp(*bounds)


def test_bounds_of_another_shape_are_refused(model):
    with pytest.raises(InterventionError, match="must broadcast to"):
        model.forward(PROMPT, clamp(np.zeros(7), None))


def test_help_says_what_it_is():
    assert [*signature(Intervention.Clamp).parameters] == [
        "low",
        "high",
        "positions",
        "heads",
        "rows",
        "experts",
        "neurons",
    ]
    assert "min(max(x, low), high)" in (Intervention.Clamp.__doc__ or "")
