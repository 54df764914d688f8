"""The store touches only what it made: whatever else lies in its folder stays, to the last byte and link."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import mionnx, succeeded

from mionnx.machine import disk_cache
from mionnx.machine.cache_entry import MANIFEST, MARK, CacheEntry
from mionnx.machine.disk_cache import ENTRY_KINDS, DiskCache, StoreWarning
from mionnx.machine.tensor_file import write_tensors

SWEEP = "0123456789abcdef" * 2


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(disk_cache, "_said", set())
    monkeypatch.setenv("MIONNX_CACHE", str(tmp_path / "data"))
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def built(text: str) -> Callable[[Path], dict[str, Any]]:
    def build(folder: Path) -> dict[str, Any]:
        (folder / "value.txt").write_text(text)
        return {"text": text}

    return build


def file(path: Path, data: bytes = b"mine" * 1000) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    os.utime(path, (1, 1))


def bystanders(root: Path, dead: int = 4_000_000) -> None:
    """What a user may have in a folder that `MIONNX_CACHE` names: data, links, and names as mionnx gives them."""
    for kind in (*ENTRY_KINDS, "sweeps"):
        file(root / kind / "mine" / "weights.bin")
        file(root / kind / "mine" / MANIFEST, json.dumps({"what": {}, "files": {}}).encode())
        file(root / kind / "mine.pins" / "note")
        file(root / kind / "mine.lock")
        file(root / kind / f".mine.0a1b2c.{dead}.partial" / "weights.bin")
        file(root / kind / f".notes.txt.{dead}.partial")
        file(root / kind / "copied" / MARK, f"{kind}/another".encode())  # a copy of an entry under another name
        (root / kind / "link").symlink_to(root.parent / "home")
        (root / kind / "dangling").symlink_to(root.parent / "nowhere")
        os.utime(root / kind / "mine", (1, 1))
    file(root / "sweeps" / "mine.safetensors")
    write_tensors(root / "sweeps" / "results.safetensors", {"values": np.zeros(9)})
    write_tensors(root / "sweeps" / f"{SWEEP}.safetensors", {"values": np.zeros(9)}, {"other": SWEEP})
    write_tensors(root / "sweeps" / "kept.safetensors", {"values": np.zeros(9)}, {"mionnx_sweep": SWEEP})
    file(root / "ckpt" / "model.safetensors")
    file(root.parent / "home" / "thesis" / "ch1.tex")
    (root / "out").symlink_to(root.parent / "home")


def tree(folder: Path) -> dict[str, bytes | str | None]:
    """Every file, link and folder below a folder, links not followed."""
    found: dict[str, bytes | str | None] = {}
    for at, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = Path(at) / name
            data = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
            found[str(path.relative_to(folder))] = data
    return found


VERBS: dict[str, Callable[[Path], object]] = {
    "ls": lambda root: succeeded("cache", "ls"),
    "info": lambda root: succeeded("cache", "info"),
    "verify": lambda root: succeeded("cache", "verify"),
    "prune": lambda root: succeeded("cache", "prune", "--to", "0B"),
    "clear": lambda root: succeeded("cache", "clear"),
    "limit": lambda root: DiskCache(root, limit=10).get("graphs", "new", built("new")),
    "folder": lambda root: DiskCache(root, limit=10).folder("models", "new-0", lambda to: None, ""),
}


@pytest.mark.parametrize("verb", VERBS)
def test_what_others_put_there_stays(verb, root, tmp_path):
    """Finding 2: MIONNX_CACHE=/data beside /data/models."""
    bystanders(root)
    before = tree(tmp_path)
    VERBS[verb](root)
    after = tree(tmp_path)
    assert {name: after.get(name) for name in before} == before


def test_entries_live_beside_them(root, tmp_path):
    bystanders(root)
    before = tree(tmp_path)
    entries = DiskCache(root, limit=10**9)
    for kind in ("bases", "graphs", "npm"):
        assert entries.get(kind, "new", built("new")).what == {"text": "new"}
    entries.folder("models", "new-0", lambda to: (to / "model.onnx").write_bytes(b"graph") and None, "")
    write_tensors(root / "sweeps" / f"{SWEEP[::-1]}.safetensors", {"v": np.zeros(9)}, {"mionnx_sweep": SWEEP[::-1]})
    listed = json.loads(succeeded("cache", "ls", "--json"))
    assert sorted(one["kind"] for one in listed) == ["bases", "graphs", "models", "npm", "sweeps"]
    assert json.loads(succeeded("cache", "info", "--json"))["bytes"] == sum(one["bytes"] for one in listed)
    for mark in root.glob("*/new*.pins/*"):
        mark.unlink()
    assert "removed 5 entries" in succeeded("cache", "clear")
    left = {name for name in tree(tmp_path).keys() - before.keys() if not name.endswith((".lock", ".pins"))}
    assert left == set()
    assert {name: tree(tmp_path).get(name) for name in before} == before


@pytest.mark.parametrize("kind", [*ENTRY_KINDS, "sweeps"])
def test_the_folder_of_a_kind_that_is_a_link_is_not_followed(kind, root, tmp_path):
    file(tmp_path / "home" / "thesis" / "ch1.tex")
    (root / kind).symlink_to("../home")
    before = tree(tmp_path)
    for verb in ("ls", "prune", "clear"):
        succeeded("cache", verb)
    assert tree(tmp_path) == before
    entries = DiskCache(root, limit=10**9)
    with pytest.warns(StoreWarning, match="is a link, which is not followed"):
        assert entries.get(kind, "key", built("new")) is None
    assert entries.find(kind, "key") is None
    assert tree(tmp_path) == before


@pytest.mark.parametrize("place", ["entry", "pins", "lock"])
def test_links_among_entries_leave_nothing_outside_and_nothing_behind(place, root, tmp_path):
    entries = DiskCache(root, limit=10**9)
    path = entries.get("graphs", "key", built("old")).path
    for mark in path.with_name("key.pins").iterdir():
        mark.unlink()
    at = {"entry": path, "pins": path.with_name("key.pins"), "lock": path.with_name("key.lock")}[place]
    target = tmp_path / "home" / at.name
    target.parent.mkdir()
    at.rename(target)
    at.symlink_to(target)
    before = tree(tmp_path / "home")
    assert f"removed {0 if place == 'entry' else 1} entries" in succeeded("cache", "clear")
    assert tree(tmp_path / "home") == before
    assert [one.name for one in (root / "graphs").iterdir() if one.suffix == ".partial"] == []
    assert place == "entry" or not path.with_name("key.pins").exists()
    if place == "entry":
        with pytest.warns(StoreWarning, match="mionnx did not make .*key: it is left as it is"):
            assert entries.get("graphs", "key", built("new")) is None
        assert at.is_symlink()
    else:
        assert (entries.get("graphs", "key", built("new")).path / "value.txt").read_text() == "new"
    assert tree(tmp_path / "home") == before


MAKING: dict[str, Callable[[DiskCache], object]] = {
    "graphs": lambda entries: entries.get("graphs", "key", built("new")),
    "models": lambda entries: entries.folder("models", "key", lambda to: None, "it is done without"),
}


@pytest.mark.parametrize("kind", MAKING)
def test_a_folder_that_stands_where_an_entry_would(kind, root):
    """A user's own: neither used nor removed."""
    file(root / kind / "key" / "value.txt")
    entries, before = DiskCache(root, limit=0), tree(root)
    with pytest.warns(StoreWarning, match="mionnx did not make"):
        assert MAKING[kind](entries) is None
    assert {name: tree(root).get(name) for name in before} == before


