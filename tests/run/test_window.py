"""Window: attention cut to the tokens before a query, beside transformers with masks and a cropped cache of its own.

FINDINGS, part 2, section 2 (`window=` of LARQL's generation) and friction 17.
"""

import numpy as np
import onnxruntime
import pytest
import torch
from command_line import PROMPT, succeeded
from repository import REPOSITORY
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from mionnx import HookSpec, InputError, Intervention, InterventionError, MIError, MIModel

SCORES = "blocks.*.attn.hook_scores"
NAMES = ("world-llama", "world-gpt2")
LONG, SHORT = [3, 4, 5, 39, 6, 40, 7, 3, 5, 9, 12], [3, 5, 39, 6, 8]
# Logits reach 20 in world-llama: 5e-6 of that; which way products round differs between processors.
ATOL = 1e-4


@pytest.fixture(scope="module", params=NAMES)
def pair(request) -> tuple[MIModel, PreTrainedModel]:
    """A model that ships, and the same in transformers."""
    folder = REPOSITORY / "models" / request.param
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return MIModel.from_pretrained(folder, threads=1), reference.eval()


def windowed(tokens: int, **limits: object) -> HookSpec:
    return HookSpec().intervene(SCORES, Intervention.Window(tokens, **limits))


@torch.no_grad()
def whole(reference: PreTrainedModel, ids: list[int], tokens: int, first: int = 0) -> np.ndarray:
    """The logits of one text in one pass, queries from `first` on reading so many tokens before their own."""
    query, key = np.arange(len(ids))[:, None], np.arange(len(ids))[None]
    reads = (key <= query) & ((query - key <= tokens) | (query < first))
    mask = torch.from_numpy(np.where(reads, 0, np.finfo(np.float32).min).astype(np.float32))[None, None]
    return reference(torch.tensor([ids]), attention_mask=mask).logits[0].numpy()


@torch.no_grad()
def cropped(reference: PreTrainedModel, ids: list[int], tokens: int, steps: int) -> list[int]:
    """Greedy tokens as LARQL makes them: the cache keeps the last keys of each layer, and positions go on counting."""
    cache, given, made = DynamicCache(), torch.tensor([ids]), []
    for step in range(steps):
        places = torch.arange(given.shape[1])[None] + (0 if not step else len(ids) + step - 1)
        logits = reference(given, past_key_values=cache, position_ids=places).logits
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[:, :, -tokens:], layer.values[:, :, -tokens:]
        made.append(int(logits[0, -1].argmax()))
        given = torch.tensor([made[-1:]])
    return made


@pytest.mark.parametrize("tokens", [0, 1, 4])
def test_a_forward_pass_equals_transformers_under_the_same_mask(pair, tokens):
    model, reference = pair
    found = model.forward(LONG, windowed(tokens)).output()[0]
    expected = whole(reference, LONG, tokens)
    assert np.abs(found - expected).max() < ATOL
    assert np.abs(found - whole(reference, LONG, 99)).max() > 0.1


@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_of_a_padded_batch_are_windowed_alone(pair, side):
    model, reference = pair
    width = len(LONG) - len(SHORT)
    pad = [0] * width
    ids = [LONG, [*pad, *SHORT] if side == "left" else [*SHORT, *pad]]
    mask = np.ones((2, len(LONG)), int)
    mask[1, slice(width) if side == "left" else slice(len(SHORT), None)] = 0
    found = model.forward(ids, windowed(2), attention_mask=mask).output()
    assert np.abs(found[0] - whole(reference, LONG, 2)).max() < ATOL
    assert np.abs(found[1][mask[1] == 1] - whole(reference, SHORT, 2)).max() < ATOL


