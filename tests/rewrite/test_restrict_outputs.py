"""Only what is asked for leaves the graph: parts of logits and captures, and no more layers than they need."""

import numpy as np
import onnx
import pytest
from families import CONFIGS, VOCAB
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mionnx import (
    HookError,
    HookPoint,
    HookSpec,
    InputError,
    Intervention,
    InterventionError,
    Logits,
    MIModel,
    StateKnockoutSpec,
)
from mionnx.bind.plan import plan_of
from mionnx.rewrite.plan import Outputs

law = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def batch() -> tuple[np.ndarray, np.ndarray]:
    ids = np.random.default_rng(1).integers(3, VOCAB, (3, 8))
    mask = np.ones_like(ids)
    mask[0, :3] = mask[1, :1] = 0
    return ids, mask


def columns(mask: np.ndarray, positions: list[int]) -> np.ndarray:
    """[batch, n]: the column of each row's position."""
    first, length = mask.argmax(1), mask.sum(1)
    return np.array([[f + (p if p >= 0 else p + n) for p in positions] for f, n in zip(first, length, strict=True)])


def test_parts_of_the_logits(family, models):
    """Positions, tokens, the largest, and all of these together are parts of the whole."""
    model, (ids, mask) = models(family), batch()
    whole = model.forward(ids, attention_mask=mask).output()
    rows = np.arange(3)[:, None]

    def found(**part: object):
        return model.forward(ids, attention_mask=mask, logits=Logits(**part))

    def close(one: np.ndarray, other: np.ndarray) -> None:
        assert one.shape == other.shape
        assert np.abs(one - other).max() / max(1, np.abs(other).max()) < 1e-6

    close(found(positions=-1).output(), whole[:, -1:])
    at = columns(mask, [-2, 0, 4])
    close(found(positions=[-2, 0, 4]).output(), whole[rows, at])
    assert np.array_equal(found(tokens=[5, 3, 5]).output(), whole[..., [5, 3, 5]])
    top = found(top_k=4)
    assert np.array_equal(top.output(), -np.sort(-whole, axis=-1)[..., :4])
    assert np.array_equal(np.take_along_axis(whole, top.top_ids, axis=-1), top.output())
    all_three = found(positions=[-2, 0, 4], tokens=[9, 8, 7], top_k=1)
    expected = whole[rows, at][..., [9, 8, 7]]
    close(all_three.output(), expected.max(-1, keepdims=True))
    assert np.array_equal(all_three.top_ids[..., 0], expected.argmax(-1))


@law
@given(st.sampled_from(sorted(CONFIGS)), st.data())
def test_a_part_of_a_capture_is_that_part(models, family, data):
    """At every hook point, before or after interventions, bit for bit; and asking for less changes nothing else."""
    model, (ids, mask) = models(family), batch()
    point = data.draw(st.sampled_from(model.hook_points()))
    before = data.draw(st.booleans()) and not point.derived
    positions = data.draw(st.none() | st.lists(st.integers(-5, 4), min_size=1, max_size=4))
    with_heads = {"n_heads", "n_kv_heads"} & {*point.axes}
    heads = data.draw(st.none() | st.lists(st.integers(0, 1), min_size=1, max_size=3)) if with_heads else None
    edit = HookSpec().intervene(HookPoint.ResidPost(0), Intervention.Scale(1.25))
    spec = HookSpec().capture(point, before, positions=positions, heads=heads).extend(edit)
    found = model.forward(ids, spec, attention_mask=mask)
    whole = model.forward(ids, HookSpec().capture(point, before).extend(edit), attention_mask=mask)
    name = f"{point}.before" if before else str(point)
    expected = whole[name]
    if heads is not None:
        axis = next(i for i, axis in enumerate(point.axes) if axis in ("n_heads", "n_kv_heads"))
        expected = np.take(expected, heads, axis=axis)
    if positions is not None:
        axis = point.axes.index("seq_q" if "seq_q" in point.axes else "seq")
        expected = np.moveaxis(np.moveaxis(expected, axis, 1)[np.arange(3)[:, None], columns(mask, positions)], 1, axis)
    assert np.array_equal(found[name], expected)
    assert np.array_equal(found.output(), whole.output())
    estimated = model.estimate(spec, *ids.shape).captures
    assert estimated == {name: expected.nbytes}


def test_without_logits_only_the_layers_that_are_needed_run(family, models):
    """Capturing in layer 0 leaves layer 1 and the head out of the graph; the value is the same to the bit."""
    model, (ids, mask) = models(family), batch()
    for name in ("blocks.0.hook_resid_post", "blocks.0.attn.hook_pattern"):
        spec = HookSpec().capture(name)
        found = model.forward(ids, spec, attention_mask=mask, logits=False)
        assert np.array_equal(found[name], model.forward(ids, spec, attention_mask=mask)[name])
        plan = plan_of(spec, model.hooked, Outputs(logits=False, carried=False))
        graph = onnx.load_from_string(model.compiled[plan].model).graph
        left = {output for node in graph.node for output in node.output}
        assert not any(value.startswith(("blocks.1.", "hook_final_norm", "logits", "present.1")) for value in left)
        with pytest.raises(HookError, match="logits=False"):
            found.output()


