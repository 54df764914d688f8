"""Sparse decompositions and occupancy against what was put in, and against plain least squares."""

import numpy as np
import pytest

from mionnx import InputError, JacobianLens
from mionnx.analysis.jacobian_lens.decomposition import decompose, occupancy

RANDOM = np.random.default_rng(1)
ATOMS = RANDOM.normal(size=(300, 64)) * RANDOM.uniform(0.2, 5, (300, 1))


def test_few_directions_are_found_again_with_their_coefficients():
    target = 2 * ATOMS[7] / np.linalg.norm(ATOMS[7]) + 1.5 * ATOMS[200] / np.linalg.norm(ATOMS[200])
    parts = decompose(target, ATOMS, 10)
    weights = dict(zip(parts.support, parts.coordinates, strict=True))
    assert {7, 200} <= {*weights}
    for index, size in ((7, 2.0), (200, 1.5)):
        assert weights[index] * np.linalg.norm(ATOMS[index]) == pytest.approx(size, rel=1e-3)
    np.testing.assert_allclose(parts.reconstruction, target, atol=1e-3)
    np.testing.assert_allclose(parts.component + parts.rest, target, atol=1e-9)
    assert parts.share == pytest.approx(1, abs=1e-5)


def test_coefficients_are_those_of_nonnegative_least_squares():
    target = RANDOM.normal(size=64)
    parts = decompose(target, ATOMS, 12)
    assert (parts.coordinates > 0).all()
    chosen = ATOMS[parts.selected].astype(np.float32).astype(np.float64)
    rest = target - parts.reconstruction
    # at the least distance no chosen direction with a coefficient is left in the rest, and no other helps
    products = chosen @ rest / np.linalg.norm(chosen, axis=1)
    active = np.isin(parts.selected, parts.support)
    assert np.abs(products[active]).max() < 1e-6
    assert (products[~active] < 1e-6).all()
    projected = chosen.T @ np.linalg.lstsq(chosen.T, target, rcond=None)[0]
    np.testing.assert_allclose(parts.component, projected, atol=1e-8)
    assert np.abs(chosen @ parts.rest).max() < 1e-6


def test_occupancy_counts_what_was_put_in():
    units = ATOMS / np.linalg.norm(ATOMS, axis=1, keepdims=True)
    target = 3 * units[3] + 2.5 * units[80] + 2 * units[150]
    found = occupancy(target, ATOMS, max_atoms=8, dictionaries=4)
    assert found.occupancy == 3
    assert {*found.selected[:3]} == {3, 80, 150}
    assert found.captured.sum() == pytest.approx(1, abs=1e-5)
    assert (found.control > 0).all()
    again = occupancy(target, ATOMS, max_atoms=8, dictionaries=4)
    np.testing.assert_array_equal(found.control, again.control)
    assert not np.array_equal(found.control, occupancy(target, ATOMS, 8, 4, seed=1).control)


def test_a_lens_decomposes_by_tokens(shipped):
    lens = JacobianLens({1: RANDOM.normal(size=(128, 128))})
    atoms = lens.dictionary(shipped, 1)
    token = shipped.token_id("Paris")
    parts = lens.decompose(shipped, atoms[token] * 2, 1, k=3)
    assert parts.support == [token]
    assert parts.coordinates[0] == pytest.approx(2, rel=1e-4)
    assert lens.occupancy(shipped, atoms[token], 1, max_atoms=3, dictionaries=2).occupancy == 1


def test_what_cannot_be_decomposed_is_refused():
    for target, atoms, k, message in (
        (np.full(64, np.nan), ATOMS, 3, "NaN"),
        (np.ones(63), ATOMS, 3, "activation"),
        (np.ones(64), ATOMS, 0, "k=0; from 1 to 300"),
        (np.ones(64), ATOMS, 301, "k=301"),
        (np.ones(64), np.vstack([ATOMS, np.zeros(64)]), 3, "direction 300 is zero"),
    ):
        with pytest.raises(InputError, match=message):
            decompose(target, atoms, k)
    with pytest.raises(InputError, match="the activation is zero"):
        occupancy(np.zeros(64), ATOMS)
    empty = decompose(np.zeros(64), ATOMS, 3)
    assert (empty.support, empty.share) == ([], 0.0)