def test_a_pass_after_a_cache_of_padded_rows(pair):
    """Padding stands inside the rows then, and counts for no distance."""
    model, reference = pair
    first = model.forward([LONG[:6], SHORT[:2]], windowed(2), use_cache=True)
    found = model.forward([LONG[6:8], SHORT[2:]], windowed(2), cache=first.kv_cache).output()
    assert np.abs(found[0, -2:] - whole(reference, LONG[:8], 2)[6:]).max() < ATOL
    assert np.abs(found[1] - whole(reference, SHORT, 2)[2:]).max() < ATOL


@pytest.mark.parametrize("tokens", [1, 3])
def test_generation_equals_a_cropped_cache_and_one_pass(pair, tokens):
    model, reference = pair
    made = model.generate([LONG, SHORT], window=tokens, max_new_tokens=8, eos_token_id=[], output_logits=True)
    for row, prompt in enumerate((LONG, SHORT)):
        new = made.new_ids[row].tolist()
        assert new == cropped(reference, prompt, tokens, 8)
        expected = whole(reference, [*prompt, *new], tokens, first=len(prompt))
        for step, cache in enumerate(made.steps):
            assert np.abs(cache.output()[row, -1] - expected[len(prompt) - 1 + step]).max() < ATOL
    alone = model.generate(SHORT, window=tokens, max_new_tokens=8, eos_token_id=[]).new_ids[0]
    np.testing.assert_array_equal(alone, made.new_ids[1])
    listed = model.generate([LONG, SHORT], window=tokens, max_new_tokens=8, eos_token_id=[], batch_size=1).new_ids
    assert [row.tolist() for row in listed] == [row.tolist() for row in made.new_ids]
    free = model.generate([LONG, SHORT], max_new_tokens=8, eos_token_id=[]).new_ids
    assert any(row.tolist() != other.tolist() for row, other in zip(free, made.new_ids, strict=True))


def test_a_layer_that_reads_less_keeps_its_own_window(hooked, references):
    """Gemma 2: every other layer reads a few keys only."""
    model, reference = MIModel.from_pretrained(hooked("gemma2"), threads=1), references("gemma2")
    windows = [one.sliding_window for one in model.hooked.metadata.attention]
    narrow = min(window for window in windows if window)
    ids = (np.arange(3 * narrow) % 90 + 3).tolist()
    made = model.generate(ids, window=narrow, max_new_tokens=4, eos_token_id=[])
    for tokens in (1, narrow):
        made = model.generate(ids, window=tokens, max_new_tokens=4, eos_token_id=[])
        assert made.new_ids[0].tolist() == cropped(reference, ids, tokens, 4)
    layer = windows.index(narrow)
    with pytest.raises(InterventionError, match=f"in a layer that reads {narrow} keys"):
        model.forward(ids, HookSpec().intervene(f"blocks.{layer}.attn.hook_scores", Intervention.Window(narrow)))


def test_limits_and_other_knockouts(pair):
    model, _ = pair
    spec = windowed(1, heads=[2], positions=[-1]).capture("blocks.0.attn.hook_pattern")
    found, before = (
        model.forward(LONG, spec)["pattern", 0][0],
        model.forward(LONG, HookSpec().capture("blocks.0.*pattern")),
    )
    changed = np.abs(found - before["pattern", 0][0]) > 1e-6
    assert {*map(tuple, np.argwhere(changed.any(axis=2)))} == {(2, len(LONG) - 1)}
    assert not found[2, -1, :-2].any()
    own = HookSpec().intervene("blocks.0.attn.hook_scores", Intervention.Window(0))
    cut = np.where(np.eye(len(LONG), dtype=bool), -np.inf, 0)
    with pytest.raises(InterventionError, match="left with no key"):
        model.forward(LONG, own.intervene("blocks.0.attn.hook_scores", Intervention.Knockout(cut)))


