"""Values for chosen rows, heads and positions: in the order given, whatever the size of the batch and the text."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toy import HEADS, IDS, RESID, VOCAB, Z, reference, run, toy

from mionnx import HookPoint, HookSpec, Intervention, InterventionError
from mionnx.bind.bound_spec import bind
from mionnx.inputs.token_batch import TokenBatch, make_token_batch
from mionnx.rewrite.plan import Outputs

ONE, EACH, WHOLE = "one entry for all", "one for each, in the order given", "one for each of the whole axis"
KINDS = {
    "replace": (Intervention.Replace, lambda x, value: value),
    "add": (Intervention.Add, lambda x, value: x + value),
    "scale": (Intervention.Scale, lambda x, value: x * value),
    "clamp": (lambda value, **limits: Intervention.Clamp(low=value, **limits), max),
}
law = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def batch_of(ids: np.ndarray, mask: np.ndarray | None = None) -> TokenBatch:
    return make_token_batch(ids, mask, None, toy())


def computed(batch: TokenBatch, name: str, edit: Intervention) -> np.ndarray:
    bound = bind(HookSpec().capture(name).intervene(name, edit), toy(), Outputs(carried=False))
    return run(bound.plan, [name], **{**batch.feeds(), **bound.values(batch)})[0]


def some(numbers: range) -> st.SearchStrategy[list[int]]:
    return st.lists(st.sampled_from(numbers), min_size=1, max_size=len(numbers), unique=True)


@st.composite
def cases(draw: st.DrawFn):
    """A batch, limits in any order, and how the value is given along batch, sequence and heads."""
    lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    seq = max(lengths) + draw(st.integers(0, 1))
    mask = np.stack([np.arange(seq) >= seq - length for length in lengths]).astype(np.int64)
    if draw(st.booleans()):
        mask = mask[:, ::-1].copy()
    limits = {}
    if draw(st.booleans()):
        limits["rows"] = draw(some(range(len(lengths))))
    if draw(st.booleans()):
        limits["heads"] = draw(some(range(HEADS)))
    if not limits or draw(st.booleans()):
        one = some(range(min(lengths))).map(lambda chosen: [p - min(lengths) if p % 2 else p for p in chosen])
        lists = st.tuples(*(some(range(length)) for length in lengths)).map(lambda rows: [[*row] for row in rows])
        limits["positions"] = draw(one if draw(st.booleans()) else lists)
    forms = [draw(st.sampled_from([ONE, EACH, WHOLE])) for _ in range(3)]
    return mask, limits, forms, draw(st.sampled_from([*KINDS])), draw(st.integers(0, 999))


def chosen_by(limits: dict, mask: np.ndarray) -> tuple[list[int], dict[int, list[int]] | None, list[int] | None]:
    """Rows; row -> positions from the start; heads. Lists keep their order; None is no limit."""
    rows = limits.get("rows", [*range(len(mask))])
    if "positions" not in limits:
        return rows, None, limits.get("heads")
    given = limits["positions"]
    by_row = given if isinstance(given[0], list) else [given] * len(mask)
    return rows, {row: [p % mask[row].sum() for p in by_row[row]] for row in rows}, limits.get("heads")


@law
@given(case=cases())
@pytest.mark.slow
def test_values_stand_where_their_indices_are_given(case):
    """Each entry of the changed value, worked out by itself, from the entry of the value that is given for it."""
    mask, limits, forms, kind, seed = case
    rows, positions, heads = chosen_by(limits, mask)
    counts = [
        len(rows) if "rows" in limits else None,
        None if positions is None else {len(one) for one in positions.values()},
        None if heads is None else len(heads),
    ]
    counts[1] = counts[1].pop() if counts[1] and len(counts[1]) == 1 else None
    whole = [len(mask), mask.shape[1], HEADS]
    sizes = [
        {ONE: 1, EACH: count or 1, WHOLE: size}[form] for form, count, size in zip(forms, counts, whole, strict=True)
    ]
    rng = np.random.default_rng(seed)
    value = rng.integers(-9, 10, (*sizes, 2)).astype(np.float32)
    ids = rng.integers(0, VOCAB, mask.shape)
    expected = reference(ids=ids)[Z].copy()
    make, change = KINDS[kind]
    for r, row in enumerate(rows):
        real = np.flatnonzero(mask[row])
        for p, column in enumerate(range(mask.shape[1]) if positions is None else real[positions[row]]):
            for h, head in enumerate(range(HEADS) if heads is None else heads):
                orders = zip((r, p, h), (row, column, head), sizes, counts, strict=True)
                at = tuple(0 if size == 1 else i if size == count else j for i, j, size, count in orders)
                for n in range(2):
                    expected[row, column, head, n] = change(expected[row, column, head, n], value[at][n])
    found = computed(batch_of(ids, mask), Z, make(value, **limits))
    assert np.array_equal(found, expected)


def test_the_order_given_counts_when_it_covers_everything():
    """The same spec on a text of three tokens and of four, two rows, and all heads."""
    rng = np.random.default_rng(0)
    value = rng.integers(1, 9, (1, 3, 4)).astype(np.float32)
    for ids in (IDS, np.array([[1, 2, 3, 4], [4, 0, 1, 2]])):
        found = computed(batch_of(ids), RESID, Intervention.Replace(value, positions=[2, 0, 1]))
        assert np.array_equal(found[0, [2, 0, 1]], value[0])
    both = rng.integers(1, 9, (2, 3, 4)).astype(np.float32)
    assert np.array_equal(computed(batch_of(IDS), RESID, Intervention.Replace(both, rows=[1, 0])), both[::-1])
    heads = rng.integers(1, 9, (2, 3, 2, 2)).astype(np.float32)
    assert np.array_equal(computed(batch_of(IDS), Z, Intervention.Replace(heads, heads=[1, 0])), heads[:, :, ::-1])


@pytest.mark.parametrize("value", [np.float32(5), np.arange(1.0, 5.0)], ids=["number", "vector"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_value_at_unequal_numbers_of_positions(kind, value):
    make, change = KINDS[kind]
    expected = reference()[RESID].copy()
    for row, column in ((0, 0), (1, 1), (1, 2)):
        for n in range(4):
            expected[row, column, n] = change(expected[row, column, n], np.broadcast_to(value, 4)[n])
    assert np.array_equal(computed(batch_of(IDS), RESID, make(value, positions=[[0], [1, 2]])), expected)


def test_entries_that_no_index_is_given_for_are_refused():
    for edit, message in (
        (Intervention.Replace(np.ones((2, 4)), positions=[[0], [1, 2]]), r"selected part \[2, n, 4\]"),
        (Intervention.Add(np.ones((2, 4)), positions=[2, 0, 1]), r"selected part \[2, 3, 4\]"),
        (Intervention.Replace(np.ones((2, 4)), positions=[2, -1]), "along seq is chosen twice"),
        (Intervention.Scale(np.ones((2, 1, 1)), rows=[1, 1]), "along batch is chosen twice"),
    ):
        with pytest.raises(InterventionError, match=message):
            bind(HookSpec().intervene(RESID, edit), toy()).values(batch_of(IDS))
    twice = Intervention.Add(1.0, positions=[2, -1])  # one entry for all: there is nothing to contradict
    assert np.array_equal(computed(batch_of(IDS), RESID, twice)[:, 2], reference()[RESID][:, 2] + 1)


def test_a_value_that_a_later_step_could_not_take_is_refused_before_the_first(shipped):
    """Of the prompt's length at a position of a later step: which entry would it be?"""
    width, point = shipped.hidden_size, HookPoint.ResidPost(0)
    for positions in ([0, 6], [6], [[5, 7]]):
        spec = HookSpec().intervene(point, Intervention.Replace(np.ones((1, 5, width)), positions=positions))
        with pytest.raises(InterventionError, match=r"fits neither the whole value .* nor the selected part"):
            shipped.generate([3, 4, 5, 6, 7], spec, max_new_tokens=6, streamer=Refusing())
    fine = HookSpec().intervene(point, Intervention.Replace(np.ones((1, 5, width)), positions=[3, 0]))
    shipped.generate([3, 4, 5, 6, 7], fine, max_new_tokens=3)


class Refusing:
    """A streamer that no token may reach."""

    def put(self, ids: np.ndarray) -> None:
        assert ids.ndim == 2, "a token was generated before the refusal"

    def end(self) -> None:
        raise AssertionError("the generation came to its end")
