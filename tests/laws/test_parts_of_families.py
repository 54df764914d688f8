"""Parts of logits and captures in every family: they are parts of the whole, and no more layers run than they need."""

import numpy as np
import onnx
import pytest
from families import VOCAB, drawn_families
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mionnx import HookError, HookPoint, HookSpec, Intervention, InterventionError, Logits, StateKnockoutSpec
from mionnx.bind.bound_spec import bind
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
    assert np.array_equal(found(token_ids=[5, 3, 5]).output(), whole[..., [5, 3, 5]])
    top = found(k=4)
    assert np.array_equal(top.output(), -np.sort(-whole, axis=-1)[..., :4])
    assert np.array_equal(np.take_along_axis(whole, top.top_ids, axis=-1), top.output())
    all_three = found(positions=[-2, 0, 4], token_ids=[9, 8, 7], k=1)
    expected = whole[rows, at][..., [9, 8, 7]]
    close(all_three.output(), expected.max(-1, keepdims=True))
    assert np.array_equal(all_three.top_ids[..., 0], expected.argmax(-1))


@drawn_families
@law
@given(data=st.data())
def test_a_part_of_a_capture_is_that_part(models, families, data):
    """At every hook point, before or after interventions, bit for bit; and asking for less changes nothing else."""
    model, (ids, mask) = models(data.draw(st.sampled_from(families))), batch()
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
        plan = bind(spec, model.hooked, Outputs(logits=False, carried=False)).plan
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
        (Logits(token_ids=[7]), whole.output()[..., [7]]),
        (Logits(k=1), whole.output().max(-1, keepdims=True)),
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
