"""LowRank: in generation, in files, on the command line, compiled; `tests/laws/test_kinds.py` holds its law."""

import numpy as np
import onnxruntime
import pytest
from safetensors.numpy import save_file

from mionnx import HookPoint, HookSpec, Intervention, InterventionError
from mionnx.cli.interventions import parse

PROMPT, HOOK = "The capital of France is", "blocks.1.hook_resid_post"
READ, WRITE = np.random.default_rng(0).normal(0, 0.1, (2, 2, 128)).astype(np.float32)


def spec_of(*args, hook=HOOK, **limits) -> HookSpec:
    return HookSpec().intervene(hook, Intervention.LowRank(*args, **limits)).capture(hook).capture(hook, before=True)


def test_offsets_stand_at_positions_in_the_order_given(shipped):
    offset = np.arange(6, dtype=np.float32).reshape(3, 2)
    cache = shipped.forward(PROMPT, spec_of(READ, WRITE, offset, positions=[3, 0, -1]))
    before, after = cache[f"{HOOK}.before"][0], cache[HOOK][0]
    expected = before.copy()
    expected[[3, 0, 4]] += (before[[3, 0, 4]] @ READ.T + offset) @ WRITE
    np.testing.assert_allclose(after, expected, atol=2e-6)


def test_each_row_has_its_offset_in_a_ragged_batch_in_parts_too(shipped):
    """Texts of unequal lengths, one batch and batches of one: the same numbers as alone."""
    prompts = [PROMPT, "France", "The capital of Japan"]
    offset = np.random.default_rng(1).normal(size=(3, 1, 2))
    spec = HookSpec().intervene(HOOK, Intervention.LowRank(READ, WRITE, offset, positions=-1))
    whole = shipped.forward(prompts, spec, batch_size=None).output()
    parts = shipped.forward(prompts, spec, batch_size=1).output()
    np.testing.assert_allclose(whole[:, -1], parts[:, -1], atol=5e-5)
    for row, prompt in enumerate(prompts):
        alone = shipped.forward(prompt, spec_of(READ, WRITE, offset[row, 0], positions=-1)).output()[0, -1]
        np.testing.assert_allclose(whole[row, -1], alone, atol=5e-5)


def test_heads_have_coordinates_of_their_own(shipped):
    z, (read, write) = "blocks.2.attn.hook_z", np.random.default_rng(2).normal(0, 0.3, (2, 1, 16)).astype(np.float32)
    cache = shipped.forward(PROMPT, spec_of(read, write, [[0.5], [2.0]], hook=z, heads=[3, 1]).capture(z))
    before, expected = cache[f"{z}.before"], cache[f"{z}.before"].copy()
    for head, shift in ((3, 0.5), (1, 2.0)):
        expected[:, :, head] += (before[:, :, head] @ read.T + shift) @ write
    np.testing.assert_allclose(cache[z], expected, atol=2e-6)


def test_generation_a_file_and_a_compiled_graph_with_a_knob(shipped, tmp_path):
    spec = spec_of(READ, 5 * WRITE, [0.5, -1.0]).intervene(
        "blocks.2.hook_resid_post", Intervention.LowRank(READ[0], WRITE[1], positions="generated")
    )
    spec.save(tmp_path / "spec.safetensors")
    loaded = HookSpec.load(tmp_path / "spec.safetensors")
    loaded.save(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "spec.safetensors").read_bytes()
    made = shipped.generate(PROMPT, loaded, max_new_tokens=5, eos_token_id=[])
    ids = made.ids[0][None, :-1]
    once = shipped.forward(ids, loaded, prompt_length=5)
    assert np.abs(made.captured(HOOK)[0] - once[HOOK][0]).max() < 5e-5
    first = HookSpec().intervene(HOOK, Intervention.LowRank(READ, 5 * WRITE, [0.5, -1.0]))
    folder = shipped.compile(first, tmp_path / "out", knobs={"strength": None})
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(ids.shape[1])[None]}
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
    feeds |= {
        one.name: np.zeros((1, 4, 0, 16), np.float32) for one in session.get_inputs() if one.name.startswith("past")
    }
    for strength, wanted in ((None, first), (0.0, None), (0.5, spec_of(READ, 2.5 * WRITE, [0.5, -1.0]))):
        turned = {} if strength is None else {"strength": np.array(strength, np.float32)}
        (logits,) = session.run(["logits"], feeds | turned)
        assert np.abs(logits - shipped.forward(ids, wanted).output()).max() < 5e-5, strength
    assert np.abs(logits - shipped.forward(ids).output()).max() > 0.01


def test_it_is_written_on_the_command_line(tmp_path):
    save_file({"read": READ, "write": WRITE}, tmp_path / "d.safetensors")
    file = tmp_path / "d.safetensors"
    hooks, found = parse("low_rank", f"{HOOK}={file}:read,{file}:write*2,0.5@positions=-1", 8, None)
    assert hooks == [HOOK]
    expected = Intervention.LowRank(READ, WRITE * 2.0, 0.5, positions=-1)
    assert [*map(np.ndarray.tolist, found.values)] == [*map(np.ndarray.tolist, expected.values)]
    assert found.positions == (-1,)
    with pytest.raises(InterventionError, match=r"READ,WRITE\[,OFFSET\]"):
        parse("low_rank", f"{HOOK}={file}:read", 8, None)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((READ, WRITE[0]), "of one shape"),
        ((READ[None], WRITE[None]), r"\[k, width\], of one shape"),
        ((READ, WRITE, [1.0, 2.0, 3.0]), "1 or 2 entries"),
        ((READ, 0 * WRITE), "do nothing"),
        ((READ, WRITE, np.nan), "offset has NaN"),
        ((READ * np.inf, WRITE), "read (has NaN|is infinite)"),
        (([], []), "read is empty"),
        (("a", WRITE), "read must be numbers"),
    ],
)
def test_what_is_no_pair_of_directions_is_refused(args, message):
    with pytest.raises(InterventionError, match=message):
        Intervention.LowRank(*args)


@pytest.mark.parametrize(
    ("hook", "options", "message"),
    [
        (HOOK, {"offset": np.zeros((7, 2))}, r"value of shape \[7, 2\] must broadcast to \[batch=1, seq=5, k=2\]"),
        (HOOK, {"offset": np.zeros((3, 2)), "positions": [1, 2]}, r"nor the selected part \[1, 2, 2\]"),
        ("blocks.1.attn.hook_z", {}, "direction of width 128"),
        (HookPoint.AttnPattern(1), {}, "its last axis is keys"),
    ],
)
def test_what_does_not_fit_a_hook_point_is_refused(shipped, hook, options, message):
    with pytest.raises(InterventionError, match=message):
        shipped.forward(PROMPT, HookSpec().intervene(hook, Intervention.LowRank(READ, WRITE, **options)))


def test_offsets_of_positions_are_refused_by_compile(shipped, tmp_path):
    spec = HookSpec().intervene(HOOK, Intervention.LowRank(READ, WRITE, np.ones((2, 2)), positions=[1, 2]))
    with pytest.raises(InterventionError, match="give each position an intervention of its own"):
        shipped.compile(spec, tmp_path / "out")
