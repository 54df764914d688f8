"""Options of verbs: their forms, defaults and helps, and the arguments that values become."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mionnx import HookSpec, InputError, MIModel
from mionnx.cli import analyses, deployment
from mionnx.cli.command import Command
from mionnx.cli.main import COMMANDS, load
from mionnx.cli.parameters import WITHOUT, WORDS, help_of, numbers, options_of, spread

DECLARED = {
    name: command
    for module in (analyses, deployment)
    for name, command in vars(module).items()
    if isinstance(command, Command)
}


def forms(
    model: object,
    clean: str,
    over: str | Iterable[str] = ("layer", "position"),
    *,
    names: Sequence[str] = (),
    layers: int | Sequence[int] | None = None,
    places: int | str | Sequence[int] | None = None,
    token_ids: Sequence[int | str] = (),
    token: int | str | Sequence[int | str] | None = None,
    metric: str | Callable[..., Any] = "kl",
    choice: Literal["left", "right"] = "left",
    number: int = 3,
    share: float | None = None,
    flag: bool = False,
    on: bool = True,
    either: bool | None = None,
    folder: str | Path | None = None,
    batch_size: int | str = "auto",
    hooks: HookSpec | None = None,
    **others: Any,
) -> None:
    """Have a parameter of each form.

    Args:
        over: names, such as blocks.*.hook_z.
        names, number: of both.
        layers: see `patch_sweep`.
        metric: a word, or a function: logits -> numbers. It is read.
        on: None for what the file says; if False, never.
        either: as for `logit_lens`, or neither.
        share: see `attribute_patch`, which has none.
    """


GROUP = options_of([forms], positional=("clean",))
OPTIONS = {parameter.name: parameter for parameter in GROUP.parameters}


def shape(name: str) -> Any:
    return OPTIONS[name].annotation.__metadata__[0]


def arguments(**values: Any) -> dict[str, Any]:
    return GROUP.argument(dict.fromkeys(OPTIONS) | values)


def test_each_parameter_is_an_option_in_its_order():
    expected = [name for name in signature(forms).parameters if name not in ("model", "others")]
    assert list(OPTIONS) == expected
    assert OPTIONS["clean"].default is Parameter.empty
    assert {option.default for name, option in OPTIONS.items() if name != "clean"} == {None}


@pytest.mark.parametrize(
    ("typed", "passed"),
    [
        ({"clean": "a,b"}, {"clean": "a,b"}),
        ({"over": ["layer,head"]}, {"over": ["layer", "head"]}),
        ({"over": ["layer"]}, {"over": "layer"}),
        ({"names": ["one"]}, {"names": ["one"]}),
        ({"names": ["one,two", "three"]}, {"names": ["one", "two", "three"]}),
        ({"layers": ["0-2", "7"]}, {"layers": [0, 1, 2, 7]}),
        ({"places": "-1"}, {"places": [-1]}),
        ({"places": "0,-2"}, {"places": [0, -2]}),
        ({"places": "generated"}, {"places": "generated"}),
        ({"token_ids": ["a,b", "7"]}, {"token_ids": ["a,b", "7"]}),
        ({"token": "a,b"}, {"token": "a,b"}),
        ({"number": 0, "share": 0.0}, {"number": 0, "share": 0.0}),
        ({"flag": True, "on": False, "either": False}, {"flag": True, "on": False, "either": False}),
        ({"folder": Path("a")}, {"folder": Path("a")}),
        ({"batch_size": "8"}, {"batch_size": 8}),
        ({"batch_size": "auto"}, {"batch_size": "auto"}),
        ({"names": [], "layers": []}, {}),
        ({}, {}),
    ],
)
def test_what_is_typed_becomes_an_argument_and_what_is_left_out_none(typed, passed):
    assert arguments(**typed) == passed


def test_a_spec_is_read_from_its_file(tmp_path):
    HookSpec().capture("hook_embed").save(tmp_path / "spec.safetensors")
    assert arguments(hooks=tmp_path / "spec.safetensors")["hooks"].captures == HookSpec().capture("hook_embed").captures


@pytest.mark.parametrize(
    ("name", "spellings"),
    [
        ("flag", ["--flag"]),
        ("on", ["--on/--no-on"]),
        ("either", ["--either/--no-either"]),
        ("token_ids", ["--token-ids"]),
        ("layers", ["--layers", "--layer"]),
        ("folder", ["--folder", "-o"]),
    ],
)
def test_spellings(name, spellings):
    assert [shape(name).default, *shape(name).param_decls] == spellings or [*shape(name).param_decls] == spellings[1:]


@pytest.mark.parametrize(
    ("name", "default"),
    [("over", "layer,position"), ("number", "3"), ("on", "True"), ("share", False), ("names", False), ("flag", False)],
)
def test_the_help_says_the_verbs_default(name, default):
    assert shape(name).show_default == default


class TestHelp:
    def test_a_star_is_no_emphasis(self):
        assert shape("over").help.startswith(r"Names, such as blocks.\*.hook_z.")

    def test_several_names_share_an_entry(self):
        assert shape("names").help.startswith("Of both.")
        assert shape("number").help == "Of both."

    def test_an_entry_elsewhere_is_put_in(self):
        assert help_of(forms)["layers"] == help_of(MIModel.patch_sweep)["layers"]
        assert shape("share").help == "See `attribute_patch`, which has none."

    def test_values_of_python_are_those_of_the_command_line(self):
        assert shape("on").help == "Left out for what the file says; otherwise, never."

    def test_functions_are_for_python(self):
        assert shape("metric").help == "A word. It is read."

    @pytest.mark.parametrize("name", [name for name in COMMANDS if name != "cache"])
    def test_every_option_of_every_command_has_one(self, name):
        lacking = [parameter.name for parameter in load(name).params if not getattr(parameter, "help", None)]
        assert not lacking, f"{name}: the docstring's `Args:` lacks an entry"


@pytest.mark.parametrize("name", DECLARED)
def test_a_command_has_every_parameter_of_its_verbs_or_says_that_it_has_not(name):
    command = DECLARED[name]
    options = {parameter.name for parameter in signature(command.function()).parameters.values()}
    for verb in command.verbs:
        for parameter in signature(verb).parameters.values():
            said = {"model", *WITHOUT, *command.without} | (
                {parameter.name} if parameter.kind.name[:3] == "VAR" else set()
            )
            assert command.words.get(parameter.name, parameter.name) in options | said, (
                f"{verb.__name__}({parameter.name})"
            )


def test_a_parameter_without_a_form_is_refused():
    def verb(model: object, table: Mapping[str, int] | None = None) -> None:
        """Take a table."""

    with pytest.raises(TypeError, match=r"table: .* has no form on the command line"):
        options_of([verb])
    assert options_of([verb], without=("table",)).parameters == []


def test_two_verbs_share_options_and_only_some_are_taken():
    group = options_of([MIModel.patch_sweep, MIModel.ablation_sweep], without=("positions",), optional=("clean",))
    names = [parameter.name for parameter in group.parameters]
    assert len(names) == len({*names})
    assert {"hook", "patching", "kind", "by"} <= {*names}
    only = options_of([MIModel.from_pretrained], only=("dtype", "threads"), words={"threads": "cores"})
    assert [parameter.name for parameter in only.parameters] == ["dtype", "cores"]
    assert only.argument({"dtype": None, "cores": 2}) == {"threads": 2}


class TestNumbers:
    @given(st.lists(st.integers(-50, 50), min_size=1))
    def test_with_commas(self, expected):
        assert numbers("layers", ",".join(map(str, expected)), int) == expected

    @given(st.integers(0, 500), st.integers(0, 500))
    def test_a_range_is_its_numbers(self, first, more):
        assert spread(f"{first}-{first + more}", int) == [*range(first, first + more + 1)]

    @pytest.mark.parametrize("text", ["", "a", "1,,2", "2-1", "1.5", "0-10000"])
    def test_what_is_none_is_refused_with_the_option(self, text):
        with pytest.raises(InputError, match=r"--layers .*numbers with commas between, as 0,1 or 2-5"):
            numbers("layers", text, int)

    def test_floats_have_no_ranges(self):
        assert numbers("strengths", "-1,0.5,2", float) == [-1.0, 0.5, 2.0]
        with pytest.raises(InputError, match=r"as 0,1$"):
            numbers("strengths", "1-2", float)


def test_words_of_files_name_what_is_missing(tmp_path):
    for word in ("reference", "labels", "groups"):
        with pytest.raises(InputError, match="cannot read"):
            WORDS[word].argument(word, tmp_path / "none.txt")
    (tmp_path / "lines.txt").write_text("Europe\n\nAsia\n")
    assert WORDS["reference"].argument("reference", tmp_path / "lines.txt") == ["Europe", "Asia"]
    assert WORDS["labels"].argument("labels", tmp_path / "lines.txt") == ["Europe", None, "Asia"]
    assert WORDS["groups"].argument("groups", tmp_path / "lines.txt") == ["Europe", "", "Asia"]
    assert WORDS["knobs"].argument("knobs", ["all", "one=a", "one=b"]) == {"all": None, "one": ["a", "b"]}
