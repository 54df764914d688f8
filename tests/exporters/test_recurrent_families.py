"""Families with recurrent layers: transformers' own numbers in one call and in many, padded anywhere, and edited."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from oracle import Inputs, run
from recurrent_families import CONFIGS, VOCAB, make_recurrent
from transformers import PreTrainedModel

from exporters.transformers import export
from exporters.transformers.trace import run_eagerly
from mionnx import HookError, HookPoint, HookSpec, Intervention, InterventionError, MIModel, StateKnockoutSpec

TOLERANCE = 5e-5
WIDTHS = (30, 1, 1, 1, 2, 5, 1)
FAST = "lfm2"
# A norm of all heads together follows these, which undoes a factor.
NORMED = {
    **dict.fromkeys(("zamba", "zamba2"), ("attn.hook_v", "attn.hook_pattern", "attn.hook_z")),
    "minimax": ("ssm.hook_q", "ssm.hook_k", "ssm.hook_v", "ssm.hook_y"),
}
Pair = tuple[MIModel, PreTrainedModel]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory):
    """Family -> its hooked model and the same in torch, made once a module."""
    pairs: dict[str, Pair] = {}

    def find(family: str) -> Pair:
        if family not in pairs:
            folder: Path = tmp_path_factory.mktemp(family)
            reference = make_recurrent(family, folder / "checkpoint")
            export(folder / "checkpoint", folder / "hooked")
            pairs[family] = MIModel.from_pretrained(folder / "hooked", threads=1), reference
        return pairs[family]

    return find


each = pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name == FAST else pytest.mark.slow) for name in CONFIGS]
)


def ids_of(seed: int, seq: int = sum(WIDTHS)) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, VOCAB, (2, seq))


def plainly(reference: PreTrainedModel, ids: np.ndarray) -> torch.Tensor:
    """Transformers in eager mode without taps, without a cache, which forgets in some families."""
    before = reference.config._attn_implementation
    reference.config._attn_implementation = "eager"
    reference.config._experts_implementation = "eager"
    try:
        return reference(torch.from_numpy(ids), use_cache=False).logits
    finally:
        reference.config._attn_implementation = before


def plain_logits(reference: PreTrainedModel, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return plainly(reference, ids).numpy()


def mask_of(kind: str, seq: int) -> np.ndarray:
    mask = np.ones((2, seq), np.int64)
    if kind == "left":
        mask[0, :5] = mask[1, :1] = 0
    if kind == "right":
        mask[0, -5:] = 0
    if kind == "between":
        mask[0, 2] = mask[0, 9:13] = mask[1, 10] = 0
    return mask


def off(one: np.ndarray, other: np.ndarray) -> float:
    """The largest difference, relative to the largest value where that is above 1."""
    return float(np.abs(one - other).max(initial=0) / max(1.0, np.abs(other).max(initial=0)))


@each
def test_logits_equal_each_row_alone_in_transformers_whatever_the_padding(family, made):
    model, reference = made(family)
    ids = ids_of(0)
    for kind in ("plain", "left", "right", "between"):
        mask = mask_of(kind, ids.shape[1])
        found = model.forward(ids, attention_mask=mask).output()
        for row, real in enumerate(mask.astype(bool)):
            assert off(found[row, real], plain_logits(reference, ids[row : row + 1, real])[0]) < TOLERANCE, kind


@each
def test_calls_of_any_widths_equal_one_pass(family, made):
    model, reference = made(family)
    ids, mask = ids_of(1), mask_of("between", sum(WIDTHS))
    whole = [plain_logits(reference, ids[row : row + 1, real])[0] for row, real in enumerate(mask.astype(bool))]
    cache, start, calls = None, 0, []
    for width in WIDTHS:
        end = start + width
        found = model.forward(ids[:, start:end], attention_mask=mask[:, :end], cache=cache, use_cache=True)
        calls.append(found.output())
        cache, start = found.kv_cache or found.state, end
    joined = np.concatenate(calls, 1)
    for row, real in enumerate(mask.astype(bool)):
        assert off(joined[row, real], whole[row]) < TOLERANCE


@each
def test_every_hook_point_equals_the_taps_in_torch(family, made):
    model, reference = made(family)
    ids = ids_of(2, 12)
    for kind, past in (("left", 0), ("between", 0), ("plain", 5)):
        inputs = Inputs(ids, mask_of(kind, 12), past=past)
        expected = run(reference, inputs)
        cache = None
        if past:
            first = model.forward(ids[:, :past], use_cache=True)
            cache = first.kv_cache or first.state
        spec = HookSpec().capture(lambda name: not HookPoint.parse(name).derived)
        found = model.forward(ids[:, past:], spec, attention_mask=inputs.mask, cache=cache, use_cache=True)
        assert {*found} == {*expected.values}
        for name, value in found.items():
            other = expected.values[name]
            axes = HookPoint.parse(name).axes
            if "seq" in axes or "seq_q" in axes:  # a state has no tokens
                axis = axes.index("seq_q" if "seq_q" in axes else "seq")
                value, other = (np.moveaxis(array, axis, 1)[inputs.real] for array in (value, other))
            seen = (value > -1e9) & (other > -1e9)
            assert off(value[seen], other[seen]) < TOLERANCE, (name, kind)
        left = found.kv_cache or found.state
        for own, theirs in zip(left.device_parts(), expected.cache, strict=True):
            assert [np.shape(part) for part in own.values()] == [part.shape for part in theirs]


@each
def test_an_edit_at_each_point_of_a_mixer_equals_the_same_edit_in_torch(family, made):
    model, reference = made(family)
    ids = ids_of(3, 10)
    inputs = Inputs(ids, mask_of("left", 10))
    plain = run(reference, inputs)
    rooms = {"ssm", "attn", "mlp"} if model.hooked.metadata.layers[0].attention else {"ssm"}
    points = [one for one in map(HookPoint.parse, plain.values) if one.layer == 0 and one.name.split(".")[2] in rooms]
    assert {point.name.split(".")[2] for point in points} == rooms
    for point in points:
        for edit in (Intervention.Scale(0.5), Intervention.Zero(positions=[-2]), Intervention.Zero()):
            if edit.positions is not None and "seq" not in point.axes:
                continue
            expected = run(reference, inputs, [(point, edit)])
            found = model.forward(ids, HookSpec().intervene(point, edit), attention_mask=inputs.mask, use_cache=True)
            assert off(found.output()[inputs.real], expected.logits[inputs.real]) < TOLERANCE, str(point)
            left = (found.kv_cache or found.state).device_parts()[0]
            for part, other in zip(left.values(), expected.cache[0], strict=True):
                assert off(np.asarray(part), other) < TOLERANCE, str(point)
            undone = edit.kind == "scale" and point.name.removeprefix("blocks.0.") in NORMED.get(family, ())
            if point.short not in ("state",) and not undone:
                assert np.abs(expected.logits - plain.logits)[inputs.real].max() > 1e-4, str(point)


@each
def test_generation_is_transformers_greedy_one(family, made):
    model, reference = made(family)
    ids = ids_of(4, 9)
    found = model.generate(ids, max_new_tokens=6, eos_token_id=[])
    expected = ids
    for _ in range(6):
        expected = np.concatenate([expected, plain_logits(reference, expected)[:, -1:].argmax(-1)], 1)
    assert [*map(list, found.new_ids)] == expected[:, -6:].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["falcon_h1", "mamba2", "minimax", "nemotron_h", "qwen3_5_text", "zamba", "zamba2"])
def test_a_token_knocked_out_of_the_states_writes_nothing(family, made):
    model, reference = made(family)
    ids = ids_of(5, 10)
    inputs = Inputs(ids, np.ones_like(ids))
    layers = [port.layer for port in model.hooked.metadata.ports if port.part == "state"]
    delta = family == "qwen3_5_text"
    write = HookPoint.SsmWrite if delta else HookPoint.SsmV  # what a delta rule erases goes with b
    silent = [(write(layer), Intervention.Zero(positions=[3])) for layer in layers]
    silenced = StateKnockoutSpec().position(3)
    spec = HookSpec().set_state_knockout(silenced.erase() if delta else silenced)
    expected = run(reference, inputs, silent).logits
    assert np.abs(expected - run(reference, inputs).logits).max() > 1e-3
    assert off(model.forward(ids, spec).output(), expected) < TOLERANCE


SLOW = ("falcon_h1", "mamba2", "minimax", "nemotron_h", "qwen3_5_text", "zamba2")
some = pytest.mark.parametrize("family", ["lfm2", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])


@some
def test_a_cell_of_a_sweep_is_the_same_patch_in_torch(family, made):
    """Longer than a chunk of a recurrence; a patched state reaches all later tokens."""
    model, reference = made(family)
    clean, corrupted = ids_of(6, 20)
    swept = model.patch_sweep(clean, corrupted, "resid_pre", answer=5, versus=6)
    ones = np.ones((1, 20), np.int64)
    streams = run(reference, Inputs(clean[None], ones)).values
    for layer, position in ((0, 4), (1, 4), (model.num_layers - 1, 17)):
        point = HookPoint.ResidPre(layer)
        patch = Intervention.Replace(streams[str(point)], positions=[position])
        logits = run(reference, Inputs(corrupted[None], ones), [(point, patch)]).logits[0, -1]
        assert abs(swept.values[layer, position] - (logits[5] - logits[6])) < TOLERANCE


@some
def test_gradients_go_through_the_recurrence_as_in_autograd(family, made):
    model, reference = made(family)
    ids, streams = ids_of(7, 20), []
    blocks = next(module for name, module in reference.named_modules() if name.endswith(".layers"))

    def keep(_module, _inputs, output):
        streams.append(output[0] if isinstance(output, tuple) else output)
        streams[-1].retain_grad()

    handles = [block.register_forward_hook(keep) for block in blocks]
    plainly(reference, ids)[:, -1, 5].sum().backward()
    for handle in handles:
        handle.remove()
    found = model.gradients(ids, "blocks.*.hook_resid_post", answer=5).grad
    for layer, stream in enumerate(streams):
        expected = stream.grad.numpy()
        assert np.abs(found[HookPoint.ResidPost(layer)] - expected).max() < 2e-5 * np.abs(expected).max(), layer


@pytest.mark.parametrize(
    "family", ["lfm2", *(pytest.param(one, marks=pytest.mark.slow) for one in ("jamba", "olmo_hybrid"))]
)
def test_mixers_are_nodes_of_circuits(family, made):
    """All edges but one are path patching of that one; to first order it is the edge's score."""
    model, _ = made(family)
    clean, corrupted = ids_of(10, 14)
    tokens = {"answer": 5, "versus": 9}
    ranking = model.edge_attribution(clean, corrupted, **tokens)
    headed = family == "olmo_hybrid"  # others have a mixer of one head
    first, last = ("r0.h1", "r2.h3") if headed else ("r0", "r2")
    assert {first, last, "a1.h0", "m1"} <= {*ranking.senders}
    assert {"r0", "r2", "a1.h0<q>", "m1", "logits"} <= {*ranking.receivers}
    for sender, receiver in ((first, "m1"), ("a1.h2", "r2"), ("embed", "r0"), (last, "logits")):
        at = ranking.senders.index(sender), ranking.receivers.index(receiver)
        scores = np.ones(ranking.scores.shape)
        scores[at] = 0
        found = model.circuit(clean, corrupted, ranking.count - 1, scores=replace(ranking, scores=scores), **tokens)
        (hook, head), (read, _) = ranking.hooks[at[0]], ranking.receiving[at[1]]
        hook = "blocks.0.hook_resid_pre" if sender == "embed" else hook
        over, layer = ("layer",) if head is None else ("layer", "head"), HookPoint.parse(hook).layer
        exact = model.path_patch(
            clean, corrupted, [read], hook, over=over, patching="noising", layers=[layer], **tokens
        )
        assert found.values[0] == pytest.approx(float(exact.values.ravel()[head or 0]), abs=TOLERANCE)
    ends = model.circuit(clean, corrupted, [0, ranking.count], scores=ranking, **tokens)
    assert ends.values == pytest.approx([ends.corrupted, ends.clean], abs=TOLERANCE)


