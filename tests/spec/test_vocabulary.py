"""The words in which things are asked: hook points, specs, interventions, knockouts, caches, results."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare, entropy
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from mionnx import (
    AblationResult,
    HookCache,
    HookError,
    HookPoint,
    HookSpec,
    InputError,
    Intervention,
    InterventionError,
    KnockoutSpec,
    TokenizerError,
    create_knockout_mask,
    sample_token,
)
from mionnx.graph.hook_points import VARIANTS
from mionnx.inputs.tokens import tokenize


class TestHookPoint:
    @given(st.sampled_from(sorted(VARIANTS)), st.integers(0, 200))
    def test_strings_and_variants_are_two_spellings_of_one_thing(self, variant, layer):
        made = getattr(HookPoint, variant)
        point = made if isinstance(made, HookPoint) else made(layer)
        assert HookPoint.parse(str(point)) == point
        assert hash(HookPoint.parse(str(point))) == hash(point)
        assert point.variant == variant
        assert eval(repr(point)) == point
        assert len(point.axes) in (3, 4, 5)
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

    def test_layers_are_counted_from_zero(self):
        with pytest.raises(HookError, match="counted from 0"):
            HookPoint.AttnQ(-1)


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

    def test_interventions_name_one_hook_point(self):
        with pytest.raises(HookError, match="pattern"):
            HookSpec().intervene("blocks.*.hook_mlp_out", Intervention.Zero())
        with pytest.raises(HookError, match="takes an Intervention"):
            HookSpec().intervene("hook_embed", 2.0)


class TestIntervention:
    @pytest.mark.parametrize("bad", [np.nan, [1.0, np.nan], np.inf, [], "text", [object()]])
    def test_values_that_are_no_numbers(self, bad):
        for make in (Intervention.Add, Intervention.Replace, Intervention.Scale, Intervention.Knockout):
            with pytest.raises(InterventionError):
                make(bad)

    def test_masks_are_zero_or_minus_infinity(self):
        Intervention.Knockout([[0.0, -np.inf]])
        with pytest.raises(InterventionError, match=r"0 \(keep\) and -inf"):
            Intervention.Knockout([[0.0, -1e9]])

    def test_the_value_is_a_copy(self):
        vector = np.ones(3)
        edit = Intervention.Add(vector)
        vector[:] = 7
        assert (edit.value == 1).all()

    @pytest.mark.parametrize("bad", [np.zeros(4), [[1, 0], [2, 0]], [[1, 0], [0, 1], [1, 1]]])
    def test_directions_must_be_independent(self, bad):
        with pytest.raises(InterventionError, match="independent"):
            Intervention.ProjectOut(bad)

    def test_directions_become_orthonormal(self):
        basis = Intervention.ProjectOut([[3.0, 0, 0], [1.0, 2.0, 0]]).value
        assert np.allclose(basis @ basis.T, np.eye(2))

    def test_limits(self):
        edit = Intervention.Zero(positions=[[0, 1], [-1]], heads=3, rows=range(2))
        assert (edit.positions, edit.heads, edit.rows) == (((0, 1), (-1,)), (3,), (0, 1))
        assert edit.limited
        assert not Intervention.Zero().limited

    @pytest.mark.parametrize(
        "bad", [{"heads": -1}, {"rows": [-2]}, {"heads": []}, {"positions": []}, {"positions": [1.5]}]
    )
    def test_bad_limits(self, bad):
        with pytest.raises(InterventionError, match=next(iter(bad))):
            Intervention.Zero(**bad)


class TestKnockout:
    def test_an_edge_of_one_head(self):
        mask = create_knockout_mask(KnockoutSpec().layer(2).head(1).edge(-1, 0), 3, 4)
        assert mask.shape == (1, 3, 4, 4)
        assert mask.dtype == np.float32
        assert np.argwhere(np.isneginf(mask)).tolist() == [[0, 1, 3, 0]]

    def test_to_and_from_a_position(self):
        to = np.isneginf(create_knockout_mask(KnockoutSpec().to_position(1), 1, 4))[0, 0]
        assert np.argwhere(to).tolist() == [[2, 1], [3, 1]]
        source = np.isneginf(create_knockout_mask(KnockoutSpec().from_position(2).heads([0]), 2, 4))[0]
        assert np.argwhere(source).tolist() == [[0, 2, 0], [0, 2, 1]]

    def test_layers(self):
        assert KnockoutSpec().target_layers(3) == [0, 1, 2]
        assert KnockoutSpec().layer_range(1, 2).layers([2, 4]).target_layers(5) == [1, 2, 4]
        with pytest.raises(InterventionError, match="layer 5 of a model with 5"):
            KnockoutSpec().layer(5).target_layers(5)
        with pytest.raises(InterventionError, match="empty"):
            KnockoutSpec().layer_range(2, 1)

    @pytest.mark.parametrize(
        ("spec", "message"),
        [
            (KnockoutSpec(), "knocks nothing out"),
            (KnockoutSpec().edge(0, 2), "later key"),
            (KnockoutSpec().edge(-1, -1).edge(4, 0), "position 4 of a sequence of 4"),
            (KnockoutSpec().head(2).edge(1, 0), "head 2 of 2"),
            (KnockoutSpec().from_position(0), "only itself"),
            (KnockoutSpec().to_position(-1), "no later position"),
        ],
    )
    def test_what_would_do_nothing_is_refused(self, spec, message):
        with pytest.raises(InterventionError, match=message):
            create_knockout_mask(spec, 2, 4)

    def test_edges_from_the_end_are_compared_where_they_lie(self):
        mask = create_knockout_mask(KnockoutSpec().edge(-1, 1).edge(3, -2), 1, 4)
        assert np.argwhere(np.isneginf(mask[0, 0])).tolist() == [[3, 1], [3, 2]]


class TestHookCache:
    cache = HookCache(
        np.zeros((1, 2, 3)), {"blocks.5.attn.hook_pattern": np.ones((1, 4, 2, 2)), "hook_embed": np.zeros(1)}
    )

    def test_three_ways_to_the_same_array(self):
        one = self.cache["blocks.5.attn.hook_pattern"]
        assert self.cache[HookPoint.AttnPattern(5)] is one
        assert self.cache["pattern", 5] is one
        assert self.cache.require("blocks.5.attn.hook_pattern") is one
        assert self.cache.get(HookPoint.AttnPattern(5)) is one
        assert (self.cache.num_captures(), len(self.cache), next(iter(self.cache))) == (
            2,
            2,
            "blocks.5.attn.hook_pattern",
        )
        assert ("pattern", 5) in self.cache
        assert HookPoint.AttnPattern(4) not in self.cache

    def test_what_was_not_captured(self):
        assert self.cache.get(HookPoint.AttnPattern(4)) is None
        with pytest.raises(HookError, match=r"blocks\.5\.attn\.hook_pattern"):
            self.cache.require("blocks.4.attn.hook_pattern")
        with pytest.raises(HookError, match="did you mean 'pattern'"):
            self.cache["patern", 5]

    def test_the_logits_can_be_taken(self):
        cache = HookCache(np.zeros((1, 2, 3)), {})
        assert cache.output().shape == (1, 2, 3)
        assert cache.into_output().shape == (1, 2, 3)
        with pytest.raises(HookError, match="into_output"):
            cache.output()


class TestAblationResult:
    @given(st.lists(st.tuples(st.floats(-30, 30), st.floats(-30, 30)), min_size=2, max_size=20))
    def test_kl_is_scipys(self, pairs):
        one, other = np.array(pairs).T
        p, q = (np.exp(x - x.max()) / np.exp(x - x.max()).sum() for x in (one, other))
        assert AblationResult(one, other).kl_divergence() == pytest.approx(entropy(p, q), rel=1e-6, abs=1e-9)

    def test_no_term_is_dropped_where_exp_underflows(self):
        assert AblationResult([0.0, 0.0], [0.0, -1e4]).kl_divergence() == pytest.approx(5e3 - np.log(2), rel=1e-9)
        assert AblationResult([0.0, 0.0], [0.0, -np.inf]).kl_divergence() == np.inf
        assert AblationResult([0.0, -np.inf], [0.0, -1e4]).kl_divergence() == pytest.approx(0, abs=1e-12)

    def test_changes_and_differences(self):
        result = AblationResult([2.0, 1.0, 0.0], [0.0, 1.0, 0.0])
        assert result.logit_diff(0) == 2
        assert result.logit_diff(0, versus=1) == 2
        top = result.top_changed_tokens(2)
        assert top[0].token == 0
        assert top[0].change < 0
        assert abs(top[0].change) >= abs(top[1].change)
        with pytest.raises(InputError, match="vocabulary is 0 to 2"):
            result.logit_diff(3)

    @pytest.mark.parametrize(("one", "other"), [([1.0], [1.0, 2.0]), ([[1.0]], [[1.0]]), ([np.nan], [0.0])])
    def test_logits_that_are_none(self, one, other):
        with pytest.raises(InputError, match="logits"):
            AblationResult(one, other)


class TestSampling:
    def test_ties_go_to_the_lowest_id(self):
        assert sample_token([1.0, 3.0, 3.0, 2.0]) == 1

    def test_samples_follow_the_distribution_and_the_seed(self):
        logits, temperature = np.log([0.5, 0.3, 0.2]), 1.0
        drawn = [sample_token(logits, temperature, seed) for seed in range(3000)]
        assert drawn == [sample_token(logits, temperature, seed) for seed in range(3000)]
        counts = np.bincount(drawn, minlength=3)
        assert chisquare(counts, [1500, 900, 600]).pvalue > 1e-4

    @pytest.mark.parametrize("temperature", [-1, np.nan, np.inf])
    def test_bad_temperatures(self, temperature):
        with pytest.raises(InputError, match="temperature"):
            sample_token([0.0], temperature)


class TestTokens:
    words = ("<unk>", "the", "cat", "saw", "catalogue")

    def tokens(self, text: str):
        tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(self.words)}, unk_token="<unk>"))
        tokenizer.pre_tokenizer = WhitespaceSplit()
        return tokenize(tokenizer, text)

    def test_positions_of_a_part(self):
        tokens = self.tokens("the cat saw the catalogue")
        assert tokens.ids.tolist() == [1, 2, 3, 1, 4]
        assert tokens.positions_of("saw the") == [2, 3]
        assert tokens.positions_of("cat", 0) == [1]
        assert tokens.positions_of("cat", -1) == [4]

    @pytest.mark.parametrize(("part", "occurrence"), [("dog", None), ("cat", None), ("cat", 2), ("", None)])
    def test_parts_that_are_not_there_or_not_one(self, part, occurrence):
        with pytest.raises(TokenizerError, match="occur"):
            self.tokens("the cat saw the catalogue").positions_of(part, occurrence)

    def test_an_empty_prompt(self):
        with pytest.raises(TokenizerError, match="empty"):
            self.tokens("  ")
