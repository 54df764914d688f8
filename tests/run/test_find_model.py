"""Folders and Hub ids that hold no model are refused; the store keeps exports, or is done without."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from command_line import mionnx, succeeded
from repository import REPOSITORY

from mionnx import ExportError, HookSpec, MIError, MIModel, ModelError
from mionnx.machine import disk_cache, leftovers
from mionnx.machine.cache_entry import MARK
from mionnx.machine.disk_cache import DiskCache, StoreWarning
from mionnx.machine.progress import silent
from mionnx.run import exporting, find_model

FORK = multiprocessing.get_context("fork")
LLAMA = REPOSITORY / "models" / "world-llama"


def test_a_folder_with_nothing_in_it(tmp_path):
    with pytest.raises(MIError, match="neither a hooked model nor a checkpoint"):
        MIModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["./no/such/folder", "/nowhere", "a/b/c"])
def test_no_such_folder(name):
    with pytest.raises(ModelError, match="no folder"):
        MIModel.from_pretrained(name)


def test_a_hub_that_cannot_be_reached(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="Hub"):
        MIModel.from_pretrained("nobody/no-such-model")


class Copying:
    """An exporter that takes no second: a checkpoint's graph is the shipped model's, its weights are linked."""

    def __init__(self) -> None:
        self.__name__ = "exporters.copying"
        self.exports: list[Path] = []
        self.fails: OSError | None = None

    def export(self, folder: Path, target: Path, dtype: str, progress: object) -> None:
        self.exports.append(target)
        os.link(folder / "model.safetensors", target / "model.safetensors")
        for name in ("tokenizer.json", "config.json", "model.onnx"):
            if self.fails:
                raise self.fails
            shutil.copyfile(LLAMA / name, target / name)


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Copying:
    made = Copying()
    for module in (find_model, exporting):
        monkeypatch.setattr(module, "exporter_for", lambda folder: made)
    return made


@pytest.fixture
def checkpoints(tmp_path: Path) -> list[Path]:
    """Three checkpoints with the shipped model's weights."""
    folders = [tmp_path / name for name in ("first", "second", "third")]
    for folder in folders:
        folder.mkdir()
        shutil.copyfile(LLAMA / "model.safetensors", folder / "model.safetensors")
    return folders


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MIONNX_CACHE", str(tmp_path / "store"))
    monkeypatch.setattr(disk_cache, "_said", set())
    return tmp_path / "store"


def let_go(store: Path) -> None:
    """As if this process did not use anything."""
    for mark in store.glob("*/*.pins/*"):
        mark.unlink()


def names(store: Path) -> list[str]:
    return [entry.path.name.partition("-")[0] for entry in DiskCache(store).all()]


@pytest.fixture
def dead_pid() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


