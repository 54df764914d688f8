"""The pool of open graphs: which way they are opened, and how many stay."""

import numpy as np

from mionnx import HookPoint, HookSpec, MIModel, Options


def test_the_first_call_decides_about_packing(models):
    """Large batches do without, everything else packs, and a model stays with what it began with."""
    hooked = models("llama").hooked
    for tokens, packed in (((1, 9), True), ((16, 32), False)):
        model = MIModel(hooked, Options(threads=1))
        ids = np.full(tokens, 7)
        model.forward(ids)
        assert model.variants.options.prepack is packed
        model.forward(np.full((1, 3), 7), HookSpec().capture("hook_embed"))
        assert model.variants.options.prepack is packed
    chosen = MIModel(hooked, Options(threads=1, prepack=False))
    chosen.generate([[3, 4]], max_new_tokens=2)
    assert chosen.variants.options.prepack is False


def test_open_graphs_are_bounded_by_memory(models):
    plain = models("llama")
    model = MIModel(plain.hooked, Options(threads=1, max_bytes=2 * plain.variants.weights))
    for layer in (0, 1, 0):
        model.warm(HookSpec().capture(HookPoint.ResidPost(layer)))
    model.warm(HookSpec())
    assert [plan.captures[0].hook if plan.captures else None for plan in model.compiled] == [
        "blocks.0.hook_resid_post",
        None,
    ]
