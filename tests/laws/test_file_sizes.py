"""Files are of a size worth opening: none over 400 lines, no function over 60, none small with one reader.

A file of fewer than 75 lines that one file of its own folder imports, and no other, is a part of that one.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
FILES = {
    ".".join(path.relative_to(REPOSITORY).with_suffix("").parts): path.read_text()
    for room in ("mionnx", "exporters")
    for path in (REPOSITORY / room).rglob("*.py")
}
LONGEST_FILE, LONGEST_FUNCTION, SMALL = 400, 60, 75
BY_TABLE = (
    "mionnx.spec.kinds.",
    "mionnx.compile.layouts.",
    "exporters.adopt.operators.",
)  # found by their names


def bodies(files: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """Functions, and the lines of each below its signature and docstring."""
    for module, source in files.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                body = node.body[1:] if ast.get_docstring(node) is not None else node.body
                yield f"{module}.{node.name}", 1 + (node.end_lineno or 0) - body[0].lineno if body else 0


def readers(files: Mapping[str, str]) -> dict[str, set[str]]:
    """Module -> the modules that import it, or something from it."""
    found = defaultdict(set)
    for module, source in files.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    inside = f"{node.module}.{alias.name}"
                    found[inside if inside in files else node.module].add(module)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    found[alias.name].add(module)
    return found


def parts(files: Mapping[str, str]) -> list[str]:
    """The small files that one file of their own folder reads, and no other."""
    found = readers(files)
    return [
        f"{module} is read by {reader} alone"
        for module, source in files.items()
        if len(source.splitlines()) < SMALL and not module.startswith(BY_TABLE) and len(found[module]) == 1
        for reader in found[module]
        if reader.rpartition(".")[0] == module.rpartition(".")[0] and not reader.endswith("__init__")
    ]


def test_no_file_is_too_long() -> None:
    assert not [name for name, source in FILES.items() if len(source.splitlines()) > LONGEST_FILE]


def test_no_function_is_too_long() -> None:
    assert not [name for name, lines in bodies(FILES) if lines > LONGEST_FUNCTION]


def test_no_small_file_is_a_part_of_one_other() -> None:
    assert not parts(FILES)


def test_a_small_file_with_one_reader_is_told() -> None:
    files = {"room.part": "X = 1\n", "room.user": "from room.part import X\n", "other.user": "import json\n"}
    assert parts(files) == ["room.part is read by room.user alone"]
    assert parts(files | {"other.user": "from room import part\n"}) == []  # two readers
    assert parts(files | {"room.part": "X = 1\n" * SMALL}) == []
    assert dict(bodies({"room.long": "def long():\n    '''Long.'''\n" + "    x = 1\n" * 61})) == {"room.long.long": 61}
