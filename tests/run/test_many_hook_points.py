"""Interventions at a glob, a predicate or a list are those at each hook point that it means."""

import numpy as np
import pytest

from mionnx import HookPoint, HookSpec, Intervention, InterventionError, Logits

PROMPTS = ["The capital of France is", "Germany is"]


def of_layers(model, point, edit: Intervention) -> HookSpec:
    spec = HookSpec()
    for layer in range(model.num_layers):
        spec.intervene(point(layer), edit)
    return spec


def is_mlp_out(name: str) -> bool:
    return name.endswith("hook_mlp_out")


@pytest.mark.parametrize("where", ["blocks.*.hook_mlp_out", is_mlp_out, [HookPoint.MlpOut(0), "blocks.[1-3].*mlp_out"]])
def test_a_pass_and_a_generation_are_those_of_the_loop(shipped, where):
    edit = Intervention.Scale(0.1, positions=[0, -1])
    spec, loop = HookSpec().intervene(where, edit), of_layers(shipped, HookPoint.MlpOut, edit)
    one, other, plain = (shipped.forward(PROMPTS, each).output() for each in (spec, loop, None))
    assert np.array_equal(one, other)
    assert not np.array_equal(one, plain)
    assert shipped.report(spec) == shipped.report(loop)
    one, other = (
        shipped.generate(PROMPTS, each.capture("blocks.3.hook_mlp_out"), max_new_tokens=3) for each in (spec, loop)
    )
    assert one.texts == other.texts
    assert all(np.array_equal(a["mlp_out", 3], b["mlp_out", 3]) for a, b in zip(one.steps, other.steps, strict=True))


def test_effect_is_asked_at_each_hook_point(shipped):
    first, end = (
        HookSpec().intervene("blocks.*.hook_mlp_out", Intervention.Scale(0.1, positions=0)),
        Logits(positions=-1),
    )
    with pytest.raises(InterventionError, match=r"scale at blocks\.3\.hook_mlp_out at position 0 changes nothing"):
        shipped.forward(PROMPTS[0], first, logits=end)
    with pytest.raises(InterventionError, match=r"scale at blocks\.3\.hook_mlp_out at position 0 changes nothing"):
        shipped.generate(PROMPTS[0], first, max_new_tokens=2)
    shipped.forward(
        PROMPTS[0], HookSpec().intervene("blocks.[0-2].hook_mlp_out", Intervention.Scale(0.1, positions=0)), logits=end
    )
    whole = HookSpec().intervene("blocks.*.hook_resid_post", Intervention.Zero())
    with pytest.raises(
        InterventionError, match=r"resid_post.*overwrites the whole value at blocks\.\d\.hook_resid_post"
    ):
        shipped.forward(PROMPTS[0], whole)


def test_analyses_take_them(shipped):
    glob = HookSpec().intervene("blocks.*.attn.hook_q", Intervention.Scale(0.5, heads=1))
    loop = of_layers(shipped, HookPoint.AttnQ, Intervention.Scale(0.5, heads=1))
    one, other, plain = (shipped.head_scores(batch=2, period=6, hooks=spec).values for spec in (glob, loop, None))
    assert np.array_equal(one, other)
    assert not np.array_equal(one, plain)
    one, other = (shipped.attribute(PROMPTS[0], hooks=spec) for spec in (glob, loop))
    assert one.to_json() == other.to_json()
    row = HookSpec().intervene("blocks.*.hook_mlp_out", Intervention.Zero(rows=0))
    with pytest.raises(InterventionError, match=r"zero at blocks\.0\.hook_mlp_out says something of each row"):
        shipped.head_scores(batch=2, period=6, hooks=row)