@pytest.mark.parametrize("layout", ["6-pth", "7-fla"])
def test_recurrent_models(rwkv, layout):
    model, ids = rwkv(layout), np.random.default_rng(0).integers(0, VOCAB, (2, 20))
    whole = model.forward(ids, HookSpec().capture("*"))
    for part, expected in (
        (Logits(positions=-1), whole.output()[:, -1:]),
        (Logits(positions=[3, -2]), whole.output()[:, [3, -2]]),
        (Logits(tokens=[7]), whole.output()[..., [7]]),
        (Logits(top_k=1), whole.output().max(-1, keepdims=True)),
    ):
        assert np.abs(model.forward(ids, logits=part).output() - expected).max() < 1e-5
    spec = HookSpec().capture(HookPoint.RwkvK(0), positions=[2, -1], heads=1)
    found = model.forward(ids, spec, logits=False)
    assert np.array_equal(found[HookPoint.RwkvK(0)], whole[HookPoint.RwkvK(0)][:, [2, -1]][:, :, [1]])
    assert found.state is None
    idle = HookSpec().capture(HookPoint.RwkvK(0)).set_state_knockout(StateKnockoutSpec().position(1).layer(1))
    with pytest.raises(InterventionError, match="no capture lies behind"):
        model.forward(ids, idle, logits=False)
    assert model.forward(ids, idle)[HookPoint.RwkvK(0)].shape[:2] == ids.shape


def test_the_cache_comes_without_logits_when_it_is_asked_for(models):
    model = models("llama")
    found = model.forward([[3, 4, 5]], use_cache=True, logits=False)
    whole = model.forward([[3, 4, 5]], use_cache=True)
    for one, other in zip(found.kv_cache.layers, whole.kv_cache.layers, strict=True):
        assert np.array_equal(one[0], other[0])


def test_a_spec_file_keeps_the_parts(tmp_path):
    spec = HookSpec().capture("*.hook_z", positions=[0, -1], heads=[1]).capture("hook_embed")
    spec.intervene("hook_embed", Intervention.Zero(positions="generated"))
    spec.save(tmp_path / "spec.safetensors")
    again = HookSpec.load(tmp_path / "spec.safetensors")
    assert again.captures == spec.captures
    assert again.interventions[0][1].positions == "generated"


WRONG = {
    "nothing": (HookSpec(), {"logits": False}, InputError, "nothing would be computed"),
    "idle": (
        HookSpec().capture("blocks.0.hook_resid_pre").intervene("blocks.1.hook_mlp_out", Intervention.Zero()),
        {"logits": False},
        InterventionError,
        "zero at blocks.1.hook_mlp_out",
    ),
    "position": (HookSpec(), {"logits": Logits(positions=5)}, InterventionError, "position 5"),
    "no positions": (HookSpec(), {"logits": Logits(positions=[])}, InputError, "no positions"),
    "token": (HookSpec(), {"logits": Logits(tokens=VOCAB)}, InputError, f"0 to {VOCAB - 1}"),
    "k": (HookSpec(), {"logits": Logits(top_k=VOCAB + 1)}, InputError, "top_k"),
    "k of tokens": (HookSpec(), {"logits": Logits(tokens=[1, 2], top_k=3)}, InputError, "of 2 logits"),
    "no k": (HookSpec(), {"logits": Logits(top_k=0)}, InputError, "top_k"),
    "capture position": (HookSpec().capture("hook_embed", positions=-6), {}, InterventionError, "position -6"),
    "capture head": (HookSpec().capture("*.hook_z", heads=4), {}, InterventionError, "head 4 of 4"),
    "no heads": (HookSpec().capture("hook_embed", heads=0), {}, InterventionError, "no heads"),
    "two parts": (
        HookSpec().capture("hook_embed", positions=0).capture("hook_embed", positions=1),
        {},
        HookError,
        "captured twice",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_parts_that_are_none_are_refused(what, models):
    spec, how, kind, named = WRONG[what]
    with pytest.raises(kind) as caught:
        models("llama").forward([[3, 4, 5, 6, 7]], spec, **how)
    assert named in str(caught.value)


def test_a_generation_has_no_parts(models):
    with pytest.raises(InterventionError, match="choose them in `forward`"):
        models("llama").generate([[3, 4]], HookSpec().capture("hook_embed", positions=0))


def test_right_padding_has_another_last_column(models):
    model: MIModel = models("llama")
    mask = [[1, 1, 1], [1, 1, 0]]
    with pytest.raises(InputError, match="padded on the right"):
        model.forward([[3, 4, 5], [6, 7, 0]], attention_mask=mask, logits=Logits(positions=-1))
    found = model.forward([[3, 4, 5], [6, 7, 0]], attention_mask=mask, logits=Logits(positions=[-1, -1])).output()
    whole = model.forward([[3, 4, 5], [6, 7, 0]], attention_mask=mask).output()
    assert np.abs(found[:, 0] - whole[[0, 1], [2, 1]]).max() < 1e-6
