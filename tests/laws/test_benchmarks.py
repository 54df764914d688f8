"""Benchmarks run for minutes, and seldom: what they call is checked without running them."""

import subprocess
import sys

import pytest
from repository import REPOSITORY

SETTINGS = """[mypy]
python_version = 3.11
explicit_package_bases = True
mypy_path = {benchmarks}
ignore_missing_imports = True
[mypy-mionnx.*,exporters.*]
follow_imports = silent
[mypy-torch.*,transformers.*,transformer_lens.*,sae_lens.*,datasets.*,ray.*,optimum.*,scipy.*,sklearn.*,matplotlib.*,IPython.*]
follow_imports = skip
"""
CALLS = "[call-arg]"  # too few or too many arguments, or a name that no parameter has


def calls(folder, tmp_path) -> list[str]:
    """Lines of mypy about calls in the programs of a folder, after it has checked all of them."""
    settings = tmp_path / "mypy.ini"
    settings.write_text(SETTINGS.format(benchmarks=REPOSITORY / "benchmarks"))
    files = sorted(str(file) for file in folder.glob("*.py"))
    command = [sys.executable, "-m", "mypy", "--config-file", str(settings), "--cache-dir", str(tmp_path / "cache")]
    said = subprocess.run([*command, *files], cwd=REPOSITORY, capture_output=True, text=True).stdout
    assert f"(checked {len(files)} source file" in said or "Success" in said, said[-2000:]
    return [line for line in said.splitlines() if line.endswith(CALLS)]


@pytest.mark.slow
def test_benchmarks_call_what_there_is(tmp_path):
    assert calls(REPOSITORY / "benchmarks", tmp_path) == []


@pytest.mark.slow
def test_a_wrong_call_is_found(tmp_path):
    lines = (
        "from mionnx import MIModel",
        "from turns import ratio",
        "MIModel.from_pretrained('x', thread=1)",
        "ratio([1])",
    )
    (tmp_path / "wrong.py").write_text("\n".join(lines))
    assert len(calls(tmp_path, tmp_path)) == 2
