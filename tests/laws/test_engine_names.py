"""No engine is named outside its own room: what differs between engines is a property of `Engine`."""

import ast
from collections.abc import Iterator
from pathlib import Path

from repository import REPOSITORY

from mionnx.engine.engines import ENGINES

PACKAGE = REPOSITORY / "mionnx"
OWN = {type(engine).__module__ for engine in ENGINES.values()}  # an engine's own file
NAMES = {*ENGINES} - {"reference"}  # which is also the word for a metric's numbers
CONSTANTS = {"ONNX_RUNTIME", *(type(engine).__name__ for engine in ENGINES.values())}
NPM = PACKAGE / "playground" / "npm_files.py"  # a package of the page that it writes, which no engine opens


def leaks(source: str) -> Iterator[str]:
    """The engines that a file names: imports of an engine's own file, its class, its name as a value."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ImportFrom(module=module, names=names):
                yield from ({module, *(f"{module}.{one.name}" for one in names)} & OWN)
                yield from (one.name for one in names if one.name in CONSTANTS)
            case ast.Import(names=names):
                yield from (one.name for one in names if one.name in OWN)
            case ast.Constant(value=str(value)) if value in NAMES:
                yield value


def test_no_engine_is_named_outside_its_room():
    files = [path for path in PACKAGE.rglob("*.py") if PACKAGE / "engine" not in path.parents and path != NPM]
    found = {str(path.relative_to(REPOSITORY)): [*leaks(path.read_text())] for path in files}
    assert not {path: names for path, names in found.items() if names}


def test_the_law_sees_each_way_of_naming_one():
    for line in (
        "from mionnx.engine import onnx_runtime",
        "from mionnx.engine.openvino import OpenVino",
        "import mionnx.engine.web",
        "from mionnx.engine.options import ONNX_RUNTIME",
        'packs = options.engine == "onnxruntime"',
    ):
        assert [*leaks(line)], line
    assert not [*leaks('"""On onnxruntime."""\nread = metric["reference"]')]


def test_every_engine_says_what_differs():
    for engine in ENGINES.values():
        assert Path(str(engine.open.__code__.co_filename)).parent == PACKAGE / "engine"
        assert engine.packages or engine.name.startswith("onnxruntime-web")  # which npm brings
