"""Every README runs: its Python in order, its commands; links lead somewhere, lines fit a page, rooms name files."""

import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from repository import REPOSITORY
from typer.testing import CliRunner

from mionnx.cli.main import COMMANDS, app, load
from mionnx.run.source_path import PACKAGED

ROOMS = ("mionnx", "exporters", "benchmarks", "models", "tests")
READMES = [REPOSITORY / "README.md", *sorted(path for room in ROOMS for path in (REPOSITORY / room).rglob("README.md"))]
PYTHON = re.compile(r"```python\n(.*?)```(?:(?:\n\nprints)?\n\n```\n(.*?)```)?", re.S)
SHELL = re.compile(r"```sh\n(.*?)```(?:\n\n```\n(.*?)```)?", re.S)
NUMBER = re.compile(r"-?\d+\.\d+(?:e[-+]\d+)?")
# A command with one of these needs more than the models that ship.
PLACEHOLDER = re.compile(r"[A-Z_]{4,}|\.\.\.|.*\.(safetensors|gguf|txt)")
OPTIONS = {
    name: {option for parameter in load(name).params for option in (*parameter.opts, *parameter.secondary_opts)}
    for name in COMMANDS
}
WIDTH = 160  # characters of a line, tables and shown output included
# Word in a block or command on a real model, which is slow and only where its package is installed -> the model.
REAL = {"smollm": "smollm2", "minilm": "minilm"}


def name_of(path: Path) -> str:
    return str(path.parent.relative_to(REPOSITORY))


def python_blocks(path: Path) -> list[tuple[str, str]]:
    """Each block of Python with the output that is shown after it, or ""."""
    return PYTHON.findall(path.read_text())


def real_models(text: str) -> list[str]:
    """The real models that a block or command opens."""
    return [model for word, model in REAL.items() if word in text]


def on_real(models: list[str]) -> list[pytest.MarkDecorator]:
    """Slow, and only where the packages of real models are installed; nothing without any."""
    absent = [PACKAGED[model].command for model in models if find_spec(PACKAGED[model].module) is None]
    return [pytest.mark.slow, pytest.mark.skipif(bool(absent), reason="; ".join(absent) or "all are installed")] * bool(
        models
    )


def blocks_on_real(path: Path) -> list[tuple[str, str]]:
    """Those that open a real model."""
    return [pair for pair in python_blocks(path) if real_models(pair[0])]


def commands(path: Path) -> Iterator[tuple[list[str], str]]:
    """Each `mionnx` command of a README, split into words, and the output that is shown after it if it stands alone."""
    for block, shown in SHELL.findall(path.read_text()):
        lines = [shlex.split(line, comments=True) for line in block.replace("\\\n", " ").splitlines()]
        lines = [words for words in lines if words[:1] == ["mionnx"]]
        for words in lines:
            yield words, shown if len(lines) == 1 else ""


def same(printed: str, shown: str) -> None:
    """Words exactly, fractions to the last digit that is shown but one."""
    assert NUMBER.sub("#", printed) == NUMBER.sub("#", shown)
    for one, other in zip(NUMBER.findall(printed), NUMBER.findall(shown), strict=True):
        assert float(one) == pytest.approx(float(other), abs=1e-3)


@pytest.mark.parametrize("readme", READMES, ids=name_of)
def test_the_python_runs_and_prints_what_is_shown(
    readme: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(REPOSITORY)
    run_blocks([pair for pair in python_blocks(readme) if not real_models(pair[0])], capsys)


@pytest.mark.parametrize(
    "readme",
    [
        pytest.param(
            path, marks=on_real([name for block, _ in blocks for name in real_models(block)]), id=name_of(path)
        )
        for path in READMES
        if (blocks := blocks_on_real(path))
    ],
)
def test_the_python_on_a_real_model_runs_and_prints_what_is_shown(
    readme: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(REPOSITORY)
    run_blocks(blocks_on_real(readme), capsys)


def run_blocks(blocks: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, Any] = {}
    for block, shown in blocks:
        exec(block, namespace)
        printed = capsys.readouterr().out
        if shown:
            same(printed, shown)


def test_the_readmes_hold_the_examples() -> None:
    """Rooms show their abilities with output; a shown refusal names the nearest hook point."""
    blocks = [block for readme in READMES for block in python_blocks(readme)]
    assert len(blocks) >= 20
    assert sum(bool(shown) for _, shown in blocks) >= 15
    assert any("did you mean 'blocks.2.hook_resid_post'" in shown for _, shown in blocks)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        pytest.param(
            *found,
            id=f"{name_of(path)}-{' '.join(found[0][1:3])}",
            marks=on_real(real_models(" ".join(found[0]))),
        )
        for path in READMES
        for found in commands(path)
    ],
)
def test_the_commands_run(words: list[str], shown: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Options exist; a command that needs only the models that ship succeeds, and prints what is shown."""
    _, name, *arguments = words
    assert {word.partition("=")[0] for word in arguments if re.match(r"--?[a-z]", word)} <= OPTIONS[name]
    if any(PLACEHOLDER.fullmatch(word) for word in arguments):
        return
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").symlink_to(REPOSITORY / "models")
    ran = CliRunner(env={"COLUMNS": "120"}).invoke(app, [name, *arguments])
    assert ran.exit_code == 0, ran.output
    if shown and name != "verify":  # where runtimes differ most, other machines differ
        same(ran.stdout, shown)


@pytest.mark.parametrize("readme", READMES, ids=name_of)
def test_its_lines_fit_a_page(readme: Path) -> None:
    lines = enumerate(readme.read_text().splitlines(), 1)
    assert {number: len(line) for number, line in lines if len(line) > WIDTH} == {}


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
