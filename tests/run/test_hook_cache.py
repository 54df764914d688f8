"""The cache of captured values: three ways to one array."""

import numpy as np
import pytest

from mionnx import HookCache, HookError, HookPoint


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
