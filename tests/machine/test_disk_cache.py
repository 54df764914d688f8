"""The store: built once, whole or not at all, checked, bounded; and bases, which change no bit."""

import ctypes
import json
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from families import VOCAB

from mionnx import HookPoint, HookSpec, InputError, Intervention, MIModel, Options
from mionnx.graph.hooked_model import HookedModel
from mionnx.machine import disk_cache
from mionnx.machine.disk_cache import CacheEntry, DiskCache, StoreWarning
from mionnx.run import prepacked

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


def test_a_killed_process_leaves_nothing_broken(entries):
    """Fifty builds, each killed at some moment: afterwards there is a whole entry or none, and the next build works."""
    rng, whole = random.Random(0), 0
    begin = time.monotonic()
    in_child(lambda: DiskCache(entries.root).get("graphs", "unhurt", writer("kill", pause=0.002)) and None).join()
    taken = time.monotonic() - begin  # on a busy machine a build takes longer
    for number in range(50):
        key = f"entry-{number}"
        child = in_child(
            lambda key=key: DiskCache(entries.root).get("graphs", key, writer("kill", pause=0.002)) and None
        )
        time.sleep(rng.uniform(0, 1.5 * taken))
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        entry = CacheEntry(entries.root / "graphs" / key)
        if entry.path.exists():
            whole += 1
            assert entry.faults(thorough=True) == []
        again = entries.get("graphs", key, writer("kill"))
        assert again.faults(thorough=True) == []
    assert 0 < whole < 50
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
    monkeypatch.setattr(disk_cache, "LARGE", 100)
    path = entries.get("graphs", "key", writer()).path
    hashed: list[str] = []
    plain = disk_cache._sha256
    monkeypatch.setattr(disk_cache, "_sha256", lambda file: hashed.append(file.name) or plain(file))
    assert DiskCache(entries.root).find("graphs", "key")
    assert hashed == []
    (path / "1.bin").write_bytes((path / "1.bin").read_bytes())  # another time of change, the same bytes
    assert DiskCache(entries.root).find("graphs", "key")
    assert hashed == ["1.bin"]
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


# -- bases


def spec_of(model: MIModel) -> HookSpec:
    return (
        HookSpec()
        .capture("*")
        .intervene(HookPoint.ResidPost(0), Intervention.Add(np.linspace(-1, 1, model.hidden_size), positions=[1, -1]))
        .intervene(HookPoint.MlpOut(1), Intervention.Scale(0.5))
    )


def equal(one, other) -> bool:
    return np.array_equal(one.output(), other.output()) and all(np.array_equal(one[k], other[k]) for k in other)


@pytest.fixture
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MIONNX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(disk_cache, "_said", set())
    return tmp_path / "cache"


def test_a_base_changes_no_bit(family, models, own_store):
    """Logits and every capture, with and without interventions, from a base and the plain way; derived values too."""
    plain = models(family)
    model = MIModel(plain.hooked, Options(threads=1, base="always"))
    ids = np.random.default_rng(0).integers(3, VOCAB, (2, 9))
    for spec in (HookSpec(), HookSpec().capture("*"), spec_of(plain)):
        assert equal(model.forward(ids, spec), plain.forward(ids, spec))
    assert (
        model.generate(ids, max_new_tokens=4).new_ids[0].tolist()
        == plain.generate(ids, max_new_tokens=4).new_ids[0].tolist()
    )
    assert len(list((own_store / "bases").glob("*/base.onnx"))) == 1
    assert len(list((own_store / "graphs").glob("*/model.onnx"))) >= 1
    again = MIModel(plain.hooked, Options(threads=1, base="always"))
    assert equal(again.forward(ids, spec_of(plain)), plain.forward(ids, spec_of(plain)))
    assert str(again.report(spec_of(plain))) == str(model.report(spec_of(plain)))


