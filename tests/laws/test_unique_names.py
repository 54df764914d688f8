"""A class name, and a constant of a module, means one thing in all of mionnx and its exporters.

Whoever reads `Found` or `LARGEST` need not ask which one. A table that many modules have under one name, because
another file looks for it by that name, is no double.
"""

import ast
from collections import Counter
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
FILES = sorted(path for room in ("mionnx", "exporters") for path in (REPOSITORY / room).rglob("*.py"))
# One name by intention.
SAME: set[str] = set()
# Still double: a name goes from here when the second thing has another one, and none comes.
DOUBLE: set[str] = set()


def names(path: Path) -> set[str]:
    """The classes and constants that a module defines; private ones (`_Above`) are its own."""
    body = ast.parse(path.read_text()).body
    classes = {node.name for node in body if isinstance(node, ast.ClassDef)}
    targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    targets += [node.target for node in body if isinstance(node, ast.AnnAssign)]
    named = {one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)}
    return {name for name in classes | {name for name in named if name.isupper()} if not name.startswith("_")}


def test_class_names_and_constants_are_unique() -> None:
    counts = Counter(name for path in FILES for name in names(path))
    double = {name for name, count in counts.items() if count > 1}
    assert sorted(double - DOUBLE - SAME) == []
    assert sorted(DOUBLE - double) == [], "no longer double: take them from the list"