def test_what_a_killed_removal_leaves_goes_with_the_next(root):
    entries = DiskCache(root, limit=10**9)
    path = entries.get("graphs", "key", built("old")).path
    doomed = path.with_name(".key.0a1b2c.4000000.partial")
    path.rename(doomed)
    (doomed / "value.txt").unlink()  # killed here: the mark goes last
    os.utime(doomed, (1, 1))
    sweep = root / "sweeps" / f".{SWEEP}.safetensors.4000000.partial"
    file(sweep)
    os.utime(sweep, (time.time() - 4000,) * 2)
    assert entries.tidy() == 2
    assert not doomed.exists()


@pytest.mark.parametrize("kind", ["graphs", "models"])
def test_an_entry_under_the_key_of_another_is_made_again(kind, root):
    """Finding 3: folders swapped, copied or restored gave another intervention's numbers, without a word."""
    entries = DiskCache(root, limit=10**9)

    def get(key: str, text: str) -> str:
        fresh = DiskCache(root, limit=10**9)
        if kind == "graphs":
            return (fresh.get(kind, key, built(text)).path / "value.txt").read_text()
        return (fresh.folder(kind, key, lambda to: built(text)(to) and None, "") / "value.txt").read_text()

    assert [get("a", "of a"), get("b", "of b")] == ["of a", "of b"]
    (root / kind / "b").rename(root / kind / "c")
    (root / kind / "a").rename(root / kind / "b")
    assert entries.all() == []
    with pytest.warns(StoreWarning, match=f"{kind}/b is damaged .it was made for {kind}/a.: it is made again"):
        assert get("b", "of b, again") == "of b, again"
    assert get("b", "not needed") == "of b, again"