@pytest.mark.parametrize("layout", ["6-pth", "7-fla"])
def test_a_base_of_a_recurrent_model_changes_no_bit(rwkv, layout, own_store):
    plain = rwkv(layout)
    model = MIModel(plain.hooked, Options(threads=1, base="always"))
    for length in (1, 5, 20):
        ids = np.random.default_rng(length).integers(0, VOCAB, length)
        for spec in (HookSpec(), HookSpec().capture("*").intervene("hook_embed", Intervention.Scale(1.5))):
            assert equal(model.forward(ids, spec), plain.forward(ids, spec))


def test_without_packing_a_graph_is_the_same_to_rounding(models, own_store):
    plain = models("llama")
    model = MIModel(plain.hooked, Options(threads=1, base="always", prepack=False))
    ids = np.arange(10, 19)[None]
    spec = spec_of(plain)
    found, expected = model.forward(ids, spec), plain.forward(ids, spec)
    assert np.abs(found.output() - expected.output()).max() < 5e-6
    nothing = HookSpec().capture("*").intervene("hook_embed", Intervention.Add(0.0))  # the null law holds within
    assert np.array_equal(model.forward(ids, nothing).output(), model.forward(ids).output())


def test_a_base_keeps_weights_as_the_checkpoint_has_them(models, own_store):
    """[out, in], which unpacked products read faster; the transposition is a part of the product, same bits."""
    plain = models("llama")
    model = MIModel(plain.hooked, Options(threads=1, base="always"))
    ids, spec = np.arange(10, 19)[None], HookSpec().capture("blocks.*.attn.hook_result").capture("blocks.*.mlp.*")
    assert equal(model.forward(ids, spec), plain.forward(ids, spec))
    graph = onnx.load(next(own_store.glob("bases/*/base.onnx")), load_external_data=False).graph
    shapes = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    assert shapes["model.layers.0.mlp.up_proj.weight"] == [96, 64]
    turned = {name for node in graph.node if node.op_type == "Transpose" for name in node.input}
    assert not turned & shapes.keys()


