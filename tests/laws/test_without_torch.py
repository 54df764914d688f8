"""A machine that only runs graphs needs neither torch nor transformers."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from repository import REPOSITORY

from mionnx import HookSpec, Intervention

HEAVY = {"torch", "transformers", "optimum", "exporters", "onnxscript"}
SLOW = {"matplotlib", "pandas", "huggingface_hub", "scipy", "openvino", "ray"}  # to import; where needed, they are
BRIDGE = {"torch", "transformers"}  # what the bridge to TransformerLens alone may import
OF_VERBS = {"numpy", "onnx", "onnxruntime", "onnx_graphsurgeon", "tokenizers", "safetensors", "jinja2", "psutil"}

RUN = """
import json, sys, importlib.util
import numpy as np
from mionnx import HookSpec, Intervention, MIModel
assert not any(importlib.util.find_spec(name) for name in ("torch", "transformers", "optimum", "onnxscript"))
spec = HookSpec().capture("blocks.1.attn.hook_pattern").intervene("hook_embed", Intervention.Scale(1.5, positions=-1))
cache = MIModel.from_pretrained(sys.argv[1], threads=1).forward(np.arange(3, 12), spec)
np.savez(sys.argv[2], logits=cache.output(), pattern=cache["pattern", 1])
print(json.dumps(sorted(name for name in sys.modules if name in ("torch", "transformers"))))
"""


@pytest.mark.slow
def test_a_clean_environment_runs_a_hooked_model(hooked, models, tmp_path):
    """pip install of the package alone, in a new virtual environment; the same bits as here."""
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    for part in ("mionnx", "exporters", "models"):  # a copy: building leaves a folder behind
        shutil.copytree(REPOSITORY / part, tmp_path / "source" / part)
    for part in ("pyproject.toml", "README.md"):
        shutil.copyfile(REPOSITORY / part, tmp_path / "source" / part)
    subprocess.run([python, "-m", "pip", "install", "-q", f"{tmp_path}/source[cpu]"], check=True)
    result = tmp_path / "result.npz"
    subprocess.run([python, "-c", RUN, hooked("llama"), result], check=True, cwd=tmp_path)
    found = np.load(result)
    spec = (
        HookSpec().capture("blocks.1.attn.hook_pattern").intervene("hook_embed", Intervention.Scale(1.5, positions=-1))
    )
    here = models("llama").forward(np.arange(3, 12), spec)
    assert np.array_equal(found["logits"], here.output())
    assert np.array_equal(found["pattern"], here["pattern", 1])


def modules_of(code: str) -> set[str]:
    """The libraries that a program has imported when it ends."""
    ending = "import json, sys; print(json.dumps([*sys.modules]), file=sys.__stdout__)"
    output = subprocess.run([sys.executable, "-c", f"{code}\n{ending}"], check=True, capture_output=True, text=True)
    return {name.split(".")[0] for name in json.loads(output.stdout.splitlines()[-1])}


def test_using_a_name_brings_in_nothing_heavy():
    assert not (HEAVY | SLOW) & modules_of("from mionnx import *; import mionnx.cli; assert MIModel")


HELP = """
import sys
from mionnx.cli.main import main
sys.argv = ["mionnx", "--help"]
try:
    main()
except SystemExit as end:
    assert not end.code
"""


@pytest.mark.parametrize("code", ["import mionnx", HELP], ids=["import mionnx", "mionnx --help"])
def test_a_start_imports_none_of_the_libraries_that_a_verb_needs(code):
    modules = modules_of(code)
    assert "mionnx" in modules
    assert not (HEAVY | SLOW | OF_VERBS) & modules


def test_the_names_are_there_although_they_come_late():
    listed = "import mionnx; names = dir(mionnx); assert {*mionnx.__all__} <= {*names}, names"
    assert "onnxruntime" in modules_of(f"{listed}; assert mionnx.MIModel is mionnx.model.MIModel")


@pytest.mark.parametrize("path", sorted((REPOSITORY / "mionnx").rglob("*.py")), ids=lambda path: path.name)
def test_no_module_imports_anything_heavy(path: Path):
    tree = ast.parse(path.read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    allowed = BRIDGE if path.parent == REPOSITORY / "mionnx" / "transformer_lens" else set()
    assert not (HEAVY - allowed) & {name.partition(".")[0] for name in imported}


def test_without_onnxruntime_the_error_says_what_to_install(tmp_path):
    (tmp_path / "onnxruntime.py").write_text("raise ImportError('hidden', name='onnxruntime')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", "import mionnx; mionnx.MIModel"], capture_output=True, text=True, env=environment
    )
    assert run.returncode != 0
    assert "pip install -e '.[cpu]'" in run.stderr
    assert ".[gpu]" in run.stderr


def without(modules: tuple[str, ...], folder: Path) -> dict[str, str]:
    """An environment in which some modules cannot be imported."""
    for name in modules:
        (folder / f"{name}.py").write_text(f"raise ModuleNotFoundError('hidden', name={name!r})")
    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{REPOSITORY}", "MIONNX_CACHE": str(folder / "store")}


def test_without_torch_the_bridge_says_what_to_install(tmp_path):
    command = [sys.executable, "-c", "import mionnx.transformer_lens"]
    run = subprocess.run(command, capture_output=True, text=True, env=without(("torch",), tmp_path))
    assert "RuntimeMissingError" in run.stderr
    assert "pip install -e '.[tl]' in a checkout of mionnx" in run.stderr


@pytest.mark.parametrize("source", ["checkpoint", "foreign"])
def test_without_torch_a_checkpoint_says_the_command_that_brings_it(tmp_path, source):
    """Part 3, 4: a sentence, where importing the exporter of ONNX files ended in a traceback."""
    folder = REPOSITORY / "tests" / "shared" / "foreign" / "optimum"
    if source == "checkpoint":
        folder = tmp_path / "checkpoint"
        folder.mkdir()
        for name in ("config.json", "model.safetensors"):
            shutil.copyfile(REPOSITORY / "models" / "world-llama" / name, folder / name)
    environment = without(("torch", "transformers", "onnx_ir", "onnxscript"), tmp_path)
    command = [sys.executable, "-m", "mionnx", "run", str(folder), "text"]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 1, run.stderr
    assert "Traceback" not in run.stderr
    needs, extra = ("torch and transformers", "export") if source == "checkpoint" else ("onnx_ir", "adopt")
    assert needs in run.stderr
    assert f"pip install -e '.[{extra}]' in a checkout of mionnx" in run.stderr
