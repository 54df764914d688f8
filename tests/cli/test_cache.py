"""`mionnx cache`: list, verify, prune, clear."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mionnx import HookSpec, MIModel, Options
from mionnx.machine import disk_cache


@pytest.fixture
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MIONNX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(disk_cache, "_said", set())
    return tmp_path / "cache"


def test_the_command_line(models, own_store):
    model = MIModel(models("llama").hooked, Options(threads=1, base="always"))
    model.warm(HookSpec().capture("hook_embed"))
    for mark in own_store.glob("*/*.pins/*"):
        mark.unlink()

    def run(*arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "mionnx", "cache", *arguments]
        environment = {**os.environ, "MIONNX_CACHE": str(own_store), "COLUMNS": "140"}
        return subprocess.run(command, capture_output=True, text=True, env=environment)

    listed = json.loads(run("ls", "--json").stdout)
    assert sorted(entry["kind"] for entry in listed) == ["bases", "graphs"]
    assert not any(entry["in_use"] for entry in listed)
    assert "llama" in run("ls").stdout
    facts = json.loads(run("info", "--json").stdout)
    assert facts["bytes"] == sum(entry["bytes"] for entry in listed)
    assert "2 entries" in run("info").stdout
    assert "every entry is whole" in run("verify").stdout
    (data,) = own_store.glob("bases/*/base.data")
    data.write_bytes(data.read_bytes()[:-1] + b"\x07")
    verified = run("verify")
    assert verified.returncode == 1
    assert "base.data was changed" in verified.stdout
    assert "removed 1 entries" in run("prune", "--to", "200KB").stdout
    assert run("prune", "--to", "large").returncode == 1
    assert "removed" in run("clear").stdout
    assert json.loads(run("ls", "--json").stdout) == []