def test_a_sender_that_is_none_is_answered_with_those_that_are(made):
    model, _ = made("lfm2")
    with pytest.raises(HookError, match=r"senders are hook_embed, attn.hook_z .* or hook_attn_out \(a mixer\)"):
        model.edge_attribution(*ids_of(10, 14), senders="blocks.0.ssm.hook_y", answer=5, versus=9)


@some
def test_an_invisible_token_might_not_be_there(family, made):
    """The first tokens hidden: distances between the others are as before, and the text as if it began behind them."""
    model, reference = made(family)
    ids, hidden = ids_of(8, 20), [0, 1]
    spec = HookSpec().set_state_knockout(StateKnockoutSpec().positions(hidden).invisible())
    alone = plain_logits(reference, ids[:, 2:])
    assert np.abs(plain_logits(reference, ids)[:, 2:] - alone).max() > 1e-3
    assert off(model.forward(ids, spec).output()[:, 2:], alone) < TOLERANCE
    mask = mask_of("left", 20)
    padded = model.forward(ids, spec, attention_mask=mask).output()
    for row, start in enumerate((7, 3)):  # five and one columns of padding, and two hidden tokens
        assert off(padded[row, start:], plain_logits(reference, ids[row : row + 1, start:])[0]) < TOLERANCE
    found = model.generate(ids, spec, max_new_tokens=4, eos_token_id=[])
    again = model.generate(ids[:, 2:], max_new_tokens=4, eos_token_id=[])
    assert [*map(list, found.new_ids)] == [*map(list, again.new_ids)]


