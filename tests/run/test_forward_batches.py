"""A list in batches: what each row gives is what it gives alone, and what it gives in one padded batch."""

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_specs import Call, draw

from mionnx import HookCache, HookCaches, HookError, HookSpec, InputError, Intervention, Logits, MIError, MIModel
from mionnx.machine import memory
from mionnx.run.pass_memory import fitting

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
    caches = model.forward(TEXTS, spec, batch_size=size, use_cache=True)
    assert isinstance(caches, HookCaches)
    assert sorted(row for batch in caches.batches for row in batch) == [*range(len(TEXTS))]
    for text, cache in zip(TEXTS, caches, strict=True):
        alone = model.forward(text, spec, use_cache=True)
        assert differs(alone, cache) < TOLERANCE
        past, own = (one.kv_cache or one.state for one in (cache, alone))
        assert np.array_equal(past.attention_mask, own.attention_mask)
        for mine, theirs in zip(past.layers, own.layers, strict=True):
            assert all(gap(a, b) < TOLERANCE for a, b in zip(mine, theirs, strict=True))


def test_a_batch_has_the_bits_of_the_same_rows_as_one_padded_batch(shipped):
    caches = shipped.forward(TEXTS, HookSpec().capture("*.hook_resid_post"), batch_size=2)
    for batch in caches.batches:
        padded = shipped.forward([TEXTS[row] for row in batch], HookSpec().capture("*.hook_resid_post"))
        for place, row in enumerate(batch):
            own = caches[row].output().shape[1]
            assert np.array_equal(padded.output()[place, -own:], caches[row].output()[0])
            assert np.array_equal(padded["resid_post", 2][place, -own:], caches[row]["resid_post", 2][0])


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
        for one, other in zip(rows_apart(call, seen, whole), parts, strict=True):
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
        assert differs(shipped.forward(text, own), caches[row]) < TOLERANCE
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
        assert gap(alone.metric, caches[row].metric) < TOLERANCE
        assert gap(alone.grad["resid_post", 1], caches[row].grad["resid_post", 1]) < TOLERANCE
    seed = np.ones((5, 14, shipped.vocab_size), np.float32)
    with pytest.raises(MIError, match="batch_size"):
        shipped.forward(TEXTS, HookSpec().gradient("hook_embed").set_metric("cotangent", cotangent=seed), batch_size=2)


def test_one_array_of_all_rows_where_they_have_one_shape(shipped, tmp_path):
    spec = HookSpec().capture("*.hook_resid_post", positions=[0, -1])
    caches = shipped.forward(TEXTS, spec, batch_size=3, logits=Logits(positions=-1, k=4))
    assert caches["resid_post", 2].shape == (5, 2, 128)
    assert caches.output().shape == (5, 1, 4)
    assert caches[1].top_ids.shape == (1, 1, 4)
    assert [len(part) for part in (caches, caches[1:3])] == [5, 2]
    with pytest.raises(HookError, match="positions="):
        shipped.forward(TEXTS, HookSpec().capture("hook_embed"), batch_size=3)["hook_embed"]
    caches.save(tmp_path / "caches.safetensors")
    again = HookCaches.load(tmp_path / "caches.safetensors")
    assert again.batches == caches.batches
    assert np.array_equal(again["resid_post", 1], caches["resid_post", 1])


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
        assert all(np.array_equal(one.output(), other.output()) for one, other in zip(expected, found, strict=True))
    assert len(shipped.forward(TEXTS[0], batch_size=2)) == 1


def test_a_past_of_each_row_goes_with_it(shipped, recurrent):
    for model in (shipped, recurrent):
        first = model.forward(TEXTS, use_cache=True)
        more = ["The", "is the capital of", ". The", "Kenya . Paris", "Nairobi"]
        past = first.kv_cache or first.state
        caches = model.forward(more, cache=past, batch_size=2)
        for text, added, cache in zip(TEXTS, more, caches, strict=True):
            alone = model.forward(text, use_cache=True)
            expected = model.forward(added, cache=alone.kv_cache or alone.state)
            assert gap(expected.output(), cache.output()) < TOLERANCE
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
    caches = shipped.forward(TEXTS * 3, batch_size="auto", logits=Logits(positions=-1))
    assert len(caches.batches) > 3
    assert gap(expected.output()[:, -1:], caches[0].output()) < TOLERANCE
    monkeypatch.setattr(memory, "available", lambda: 2**10)
    with pytest.raises(InputError, match="15 rows need"):
        shipped.forward(TEXTS * 3, HookSpec().capture("*"), batch_size="auto")
