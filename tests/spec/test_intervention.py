"""Interventions: values and limits."""

import numpy as np
import pytest

from mionnx import Intervention, InterventionError


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
