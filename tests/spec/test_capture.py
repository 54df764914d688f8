"""Capture requests: which hook points a name, a glob or a predicate selects."""

import pytest

from mionnx.errors import HookError, SpecFileError
from mionnx.graph.hook_points import HookPoint
from mionnx.spec.capture import Capture, is_glob, resolve

NAMES = [
    "hook_embed",
    "blocks.0.attn.hook_z",
    "blocks.0.attn.hook_result",
    "blocks.0.hook_resid_post",
    "blocks.1.attn.hook_z",
    "blocks.1.attn.hook_result",
    "blocks.0.rwkv.hook_effective_attn",
]


@pytest.mark.parametrize(
    ("what", "chosen"),
    [
        ("hook_embed", ["hook_embed"]),
        (HookPoint.AttnZ(1), ["blocks.1.attn.hook_z"]),
        ("*.hook_z", ["blocks.0.attn.hook_z", "blocks.1.attn.hook_z"]),
        ("blocks.[0].hook_*", ["blocks.0.hook_resid_post"]),
        (lambda name: "embed" in name, ["hook_embed"]),
        ("blocks.0.rwkv.hook_eff*", ["blocks.0.rwkv.hook_effective_attn"]),
    ],
)
def test_what_is_selected(what, chosen):
    assert resolve(Capture(what), NAMES) == chosen


def test_large_values_are_selected_only_by_their_name():
    assert resolve(Capture("blocks.0.rwkv.*"), [*NAMES, "blocks.0.rwkv.hook_k"]) == ["blocks.0.rwkv.hook_k"]
    assert resolve(Capture("blocks.0.rwkv.hook_effective_attn"), NAMES) == ["blocks.0.rwkv.hook_effective_attn"]


def test_a_request_that_selects_nothing_names_the_nearest():
    with pytest.raises(HookError, match=r"did you mean 'hook_embed'"):
        resolve(Capture("hook_embd"), NAMES)


def test_globs_and_entries():
    assert is_glob("blocks.*")
    assert not is_glob("hook_embed")
    assert not is_glob(HookPoint.AttnZ(0))
    assert Capture("*.hook_z", heads=(0,)).to_entry() == {"hook": "*.hook_z", "before": False, "heads": (0,)}
    with pytest.raises(SpecFileError, match="predicate"):
        Capture(lambda name: True).to_entry()
