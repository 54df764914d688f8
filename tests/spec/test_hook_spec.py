"""Hook specs: questions, order, predicates."""

import pytest

from mionnx import HookError, HookPoint, HookSpec, Intervention


class TestHookSpec:
    def test_questions(self):
        spec = HookSpec()
        assert spec.is_empty()
        spec.capture(HookPoint.AttnPattern(5)).capture("blocks.*.hook_resid_post").capture(HookPoint.AttnPattern(5))
        spec.intervene("blocks.1.hook_mlp_out", Intervention.Zero())
        assert (spec.num_captures(), spec.num_interventions(), spec.is_empty()) == (2, 1, False)
        assert spec.is_captured("blocks.5.attn.hook_pattern")
        assert spec.is_captured(HookPoint.ResidPost(9))
        assert not spec.is_captured(HookPoint.ResidPre(9))
        assert spec.has_intervention_at(HookPoint.MlpOut(1))
        assert not spec.has_intervention_at(HookPoint.MlpOut(2))

    def test_extend_keeps_the_order(self):
        first, second = Intervention.Scale(2.0), Intervention.Add(1.0)
        spec = HookSpec().intervene("hook_embed", first).capture("hook_embed")
        spec.extend(HookSpec().intervene("hook_embed", second).capture("hook_embed").capture("hook_logits"))
        assert [edit for _, edit in spec.interventions] == [first, second]
        assert spec.num_captures() == 2

    def test_a_predicate(self):
        spec = HookSpec().capture(lambda name: "attn" in name)
        assert spec.is_captured("blocks.0.attn.hook_q")
        assert not spec.is_captured("hook_embed")

    def test_interventions_by_glob_predicate_and_list(self):
        spec = HookSpec().intervene("blocks.*.hook_mlp_out", Intervention.Zero())
        spec.intervene(lambda name: name.endswith("hook_z"), Intervention.Zero())
        assert spec.num_interventions() == 2
        assert spec.has_intervention_at(HookPoint.MlpOut(7))
        assert spec.has_intervention_at("blocks.0.attn.hook_z")
        assert not spec.has_intervention_at("blocks.0.attn.hook_q")
        several = HookSpec().intervene([HookPoint.Embed, "blocks.*.attn.hook_q"], Intervention.Zero())
        assert (several.num_interventions(), several.has_intervention_at("blocks.3.attn.hook_q")) == (2, True)
        assert "blocks.*.attn.hook_q: Intervention.Zero()" in str(several)
        captured = HookSpec().capture(["hook_embed", "blocks.*.attn.hook_q"], before=True)
        assert [str(request) for request in captured.captures] == ["hook_embed", "blocks.*.attn.hook_q"]

    def test_what_is_no_intervention_is_refused(self):
        with pytest.raises(HookError, match="takes an Intervention"):
            HookSpec().intervene("hook_embed", 2.0)
        with pytest.raises(HookError, match="a list of these"):
            HookSpec().intervene([], Intervention.Zero())
