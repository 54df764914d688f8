"""Commands declared of a verb: arguments, further options, output, exit codes; groups of options."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from command_line import LLAMA, PROMPT, RWKV, mionnx, succeeded
from typer.testing import CliRunner

from mionnx import LensResult, MIModel
from mionnx.cli.command import Command
from mionnx.cli.injection import PRINTS, Opening, Output, opening, with_groups
from mionnx.cli.main import COMMANDS, load
from mionnx.machine.stored import ENDING


@dataclass
class Sum:
    """A result."""

    values: list[int]

    def table(self) -> str:
        return f"the sum is {sum(self.values)}"

    def to_dict(self) -> dict[str, Any]:
        return {"sum": sum(self.values), "not a number": float("nan")}

    def save(self, path: Path) -> None:
        path.write_text(self.table())


def add(numbers: list[int] | None, first: int, *, times: int = 1, before: Callable[[str], None] | None = None) -> Sum:
    """Add numbers.

    All of them.

    Args:
        first: a number.
        times: how often.
    """
    if before is not None:
        before("begins")
    return Sum([first] * times + (numbers or []))


def run(command: Command, *words: str) -> Any:
    app = typer.Typer()
    app.command(help=command.help)(command.function())
    return CliRunner().invoke(app, words)


def call(open: Any, arguments: dict[str, Any], more: Annotated[int, typer.Option(help="One more.")] = 0) -> Sum:
    assert open is None
    return add([more], **arguments)


def show(result: Sum, k: Annotated[int, typer.Option(help="How many.")] = 9) -> list[str]:
    return [result.table(), f"first {result.values[:k]}"]


ADD = Command(
    [add], ["add 1", "add 2"], "Or fewer.", call=call, positional=("first",), without=("numbers",), settings=None
)
SHOWN = Command([add], ["add 1"], call=call, show=show, positional=("first",), without=("numbers",), settings=None)


def test_arguments_and_options_reach_the_verb():
    assert run(ADD, "4").output == "the sum is 4\n"
    assert run(ADD, "4", "--times", "3", "--more", "2").output == "the sum is 14\n"
    assert run(ADD).exit_code == 2


def test_what_is_shown_has_options_too():
    assert run(SHOWN, "4", "--times", "3", "--k", "2").output == "the sum is 12\nfirst [4, 4]\n"


def test_json_is_strict_and_files_are_written(tmp_path):
    page = tmp_path / "a.html"
    assert json.loads(run(ADD, "4", "--json", "--html", str(page)).output) == {"sum": 4, "not a number": None}
    assert page.read_text() == "the sum is 4"


@pytest.mark.parametrize(("option", "ending"), [("--html", ".html"), ("--png", ".png"), ("--save", ENDING)])
def test_a_file_of_another_ending_is_refused_before_anything_runs(option, ending):
    def never(open: Any, arguments: dict[str, Any]) -> Sum:
        raise AssertionError

    command = Command([add], [""], call=never, positional=("first",), without=("numbers",), settings=None)
    refused = run(command, "4", option, "result.txt")
    assert refused.exit_code == 2
    assert f"should end in {ending}" in " ".join(refused.output.replace("│", " ").split())


def test_facts_and_exit_codes_are_of_the_result():
    command = Command(
        [add], [""], call=call, positional=("first",), without=("numbers",), settings=None, files=False,
        facts=lambda result: {"numbers": result.values}, exit_code=lambda result: len(result.values),
    )  # fmt: skip
    ran = run(command, "4", "--times", "2", "--json")
    assert json.loads(ran.output) == {"numbers": [4, 4, 0]}
    assert ran.exit_code == 3
    assert run(command, "4", "--html", "a.html").exit_code == 2  # no such option


def test_what_comes_before_is_left_out_of_json():
    said: list[str] = []
    command = Command(
        [add], [""], call=call, before=said.append, positional=("first",), without=("numbers",), settings=None
    )
    run(command, "4", "--json")
    assert said == []
    run(command, "4")
    assert said == ["begins"]


def test_the_help_is_the_verbs_without_its_first_line():
    assert ADD.help == "All of them.\n\nOr fewer.\n\nExamples:\n\nadd 1\n\nadd 2"
    assert SHOWN.help == "All of them.\n\nExample:\n\nadd 1"


class TestGroups:
    def test_the_model_is_the_first_argument_and_its_settings_come_last(self):
        @with_groups(opening=opening("dtype", "threads"), output=PRINTS)
        def command(opening: Opening, output: Output, own: Annotated[int, typer.Option(help="Own.")] = 3) -> None:
            seen.append((opening, output.as_json, own))

        seen: list[Any] = []
        app = typer.Typer()
        app.command()(command)
        names = [parameter.name for parameter in typer.main.get_command(app).params]
        assert [name for name in names if "completion" not in name] == [
            *("model", "own", "as_json", "dtype", "threads", "revision", "subfolder")
        ]
        CliRunner().invoke(app, ["somewhere", "--threads", "2", "--own", "4", "--json"])
        CliRunner().invoke(app, ["somewhere"])
        assert seen == [(Opening("somewhere", {"threads": 2}), True, 4), (Opening("somewhere", {}), False, 3)]

    def test_an_opening_opens_what_from_pretrained_opens(self):
        settings = Opening(str(LLAMA), {"threads": 1, "dtype": "float32"})
        model = settings.model()
        assert isinstance(model, MIModel)
        assert model.options.threads == 1
        assert settings.once().variants.options.prepack is False
        assert (settings.version.revision, settings.version.subfolder) == (None, "")


class TestTheListOfCommands:
    def test_it_says_the_first_sentence_of_each(self):
        shown = " ".join(succeeded("--help").replace("│", " ").split())
        for name, (_, sentence) in COMMANDS.items():
            assert f"{name} {sentence}" in shown
            assert load(name).help.startswith(sentence) or name == "cache"

    def test_it_imports_no_command(self):
        code = "import sys; from mionnx.cli.main import app; app(['--help'], standalone_mode=False);"
        code += "print(sorted(name for name in sys.modules if name.startswith('mionnx.cli.')))"
        printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
        assert printed.splitlines()[-1] == "['mionnx.cli.main']"

    def test_a_command_that_there_is_not_is_refused_with_the_nearest(self):
        refused = mionnx("lense", RWKV, PROMPT)
        assert refused.returncode == 2
        assert "Did you mean 'lens'?" in " ".join(refused.stderr.replace("│", " ").split())


def test_a_result_is_saved_by_a_command_as_by_python(tmp_path, shipped):
    succeeded("lens", LLAMA, PROMPT, "--save", tmp_path / "lens.safetensors", "--json")
    assert LensResult.load(tmp_path / "lens.safetensors").to_json() == shipped.logit_lens(PROMPT).to_json()
