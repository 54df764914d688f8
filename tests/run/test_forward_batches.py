"""A list in batches: what each row gives is what it gives alone, and what it gives in one padded batch."""

from collections import Counter
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_specs import Call, draw

from mionnx import HookCache, HookPoint, HookSpec, InputError, Intervention, Logits, MIError, MIModel
from mionnx.bind.bound_spec import Binder, BoundSpec
from mionnx.inputs.token_batch import TokenBatch, make_token_batch
from mionnx.machine import memory
from mionnx.run import forward_batches
from mionnx.run.batching import batches_of, fitting
from mionnx.run.forward_batches import in_one_pass
from mionnx.run.hook_cache import rows_of

TOLERANCE = 5e-5
FAMILIES = ("llama", "gpt2", "gemma2", "rwkv7")
TEXTS = [
    "The capital of France is",
    "Paris",
    "The capital of Germany is Berlin . The capital of Japan is Tokyo .",
    "Paris is the capital of",
    "The capital of Kenya is",
]


@pytest.fixture(scope="session")
def family_model(models, rwkv) -> Callable[[str], MIModel]:
    return lambda family: rwkv("7-pth") if family == "rwkv7" else models(family)


def differs(one: HookCache, other: HookCache) -> float:
    """The largest difference between two results of one row, relative to the size of the numbers."""
    assert [*one] == [*other]
    pairs = [(one[name], other[name]) for name in one]
    pairs += [] if not one.has_logits else [(one.output(), other.output())]
    for mine, theirs in pairs:
        assert mine.shape == theirs.shape
    return max((gap(mine, theirs) for mine, theirs in pairs), default=0.0)


def row_of(cache: HookCache, row: int, like: HookCache) -> HookCache:
    """One row of a list's results, without the padding that stands before it."""

    def part(value: np.ndarray, other: np.ndarray) -> np.ndarray:
        return value[row : row + 1][(slice(None), *(slice(have - want, None) for have, want in ends(value, other)))]

    def ends(value: np.ndarray, other: np.ndarray) -> Iterator[tuple[int, int]]:
        return zip(value.shape[1:], other.shape[1:], strict=True)

    logits = None if like._logits is None else part(cache.output(), like.output())
    return HookCache(logits, {name: part(cache[name], like[name]) for name in cache})


def gap(one: np.ndarray, other: np.ndarray) -> float:
    seen = one > np.finfo(np.float32).min / 2  # masked scores are what they are
    assert np.array_equal(seen, other > np.finfo(np.float32).min / 2)
    scale = max(1.0, float(np.abs(one[seen]).max(initial=0)))
    return float(np.abs(one[seen] - other[seen]).max(initial=0)) / scale


@pytest.mark.parametrize("name", ["shipped", "recurrent"])
@pytest.mark.parametrize("size", [1, 2, "auto"])
def test_each_row_is_what_its_text_gives_alone(request, name, size):
    model = request.getfixturevalue(name)
    spec = HookSpec().capture("blocks.*").intervene("blocks.1.hook_mlp_out", Intervention.Scale(1.5, positions=-1))
    whole = model.forward(TEXTS, spec, batch_size=size, use_cache=True)
    assert isinstance(whole, HookCache)
    for row, text in enumerate(TEXTS):
        alone = model.forward(text, spec, use_cache=True)
        assert differs(alone, row_of(whole, row, alone)) < TOLERANCE
        past, own = (whole.kv_cache or whole.state).row(row), alone.kv_cache or alone.state
        assert np.array_equal(past.attention_mask, own.attention_mask)
        for mine, theirs in zip(past.layers, own.layers, strict=True):
            assert all(gap(a, b) < TOLERANCE for a, b in zip(mine, theirs, strict=True))


def test_a_batch_has_the_bits_of_the_same_rows_as_one_padded_batch(shipped):
    spec, lengths = HookSpec().capture("*.hook_resid_post"), [len(shipped.tokenize(text).ids) for text in TEXTS]
    whole = shipped.forward(TEXTS, spec, batch_size=2)
    for batch in batches_of(lengths, 2):
        padded = shipped.forward([TEXTS[row] for row in batch], spec, batch_size=None)
        for place, row in enumerate(batch):
            own = lengths[row]
            assert np.array_equal(padded.output()[place, -own:], whole.output()[row, -own:])
            assert np.array_equal(padded["resid_post", 2][place, -own:], whole["resid_post", 2][row, -own:])
            assert not whole["resid_post", 2][row, :-own].any()