def manifests() -> dict[str, Callable[[Path], object]]:
    def signed(change: dict[str, Any]) -> Callable[[Path], object]:
        def write(path: Path) -> None:
            manifest = {**json.loads(path.read_text()), **change}
            manifest["sha256"] = disk_cache.digest(manifest)
            path.write_text(json.dumps(manifest))

        return write

    def replaced(make: Callable[[Path], object]) -> Callable[[Path], object]:
        return lambda path: (path.unlink(), make(path))

    return {
        "numbers": signed({"files": {"value.txt": 1, MARK: 2}}),
        "list": signed({"files": []}),
        "text": signed({"files": {"value.txt": {"size": "x"}, MARK: {}}}),
        "what": signed({"what": 1, "of": None}),
        "deep": lambda path: path.write_text("[" * 100_000),
        "bytes": lambda path: path.write_bytes(b"\xff\xfe"),
        "pipe": replaced(os.mkfifo),
        "device": replaced(lambda path: path.symlink_to("/dev/zero")),
        "folder": replaced(lambda path: path.mkdir()),
        "large": replaced(lambda path: (path.touch(), os.truncate(path, 2**40))),
    }


@pytest.mark.parametrize("name", manifests())
def test_an_odd_manifest_is_a_damaged_entry_at_once(name, root):
    """Findings 3 and 9: numbers were a raw TypeError, a pipe was waited for, /dev/zero read until memory ended."""
    path = DiskCache(root, limit=10**9).get("graphs", "key", built("old")).path
    manifests()[name](path / MANIFEST)
    begun = time.monotonic()
    assert [one["key"] for one in json.loads(succeeded("cache", "ls", "--json"))] == ["key"]
    assert succeeded("cache", "ls")
    assert mionnx("cache", "verify").returncode == 1
    with pytest.warns(StoreWarning, match="graphs/key is damaged"):
        assert DiskCache(root).find("graphs", "key") is None
    assert DiskCache(root).get("graphs", "key", built("new")).faults(thorough=True) == []
    assert time.monotonic() - begun < 20  # with a process of its own, on a busy machine


@pytest.mark.parametrize("data", [b"", b"graphs/other", b"\xff" * 100])
def test_a_damaged_mark_is_a_damaged_entry(data, root):
    path = DiskCache(root, limit=10**9).get("graphs", "key", built("old")).path
    (path / MARK).write_bytes(data)
    with pytest.warns(StoreWarning, match="graphs/key is damaged"):
        assert CacheEntry(DiskCache(root).get("graphs", "key", built("new")).path).faults() == []


def test_clear_says_why_an_entry_stays(root, monkeypatch):
    """Finding 12: of a store that is read-only it said "1 are in use"."""
    path = DiskCache(root, limit=10**9).get("graphs", "key", built("old")).path
    for mark in path.with_name("key.pins").iterdir():
        mark.unlink()

    def refused(self: Path, *_: object) -> None:
        raise OSError(30, "Read-only file system", str(self))

    monkeypatch.setattr(Path, "rename", refused)
    assert "removed 0 entries; 1 stay: Read-only file system" in succeeded("cache", "clear")
