"""Attention in blocks of queries: the bits of one product, in every family, past, batch and spec."""

from typing import Any

import numpy as np
import onnx
import pytest
from families import CONFIGS, VOCAB
from hypothesis import given, settings
from hypothesis import strategies as st

from mionnx import HookPoint, HookSpec, Intervention, KnockoutSpec, Logits, MIModel, create_knockout_mask
from mionnx.rewrite import Plan, rewrite
from mionnx.rewrite.query_blocks import in_query_blocks
from mionnx.run.call_graph import in_blocks

TOKENS = 32
FAMILIES = ("gpt2", "llama", "gemma3_text")


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set from how many tokens on attention is in how many blocks."""

    def choose(*steps: tuple[int, int]) -> None:
        monkeypatch.setattr("mionnx.run.batching.QUERY_BLOCKS", steps)

    return choose


def some_ids(rows: int, tokens: int) -> np.ndarray:
    return np.random.default_rng(tokens).integers(3, VOCAB, (rows, tokens))


def softmaxes(model: MIModel, plan: Plan) -> int:
    graph = onnx.ModelProto.FromString(rewrite(model.hooked.proto, plan, model.hooked.metadata)[0]).graph
    return sum(node.op_type == "Softmax" and "attn.hook_pattern" in node.output[0] for node in graph.node)


@pytest.mark.parametrize(
    "family", [one if one in FAMILIES else pytest.param(one, marks=pytest.mark.slow) for one in CONFIGS]
)
def test_every_family_has_the_bits_of_one_product(models, blocks, family):
    model = models(family)
    assert softmaxes(model, Plan()) == model.num_layers
    assert softmaxes(model, Plan(blocks=2)) == 2 * model.num_layers
    ids, spec = some_ids(2, TOKENS), HookSpec().capture("*.attn.hook_z")
    found = []
    for steps in ((), ((32, 2),)):
        blocks(*steps)
        cache = model.forward(ids, spec, use_cache=True)
        rest = model.forward(ids[:, ::-1], spec, cache=cache.kv_cache)  # behind a past
        found.append([cache.output(), *cache.values(), rest.output(), *rest.values()])
    assert all(np.array_equal(*pair) for pair in zip(*found, strict=True))


def test_a_layer_whose_pattern_somebody_reads_stays_and_no_bit_changes(models, blocks):
    """The null law: a capture of scores or a pattern, and an intervention that changes nothing."""
    model, ids = models("llama"), some_ids(1, TOKENS)
    scores, pattern = HookPoint.AttnScores(0), HookPoint.AttnPattern(1)
    blocks((32, 2))
    plain = model.forward(ids).output()
    for spec in (
        HookSpec().capture(scores),
        HookSpec().capture(pattern, positions=-1),
        HookSpec().intervene(pattern, Intervention.Scale(1)),
        HookSpec().intervene(scores, Intervention.Scale(1)),
        HookSpec().capture("*"),
    ):
        assert np.array_equal(model.forward(ids, spec).output(), plain)
    open_layers = model.binder.bind(HookSpec().capture(pattern)).plan
    assert softmaxes(model, Plan(captures=open_layers.captures, blocks=2)) == 1 + 2 * (model.num_layers - 1)
    edges = create_knockout_mask(KnockoutSpec().edge(30, 3), model.num_heads, TOKENS)
    knocked = HookSpec().intervene(scores, Intervention.Knockout(edges))
    there = model.forward(ids, knocked).output()
    blocks()
    assert np.array_equal(model.forward(ids, knocked).output(), there)
    assert not np.array_equal(plain, there)


@settings(max_examples=6, deadline=None)
@given(
    tokens=st.integers(32, 60),
    rows=st.integers(1, 3),
    layer=st.integers(0, 1),
    kind=st.sampled_from(["ResidPost", "AttnZ", "MlpOut", "AttnPattern", "AttnQ"]),
    last=st.booleans(),
)
def test_random_specs_have_the_same_bits(shipped, tokens, rows, layer, kind, last):
    point = getattr(HookPoint, kind)(layer)
    spec = HookSpec().intervene(point, Intervention.Scale(0.5, positions=5)).capture("*.hook_resid_post")
    ids, logits = some_ids(rows, tokens) % shipped.vocab_size, Logits(positions=-1) if last else True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mionnx.run.batching.QUERY_BLOCKS", ())
        one = shipped.forward(ids, spec, logits=logits)
        patch.setattr("mionnx.run.batching.QUERY_BLOCKS", ((32, 2),))
        other = shipped.forward(ids, spec, logits=logits)
    assert np.array_equal(one.output(), other.output())
    assert all(np.array_equal(one[name], other[name]) for name in one)


def test_the_shipped_model_repeats_its_keys(shipped):
    """Its groups of heads are written out, where other graphs fold them into the rows of a product."""
    assert softmaxes(shipped, Plan(blocks=2)) == 2 * shipped.num_layers


def test_a_length_decides_not_a_capture(models):
    variants = models("llama").variants
    assert [in_blocks(Plan(), variants, n).blocks for n in (5, 1023, 1024, 2048, 4096)] == [0, 0, 8, 16, 32]


def test_texts_of_unequal_length_have_the_same_bits(models, blocks):
    model, ids = models("llama"), some_ids(1, TOKENS)[0].tolist()
    found = []
    for steps in ((), ((32, 2),)):
        blocks(*steps)
        cache = model.forward([ids, ids[3:]], HookSpec().capture("*.hook_resid_post"), batch_size=None)
        arrays = [cache.output(), *cache.values()]
        found.append([part for array in arrays for part in (array[0], array[1, 3:])])  # padding reads other padding
    assert all(np.array_equal(*pair) for pair in zip(*found, strict=True))


def test_a_long_prompt_is_continued_with_the_same_tokens_and_bits(models, blocks):
    model, ids = models("llama"), some_ids(1, TOKENS)
    steered = HookSpec().intervene(HookPoint.ResidPost(0), Intervention.Scale(0.5, positions="generated"))
    for spec in (None, steered):
        found = []
        for steps in ((), ((32, 2),)):
            blocks(*steps)
            made = model.generate(ids, spec, max_new_tokens=4, eos_token_id=[], output_logits=True)
            found.append(np.concatenate([step.output()[:, -1] for step in made.steps]))
        assert np.array_equal(*found)


def test_memory_of_a_long_pass_is_estimated_without_all_scores(models, blocks):
    model = models("llama")
    pattern, long = HookSpec().capture(HookPoint.AttnPattern(0), positions=-1), {"batch": 1, "seq": 4096}
    plain, read = (model.estimate(spec, **long).passing for spec in (HookSpec(), pattern))
    assert 2 * plain < read
    assert model.estimate(HookSpec(), batch=1, seq=1023).passing > plain / 4


def test_a_sweep_has_the_same_values(models, blocks, monkeypatch):
    written: list[int] = []

    def noted(*given: Any) -> Any:
        written.append(1)
        return in_query_blocks(*given)

    monkeypatch.setattr("mionnx.rewrite.apply_plan.in_query_blocks", noted)
    model, clean = models("llama"), some_ids(1, TOKENS)[0]
    corrupted = np.where(np.arange(TOKENS) == 1, clean + 1, clean)
    found = []
    for steps in ((), ((TOKENS, 2),)):
        blocks(*steps)
        for hook, over in (("hook_resid_pre", ("layer", "position")), ("hook_z", ("layer", "head"))):
            sweep = model.patch_sweep(clean, corrupted, hook, over, answer=5, versus=7)
            found.append(sweep.values)
    assert np.array_equal(found[0], found[2])
    assert np.array_equal(found[1], found[3])
    assert len(written) >= model.num_layers


def test_gradients_have_the_same_bits(models, blocks):
    model, ids, point = models("llama"), some_ids(1, TOKENS), HookPoint.ResidPost(0)
    found = []
    for steps in ((), ((32, 2),)):
        blocks(*steps)
        found.append(model.gradients(ids, [point], answer=5).grad[point])
    assert np.array_equal(*found)


def test_python_functions_see_the_same_values(models, blocks):
    model, ids = models("llama"), some_ids(1, TOKENS)
    found = []
    for steps in ((), ((32, 2),)):
        blocks(*steps)
        hooks = [(point, lambda value, hook: value * 0.5) for point in (HookPoint.AttnPattern(0), HookPoint.AttnZ(1))]
        found.append(np.asarray(model.run_with_hooks(ids, hooks)))
    assert np.array_equal(*found)
