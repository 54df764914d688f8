"""Hook points: names, layers and variants."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mionnx import HookError, HookPoint
from mionnx.graph.hook_points import LENS_NAMES, LENS_NEAR, VARIANTS, nearest_hook


class TestHookPoint:
    @given(st.sampled_from(sorted(VARIANTS)), st.integers(0, 200))
    def test_strings_and_variants_are_two_spellings_of_one_thing(self, variant, layer):
        made = getattr(HookPoint, variant)
        point = made if isinstance(made, HookPoint) else made(layer)
        assert HookPoint.parse(str(point)) == point
        assert hash(HookPoint.parse(str(point))) == hash(point)
        assert point.variant == variant
        assert eval(repr(point)) == point
        assert len(point.axes) in (2, 3, 4, 5)
        assert point.axes[0] == "batch"

    def test_the_names_of_the_specification(self):
        names = {
            HookPoint.Embed: "hook_embed",
            HookPoint.ResidPre(3): "blocks.3.hook_resid_pre",
            HookPoint.AttnQ(0): "blocks.0.attn.hook_q",
            HookPoint.AttnK(0): "blocks.0.attn.hook_k",
            HookPoint.AttnV(0): "blocks.0.attn.hook_v",
            HookPoint.AttnScores(11): "blocks.11.attn.hook_scores",
            HookPoint.AttnPattern(5): "blocks.5.attn.hook_pattern",
            HookPoint.AttnOut(1): "blocks.1.hook_attn_out",
            HookPoint.ResidMid(1): "blocks.1.hook_resid_mid",
            HookPoint.MlpPre(1): "blocks.1.mlp.hook_pre",
            HookPoint.MlpPost(1): "blocks.1.mlp.hook_post",
            HookPoint.MlpOut(1): "blocks.1.hook_mlp_out",
            HookPoint.ResidPost(1): "blocks.1.hook_resid_post",
            HookPoint.FinalNorm: "hook_final_norm",
        }
        assert {point: str(point) for point in names} == names

    @pytest.mark.parametrize("name", ["blocks.x.hook_q", "blocks.01.attn.hook_q", "blocks.1.hook_q", "anything", ""])
    def test_an_unknown_string_is_custom(self, name):
        point = HookPoint.parse(name)
        assert point == HookPoint.Custom(name)
        assert (str(point), point.axes, point.layer) == (name, None, None)

    def test_transformer_lens_names_of_mixers_are_ours_where_the_value_is(self):
        names = {
            "blocks.3.linear_attn.hook_in": HookPoint.SsmPre(3),
            "blocks.3.linear_attn.hook_v": HookPoint.SsmV(3),
            "blocks.3.linear_attn.hook_recurrence_out": HookPoint.SsmY(3),
            "blocks.3.linear_attn.hook_ssm_state": HookPoint.SsmStates(3),
            "blocks.2.mamba.hook_in": HookPoint.SsmPre(2),
        }
        assert {name: HookPoint.parse(name) for name in names} == names
        assert HookPoint("blocks.3.linear_attn.hook_v") == HookPoint.SsmV(3)
        assert {*LENS_NAMES.values()} <= {*VARIANTS}
        assert {f"{mixer}.hook_out" for mixer in ("linear_attn", "mixer", "mamba")} <= {*LENS_NEAR}  # one of two values
        for name, (ours, _) in LENS_NEAR.items():
            assert HookPoint.parse(f"blocks.1.{name}").variant == "Custom"
            assert HookPoint.parse(f"blocks.1.{ours}").variant != "Custom"
            assert f"here is blocks.1.{ours}, " in nearest_hook(f"blocks.1.{name}", [])

    def test_a_string_makes_one_and_equals_it(self):
        """FINDINGS, part 2, friction 19."""
        point = HookPoint("blocks.5.attn.hook_pattern")
        assert point == HookPoint.AttnPattern(5) == "blocks.5.attn.hook_pattern" == point
        assert point.variant == "AttnPattern"
        assert point != "blocks.4.attn.hook_pattern"
        assert {point: 1}["blocks.5.attn.hook_pattern"] == 1
        assert HookPoint.AttnPattern(5) in {"blocks.5.attn.hook_pattern"}
        assert HookPoint(point) == point
        assert point != 5

    @pytest.mark.parametrize(
        ("given", "remedy"),
        [
            (("AttnPattern", 5), r"HookPoint\.AttnPattern\(5\)"),
            (("Embed",), r"HookPoint\.Embed$"),
            (("blocks.5.attn.hook_pattern", 5), r"HookPoint\('blocks.5.attn.hook_pattern'\)"),
            ((3,), "got int 3"),
            (([],), "got list"),
        ],
    )
    def test_parts_of_a_hook_point_say_what_to_write(self, given, remedy):
        with pytest.raises(HookError, match=remedy):
            HookPoint(*given)

    def test_layers_are_counted_from_zero(self):
        with pytest.raises(HookError, match="counted from 0"):
            HookPoint.AttnQ(-1)
        with pytest.raises(HookError, match="a layer is an integer, got True"):
            HookPoint.AttnQ(True)
