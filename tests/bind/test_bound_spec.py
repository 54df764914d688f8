"""A spec on a small model: the plan holds structure, the inputs hold values, and one graph serves all values."""

import numpy as np
import pytest
from toy import ATTN_OUT, HIDDEN, IDS, RESID, Z, reference, run, toy

from mionnx import HookError, HookPoint, HookSpec, Intervention, InterventionError
from mionnx.bind.bound_spec import Binder, bind
from mionnx.inputs.token_batch import make_token_batch
from mionnx.rewrite.plan import CaptureNode, Outputs

VECTOR = np.arange(1, HIDDEN + 1, dtype=np.float32)
RESULT = "blocks.0.attn.hook_result"  # derived, behind what it is derived from
ALONE = Outputs(carried=False)


def batch_of(ids: np.ndarray = IDS):
    return make_token_batch(ids, None, None, toy())


def computed(spec: HookSpec, *outputs: str) -> list[np.ndarray]:
    bound, batch = bind(spec, toy(), ALONE), batch_of()
    return run(bound.plan, outputs, **{**batch.feeds(), **bound.values(batch)})


def test_plan_and_inputs_fit_together():
    spec = HookSpec().intervene(RESID, Intervention.Add(VECTOR, positions=[0, -1])).capture(Z)
    logits, z = computed(spec, "logits", Z)
    where = np.array([True, False, True])[None, :, None]
    expected = reference({RESID: lambda value: value + where * VECTOR})
    assert np.array_equal(logits, expected["hook_logits"])
    assert np.array_equal(z, expected[Z])


def test_equal_structures_are_equal_plans():
    def plan(spec: HookSpec):
        return bind(spec, toy()).plan

    one = plan(HookSpec().intervene(RESID, Intervention.Add(VECTOR, positions=0)))
    assert one == plan(HookSpec().intervene(RESID, Intervention.Add(0.5, positions=[1, 2])))
    assert hash(one) == hash(plan(HookSpec().intervene(RESID, Intervention.Add(-VECTOR, positions=-1))))
    assert one != plan(HookSpec().intervene(RESID, Intervention.Add(VECTOR)))
    assert one != plan(HookSpec().intervene(RESID, Intervention.Scale(2.0, positions=0)))
    assert one != plan(HookSpec().intervene(ATTN_OUT, Intervention.Add(VECTOR, positions=0)))
    assert plan(HookSpec()).empty


def test_captures_are_in_execution_order_and_named_once():
    spec = HookSpec().capture("hook_logits").capture("blocks.*").capture("hook_embed").capture(RESID)
    nodes = [capture.node for capture in bind(spec, toy()).captures]
    assert nodes == [CaptureNode(name) for name in ("hook_embed", Z, RESULT, ATTN_OUT, RESID, "hook_logits")]


def test_edits_at_one_hook_are_numbered_and_paired_with_their_interventions():
    spec = HookSpec().intervene(Z, Intervention.Zero()).intervene(Z, Intervention.Scale(2.0))
    edits = bind(spec, toy()).edits
    assert [edit.index for edit, _ in edits] == [0, 1]
    assert [change for _, change in edits] == [change for _, change in spec.interventions]


def test_a_binder_asks_a_predicate_at_every_call():
    binder, wanted = Binder(toy()), [Z]
    spec = HookSpec().capture(lambda name: name in wanted)
    assert [capture.node.hook for capture in binder.bind(spec).captures] == [Z]
    wanted.append(RESID)
    assert [capture.node.hook for capture in binder.bind(spec).captures] == [Z, RESID]


def test_it_is_known_what_a_spec_touches_and_takes():
    bound = bind(HookSpec().capture(Z).intervene(RESID, Intervention.Zero()), toy())
    assert bound.touches(HookPoint.AttnZ(0))
    assert bound.touches(HookPoint.ResidPost(0))
    assert not bound.touches(HookPoint.parse("hook_embed"))
    assert bound.estimate(2, 3, 3).captures == {Z: 2 * 3 * HIDDEN * 4}
    half = bind(HookSpec().capture(Z, dtype="float16"), toy())
    assert half.estimate(2, 3, 3).captures == {Z: 2 * 3 * HIDDEN * 2}
    same = bind(HookSpec().capture(Z, dtype="float32"), toy())
    assert same.plan == bind(HookSpec().capture(Z), toy()).plan


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        (HookSpec().capture("blocks.1.hook_resid_post"), HookError, "layers are 0 to 0"),
        (HookSpec().capture(Z, heads=0).capture(Z, heads=1), HookError, "twice"),
        (HookSpec().capture(Z).capture(Z, dtype="float16"), HookError, "as None and as float16"),
        (HookSpec().capture(RESID, heads=0), InterventionError, "no heads"),
        (HookSpec().intervene(RESID, Intervention.Zero(heads=0)), InterventionError, "hook points that do: " + Z),
        (HookSpec().intervene("blocks.0.attn.hook_result", Intervention.Zero()), InterventionError, "derived"),
    ],
)
def test_what_makes_no_sense_on_the_model_is_refused(spec, error, message):
    with pytest.raises(error) as caught:
        bind(spec, toy())
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (Intervention.Add(np.ones(3)), "batch=2, seq=3, hidden=4"),
        (Intervention.Zero(positions=3), "position 3"),
        (Intervention.Zero(rows=2), "row 2"),
    ],
)
def test_what_does_not_fit_the_batch_is_refused(edit, message):
    with pytest.raises(InterventionError, match=message):
        bind(HookSpec().intervene(RESID, edit), toy()).values(batch_of())


def test_a_glob_is_the_loop_over_its_hook_points():
    glob = HookSpec().intervene("blocks.0.hook_*", Intervention.Add(VECTOR)).intervene(RESID, Intervention.Scale(2.0))
    loop = HookSpec()
    for name in (ATTN_OUT, RESID):
        loop.intervene(name, Intervention.Add(VECTOR))
    loop.intervene(RESID, Intervention.Scale(2.0))
    assert bind(glob, toy()).plan == bind(loop, toy()).plan
    assert bind(glob, toy()).spec.to_bytes() == loop.to_bytes()
    assert glob.num_interventions() == 2  # the spec itself stays as it was
    expected = reference({ATTN_OUT: lambda value: value + VECTOR, RESID: lambda value: 2 * (value + VECTOR)})
    assert np.array_equal(computed(glob, "logits")[0], expected["hook_logits"])


@pytest.mark.parametrize(
    ("where", "edit", "message"),
    [
        ("blocks.*", Intervention.Zero(), rf"{RESULT} is derived.* intervene at {Z} instead \('blocks.\*' means"),
        (lambda name: True, Intervention.Knockout([[0, -np.inf]]), r"before the softmax.*\('<lambda>' means"),
        (
            "*",
            Intervention.Zero(heads=0),
            r"zero at hook_embed: axes .* have no heads; hook points that do: .*'\*' means",
        ),
    ],
)
def test_a_glob_at_a_hook_point_that_cannot_be_changed_so_is_refused_by_name(where, edit, message):
    with pytest.raises(InterventionError, match=message):
        bind(HookSpec().intervene(where, edit), toy())
