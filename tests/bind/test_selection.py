"""The part of a value that an intervention selects, and values of the wrong shape."""

import json

import numpy as np
import pytest

from mionnx import HookPoint, HookSpec, Intervention, InterventionError

IDS = np.arange(3, 13)[None]


def test_positions_in_the_cached_past(models):
    cache = models("llama").forward(IDS, use_cache=True).kv_cache
    spec = HookSpec().intervene("hook_embed", Intervention.Zero(positions=3))
    with pytest.raises(InterventionError, match=r"position 3 of row 0 lies in the cached past.*10 to 12"):
        models("llama").forward(IDS[:, :3], spec, cache=cache)


def test_values_of_the_wrong_shape(models):
    wrong = {
        "replace": Intervention.Replace(np.zeros((1, 9, 64))),
        "add": Intervention.Add(np.zeros((3, 64))),
        "project_out": Intervention.ProjectOut(np.ones(63)),
    }
    for kind, edit in wrong.items():
        with pytest.raises(InterventionError, match=rf"{kind} at hook_embed.*batch=1, seq=10, hidden=64"):
            models("llama").forward(IDS, HookSpec().intervene("hook_embed", edit))
    some = Intervention.Replace(np.zeros((3, 64)), positions=[1, 2])
    with pytest.raises(InterventionError, match=r"selected part \[1, 2, 64\]"):
        models("llama").forward(IDS, HookSpec().intervene("hook_embed", some))


def test_a_value_for_the_selected_part(models):
    """A replacement may be given for the chosen positions, heads and rows only."""
    model, part = models("llama"), np.random.default_rng(0).normal(size=(2, 1, 16)).astype(np.float32)
    point = HookPoint.AttnZ(0)
    spec = HookSpec().capture(point).capture(point, before=True)
    found = model.forward(
        np.repeat(IDS, 2, 0), spec.intervene(point, Intervention.Replace(part, positions=[2, 7], heads=3))
    )
    expected = found[f"{point}.before"].copy()
    expected[:, [2, 7], 3] = part[:, 0]
    assert np.array_equal(found[point], expected)


def test_project_out_of_keys_and_metadata_are_explained(models):
    with pytest.raises(InterventionError, match=r"not features.*blocks\.0\.attn\.hook_z"):
        models("llama").forward(
            IDS, HookSpec().intervene(HookPoint.AttnPattern(0), Intervention.ProjectOut(np.ones(10)))
        )
    props = {p.key: p.value for p in models("llama").hooked.proto.metadata_props}
    assert json.loads(props["mionnx.family"]) == "llama"
