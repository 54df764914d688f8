"""A new structure in pieces of the base: the bits of one graph, opened in a part of the time."""

from collections.abc import Callable, Iterator
from functools import cache
from random import Random

import numpy as np
import pytest
from alike import assert_same_bits
from random_specs import draw
from repository import REPOSITORY

from mionnx import HookSpec, Intervention, MIError, MIModel
from mionnx.run import pieces, prepacked

TEXT = "The capital of France is"
SPECS = 24
Pair = tuple[MIModel, MIModel]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Pair]]:
    """Name -> the shipped model with a base in four pieces, and the same as one graph a structure."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIONNX_CACHE", str(tmp_path_factory.mktemp("store")))
        patch.setattr(prepacked, "WORTHWHILE", 0)
        patch.setattr(pieces, "PIECES", 4)

        @cache
        def find(name: str) -> Pair:
            cut, whole = (MIModel.from_pretrained(REPOSITORY / "models" / name, threads=1) for _ in range(2))
            patch.setattr(whole.variants, "pieces", lambda plan, tokens: None)
            for model in (cut, whole):
                patch.setattr(model.variants, "every_layer", lambda plan, cuts=(): None)
                assert model.prepare()
            return cut, whole

        yield find


OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("world-gpt2", "world-rwkv7")]


@pytest.mark.parametrize("name", ["world-llama", *OTHERS])
def test_random_specs_have_the_bits_of_one_graph(pair, name: str, monkeypatch) -> None:
    cut, whole = pair(name)
    run, chains = pieces.PiecedGraph.run, []
    monkeypatch.setattr(pieces.PiecedGraph, "run", lambda graph, *rest: chains.append(graph) or run(graph, *rest))
    random = Random(0)
    for _ in range(SPECS):
        call = draw(whole, random)[0]
        found: list[object] = []
        for model in (cut, whole):
            try:
                found.append(model.forward(call.ids, call.spec, attention_mask=call.mask, use_cache=True))
            except MIError as error:
                found.append(str(error))
        if isinstance(found[0], str):
            assert found[0] == found[1]
            continue
        assert_same_bits(*found)
        one, other = ((cache.state or cache.kv_cache).device_parts() for cache in found)
        for parts, others in zip(one, other, strict=True):
            assert {*parts} == {*others} != set()
            for key in parts:
                np.testing.assert_array_equal(parts[key], others[key])
    assert len(chains) > SPECS // 3


def test_a_new_structure_opens_the_piece_that_it_touches(pair) -> None:
    cut, _ = pair("world-llama")
    cut.forward(TEXT, HookSpec().intervene("blocks.1.hook_mlp_out", Intervention.Zero()))
    before = {*cut.variants.open}
    cut.forward(TEXT, HookSpec().intervene("blocks.2.attn.hook_z", Intervention.Zero()))
    (opened,) = {*cut.variants.open} - before
    assert [edit.hook for edit in opened.edits] == ["blocks.2.attn.hook_z"]
    assert opened.starts


def test_a_structure_that_is_called_again_and_again_gets_a_graph_of_its_own(pair, monkeypatch) -> None:
    cut, whole = pair("world-llama")
    monkeypatch.setattr(pieces, "CALLS", 2)
    spec = HookSpec().intervene("blocks.3.mlp.hook_act", Intervention.Scale(0.5))
    plan = cut.binder.bind(spec).plan
    for call in range(4):
        assert_same_bits(cut.forward(TEXT, spec), whole.forward(TEXT, spec))
        assert any(one.edits == plan.edits and not one.starts for one in cut.variants.open) is (call >= 2)


def test_functions_act_between_graphs_of_a_recurrent_models_base(pair) -> None:
    """ONNX Runtime leaves types out of a base, and a graph that began at such a value could not be opened."""
    cut, _ = pair("world-rwkv7")
    scaled = cut.run_with_hooks(TEXT, fwd_hooks=[("blocks.1.hook_resid_post", lambda value, hook: value * 0.5)])
    spec = HookSpec().intervene("blocks.1.hook_resid_post", Intervention.Scale(0.5))
    np.testing.assert_array_equal(scaled, cut.forward(TEXT, spec).output())
