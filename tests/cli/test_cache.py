"""`mionnx cache`: list, verify, prune, clear."""

import json
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from command_line import mionnx

from mionnx import HookSpec, MIModel, Options
from mionnx.machine import disk_cache


@pytest.fixture
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MIONNX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(disk_cache, "_said", set())
    return tmp_path / "cache"


def test_the_command_line(shipped, own_store):
    model = MIModel(shipped.hooked, Options(threads=1, base="always"))
    model.warm(HookSpec().capture("hook_embed"))
    for mark in own_store.glob("*/*.pins/*"):
        mark.unlink()

    def run(*arguments: str) -> CompletedProcess:
        return mionnx("cache", *arguments)

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
