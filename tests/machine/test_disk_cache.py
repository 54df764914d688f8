"""The store: built once, whole or not at all, checked, bounded; and bases, which change no bit."""

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mionnx import InputError
from mionnx.machine import cache_entry, disk_cache
from mionnx.machine.cache_entry import CacheEntry
from mionnx.machine.disk_cache import DiskCache, StoreWarning

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DiskCache:
    monkeypatch.setattr(disk_cache, "_said", set())
    return DiskCache(tmp_path / "store", limit=10**9)


def writer(text: str = "text", log: Path | None = None, pause: float = 0.0) -> Callable[[Path], dict[str, Any]]:
    """Builds an entry of three files, a piece at a time; each build leaves a line in the log."""

    def build(folder: Path) -> dict[str, Any]:
        if log:
            with log.open("a") as file:
                file.write(f"{os.getpid()}\n")
        for number in range(3):
            with (folder / f"{number}.bin").open("w") as file:
                for _ in range(4):
                    file.write(text * 1000)
                    file.flush()
                    time.sleep(pause)
        return {"text": text}

    return build


def in_child(work: Callable[[], None]) -> multiprocessing.process.BaseProcess:
    child = FORK.Process(target=work, daemon=True)
    child.start()
    return child


def test_twenty_processes_build_each_entry_once(entries, tmp_path):
    log = tmp_path / "log"

    def work() -> None:
        for key in ("a", "b"):
            entry = DiskCache(entries.root).get("graphs", key, writer(key, log, 0.01))
            assert (entry.path / "2.bin").read_text() == key * 4000

    children = [in_child(work) for _ in range(20)]
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    assert len(log.read_text().splitlines()) == 2
    assert sorted(entry.path.name for entry in entries.all()) == ["a", "b"]


@pytest.mark.parametrize("builds", [12, pytest.param(50, marks=pytest.mark.slow)])
def test_a_killed_process_leaves_nothing_broken(entries, builds):
    """Builds, each killed at some moment: afterwards there is a whole entry or none, and the next build works."""
    rng, whole = random.Random(0), 0
    begin = time.monotonic()
    in_child(lambda: DiskCache(entries.root).get("graphs", "unhurt", writer("kill", pause=0.002)) and None).join()
    taken = time.monotonic() - begin  # on a busy machine a build takes longer
    for number in range(builds):
        key = f"entry-{number}"
        child = in_child(
            lambda key=key: DiskCache(entries.root).get("graphs", key, writer("kill", pause=0.002)) and None
        )
        time.sleep(rng.uniform(0, 1.5 * taken))
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        entry = CacheEntry(entries.root / "graphs" / key)
        taken *= 0.8 if entry.path.exists() else 1.2  # whatever else runs here, some builds end before they are killed
        if entry.path.exists():
            whole += 1
            assert entry.faults(thorough=True) == []
        again = entries.get("graphs", key, writer("kill"))
        assert again.faults(thorough=True) == []
    assert 0 < whole < builds
    left = [path.name for path in (entries.root / "graphs").iterdir() if path.name.endswith(".partial")]
    assert left == []


@pytest.mark.parametrize("file", ["0.bin", "2.bin", "manifest.json"])
@pytest.mark.parametrize("place", [0, 0.5, 1])
def test_flipped_bytes_are_found_before_they_are_used(entries, file, place):
    """By a process that has not used the entry yet; the entry is made again, and that is said."""
    path = entries.get("graphs", "key", writer()).path
    data = bytearray((path / file).read_bytes())
    at = int(place * (len(data) - 1))
    data[at] ^= 1
    (path / file).write_bytes(data)
    os.utime(path / file, ns=(0, CacheEntry(path).manifest.get("files", {}).get(file, {}).get("changed", 0)))
    fresh = DiskCache(entries.root)
    with pytest.warns(StoreWarning, match="graphs/key is damaged"):
        assert fresh.find("graphs", "key") is None
    assert fresh.get("graphs", "key", writer()).faults(thorough=True) == []


@pytest.mark.parametrize("damage", ["missing", "surplus", "cut"])
def test_other_damage_is_found(entries, damage):
    path = entries.get("graphs", "key", writer()).path
    if damage == "missing":
        (path / "1.bin").unlink()
    elif damage == "surplus":
        (path / "more.bin").write_text("more")
    else:
        (path / "1.bin").write_text("text")
    with pytest.warns(StoreWarning, match=r"1\.bin|more\.bin"):
        assert DiskCache(entries.root).find("graphs", "key") is None


def test_large_files_are_hashed_when_they_changed(entries, monkeypatch):
    monkeypatch.setattr(cache_entry, "LARGE_FILE", 1000)  # the mark is smaller
    path = entries.get("graphs", "key", writer()).path
    hashed: list[str] = []
    plain = cache_entry.sha256
    monkeypatch.setattr(cache_entry, "sha256", lambda file: hashed.append(file.name) or plain(file))
    assert DiskCache(entries.root).find("graphs", "key")
    assert hashed == [cache_entry.MARK]
    (path / "1.bin").write_bytes((path / "1.bin").read_bytes())  # another time of change, the same bytes
    assert DiskCache(entries.root).find("graphs", "key")
    assert sorted(hashed) == [cache_entry.MARK, cache_entry.MARK, "1.bin"]
    assert CacheEntry(path).faults(thorough=True) == []


def test_the_oldest_go_first_and_never_what_is_in_use(entries):
    sizes = {}
    for age, key in enumerate(["old", "used", "new"]):
        sizes[key] = entries.get("graphs", key, writer(key)).size
        os.utime(entries.root / "graphs" / key, (age, age))
    for mark in (entries.root / "graphs").glob("*.pins/*"):
        mark.unlink()  # this process' own
    ready = FORK.Event()

    def hold() -> None:
        DiskCache(entries.root).find("graphs", "used")
        os.utime(entries.root / "graphs" / "used", (1, 1))
        ready.set()
        time.sleep(60)

    child = in_child(hold)
    assert ready.wait(20)
    removed = entries.prune(sizes["used"])
    assert [entry.path.name for entry in removed] == ["old", "new"]
    assert [entry.path.name for entry in entries.all()] == ["used"]
    assert entries.prune(0) == []
    child.kill()
    child.join()
    assert [entry.path.name for entry in entries.prune(0)] == ["used"]


def test_building_keeps_the_store_within_its_limit(entries, tmp_path):
    small = DiskCache(tmp_path / "small", limit=40_000)
    for key in range(6):
        small.get("graphs", str(key), writer())
        for mark in (tmp_path / "small" / "graphs").glob("*.pins/*"):
            mark.unlink()
    assert sum(entry.size for entry in small.all()) <= 40_000 + 20_000
    assert "5" in [entry.path.name for entry in small.all()]


@pytest.mark.parametrize("text", ["many", "10 XB", "-", "GB"])
def test_a_limit_that_is_none(text, monkeypatch, tmp_path):
    monkeypatch.setenv("MIONNX_CACHE_LIMIT", text)
    with pytest.raises(InputError, match="20GB"):
        DiskCache(tmp_path)


def test_limits_are_sizes():
    assert [disk_cache.size_of(text) for text in ("5", "1kb", "2 MB", "1.5GB")] == [5, 1024, 2**21, 3 * 2**29]
