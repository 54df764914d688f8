"""The result of an ablation: KL divergence and changes of logits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import entropy

from mionnx import AblationResult, InputError


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
