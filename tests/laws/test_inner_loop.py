"""The inner loop: the tests of a room on the ground floors need neither torch nor an exported checkpoint."""

import ast
import subprocess
import sys

import pytest
from repository import REPOSITORY

ROOMS = ["machine", "graph", "spec", "rewrite", "view"]
COLLECT = """
import sys, pytest
assert pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", *sys.argv[1:]]) == 0
print(*sorted({"torch", "transformers", "playwright"} & {*sys.modules}))
"""
EXPORTED = {"models", "hooked", "checkpoint", "references", "rwkv", "family", "environment", "web"}


def test_collecting_imports_no_torch():
    folders = [str(REPOSITORY / "tests" / room) for room in ROOMS]
    ran = subprocess.run([sys.executable, "-c", COLLECT, *folders], capture_output=True, text=True, cwd=REPOSITORY)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.splitlines()[-1] == ""


@pytest.mark.parametrize("room", ROOMS)
def test_no_fixture_exports(room):
    asked = {
        f"{path.name}: {argument.arg}"
        for path in (REPOSITORY / "tests" / room).rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        for argument in node.args.args
        if argument.arg in EXPORTED
    }
    assert asked == set()