def test_what_is_free_goes_back_to_the_system():
    """A process that frees much below something it keeps still holds the pages, until they are given back."""
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("not glibc")
    program = (
        "import psutil; from mionnx import memory\n"
        "kept = [bytes(60_000) for _ in range(2000)]\n"
        "last = bytes(60_000)\n"
        "del kept\n"
        "before = psutil.Process().memory_info().rss; assert memory.release()\n"
        "assert before - psutil.Process().memory_info().rss > 50_000_000"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_first_call_decides_about_packing(models):
    """Large batches do without, everything else packs, and a model stays with what it began with."""
    hooked = models("llama").hooked
    for tokens, packed in (((1, 9), True), ((16, 32), False)):
        model = MIModel(hooked, Options(threads=1))
        ids = np.full(tokens, 7)
        model.forward(ids)
        assert model.variants.options.prepack is packed
        model.forward(np.full((1, 3), 7), HookSpec().capture("hook_embed"))
        assert model.variants.options.prepack is packed
    chosen = MIModel(hooked, Options(threads=1, prepack=False))
    chosen.generate([[3, 4]], max_new_tokens=2)
    assert chosen.variants.options.prepack is False


def test_other_weights_have_another_base(models, hooked, tmp_path):
    import shutil

    shutil.copytree(hooked("llama"), tmp_path / "copy")
    options = Options()
    one = prepacked.key_of(HookedModel.open(tmp_path / "copy"), options)
    assert prepacked.key_of(HookedModel.open(tmp_path / "copy"), options) == one
    os.utime(tmp_path / "copy" / "model.safetensors", (1, 1))
    assert prepacked.key_of(HookedModel.open(tmp_path / "copy"), options) != one
    assert prepacked.key_of(HookedModel.open(tmp_path / "copy"), Options(fast=True)) != prepacked.key_of(
        HookedModel.open(tmp_path / "copy"), options
    )


def test_a_damaged_base_is_made_again(models, own_store):
    plain, ids = models("llama"), np.arange(10, 15)[None]
    expected = plain.forward(ids, spec_of(plain))
    MIModel(plain.hooked, Options(threads=1, base="always")).prepare()
    (data,) = (own_store / "bases").glob("*/base.data")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 255
    data.write_bytes(content)
    with pytest.warns(StoreWarning, match=r"base\.data was changed"):
        found = MIModel(plain.hooked, Options(threads=1, base="always")).forward(ids, spec_of(plain))
    assert equal(found, expected)


def test_a_store_that_cannot_be_written_is_said_once(models, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("MIONNX_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(disk_cache, "_said", set())
    plain, ids = models("llama"), np.arange(10, 15)[None]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = MIModel(plain.hooked, Options(threads=1, base="always"))
        assert equal(model.forward(ids, spec_of(plain)), plain.forward(ids, spec_of(plain)))
        assert not model.prepare()
    (one,) = [one for one in said if one.category is StoreWarning]
    assert "running without it" in str(one.message)


FULL = """
import signal, sys, warnings
import numpy as np
import onnx
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from mionnx import HookSpec, MIModel, Options
from mionnx.graph.hooked_model import HookedModel
model = MIModel(HookedModel.open(__import__("pathlib").Path(sys.argv[1])), Options(threads=1, base="always"))
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    logits = model.forward(np.arange(10, 15)[None], HookSpec().capture("*")).output()
print(len(said), str(said[0].message)[:60])
np.save(sys.argv[2], logits) if len(sys.argv) > 2 else print(float(np.abs(logits).sum()))
"""


def test_a_disk_that_is_full(models, hooked, tmp_path):
    """Files that may not grow beyond 64 KiB: the base cannot be written, the model runs without it."""
    environment = {**os.environ, "MIONNX_CACHE": str(tmp_path / "cache")}
    ran = subprocess.run(
        [sys.executable, "-c", FULL, str(hooked("llama"))],
        capture_output=True,
        text=True,
        env=environment,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16)),
    )
    assert ran.returncode == 0, ran.stderr
    said, total = ran.stdout.splitlines()
    assert said.startswith("1 the store")
    expected = models("llama").forward(np.arange(10, 15)[None]).output()
    assert float(total) == pytest.approx(float(np.abs(expected).sum()), rel=1e-6)
    assert list((tmp_path / "cache").rglob("base.*")) == []


def test_a_base_that_has_no_room_is_not_begun(models, own_store, monkeypatch):
    monkeypatch.setenv("MIONNX_CACHE_LIMIT", "100KB")
    plain = models("llama")
    with pytest.warns(StoreWarning, match="there is room for 100"):
        assert not MIModel(plain.hooked, Options(base="always")).prepare()


def test_the_second_structure_of_a_large_model_makes_a_base(models, own_store, monkeypatch):
    monkeypatch.setattr(prepacked, "WORTHWHILE", 1)
    model, ids = MIModel(models("llama").hooked, Options(threads=1)), np.arange(10, 15)[None]
    model.forward(ids)
    model.forward(ids, HookSpec().capture("hook_embed"))
    assert not (own_store / "bases").exists()
    model.warm(HookSpec().capture(HookPoint.ResidPost(0)))
    assert len(list((own_store / "bases").glob("*/base.onnx"))) == 1
    other = MIModel(models("llama").hooked, Options(threads=1))
    other.forward(ids, HookSpec().capture("hook_embed"))
    assert other.compile_graph(HookSpec().capture("hook_embed")).cost < 2**26
    never = MIModel(models("llama").hooked, Options(threads=1, base="never"))
    never.forward(ids, HookSpec().capture("hook_embed"))
    assert never.compile_graph(HookSpec().capture("hook_embed")).cost == never.variants.weights


def test_open_graphs_are_bounded_by_memory(models):
    plain = models("llama")
    model = MIModel(plain.hooked, Options(threads=1, max_bytes=2 * plain.variants.weights))
    for layer in (0, 1, 0):
        model.warm(HookSpec().capture(HookPoint.ResidPost(layer)))
    model.warm(HookSpec())
    assert [plan.captures[0].hook if plan.captures else None for plan in model.compiled] == [
        "blocks.0.hook_resid_post",
        None,
    ]


def test_an_unknown_way_is_refused(models):
    with pytest.raises(InputError, match="did you mean 'always'"):
        MIModel(models("llama").hooked, Options(base="alway"))


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
