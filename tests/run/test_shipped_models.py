"""Shipped models open by their names, from a checkout and from an installed wheel."""

import subprocess
import sys
import zipfile

import numpy as np
import pytest
from repository import REPOSITORY

from mionnx import ExportError, MIModel, ModelError
from mionnx.run.source_path import shipped_models

NAMES = {"world-bert", "world-gpt2", "world-hybrid", "world-llama", "world-rwkv7"}
LOOK = (
    "from mionnx import MIModel; import mionnx; print(mionnx.__file__); print(MIModel.from_pretrained('world-llama'))"
)


def test_a_shipped_model_opens_by_its_name_from_any_folder(tmp_path, monkeypatch, shipped):
    monkeypatch.chdir(tmp_path)
    assert set(shipped_models()) == NAMES
    found = MIModel.from_pretrained("world-llama").forward("The capital of France is")
    assert np.array_equal(found.output(), shipped.forward("The capital of France is").output())


def test_a_folder_goes_before_a_shipped_model(tmp_path, monkeypatch):
    (tmp_path / "world-llama").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ExportError, match="world-llama holds neither a hooked model nor a checkpoint"):
        MIModel.from_pretrained("world-llama")


def test_a_mistyped_name_is_answered_with_the_nearest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("world-lama", "./models/world-llama"):
        with pytest.raises(ModelError, match="did you mean 'world-llama'"):
            MIModel.from_pretrained(name)


def test_where_no_models_are_none_is_known(tmp_path):
    assert shipped_models((tmp_path / "nowhere", tmp_path)) == {}


@pytest.mark.slow
def test_an_installed_wheel_knows_its_models(tmp_path):
    """Built as a release is, installed into an empty environment, run outside of the repository."""
    commands = [sys.executable, "-m", "build", "--outdir", tmp_path / "dist", REPOSITORY]
    subprocess.run(commands, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for name in NAMES:
        folder, place = REPOSITORY / "models" / name, f"mionnx/shipped/{name}/"
        shipped = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        assert {found.removeprefix(place) for found in names if found.startswith(place)} == shipped
    assert {"mionnx/py.typed", "mionnx/engine/web.mjs", "exporters/rwkv/__init__.py"} <= set(names)
    files = [path for path in (REPOSITORY / "mionnx" / "playground").rglob("*") if path.is_file()]
    page = {path.relative_to(REPOSITORY).as_posix() for path in files if path.suffix != ".pyc"}
    assert {"mionnx/playground/sw.js", "mionnx/playground/page/index.html"} <= page <= set(names)
    assert not [name for name in names if name.startswith(("models", "tests", "benchmarks"))]

    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    programs = tmp_path / "venv" / "bin"
    subprocess.run([programs / "pip", "install", "-q", f"{wheel}[cpu]"], check=True)
    place = {"cwd": tmp_path, "env": {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}, "text": True, "check": True}
    printed = subprocess.run([programs / "python", "-c", LOOK], capture_output=True, **place).stdout
    assert str(tmp_path) in printed
    assert "MIModel(llama, " in printed
    demo = subprocess.run([programs / "mionnx", "demo"], capture_output=True, **place).stdout
    assert "MIModel(llama, " in demo
    assert "MIModel(rwkv7, " in demo
