"""The cache of captured values: three ways to one array."""

import numpy as np
import pytest

from mionnx import HookCache, HookError, HookPoint, HookSpec


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


class TestLayers:
    prompt = "The capital of France is"

    @pytest.fixture
    def cache(self, shipped):
        return shipped.run_with_cache(self.prompt)[1]

    def test_layers_count_from_the_end(self, shipped, cache):
        for short in ("resid_post", "pattern", "z"):
            for layer in range(1, 5):
                assert cache[short, -layer] is cache[short, 4 - layer]
        assert cache["resid_post", np.int64(-1)] is cache[HookPoint.ResidPost(3)]
        assert ("z", -2) in cache
        assert ("z", -5) not in cache
        assert cache.get(("z", 4)) is None
        spec = HookSpec().capture("blocks.*.hook_resid_post")
        steps = shipped.generate(self.prompt, spec, max_new_tokens=2).steps
        assert steps[1]["resid_post", -1] is steps[1]["resid_post", 3]

    @pytest.mark.parametrize("layer", [4, -5, 99])
    def test_a_layer_that_does_not_exist(self, cache, layer):
        with pytest.raises(HookError, match="layers 0 to 3, or -4 to -1 from the end"):
            cache["resid_post", layer]

    @pytest.mark.parametrize("layer", [None, "1", 1.0, True])
    def test_what_is_no_layer(self, cache, layer):
        with pytest.raises(HookError, match="a layer is an integer"):
            cache["resid_post", layer]

    def test_a_cache_of_its_own_counts_from_the_start_only(self):
        with pytest.raises(HookError, match="does not know its model's number of layers"):
            TestHookCache.cache["pattern", -1]

    @pytest.mark.parametrize("hook", ["blocks.2.attn.hook_scores", ("scores", 2), HookPoint.AttnScores(2)])
    def test_what_was_not_captured_says_how_it_is(self, shipped, hook):
        """FINDINGS, part 2, friction 18: no other hook point is meant, this one was left out."""
        cache = shipped.forward("The capital", HookSpec().capture("blocks.2.attn.hook_pattern"))
        with pytest.raises(HookError, match=r"was not captured.*capture\('blocks.2.attn.hook_scores'\)") as caught:
            cache.require(hook)
        assert "did you mean" not in str(caught.value)
        with pytest.raises(HookError, match=r"capture\('blocks.2.attn.hook_scores', before=True\)"):
            cache.require("blocks.2.attn.hook_scores.before")

    def test_a_misspelled_one_is_told_the_nearest(self, cache):
        """A name that no model has, and a layer that this one does not have."""
        with pytest.raises(HookError, match=r"did you mean 'blocks.2.hook_resid_post'"):
            cache.require("blocks.2.hook_resid_pots")
        with pytest.raises(HookError, match="the model has the layers 0 to 3"):
            cache.require("blocks.9.hook_resid_post")

    def test_hook_points_outside_the_layers_have_short_names(self, cache):
        assert cache["embed"] is cache["hook_embed"]
        assert "final_norm" in cache
        with pytest.raises(HookError, match="'hook_embed' stands in no layer"):
            cache["embed", 0]
        with pytest.raises(HookError, match="'resid_post' was not captured"):
            cache["resid_post"]