def test_a_compiled_window_holds_in_texts_of_any_length(pair, tmp_path):
    model, reference = pair
    folder = model.compile(windowed(2), tmp_path / "window")
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    sizes, past = model.hooked.metadata.sizes, {}
    for entry in session.get_inputs():
        if entry.name.startswith("past"):
            past[entry.name] = np.zeros((2, sizes.num_kv_heads, 0, sizes.head_dim), np.float32)
    pad = len(LONG) - len(SHORT)
    ids, mask = np.array([LONG, [0] * pad + SHORT]), np.ones((2, len(LONG)), np.int64)
    mask[1, :pad] = 0
    places = np.maximum(mask.cumsum(1) - 1, 0)
    (found,) = session.run(["logits"], {"input_ids": ids, "attention_mask": mask, "position_ids": places, **past})
    assert np.abs(found[0] - whole(reference, LONG, 2)).max() < ATOL
    assert np.abs(found[1, pad:] - whole(reference, SHORT, 2)).max() < ATOL


def test_a_compiled_window_of_new_tokens(pair, tmp_path):
    """The window of `generate(window=)` in a graph that is decoded with by hand."""
    model, reference = pair
    session = onnxruntime.InferenceSession(
        model.compile(windowed(3, positions="generated"), tmp_path / "window") / "model.onnx"
    )
    names, sizes = [entry.name for entry in session.get_outputs()], model.hooked.metadata.sizes
    feeds = {
        entry.name: np.zeros((1, sizes.num_kv_heads, 0, sizes.head_dim), np.float32)
        for entry in session.get_inputs()
        if entry.name.startswith("past")
    }
    given, total, made = np.array([LONG]), len(LONG), []
    for _ in range(6):
        places = np.arange(total - given.shape[1], total)[None]
        inputs = {"input_ids": given, "attention_mask": np.ones((1, total), np.int64), "position_ids": places}
        results = dict(zip(names, session.run(names, {**inputs, **feeds}), strict=True))
        made.append(int(results["logits"][0, -1].argmax()))
        feeds = {name: results[name.replace("past_key_values", "present")] for name in feeds}
        given, total = np.array([made[-1:]]), total + 1
    assert made == cropped(reference, LONG, 3, 6)


def test_a_file_keeps_it(tmp_path):
    spec = windowed(7, positions="generated")
    spec.save(tmp_path / "spec.safetensors")
    again = HookSpec.load(tmp_path / "spec.safetensors")
    assert again.to_bytes() == spec.to_bytes()
    assert repr(again.interventions[0][1]) == "Intervention.Window(7, positions='generated')"


def test_the_command_line_has_it(shipped):
    told = succeeded("run", "world-llama", PROMPT, "--window", f"{SCORES}=1", "--json")
    logits = shipped.forward(PROMPT, windowed(1)).output()[0, -1]
    assert shipped.to_string(logits.argmax()).strip() in told


@pytest.mark.parametrize(
    ("act", "kind", "message"),
    [
        (lambda model: Intervention.Window(-1), InterventionError, "0 or more, got -1"),
        (lambda model: Intervention.Window(1.5), InterventionError, r"0 or more, got 1\.5"),
        (lambda model: Intervention.Window([1, 2]), InterventionError, "0 or more"),
        (lambda model: model.forward(SHORT, windowed(4)), InterventionError, "cuts nothing.*more than 4 tokens"),
        (lambda model: model.generate(SHORT, window=64), InterventionError, "cuts nothing.*more than 64 tokens"),
        (lambda model: model.generate(SHORT, window=2, max_new_tokens=1), InterventionError, "no new token is read"),
        (lambda model: model.generate(SHORT, window=2.5), InputError, "window must be an integer"),
        (
            lambda model: model.forward(SHORT, HookSpec().intervene("blocks.0.attn.hook_z", Intervention.Window(1))),
            InterventionError,
            "window at blocks.0.attn.hook_z: .*at blocks.0.attn.hook_scores",
        ),
    ],
)
def test_what_would_cut_nothing_is_refused(shipped, act, kind, message):
    with pytest.raises(kind, match=message):
        act(shipped)


def test_a_recurrent_model_has_no_window(recurrent):
    with pytest.raises(MIError, match="no layer of this rwkv7 model has attention"):
        recurrent.generate("The capital of France is", window=2)
