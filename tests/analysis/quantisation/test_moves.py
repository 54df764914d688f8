"""Moves: the order by KL for a byte, and the smallest sets, as trying all of them finds."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mionnx.analysis.quantisation.budget import Moves
from mionnx.analysis.quantisation.matrix_loss import MatrixLoss

quick = settings(max_examples=40, deadline=None, derandomize=True)


def loss(name: str, kl: float) -> MatrixLoss:
    return MatrixLoss(name, 0, (2, 2), 4, 8, 0.1, 0.1, kl, 1.0)


def moves(costs: list[tuple[float, int]]) -> Moves:
    names = [f"w{number}" for number in range(len(costs))]
    losses = [loss(name, kl) for name, (kl, _) in zip(names, costs, strict=True)]
    more = {name: size for name, (_, size) in zip(names, costs, strict=True)}
    return Moves.of(dict.fromkeys(names, 4), dict.fromkeys(names, 8), losses, more)


COSTS = st.lists(st.tuples(st.integers(0, 64).map(lambda n: n / 64), st.integers(1, 50)), min_size=1, max_size=7)


@given(COSTS, st.integers(1, 128).map(lambda n: n / 64))
@quick
def test_no_set_within_the_sum_takes_fewer_bytes(costs: list[tuple[float, int]], left: float) -> None:
    made = moves(costs)
    bits = made.fewest(left)
    stay = [number for number in range(len(costs)) if bits[f"w{number}"] == 4]
    tried = [
        sum(size for moved, (_, size) in zip(choice, costs, strict=True) if moved)
        for choice in product((False, True), repeat=len(costs))
        if sum(kl for moved, (kl, _) in zip(choice, costs, strict=True) if not moved) <= left
    ]
    assert sum(costs[number][0] for number in stay) <= left
    # Costs are counted in whole grains: a sum that is the bound itself may be one grain above it.
    just = [
        sum(size for moved, (_, size) in zip(choice, costs, strict=True) if moved)
        for choice in product((False, True), repeat=len(costs))
        if sum(kl for moved, (kl, _) in zip(choice, costs, strict=True) if not moved) <= left * (1 - 1e-4)
    ]
    assert min(tried) <= made.bytes(bits) <= min(just)


@given(COSTS)
@quick
def test_steps_move_one_matrix_each_and_leave_the_rest(costs: list[tuple[float, int]]) -> None:
    made = moves(costs)
    rates = [one.kl / more for one, more in zip(made.losses, made.more, strict=True)]
    assert rates == sorted(rates, reverse=True)
    assert made.steps[0] == made.begin
    assert made.steps[-1] == made.end
    for before, after in zip(made.steps, made.steps[1:], strict=False):
        assert sum(before[name] != after[name] for name in before) == 1
        assert made.bytes(after) > made.bytes(before)
    assert made.left[0] == pytest.approx(sum(kl for kl, _ in costs))
    assert made.left[-1] == 0
    assert made.bytes(made.end) == sum(size for _, size in costs)
