"""`Subspace`: its interventions equal projections by least squares, and a swap of two countries moves the answer."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mionnx import HookSpec, Intervention, InterventionError, Subspace

WIDTH = 12
quick = settings(max_examples=25, deadline=None, derandomize=True)


def drawn(seed: int, k: int) -> tuple[Subspace, np.ndarray, np.random.Generator]:
    rng = np.random.default_rng(seed)
    return Subspace(rng.normal(size=(k, WIDTH)) + 0.5), rng.normal(size=(3, WIDTH)), rng


def applied(one: Intervention, x: np.ndarray) -> np.ndarray:
    return one.rules.reference(x, *one.values)


def solved(x: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """Coordinates by least squares, a row of x at a time."""
    return np.stack([np.linalg.lstsq(vectors.T, row, rcond=None)[0] for row in x])


@quick
@given(seed=st.integers(0, 999), k=st.integers(1, 4), strength=st.sampled_from([0.5, 1.0, -2.0]))
def test_interventions_are_what_least_squares_say(seed: int, k: int, strength: float) -> None:
    space, x, rng = drawn(seed, k)
    vectors, source, wanted = space.vectors, rng.normal(size=(3, WIDTH)), rng.normal(size=k)
    coordinates = solved(x, vectors)
    np.testing.assert_allclose(space.coordinates(x), coordinates, atol=1e-9)
    without = x - coordinates @ vectors
    np.testing.assert_allclose(applied(space.ablate(), x), without, atol=1e-9)
    np.testing.assert_allclose(applied(space.ablate(), x), applied(Intervention.ProjectOut(vectors), x), atol=1e-9)
    np.testing.assert_allclose(applied(space.clamp(wanted), x), without + wanted @ vectors, atol=1e-9)
    np.testing.assert_allclose(applied(space.steer(wanted), x), x + wanted @ vectors, atol=1e-9)
    moved = x + strength * (solved(source, vectors) - coordinates) @ vectors
    np.testing.assert_allclose(applied(space.interchange(source, strength), x), moved, atol=1e-9)
    random = applied(space.placebo(x, source, seed, strength), x)
    np.testing.assert_allclose(np.linalg.norm(random - x, axis=-1), np.linalg.norm(moved - x, axis=-1), rtol=1e-9)
    same = Subspace(space.basis, orthonormal=True)  # the span decides, not the basis
    np.testing.assert_allclose(applied(same.interchange(source), x), applied(space.interchange(source), x), atol=1e-9)


@quick
@given(seed=st.integers(0, 999))
def test_a_swap_exchanges_two_coordinates_and_twice_is_none(seed: int) -> None:
    space, x, _ = drawn(seed, 2)
    swapped = applied(space.swap(), x)
    np.testing.assert_allclose(solved(swapped, space.vectors), solved(x, space.vectors)[:, ::-1], atol=1e-8)
    np.testing.assert_allclose(applied(space.ablate(), swapped), applied(space.ablate(), x), atol=1e-8)
    np.testing.assert_allclose(applied(space.swap(), swapped), x, atol=1e-8)
    assert len(space.swap().values[0]) == 1  # rank 1


def test_a_swap_of_two_countries_moves_the_answer_and_another_pair_does_not(shipped):
    """At the embedding the two prompts differ in nothing else: the swap gives the other prompt's own logits."""
    france, germany = (f"The capital of {name} is" for name in ("France", "Germany"))
    both = [shipped.embedding_for(name) for name in ("France", "Germany")]
    swapped, other = (
        shipped.forward(france, HookSpec().intervene("hook_embed", pair.swap(positions=3))).output()[0, -1]
        for pair in (Subspace(both), Subspace([shipped.embedding_for(name) for name in ("Spain", "Egypt")]))
    )
    np.testing.assert_allclose(swapped, shipped.forward(germany).output()[0, -1], atol=5e-5)
    assert [shipped.to_string(one.argmax()) for one in (swapped, other)] == ["Berlin", "Paris"]


def test_bases_by_neurons_chance_and_class_means():
    assert Subspace.neurons([3, 1], WIDTH).coordinates(np.arange(WIDTH)).tolist() == [3, 1]
    one, again, other = (Subspace.random(3, WIDTH, seed).vectors for seed in (0, 0, 1))
    assert np.array_equal(one, again)
    assert not np.allclose(one, other)
    rng = np.random.default_rng(0)
    means = rng.normal(size=(3, WIDTH))
    labels = np.arange(60) % 3
    space = Subspace.mean_differences(means[labels] + 1e-3 * rng.normal(size=(60, WIDTH)), labels)
    assert len(space) == 2
    left = applied(space.ablate(), means)
    np.testing.assert_allclose(left - left[0], 0, atol=1e-2)  # without it the classes are alike


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Subspace([[1.0, 0.0], [0.5, 1.0]], orthonormal=True), "directions 0 and 1 have the product 0.5"),
        (lambda: Subspace([[2.0, 0.0]], orthonormal=True), "directions 0 and 0 have the product 4"),
        (lambda: Subspace([[1.0, 0.0], [2.0, 0.0]]), "independent"),
        (lambda: Subspace([0.0, 0.0]), "not zero"),
        (lambda: Subspace([np.nan, 1.0]), "finite"),
        (lambda: Subspace("France"), "finite|no array"),
        (lambda: Subspace([1.0, 0.0]).swap(), "two directions, and this subspace has 1"),
        (lambda: Subspace([[1.0, 0.0], [1.0, 1e-3]]).swap(), "nearly parallel"),
        (lambda: Subspace([1.0, 0.0]).interchange([1.0, 0.0, 0.0]), "width is 2"),
        (lambda: Subspace([1.0, 0.0]).placebo([1.0, 0.0], [1.0, 0.0]), "moves nothing"),
        (lambda: Subspace([1.0, 0.0]).placebo([1.0, 0.0], [[1.0, 0.0]]), "one shape"),
        (lambda: Subspace.random(3, 2), "from 1 to 2"),
        (lambda: Subspace.neurons([2], 2), "from 0 to 1"),
        (lambda: Subspace.mean_differences([[1.0, 2.0]], [0]), "two classes"),
    ],
)
def test_what_is_no_subspace_is_refused(make, message):
    with pytest.raises(InterventionError, match=message):
        make()
