"""Calls that differ in the layer only share a graph of every layer, and get the bits of graphs of their own."""

from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import pytest
from alike import assert_same_bits
from repository import REPOSITORY

from mionnx import HookPoint, HookSpec, Intervention, Logits, MIModel
from mionnx.run import call_graph
from mionnx.run.every_layer import every_layer

TEXTS = ["The capital of France is", "Paris is"]
VECTOR = np.linspace(-1, 1, 2**14, dtype=np.float32)

Make = Callable[[MIModel, int], HookSpec]


def add(model: MIModel, layer: int) -> HookSpec:
    hidden = model.binder.model.metadata.sizes.hidden_size
    return HookSpec().intervene(HookPoint.ResidPost(layer), Intervention.Add(VECTOR[:hidden]))


def zero_heads(model: MIModel, layer: int) -> HookSpec:
    return HookSpec().intervene(HookPoint.AttnZ(layer), Intervention.Zero(positions=-1, heads=[layer % 2]))


def scale_pattern(model: MIModel, layer: int) -> HookSpec:
    return HookSpec().intervene(HookPoint.AttnPattern(layer), Intervention.Scale(0.5, rows=[0]))


def zero_whole(model: MIModel, layer: int) -> HookSpec:
    return HookSpec().intervene(HookPoint.MlpOut(layer), Intervention.Zero())


def two(model: MIModel, layer: int) -> HookSpec:
    spec = HookSpec().intervene(HookPoint.ResidPre(layer), Intervention.Scale(2.0, positions=[0, 1]))
    return spec.intervene(HookPoint.ResidPre(layer), Intervention.Add(1.0)).capture(
        HookPoint.ResidPre(layer), before=True
    )


def captures(model: MIModel, layer: int) -> HookSpec:
    point = HookPoint.AttnZ(layer)
    return HookSpec().capture(HookPoint.ResidPost(layer)).capture(point, positions=[0, -1], heads=[1], dtype="float16")


def knock_out(model: MIModel, layer: int) -> HookSpec:
    return HookSpec().intervene(HookPoint.AttnScores(layer), Intervention.Add(-1.0, positions=-1)).capture("hook_embed")


MAKES = [add, zero_heads, scale_pattern, zero_whole, two, captures, knock_out]


@pytest.fixture(scope="module")
def pair() -> Iterator[Callable[[str], tuple[MIModel, MIModel]]]:
    """Name -> the shipped model of it, and the same whose structures are opened by themselves."""
    with pytest.MonkeyPatch.context() as patch:

        @cache
        def find(name: str) -> tuple[MIModel, MIModel]:
            wide, narrow = (MIModel.from_pretrained(REPOSITORY / "models" / name, threads=1) for _ in range(2))
            patch.setattr(narrow.variants, "every_layer", lambda plan, cuts=(): None)
            return wide, narrow

        yield find