def test_a_list_of_one_kind_has_the_bits_of_one_pass_unless_told_otherwise(shipped):
    spec = HookSpec().capture("*.hook_resid_post")
    one, other = (shipped.forward(TEXTS, spec, **options) for options in ({}, {"batch_size": None}))
    assert np.array_equal(one.output(), other.output())
    assert np.array_equal(one["resid_post", 2], other["resid_post", 2])


def test_a_long_text_among_many_short_ones_runs_apart(shipped):
    bound = shipped.binder.bind(HookSpec())
    batch = make_token_batch([[3]] * 99 + [[3] * 50], None, None, shipped.hooked)
    assert not in_one_pass(bound, batch, "auto")
    assert in_one_pass(bound, batch, None)
    assert in_one_pass(bound, make_token_batch([[3] * 40] * 100, None, None, shipped.hooked), "auto")


def test_a_pass_parts_a_list_of_which_a_quarter_is_padding(shipped, monkeypatch):
    """A generation does not: each of its steps reads all weights once, whatever the number of rows."""
    rows = [[3] * size for size in range(20, 60)]
    bound, batch = shipped.binder.bind(HookSpec()), make_token_batch(rows, None, None, shipped.hooked)
    assert 0.25 < 1 - batch.real.mean() < 0.5
    assert in_one_pass(bound, batch, "auto")
    sizes = list[int]()
    run = forward_batches.run_pass

    def counted(model: MIModel, bound: BoundSpec, batch: TokenBatch, *past: Any, **options: Any) -> HookCache:
        sizes.append(batch.batch)
        return run(model, bound, batch, *past, **options)

    monkeypatch.setattr(forward_batches, "run_pass", counted)
    parted = shipped.forward(rows, HookSpec().capture("blocks.2.hook_resid_post"))
    assert sum(sizes) == len(rows)
    assert len(sizes) > 1
    whole = shipped.forward(rows, HookSpec().capture("blocks.2.hook_resid_post"), batch_size=None)
    assert gap(whole["resid_post", 2][batch.real], parted["resid_post", 2][batch.real]) < TOLERANCE
    assert gap(whole.output()[batch.real], parted.output()[batch.real]) < TOLERANCE


def rows_apart(call: Call, past: np.ndarray, whole: HookCache) -> list[HookCache]:
    """The rows of a padded batch without padding, by the axes of the hook points."""
    made = []
    for row, mask in enumerate(call.mask):
        real, keys = np.flatnonzero(mask), np.flatnonzero(np.concatenate([past[row], mask]))
        captured = {}
        for capture in sorted(call.captures, key=lambda one: [*whole].index(one.name)):
            value = whole[capture.name][[row]]
            for axis, name in enumerate(capture.point.axes):
                if name == "seq_k":
                    value = value.take(keys, axis)
                elif name in ("seq", "seq_q") and capture.positions is None:
                    value = value.take(real, axis)
            captured[capture.name] = value
        logits = None if not whole.has_logits else whole.output()[[row]][:, real]
        made.append(HookCache(logits, captured))
    return made


def result(run: Callable[..., Any], *arguments: Any, **named: Any) -> tuple[Any, MIError | None]:
    try:
        return run(*arguments, use_cache=True, **named), None
    except MIError as error:
        return None, error


def compare(model: MIModel, random: Random, counts: Counter[str]) -> None:
    """Run the calls of a random draw as one batch and in batches."""
    past = None
    for call in draw(model, random):
        seen = np.zeros((len(call.ids), 0)) if past is None else past.attention_mask
        given = {"attention_mask": call.mask, "prompt_length": call.prompts, "logits": call.logits, "cache": past}
        if call.new or not (call.logits or call.captures):
            return
        whole, error = result(model.forward, call.ids, call.spec, **given)
        parts, refused = result(model.forward, call.ids, call.spec, batch_size=random.choice([1, 2, "auto"]), **given)
        if error is not None:
            assert refused is not None, (error, call)
            return
        counts["equal" if refused is None else "refused"] += 1
        if refused is not None:
            return
        again = rows_apart(call, seen, parts)
        for one, other in zip(rows_apart(call, seen, whole), again, strict=True):
            assert differs(one, other) < TOLERANCE, call
        past = whole.kv_cache or whole.state


