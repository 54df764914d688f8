"""Hook points by name, glob or predicate, alone or in a list."""

import pytest

from mionnx.errors import HookError, SpecFileError
from mionnx.graph.hook_points import HookPoint
from mionnx.spec.hook_choice import HookChoice, each, is_glob, resolve

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
    assert resolve(HookChoice(what), NAMES) == chosen


def test_large_values_are_selected_only_by_their_name():
    assert resolve(HookChoice("blocks.0.rwkv.*"), [*NAMES, "blocks.0.rwkv.hook_k"]) == ["blocks.0.rwkv.hook_k"]
    assert resolve(HookChoice("blocks.0.rwkv.hook_effective_attn"), NAMES) == ["blocks.0.rwkv.hook_effective_attn"]


def test_a_choice_that_selects_nothing_names_the_nearest():
    with pytest.raises(HookError, match=r"did you mean 'hook_embed'"):
        resolve(HookChoice("hook_embd"), NAMES)
    with pytest.raises(HookError, match=r"did you mean 'blocks.1.attn.hook_z'"):
        resolve(HookChoice("blocks.*.attn.hook_zz"), NAMES)

    def in_no_layer(name: str) -> bool:
        return name.startswith("layers.")

    with pytest.raises(HookError, match=r"in_no_layer selects none of the model's 7 hook points.*'blocks.0.hook_res"):
        resolve(HookChoice(in_no_layer), NAMES)


def test_globs_and_their_text():
    assert is_glob("blocks.*")
    assert not is_glob("hook_embed")
    assert not is_glob(HookPoint.AttnZ(0))
    assert HookChoice("*.hook_z").text == "*.hook_z"
    with pytest.raises(SpecFileError, match=r"an intervention by predicate cannot be saved.*a glob"):
        _ = HookChoice(is_glob).text


def test_a_list_is_each_of_its_entries():
    both = ["hook_embed", "*.hook_z", is_glob, HookPoint.AttnZ(1)]
    expected = [HookPoint.Embed, "*.hook_z", is_glob, HookPoint.AttnZ(1)]
    assert [*each(both)] == [*each(tuple(both))] == [*each(iter(both))] == expected
    assert [[*each(one)] for one in both] == [[one] for one in expected]
    for wrong in ([], {"hook_embed": 1}):
        with pytest.raises(HookError, match="a name, a glob, a function of the name, or a list of these"):
            [*each(wrong)]