@pytest.mark.parametrize("make", MAKES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("name", ["world-gpt2", "world-llama"])
def test_every_layer_gives_the_bits_of_its_own_graph(pair, name: str, make: Make) -> None:
    wide, narrow = pair(name)
    before = len(wide.variants.open)
    for prompt in (TEXTS[0], TEXTS):
        for layer in range(4):
            assert_same_bits(wide.forward(prompt, make(wide, layer)), narrow.forward(prompt, make(narrow, layer)))
    # the first layer's own graph and the one of every layer, for a text and for a batch with padding
    assert len(wide.variants.open) <= before + 4


@pytest.mark.parametrize("make", [add, zero_whole])
def test_of_a_recurrent_model(pair, make: Make) -> None:
    wide, narrow = pair("world-rwkv7")
    before = len(wide.variants.open)
    for layer in range(4):
        assert_same_bits(wide.forward(TEXTS[0], make(wide, layer)), narrow.forward(TEXTS[0], make(narrow, layer)))
    assert len(wide.variants.open) == before + 2


def test_several_layers_at_once_share_it_too(pair) -> None:
    wide, narrow = pair("world-llama")
    both = add(wide, 0).intervene(HookPoint.ResidPost(2), Intervention.Add(1.0))
    for spec in (both, add(wide, 3)):
        assert_same_bits(wide.forward(TEXTS[0], spec), narrow.forward(TEXTS[0], spec))


def test_of_weights_in_blocks(shipped, tmp_path) -> None:
    """Whose passes and generations share graphs, which read where the logits begin."""
    made = MIModel.from_pretrained(shipped.quantise(tmp_path / "made"), threads=1)
    for layer in (0, 1, 2, 3, 0):
        for logits in (True, Logits(positions=-1)):
            spec = HookSpec().capture(HookPoint.ResidPost(layer))
            cache = made.forward(
                TEXTS[0], spec.intervene(HookPoint.MlpOut(layer), Intervention.Scale(0.5)), logits=logits
            )
            alone = MIModel.from_pretrained(made.hooked.folder, threads=1).forward(TEXTS[0], spec, logits=logits)
            np.testing.assert_allclose(cache.output(), alone.output(), atol=1e-5)
            np.testing.assert_allclose(cache["resid_post", layer], alone["resid_post", layer], atol=1e-5)


def test_gradients_by_the_layer(pair) -> None:
    wide, narrow = pair("world-llama")
    before = len(wide.variants.open)
    for layer in range(4):
        spec = HookSpec().intervene(HookPoint.AttnZ(layer), Intervention.Scale(0.5, heads=[1]))
        one, other = (
            model.gradients(TEXTS, f"blocks.{layer}.hook_resid_post", answer="Paris", hooks=spec)
            for model in (wide, narrow)
        )
        assert_same_bits(one, other)
    assert len(wide.variants.open) == before + 2


def test_generation(pair) -> None:
    wide, narrow = pair("world-llama")
    before = len(wide.variants.open)
    for layer in range(4):
        spec = add(wide, layer).intervene(HookPoint.AttnZ(layer), Intervention.Zero(positions="generated"))
        one, other = (model.generate(TEXTS, spec, max_new_tokens=6) for model in (wide, narrow))
        assert one.texts == other.texts
    assert len(wide.variants.open) == before + 2


@pytest.mark.parametrize("name", ["world-gpt2", "world-llama"])
def test_python_functions(pair, name: str) -> None:
    wide, narrow = pair(name)
    before = len(wide.variants.open)

    def double(value, hook):
        value[:, -1] *= 2

    for layer in range(4):
        hooks = [(f"blocks.{layer}.attn.hook_z", double), (HookPoint.ResidPost(layer), double)]
        spec = zero_heads(wide, layer)
        one, other = (model.run_with_hooks(TEXTS, hooks, hooks=spec) for model in (wide, narrow))
        np.testing.assert_array_equal(one, other)
    assert len(wide.variants.open) == before + 2
    for layer in range(3):
        one, other = (
            model.generate(TEXTS, fwd_hooks=[(HookPoint.MlpOut(layer), double)], max_new_tokens=4)
            for model in (wide, narrow)
        )
        assert one.texts == other.texts
    assert len(wide.variants.open) == before + 4


def test_what_costs_much_at_every_layer_stays_at_its_own(pair, monkeypatch) -> None:
    wide, narrow = pair("world-llama")
    results = [HookSpec().capture(HookPoint.AttnResult(layer)) for layer in range(3)]
    plans = [wide.binder.bind(spec).plan for spec in results]
    assert [every_layer(plan, wide.binder.model) for plan in plans] == [None] * 3
    monkeypatch.setattr(call_graph, "ALL_LAYERS", 0)
    before = len(wide.variants.open)
    for layer in range(3):
        spec = HookSpec().capture(HookPoint.MlpOut(layer))
        assert_same_bits(wide.forward(TEXTS[0], spec), narrow.forward(TEXTS[0], spec))
    assert len(wide.variants.open) == before + 3


def test_two_limits_of_one_name_have_graphs_of_their_own(pair) -> None:
    wide, narrow = pair("world-llama")
    for layer in range(3):
        spec = add(wide, layer).intervene(HookPoint.ResidPost(3 - layer), Intervention.Add(1.0, positions=-1))
        assert_same_bits(wide.forward(TEXTS[0], spec), narrow.forward(TEXTS[0], spec))