@some
def test_an_invisible_token_between_others_keeps_its_place(family, made):
    model, reference = made(family)
    ids, mask = ids_of(8, 20), np.ones((2, 20), np.int64)
    mask[:, 7] = 0
    arrays = (torch.from_numpy(one) for one in (ids, mask, np.tile(np.arange(20), (2, 1))))
    expected = run_eagerly(reference, lambda _name, value, _stream: value, *arrays, [])[0].numpy()
    spec = HookSpec().set_state_knockout(StateKnockoutSpec().position(7).invisible())
    assert off(np.delete(model.forward(ids, spec).output(), 7, 1), np.delete(expected, 7, 1)) < TOLERANCE


def test_a_compiled_graph_hides_an_invisible_token(made, tmp_path):
    model, reference = made("lfm2")
    ids, spec = ids_of(8, 12), HookSpec().set_state_knockout(StateKnockoutSpec().position(0).invisible())
    folder = model.compile(spec, tmp_path / "out")
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    logits, past = [], None
    for start, stop in ((0, 6), (6, 11), (11, 12)):
        feeds = dict(model.hooked.metadata.past_shapes(2, 0)) if past is None else past
        feeds = {name: np.zeros(one, np.float32) if isinstance(one, tuple) else one for name, one in feeds.items()}
        feeds |= {"input_ids": ids[:, start:stop], "attention_mask": np.ones((2, stop), np.int64)}
        feeds |= {"position_ids": np.tile(np.arange(start, stop), (2, 1))}
        wanted = {one.name for one in session.get_inputs()}
        found = dict(
            zip(
                [one.name for one in session.get_outputs()],
                session.run(None, {k: feeds[k] for k in wanted}),
                strict=True,
            )
        )
        logits.append(found["logits"])
        past = {port.past: found[port.present] for port in model.hooked.metadata.ports}
    assert off(np.concatenate(logits, 1)[:, 1:], plain_logits(reference, ids[:, 1:])) < TOLERANCE
    with pytest.raises(InterventionError, match="does not remember where a prompt ended"):
        model.compile(HookSpec().set_state_knockout(StateKnockoutSpec().position(-1).invisible()), tmp_path / "again")


