"""Plain words in docstrings, beside ruff's `D` rules; READMEs: one a room, all of one length, the top one short."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
ROOMS = sorted(path.parent for path in (REPOSITORY / "mionnx").rglob("__init__.py") if path.parent.name != "mionnx")
FOLDERS = [*ROOMS, REPOSITORY / "mionnx", REPOSITORY / "exporters"]
READMES = [room for room in ROOMS if room.parent.name in ("mionnx", "analysis")]
# Words that a reader of the field has to decode: the field's own say "most probable", "probabilities", "backward pass".
PARAPHRASES = re.compile(r"\b(likeliest|chances|given twice|whole way back|nobody ever|somebody)\b", re.IGNORECASE)
# "title: of the table." says no more than the name.
FRAGMENT = re.compile(r"(?m)^\s+[a-z_]+: (of|in|for|by|from|to|at|with|whose|how|the same)( \S+){0,5}\.?$")


def docstrings(file: Path) -> Iterator[tuple[str, str]]:
    """Each documented module, class and function of a file with its docstring."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            yield f"{file.relative_to(REPOSITORY)}:{getattr(node, 'name', '')}", text


def complaints(place: str, text: str) -> Iterator[str]:
    """Everything that the rules say against one docstring."""
    if found := PARAPHRASES.search(text):
        yield f"{place}: {found.group()!r} has a word of the field"
    if found := FRAGMENT.search(text):
        yield f"{place}: {found.group().strip()!r} is no sentence and says no more than the name"


@pytest.mark.parametrize(
    "folder", [*ROOMS, REPOSITORY / "mionnx", REPOSITORY / "exporters"], ids=lambda path: path.name
)
def test_docstrings_are_plain_english(folder: Path) -> None:
    files = sorted(folder.rglob("*.py") if folder.name == "exporters" else folder.glob("*.py"))
    found = [line for file in files for place, text in docstrings(file) for line in complaints(place, text)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("room", READMES, ids=lambda path: path.name)
def test_every_room_has_a_readme(room: Path) -> None:
    lines = (room / "README.md").read_text().splitlines()
    assert 25 <= len(lines) <= 80
    assert any(line.lower().startswith("## how to add") for line in lines)


def test_the_top_readme_fits_a_reader_of_five_minutes() -> None:
    assert len((REPOSITORY / "README.md").read_text().splitlines()) <= 150
