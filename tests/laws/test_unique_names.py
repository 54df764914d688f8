"""A class, or a constant that several files meet, has a name that nothing else in mionnx and its exporters has.

Whoever reads `Found` or `TOKENS` need not ask which one. A constant counts if another file imports it, or if it is
one of five or more of its name.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
FILES = sorted(path for room in ("mionnx", "exporters") for path in (REPOSITORY / room).rglob("*.py"))
MANY = 5


@cache
def body_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def names(path: Path) -> set[str]:
    """The classes and constants that a module defines; private ones (`_AboveError`) and `T` are its own."""
    body = body_of(path).body
    classes = {node.name for node in body if isinstance(node, ast.ClassDef)}
    targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    targets += [node.target for node in body if isinstance(node, ast.AnnAssign)]
    named = {one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)}
    constants = {name for name in named if name.isupper() and len(name) > 1}
    return {name for name in classes | constants if not name.startswith("_")}


def imported() -> Iterator[tuple[str, str]]:
    """Modules, and what other files import from them."""
    for path in FILES:
        for node in ast.walk(body_of(path)):
            if isinstance(node, ast.ImportFrom) and node.module:
                yield from ((node.module, alias.name) for alias in node.names)


def test_the_names_of_classes_and_of_constants_that_files_share_are_unique() -> None:
    modules = defaultdict(set)
    for path in FILES:
        for name in names(path):
            modules[name].add(".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__"))
    met = {*imported()}
    double = {
        name: sorted(places)
        for name, places in modules.items()
        if len(places) > 1
        and (not name.isupper() or len(places) >= MANY or any((place, name) in met for place in places))
    }
    assert not double, f"choose other names: {double}"