def test_a_token_is_not_hidden_in_part(made):
    model, _ = made("lfm2")
    with pytest.raises(InterventionError, match="of all layers of this lfm2 model at once: name no layers"):
        model.forward(
            ids_of(8, 10), HookSpec().set_state_knockout(StateKnockoutSpec().layer(0).position(3).invisible())
        )
    with pytest.raises(InterventionError, match=r"lfm2 has no term write; it has convolution; .invisible\(\) hides"):
        model.forward(ids_of(8, 10), HookSpec().set_state_knockout(StateKnockoutSpec().position(3).token_shift()))


@pytest.mark.slow
def test_a_term_of_other_families_is_refused(made):
    model, _ = made("mamba2")
    with pytest.raises(
        InterventionError, match=r"no term token_shift; it has write, decay, convolution; .invisible\(\) hides"
    ):
        model.forward(ids_of(8, 10), HookSpec().set_state_knockout(StateKnockoutSpec().position(3).token_shift()))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mamba", "mamba2", "qwen3_5_text", "kimi_linear", "recurrent_gemma"])
def test_effective_attention_and_states_are_a_loop_of_what_the_recurrence_reads(family, made):
    model, _ = made(family)
    ids, mask = ids_of(9, 20), mask_of("between", 20)
    names = ("q", "k", "v", "log_decay", "y", "state", "states", "effective_attn", "effective_attn_raw")
    spec = HookSpec().set_state_knockout(StateKnockoutSpec().position(4))
    delta = "blocks.0.ssm.hook_write" in model.hook_points()
    for name in (*names, *(["write"] if delta else [])):
        spec.capture(f"blocks.0.ssm.hook_{name}")
    found = model.forward(ids, spec, attention_mask=mask)
    value = {name: np.asarray(found[f"blocks.0.ssm.hook_{name}"], np.float64) for name in names}
    seen = mask * (mask.cumsum(1) - 1 != 4)
    write = np.asarray(found["blocks.0.ssm.hook_write"], np.float64) if delta else np.ones((2, 20, 1, 1))
    state, states = np.zeros(value["state"].shape), []
    for t in range(20):
        real, here = mask[:, t, None, None, None], seen[:, t, None, None]
        decay = np.clip(value["log_decay"][:, t], -1e4, 0)
        whole = decay.shape[-1] == state.shape[2] * state.shape[3] > state.shape[2]
        decay = decay.reshape(*decay.shape[:2], *state.shape[2:]) if whole else decay[..., None]
        state = np.exp(decay * real) * state
        key, written = value["k"][:, t], value["v"][:, t] * here
        if delta:
            written = write[:, t] * mask[:, t, None, None] * (written - np.einsum("bhk,bhkv->bhv", key, state))
        state = state + key[..., None] * written[:, :, None]
        states.append(state)
    states = np.stack(states, 1)
    assert off(value["states"], states) < TOLERANCE
    assert np.array_equal(value["states"][:, -1].astype(np.float32), found["blocks.0.ssm.hook_state"]) or (
        off(value["states"][:, -1], value["state"]) < TOLERANCE
    )
    raw, v = value["effective_attn_raw"], value["v"]
    # of Mamba and Griffin each channel has its own weights
    y = (
        np.einsum("bcij,bjc->bic", raw, v[:, :, 0])[:, :, None]
        if raw.shape[1] != v.shape[2]
        else (np.einsum("bhij,bjhv->bihv", raw, v))
    )
    assert off(y[mask.astype(bool)], value["y"][mask.astype(bool)]) < TOLERANCE
    assert not raw.swapaxes(1, 3)[:, :, :, :][~seen.astype(bool)].any()  # columns of silenced tokens and of padding
    positive = np.maximum(raw, 0)
    total = positive.sum(-1, keepdims=True)
    assert off(value["effective_attn"] * total, positive) < TOLERANCE
