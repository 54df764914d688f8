"""The order of the rooms: a room imports only rooms on lower floors, no two files import each other in a circle.

It also says who may import onnx, onnx-graphsurgeon and ONNX Runtime.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "mionnx"
# From the ground up; rooms on one floor do not import each other.
FLOORS = (
    ("errors",),
    ("machine", "graph"),
    ("spec", "inputs", "rewrite", "quantise", "engine", "view"),
    ("bind",),
    ("run", "compile"),
    ("analysis",),
    ("verify",),
    ("model",),
    ("distributed", "playground", "names", "transformer_lens"),
    ("cli",),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
ALONE = ("analysis.sweep", "analysis.python_hooks")  # sub-rooms that know no sibling
FILES = sorted(
    path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.stem not in ("__init__", "__main__")
)
EXPORTERS = PACKAGE.parent / "exporters"
OF_EXPORTERS = ("graph", "errors", "machine.files", "machine.progress")  # what exporters may import of mionnx
# Library -> the rooms that may import it.
LIBRARIES = {
    "onnxruntime": ("engine",),
    "openvino": ("engine",),
    "onnx": ("graph", "rewrite", "quantise", "engine", "compile", "analysis.quantisation", "verify"),
    "onnx_graphsurgeon": ("graph.builder", "graph.edited_graph", "rewrite"),
    "ray": ("distributed.cluster",),
    **dict.fromkeys(("torch", "transformers", "transformer_lens", "accelerate"), ("transformer_lens",)),
}


def name_of(path: Path) -> str:
    """A file as a module, without the package's name: "rewrite.plan"."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


@cache
def imports(path: Path) -> list[str]:
    """The modules that a file imports, wherever in it."""
    return [*_imports(path)]


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                inside = (
                    full.startswith("mionnx.") and (PACKAGE.parent / full.replace(".", "/")).with_suffix(".py").exists()
                )
                yield full if inside else node.module


def inner(path: Path) -> list[str]:
    """The modules of mionnx that a file imports."""
    return [module.removeprefix("mionnx.") for module in imports(path) if module.startswith("mionnx.")]


def test_the_package_holds_rooms_and_five_files() -> None:
    files = {path.name for path in PACKAGE.glob("*.py")}
    assert files == {"__init__.py", "__main__.py", "errors.py", "model.py", "names.py"}
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert rooms == {*FLOOR} - {"errors", "model", "names"}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_room_imports_only_rooms_below_it(path: Path) -> None:
    room = name_of(path).split(".")[0]
    for module in inner(path):
        other = module.split(".")[0]
        assert other == room or FLOOR[other] < FLOOR[room], f"{name_of(path)} imports {module}"


@pytest.mark.parametrize("sub_room", ALONE)
def test_a_sub_room_that_stands_alone_knows_no_sibling(sub_room: str) -> None:
    for path in FILES:
        if name_of(path).startswith(f"{sub_room}."):
            siblings = [module for module in inner(path) if module.startswith("analysis.")]
            assert all(module.startswith(sub_room) or module.count(".") == 1 for module in siblings), name_of(path)


def test_no_files_import_each_other_in_a_circle() -> None:
    reads = {name_of(path): {*inner(path)} for path in FILES}
    while leaves := [name for name, modules in reads.items() if not modules & reads.keys() - {name}]:
        for name in leaves:
            del reads[name]
    assert not reads, f"circles among {sorted(reads)}"


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_is_met_in_its_rooms_only(library: str) -> None:
    allowed = LIBRARIES[library]
    found = {name_of(path) for path in FILES if any(module.split(".")[0] == library for module in imports(path))}
    assert {name for name in found if not name.startswith(allowed)} == set()


def test_no_room_imports_the_bridge() -> None:
    """It brings torch: who wants it asks for it by name."""
    assert not [
        name_of(path) for path in FILES for module in inner(path)
        if module.startswith("transformer_lens") and not name_of(path).startswith("transformer_lens")
    ]  # fmt: skip


@pytest.mark.parametrize("path", sorted(EXPORTERS.rglob("*.py")), ids=lambda path: path.stem)
def test_an_exporter_knows_graphs_errors_files_and_progress_only(path: Path) -> None:
    for module in inner(path):
        assert module.startswith(OF_EXPORTERS), f"{path.relative_to(EXPORTERS)} imports {module}"