@pytest.mark.parametrize("count", [10, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
def test_random_specs_mean_in_batches_what_they_mean_in_one(family_model, family, count):
    model, counts = family_model(family), Counter[str]()

    @settings(max_examples=count, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.integers(0, 2**32 - 1).map(Random))
    def every(random: Random) -> None:
        compare(model, random, counts)

    every()
    assert counts["refused"] <= 0.1 * counts["equal"], counts


@pytest.mark.slow
def test_values_of_rows_stay_with_their_rows(shipped):
    """Each text of a ragged list gets a vector of its own, and one of them alone a zero."""
    values = np.random.default_rng(0).normal(0, 0.5, (len(TEXTS), 1, 128)).astype(np.float32)
    point = "blocks.1.hook_resid_post"
    spec = HookSpec().intervene(point, Intervention.Add(values)).capture("blocks.2.hook_resid_post", positions=-1)
    spec.intervene("blocks.2.hook_mlp_out", Intervention.Zero(rows=[3]))
    caches = shipped.forward(TEXTS, spec, batch_size=2)
    for row, text in enumerate(TEXTS):
        own = HookSpec().intervene(point, Intervention.Add(values[row, 0])).extend(HookSpec(captures=spec.captures))
        if row == 3:
            own.intervene("blocks.2.hook_mlp_out", Intervention.Zero())
        alone = shipped.forward(text, own)
        assert differs(alone, row_of(caches, row, alone)) < TOLERANCE
    with pytest.raises(MIError, match="row 9"):
        shipped.forward(TEXTS, HookSpec().intervene(point, Intervention.Zero(rows=[9])), batch_size=2)
    with pytest.raises(MIError, match="shape"):
        shipped.forward(TEXTS, HookSpec().intervene(point, Intervention.Add(values[:2])), batch_size=2)


def test_answers_of_rows_stay_with_their_rows(shipped):
    answers = ["Paris", ".", "Berlin", "Tokyo", "Nairobi"]
    spec = HookSpec().gradient("blocks.1.hook_resid_post", positions=-1).set_metric("logit", answer=answers)
    caches = shipped.forward(TEXTS, spec, batch_size=2)
    assert caches.metric.shape == (5,)
    for row, (text, answer) in enumerate(zip(TEXTS, answers, strict=True)):
        own = HookSpec().gradient("blocks.1.hook_resid_post", positions=-1).set_metric("logit", answer=answer)
        alone = shipped.forward(text, own)
        assert gap(alone.metric, caches.metric[[row]]) < TOLERANCE
        assert gap(alone.grad["resid_post", 1], caches.grad["resid_post", 1][[row]]) < TOLERANCE
    seed = np.ones((5, 14, shipped.vocab_size), np.float32)
    with pytest.raises(MIError, match="batch_size"):
        shipped.forward(TEXTS, HookSpec().gradient("hook_embed").set_metric("cotangent", cotangent=seed), batch_size=2)


def test_positions_of_all_rows_stand_without_padding(shipped):
    spec = HookSpec().capture("*.hook_resid_post", positions=[0, -1])
    cache = shipped.forward(TEXTS, spec, batch_size=3, logits=Logits(positions=-1, k=4))
    whole = shipped.forward(TEXTS, spec, logits=Logits(positions=-1, k=4))
    assert cache["resid_post", 2].shape == (5, 2, 128)
    assert gap(whole["resid_post", 2], cache["resid_post", 2]) < TOLERANCE
    assert cache.output().shape == (5, 1, 4)
    assert np.array_equal(cache.top_ids, whole.top_ids)


def test_lists_come_in_every_form_that_a_prompt_has(shipped):
    ids = [shipped.tokenize(text).ids.tolist() for text in TEXTS]
    width = max(map(len, ids))
    right = np.array([[*row, *[0] * (width - len(row))] for row in ids])
    mask = np.array([[1] * len(row) + [0] * (width - len(row)) for row in ids])
    forms = [
        (TEXTS, None),
        (ids, None),
        ([shipped.tokenize(text) for text in TEXTS], None),
        ([{"input_ids": row, "attention_mask": [1] * len(row)} for row in ids], None),
        ({"input_ids": right, "attention_mask": mask}, None),
        (right, mask),
    ]
    expected = shipped.forward(TEXTS, batch_size=2)
    for tokens, given_mask in forms:
        found = shipped.forward(tokens, attention_mask=given_mask, batch_size=2)
        real = mask == 1 if tokens is right or isinstance(tokens, dict) else mask[:, ::-1] == 1
        assert np.array_equal(expected.output()[mask[:, ::-1] == 1], found.output()[real])
    assert shipped.forward(TEXTS[0], batch_size=2).output().shape[0] == 1


def test_a_past_of_each_row_goes_with_it(shipped, recurrent):
    for model in (shipped, recurrent):
        first = model.forward(TEXTS, use_cache=True)
        more = ["The", "is the capital of", ". The", "Kenya . Paris", "Nairobi"]
        past = first.kv_cache or first.state
        caches = model.forward(more, cache=past, batch_size=2)
        for row, (text, added) in enumerate(zip(TEXTS, more, strict=True)):
            alone = model.forward(text, use_cache=True)
            expected = model.forward(added, cache=alone.kv_cache or alone.state)
            assert gap(expected.output(), row_of(caches, row, expected).output()) < TOLERANCE
        with pytest.raises(InputError, match="rows"):
            model.forward(more[:2], cache=past, batch_size=2)


def test_errors_name_the_row(shipped):
    with pytest.raises(InputError, match="row 1: token 999999"):
        shipped.forward([[3, 4], [999999]], batch_size=2)
    with pytest.raises(MIError, match=r"row 1 of 5: .*position 3"):
        shipped.forward(TEXTS, HookSpec().capture("hook_embed", positions=3), batch_size=1)
    with pytest.raises(InputError, match="batch_size"):
        shipped.forward(TEXTS, batch_size=0)


def test_memory_chooses_the_batch(shipped, monkeypatch):
    bound = shipped.binder.bind(HookSpec().capture("*"))
    large = fitting(bound)(10)
    monkeypatch.setattr(memory, "available", lambda: 2**24)
    assert 0 < fitting(bound)(10) < large
    assert fitting(bound)(40) < fitting(bound)(10)
    expected = shipped.forward(TEXTS[:1])
    monkeypatch.setattr(memory, "available", lambda: 2**20)
    batches: list[list[int]] = []
    monkeypatch.setattr(forward_batches, "rows_of", lambda *given: batches.append(given) or rows_of(*given))
    whole = shipped.forward(TEXTS * 3, logits=Logits(positions=-1))
    assert len(batches) > 3
    assert gap(expected.output()[:, -1:], whole.output()[:1]) < TOLERANCE
    monkeypatch.setattr(memory, "available", lambda: 2**10)
    with pytest.raises(InputError, match="15 rows need"):
        shipped.forward(TEXTS * 3, HookSpec().capture("*"), batch_size="auto")


def test_a_spec_is_resolved_once_a_call(models, monkeypatch):
    """`forward` binds it once, and selects its positions once, whether rows run together or in batches."""
    model, bound, selected = models("llama"), [], []
    bind, select = Binder.bind, BoundSpec.selections
    monkeypatch.setattr(Binder, "bind", lambda self, *rest, **named: bound.append(1) or bind(self, *rest, **named))
    monkeypatch.setattr(BoundSpec, "selections", lambda *rest: selected.append(1) or select(*rest))
    spec = HookSpec().capture(HookPoint.ResidPost(0)).intervene(HookPoint.ResidPost(1), Intervention.Scale(2.0))
    model.forward([[3, 4, 5], [6, 7, 8]], spec)
    assert (len(bound), len(selected)) == (1, 1)
    bound.clear()
    model.forward([[3, 4, 5], [6], [7, 8], [9]], spec, batch_size=2)
    assert len(bound) == 1
