"""Every README runs: its Python in its order, its commands; links lead somewhere, and rooms name all of their files."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from repository import REPOSITORY
from typer.main import get_command
from typer.testing import CliRunner

from mionnx.cli.main import app

ROOMS = ("mionnx", "exporters", "benchmarks", "models", "tests")
READMES = [REPOSITORY / "README.md", *sorted(path for room in ROOMS for path in (REPOSITORY / room).rglob("README.md"))]
PYTHON = re.compile(r"```python\n(.*?)```(?:(?:\n\nprints)?\n\n```\n(.*?)```)?", re.S)
NUMBER = re.compile(r"-?\d+\.\d+")
# A command with one of these needs more than the models that ship.
PLACEHOLDER = re.compile(r"[A-Z_]{4,}|\.\.\.|.*\.(safetensors|gguf|txt)")
COMMANDS = get_command(app).commands


def name_of(path: Path) -> str:
    return str(path.parent.relative_to(REPOSITORY))


def python_blocks(path: Path) -> list[tuple[str, str]]:
    """Each block of Python with the output that is shown after it, or ""."""
    return PYTHON.findall(path.read_text())


def commands(path: Path) -> list[list[str]]:
    """The `mionnx` commands of a README, split into words."""
    lines = "\n".join(re.findall(r"```sh\n(.*?)```", path.read_text(), re.S)).splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    return [line for line in words if line[:1] == ["mionnx"]]


@pytest.mark.parametrize("readme", READMES, ids=name_of)
def test_the_python_runs_and_prints_what_is_shown(
    readme: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Words exactly, fractions to the last digit that is shown but one."""
    monkeypatch.chdir(REPOSITORY)
    namespace: dict[str, Any] = {}
    for block, shown in python_blocks(readme):
        exec(block, namespace)
        printed = capsys.readouterr().out
        if shown:
            assert NUMBER.sub("#", printed) == NUMBER.sub("#", shown)
            for one, other in zip(NUMBER.findall(printed), NUMBER.findall(shown), strict=True):
                assert float(one) == pytest.approx(float(other), abs=1e-3)


def test_the_readmes_hold_the_examples() -> None:
    """As many blocks as the one README had before the rooms, and the shown refusal names the nearest hook point."""
    blocks = [block for readme in READMES for block in python_blocks(readme)]
    assert len(blocks) >= 25
    assert sum(bool(shown) for _, shown in blocks) >= 18
    assert any("did you mean 'blocks.2.hook_resid_post'" in shown for _, shown in blocks)


@pytest.mark.parametrize(
    ("readme", "words"),
    [
        pytest.param(path, words, id=f"{name_of(path)}-{' '.join(words[:3])}")
        for path in READMES
        for words in commands(path)
    ],
)
def test_the_commands_run(readme: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Options exist; a command that needs only the models that ship succeeds."""
    _, name, *arguments = words
    known = {option for parameter in COMMANDS[name].params for option in parameter.opts}
    assert {word.partition("=")[0] for word in arguments if re.match(r"--?[a-z]", word)} <= known
    if any(PLACEHOLDER.fullmatch(word) for word in arguments):
        return
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").symlink_to(REPOSITORY / "models")
    ran = CliRunner().invoke(app, [name, *arguments])
    assert ran.exit_code == 0, ran.output


@pytest.mark.parametrize("readme", READMES, ids=name_of)
def test_its_links_and_the_files_it_names_exist(readme: Path) -> None:
    text = re.sub(r"```.*?```", "", readme.read_text(), flags=re.S)
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"\w+:|#", link)]
    assert [link for link in links if not (readme.parent / link.partition("#")[0]).exists()] == []
    named = re.findall(r"`((?:mionnx|exporters|benchmarks|models|tests)/[\w/.-]+)`", text)
    assert [path for path in named if not (REPOSITORY / path).exists()] == []


@pytest.mark.parametrize("readme", [path for path in READMES if "mionnx" in name_of(path)], ids=name_of)
def test_a_room_names_all_of_its_files(readme: Path) -> None:
    text = readme.read_text()
    files = {path.stem for path in readme.parent.glob("*.py")} - {"__init__"}
    assert {stem for stem in files if not re.search(rf"\b{stem}\b", text)} == set()