class TestTheStoreOfExports:
    def test_what_a_killed_export_left_is_removed_by_the_next(self, exporter, checkpoints, store, dead_pid, tmp_path):
        models = store / "models"
        dead, alive = models / f".gone-01.{dead_pid}.partial", models / f".other-02.{os.getpid()}.partial"
        beside, photos = tmp_path / "out" / f".old.{dead_pid}.partial", tmp_path / "out" / f".my.{dead_pid}.partial"
        for folder in (dead, alive, beside, photos):
            folder.mkdir(parents=True)
            (folder / ("a.jpg" if folder == photos else "converted.safetensors")).write_bytes(b"half")
        (dead / MARK).write_text("models/gone-01")
        find_model.find_model(checkpoints[0], "float32", silent)
        assert (dead.exists(), alive.exists()) == (False, True)
        exporting.export(checkpoints[0], tmp_path / "out" / "new", "float32", silent)
        assert (beside.exists(), photos.exists()) == (False, True)
        assert len(exporter.exports) == 2

    def test_in_place_too(self, exporter, checkpoints, dead_pid):
        folder = checkpoints[0]
        (folder / f".export.0a1b2c.{dead_pid}.partial").mkdir()
        (folder / f".export.0a1b2c.{dead_pid}.partial" / "model.onnx").write_bytes(b"half")
        exporting.export_in_place(folder, "float32", silent)
        expected = ["config.json", "model.onnx", "model.safetensors", "tokenizer.json"]
        assert sorted(path.name for path in folder.iterdir()) == expected

    def test_exports_are_listed_with_what_they_alone_keep(self, exporter, checkpoints, store):
        for folder in checkpoints[:2]:
            MIModel.from_pretrained(folder)
        shutil.rmtree(checkpoints[1])  # now the store alone keeps its weights
        listed = {one["key"].partition("-")[0]: one for one in json.loads(succeeded("cache", "ls", "--json"))}
        assert [one["kind"] for one in listed.values()] == ["models", "models"]
        weights = (LLAMA / "model.safetensors").stat().st_size
        rest = sum((LLAMA / name).stat().st_size for name in ("tokenizer.json", "config.json", "model.onnx"))
        marks = [len(f"models/{one['key']}") for one in listed.values()]
        sizes = [(one["bytes"] - mark, one["shared_bytes"]) for one, mark in zip(listed.values(), marks, strict=True)]
        assert sizes == [(rest, weights), (rest + weights, 0)]
        assert all(one["in_use"] for one in listed.values())
        assert time.time() - 60 < DiskCache(store).all()[0].used <= time.time()
        table = succeeded("cache", "ls")
        assert "first-" in table
        assert "of the checkpoint's" in table
        assert json.loads(succeeded("cache", "info", "--json"))["bytes"] == 2 * rest + weights + sum(marks)
        assert "every entry is whole" in succeeded("cache", "verify")

    def test_a_damaged_export_is_named(self, exporter, checkpoints, store):
        folder = MIModel.from_pretrained(checkpoints[0]).hooked.folder
        data = bytearray((folder / "model.safetensors").read_bytes())
        data[len(data) // 2] ^= 1
        (folder / "model.safetensors").write_bytes(data)
        run = mionnx("cache", "verify")
        assert run.returncode == 1
        assert f"models/{folder.name}: " in run.stdout

    def test_a_damaged_export_is_made_again(self, exporter, checkpoints, store):
        folder = MIModel.from_pretrained(checkpoints[0]).hooked.folder
        weights = bytes(len((LLAMA / "model.safetensors").read_bytes()))
        for file, data in (("model.onnx", b"cut"), ("model.safetensors", weights)):
            (folder / file).unlink()
            (folder / file).write_bytes(data)
            with pytest.raises(ModelError):
                MIModel.from_pretrained(folder)  # by its path: of what, is not known
            with pytest.warns(StoreWarning, match=rf"models/{folder.name} is damaged \(.*\): it is made again"):
                again = MIModel.from_pretrained(checkpoints[0], threads=1)
            assert again.hooked.folder == folder
            assert again.forward([5]).output().size
        assert len(exporter.exports) == 3
        (folder / "model.onnx").write_bytes(b"cut")
        ready = FORK.Event()
        child = FORK.Process(target=lambda: (DiskCache(store).use(folder), ready.set(), time.sleep(60)), daemon=True)
        child.start()
        assert ready.wait(30)
        with pytest.raises(ModelError):  # not while another process uses it
            MIModel.from_pretrained(checkpoints[0])
        child.kill()
        child.join()

    def test_the_limit_counts_exports_and_the_oldest_go(self, exporter, checkpoints, store, monkeypatch):
        for age, folder in enumerate(checkpoints[:2]):
            made = MIModel.from_pretrained(folder).hooked.folder
            os.utime(made, (age + 5, age + 5))
            shutil.rmtree(folder)  # so that their weights count
        MIModel.from_pretrained(find_model.cache_folder() / "models" / made.name)  # opened by its path: used
        os.utime(made, (0, 0))
        let_go(store)
        one = DiskCache(store).all()[0].size
        monkeypatch.setenv("MIONNX_CACHE_LIMIT", str(int(1.5 * one)))
        MIModel.from_pretrained(checkpoints[2])  # whose weights are the checkpoint's: room for one other
        assert names(store) == ["first", "third"]
        assert "removed 1 entries" in succeeded("cache", "prune", "--to", "0B")  # the third is in use here
        assert names(store) == ["third"]
        let_go(store)
        assert "removed 1 entries" in succeeded("cache", "clear")
        assert names(store) == []
        assert MIModel.from_pretrained(checkpoints[2]).forward([5]).output().size  # exported again

    @pytest.mark.parametrize("opened", ["checkpoint", "path", "pickle"])
    def test_a_model_that_another_process_uses_stays(self, exporter, checkpoints, store, opened):
        model = MIModel.from_pretrained(checkpoints[0])
        folder, ready = model.hooked.folder, FORK.Event()
        let_go(store)

        def hold() -> None:
            if opened == "pickle":
                rebuild, recipe = model.__reduce__()
                rebuild(*recipe)
            else:
                MIModel.from_pretrained(folder if opened == "path" else checkpoints[0])
            ready.set()
            time.sleep(60)

        child = FORK.Process(target=hold, daemon=True)
        child.start()
        assert ready.wait(30)
        assert "removed 0 entries" in succeeded("cache", "prune", "--to", "0B")
        assert "removed 0 entries; 1 are in use" in succeeded("cache", "clear")
        assert (folder / "model.onnx").exists()
        child.kill()
        child.join()
        assert "removed 1 entries" in succeeded("cache", "clear")
        assert not folder.exists()

    def test_clear_says_what_killed_processes_left(self, exporter, store, dead_pid):
        (store / "models" / f".gone-01.{dead_pid}.partial").mkdir(parents=True)
        assert "removed 0 entries; 1 left by killed processes removed too" in succeeded("cache", "clear")
        assert [*(store / "models").iterdir()] == []


def refusing(monkeypatch: pytest.MonkeyPatch, store: Path) -> None:
    """The system calls that write answer as they do on a disk that is mounted read-only."""

    def refused(call: Callable[..., object]) -> Callable[..., object]:
        def instead(path: object, *args: object, **more: object) -> object:
            writes = call is not plain_open or (args and int(args[0]) & (os.O_CREAT | os.O_WRONLY | os.O_RDWR))
            if writes and Path(str(path)).is_relative_to(store):
                raise OSError(30, "Read-only file system", str(path))
            return call(path, *args, **more)

        return instead

    plain_open = os.open
    for name in ("open", "mkdir", "utime"):
        monkeypatch.setattr(os, name, refused(getattr(os, name)))


class TestWithoutAStore:
    @pytest.mark.parametrize("kind", ["below a file", "read-only", "read-only, with folders"])
    def test_it_is_said_once_and_the_model_runs(self, exporter, checkpoints, store, kind, monkeypatch, tmp_path):
        if kind == "below a file":
            store.write_text("a file")
        else:
            if kind.endswith("folders"):
                (store / "models").mkdir(parents=True)
            refusing(monkeypatch, store)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        monkeypatch.setattr(leftovers, "_temporary", {})
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model = MIModel.from_pretrained(checkpoints[0], threads=1)
            again = MIModel.from_pretrained(checkpoints[0], threads=1)
            model.prepare()
            found = model.forward([5, 6], HookSpec().capture("hook_embed")).output()
            swept = model.patch_sweep([5, 6], [5, 7], answer=5, versus=6, over=("layer",), resume=True)
        stores = [one.message for one in said if isinstance(one.message, StoreWarning)]
        assert len(stores) == 2  # the second is said only of sweeps that are to be resumed
        assert "temporary folder that lasts as long as this process" in str(stores[0])
        assert "an interruption would lose the cells" in str(stores[1])
        assert np.isfinite(swept.values).all()
        assert len(exporter.exports) == 1
        assert again.hooked.folder == model.hooked.folder
        assert model.hooked.folder.parent.parent == tmp_path
        assert np.array_equal(found, MIModel.from_pretrained(LLAMA, threads=1).forward([5, 6]).output())
        leftovers._remove_temporary()
        assert not model.hooked.folder.exists()

    def test_what_a_read_only_store_has_is_used(self, exporter, checkpoints, store, monkeypatch):
        folder = MIModel.from_pretrained(checkpoints[0]).hooked.folder
        refusing(monkeypatch, store)
        with pytest.warns(StoreWarning, match="what is in it is used as it is"):
            assert MIModel.from_pretrained(checkpoints[0]).hooked.folder == folder
        assert len(exporter.exports) == 1
        listed = json.loads(succeeded("cache", "ls", "--json"))
        assert [one["key"] for one in listed] == [folder.name]

    def test_neither_a_store_nor_a_temporary_folder(self, exporter, checkpoints, store, monkeypatch, tmp_path):
        store.write_text("a file")
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
        monkeypatch.setattr(leftovers, "_temporary", {})
        with (
            pytest.warns(StoreWarning, match="Not a directory"),
            pytest.raises(ExportError, match=r"neither the store .* nor a temporary folder can be written"),
        ):
            MIModel.from_pretrained(checkpoints[0])

    def test_a_full_disk_leaves_nothing(self, exporter, checkpoints, store):
        exporter.fails = OSError(28, "No space left on device")
        with pytest.raises(ExportError, match="No space left"):
            MIModel.from_pretrained(checkpoints[0])
        assert [path.suffix for path in (store / "models").iterdir()] == [".lock"]
        exporter.fails = None
        assert MIModel.from_pretrained(checkpoints[0]).forward([5]).output().size

    def test_a_full_store_is_done_without(self, exporter, checkpoints, store, monkeypatch, tmp_path):
        """Finding 12: it was an ExportError, and not the temporary folder that machine's README promises."""
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        monkeypatch.setattr(leftovers, "_temporary", {})
        plain = exporter.export

        def export(folder: Path, target: Path, dtype: str, progress: object) -> None:
            exporter.fails = OSError(28, "No space left on device") if target.is_relative_to(store) else None
            plain(folder, target, dtype, progress)

        monkeypatch.setattr(exporter, "export", export)
        with pytest.warns(StoreWarning, match=r"No space left .*temporary folder that lasts as long as this process"):
            model = MIModel.from_pretrained(checkpoints[0], threads=1)
        assert model.forward([5]).output().size
        assert not model.hooked.folder.is_relative_to(store)
        assert [path.suffix for path in (store / "models").iterdir()] == [".lock"]
        leftovers._remove_temporary()


EXPORT = "import sys; from mionnx import MIModel; MIModel.from_pretrained(sys.argv[1], dtype='float16')"


def killed_while_converting(command: list[str], environment: dict[str, str], folder: Path) -> None:
    """Run an export, and kill it when it has begun to write its weights."""
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not [*folder.glob(".*.partial/converted.safetensors")]:
        assert process.poll() is None
        time.sleep(0.0005)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert [*folder.glob(".*.partial/converted.safetensors")], "the export was complete before it was killed"


@pytest.mark.slow
def test_exports_that_are_killed_leave_what_the_next_removes(checkpoint, store, tmp_path):
    environment = {**os.environ, "MIONNX_CACHE": str(store)}
    source = str(checkpoint("llama"))
    killed_while_converting([sys.executable, "-c", EXPORT, source], environment, store / "models")
    model = MIModel.from_pretrained(source)
    assert [path.name for path in (store / "models").iterdir() if path.is_dir()].count(model.hooked.folder.name) == 1
    assert [*(store / "models").glob(".*.partial")] == []

    out = tmp_path / "out"
    command = [sys.executable, "-m", "mionnx", "export", source, "--dtype", "float16", "-o"]
    killed_while_converting([*command, str(out / "one")], environment, out)
    exporting.export(Path(source), out / "two", "float32", silent)
    assert [path.name for path in out.iterdir()] == ["two"]


def mounted(options: str, folder: Path, code: str, *arguments: str) -> subprocess.CompletedProcess:
    """Run Python with the store on a file system of its own that no other process sees."""
    mount = f'mount -t tmpfs -o "{options}" tmpfs "{folder}"'
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    environment = {**os.environ, "MIONNX_CACHE": str(folder / "store"), "TMPDIR": str(folder.parent)}
    command = ["unshare", "-rm", "sh", "-c", f'{mount} && exec "$@"', "sh", sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


RUNS = """
import sys
from mionnx import HookSpec, MIModel
model = MIModel.from_pretrained(sys.argv[1])
print(model.hooked.folder, model.forward([5, 6], HookSpec().capture("hook_embed")).output().shape)
"""
FILLS = """
import sys
import tempfile
from pathlib import Path
from mionnx import ExportError
from mionnx.machine.progress import silent
from mionnx.run import exporting, find_model
try:
    tempfile.tempdir = str(find_model.cache_folder().parent)  # as full
    find_model.find_model(sys.argv[1], "float32", silent)
except ExportError as error:
    print(error, [path.name for path in find_model.cache_folder().rglob("*") if path.is_file()])
"""


@pytest.mark.slow
def test_disks_that_are_read_only_or_full(checkpoint, tmp_path):
    (tmp_path / "disk").mkdir()
    source = str(checkpoint("llama"))
    ran = mounted("ro", tmp_path / "disk", RUNS, source)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(str(tmp_path))
    assert ran.stderr.count("StoreWarning") == 1
    assert [*tmp_path.glob(".mionnx*")] == []
    filled = mounted("size=128k", tmp_path / "disk", FILLS, source)
    assert filled.returncode == 0, filled.stderr
    assert "No space left" in filled.stdout
    assert filled.stdout.count(".lock'") == filled.stdout.count(", '") + 1 == 1  # a lock, and nothing else
    assert filled.stderr.count("temporary folder that lasts as long as this process") == 1
