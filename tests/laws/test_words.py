"""Plain words in docstrings, beside ruff's `D` rules, and nouns as names; READMEs: one a room, all of one length."""

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
# As names they say that something has been done to a value, not what it is.
PARTICIPLES = {"asked", "found", "given", "held", "kept", "known", "made", "told", "wanted", "whole"}


def complaints(place: str, text: str) -> Iterator[str]:
    """Everything that the rules say against one docstring."""
    if match := PARAPHRASES.search(text):
        yield f"{place}: {match.group()!r} has a word of the field"
    if match := FRAGMENT.search(text):
        yield f"{place}: {match.group().strip()!r} is no sentence and says no more than the name"


def names_bound(node: ast.AST) -> Iterator[str]:
    """The names that a node binds: variables, parameters, attributes, functions; imports keep other libraries' own."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            yield name
        case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.ExceptHandler(name=str(name)):
            yield name
        case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
            yield name
        case ast.Global(names=names) | ast.Nonlocal(names=names):
            yield from names


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_docstrings_are_plain_english_and_names_are_nouns(folder: Path) -> None:
    lines: list[str] = []
    for file in sorted(folder.rglob("*.py") if folder.name == "exporters" else folder.glob("*.py")):
        place = file.relative_to(REPOSITORY)
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                lines += complaints(f"{place}:{getattr(node, 'name', '')}", text)
            words = PARTICIPLES.intersection(names_bound(node))
            lines += [f"{place}:{getattr(node, 'lineno', 0)}: {word!r} says not what the value is" for word in words]
    assert not lines, "\n".join(lines)


def test_names_of_every_kind_are_looked_at() -> None:
    source = """
def made(given, *kept, whole=1, **told):
    self.held = [known for known in given]
    if found := given: pass
    try: pass
    except ValueError as asked: pass
    match given:
        case [wanted, *_]: pass
"""
    names = {name for node in ast.walk(ast.parse(source)) for name in names_bound(node)}
    assert names >= PARTICIPLES


@pytest.mark.parametrize("room", READMES, ids=lambda path: path.name)
def test_every_room_has_a_readme(room: Path) -> None:
    lines = (room / "README.md").read_text().splitlines()
    assert 25 <= len(lines) <= 80
    assert any(line.lower().startswith("## how to add") for line in lines)


def test_the_top_readme_fits_a_reader_of_five_minutes() -> None:
    assert len((REPOSITORY / "README.md").read_text().splitlines()) <= 150
