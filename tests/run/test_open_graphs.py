"""The pool of open graphs: which way they are opened, and how many stay."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from mionnx import HookPoint, HookSpec, MIModel, Options
from mionnx.machine import memory


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


def _mapped(model):
    """Pieces of the model's files that this process maps."""
    folder = str(model.hooked.folder)
    return sum(folder in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not tell what is mapped")
def test_open_graphs_of_all_models_stay_within_the_mappings_of_a_process(models, monkeypatch, tmp_path):
    """Those of the model used longest ago are closed, before the system refuses to start a thread."""
    specs = [HookSpec().capture(HookPoint.ResidPost(layer)) for layer in (0, 1)] + [HookSpec()]
    folders = [shutil.copytree(models("llama").hooked.folder, tmp_path / name) for name in ("first", "second")]
    first, second = (MIModel.from_pretrained(folder, threads=1, prepack=False) for folder in folders)
    ids = np.array([[3, 4, 5]])
    before = [first.forward(ids, spec).output() for spec in specs]
    own = first.variants.mappings
    assert len(first.compiled) > 1
    assert 0 < _mapped(first) <= own
    monkeypatch.setattr(memory, "most_mappings", lambda: 2 * (own + own // 3))
    for spec in specs:
        second.forward(ids, spec)
    assert second.variants.mappings == own
    assert len(first.compiled) < len(second.compiled)
    assert first.variants.mappings + second.variants.mappings <= own + own // 3
    assert _mapped(first) <= first.variants.mappings
    for spec, logits in zip(specs, before, strict=True):  # opened again
        assert np.array_equal(first.forward(ids, spec).output(), logits)
