"""Hashes of large weights are recorded after the export, in one step, and never of weights that changed meanwhile."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from threading import Timer

import onnx
import pytest

from mionnx import HookSpec, MIModel, ModelError
from mionnx.graph import file_digest, weight_record
from mionnx.graph.hooked_model import HookedModel

WEIGHTS = "model.safetensors"


@pytest.fixture
def pending(copy, monkeypatch):
    """A model as it is right after the export of large weights: their hash is not known yet."""
    monkeypatch.setattr(weight_record, "SMALL_FILE", 0)
    monkeypatch.setattr(file_digest, "peek", lambda file: None)
    proto = onnx.load(copy / "model.onnx", load_external_data=False)
    del proto.metadata_props[[entry.key for entry in proto.metadata_props].index("mionnx.weights_sha256")]
    described = weight_record.describe(copy, [WEIGHTS])
    assert set(described[WEIGHTS]) == {"size", "sampled", "changed"}
    proto.metadata_props.add(key="mionnx.weight_files", value=json.dumps(described))
    (copy / "model.onnx").write_bytes(proto.SerializeToString())
    return copy


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()


def flip(path: Path, at: int = 1_000_003) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        held = file.read(1)
        file.seek(at)
        file.write(bytes([held[0] ^ 1]))


def recorded(folder: Path) -> str | None:
    path = folder / weight_record.RECORD
    deadline = time.monotonic() + 20
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return json.loads(path.read_text())[WEIGHTS]["sha256"]


def test_opening_a_model_records_the_hash_in_the_background(pending):
    graph = (pending / "model.onnx").read_bytes()
    model = MIModel.from_pretrained(pending)
    assert recorded(pending) == digest(pending) == model.hooked.weights_sha256
    assert (pending / "model.onnx").read_bytes() == graph
    assert not weight_record.is_pending(pending, model.hooked.metadata)
    assert not list(pending.glob(".*partial"))


def test_a_recorded_hash_tells_a_changed_byte(pending):
    MIModel.from_pretrained(pending)
    recorded(pending)
    HookedModel.open(pending, check="full")
    flip(pending / WEIGHTS)
    with pytest.raises(ModelError, match="is damaged"):
        HookedModel.open(pending, check="full")


def test_weights_that_changed_before_are_not_recorded(pending):
    flip(pending / WEIGHTS)
    model = MIModel.from_pretrained(pending)
    with pytest.raises(ModelError, match="changed since it was exported"):
        _ = model.hooked.weights_sha256
    with pytest.raises(ModelError, match="changed since it was exported"):
        HookedModel.open(pending, check="full")
    assert not (pending / weight_record.RECORD).exists()


def test_a_record_of_other_weights_is_not_believed(pending, tmp_path):
    weight_record.complete(pending, HookedModel.open(pending).metadata)
    record = json.loads((pending / weight_record.RECORD).read_text())
    for wrong in ("{}", "[1]", "no JSON", json.dumps({WEIGHTS: {**record[WEIGHTS], "sampled": "0" * 64}})):
        (pending / weight_record.RECORD).write_text(wrong)
        assert weight_record.is_pending(pending, HookedModel.open(pending).metadata)
    assert HookedModel.open(pending).weights_sha256 == digest(pending)


def test_a_compiled_model_waits_for_the_hash(pending, tmp_path):
    MIModel.from_pretrained(pending).compile(HookSpec(), tmp_path / "compiled", plain=True)
    (props,) = (onnx.load(tmp_path / "compiled" / "model.onnx", load_external_data=False).metadata_props,)
    assert any(digest(pending) in entry.value for entry in props)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_link_is_read_where_the_file_that_was_read_is_gone(when, tmp_path):
    gone, later = tmp_path / "gone", tmp_path / "later"
    gone.write_bytes(b"weights")
    os.link(gone, later)
    failing = file_digest._digests[file_digest.identity(gone)] = file_digest._Digest(gone)
    gone.unlink()
    reading = Timer(0.3 if when == "meanwhile" else 0, failing.run)
    reading.start()
    if when == "before":
        reading.join()
    assert file_digest.wait(later) == hashlib.sha256(b"weights").hexdigest()
    assert isinstance(failing.error, FileNotFoundError)


def test_a_file_that_changes_after_it_was_begun_is_begun_again(tmp_path, monkeypatch):
    file, begin = tmp_path / "weights", file_digest.start
    file.write_bytes(b"weights")

    def change(files):
        begin(files)
        monkeypatch.setattr(file_digest, "start", begin)
        file.write_bytes(b"other weights")

    monkeypatch.setattr(file_digest, "start", change)
    assert file_digest.wait(file) == hashlib.sha256(b"other weights").hexdigest()


def test_a_failed_reading_is_told_and_tried_again(tmp_path, monkeypatch):
    file = tmp_path / "weights"
    file.write_bytes(b"weights")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda *_: (_ for _ in ()).throw(OSError("a disk of no sense")))
        with pytest.raises(OSError, match="of no sense"):
            file_digest.wait(file)
    assert file_digest.wait(file) == hashlib.sha256(b"weights").hexdigest()


CHILD = """
import sys
from pathlib import Path
from mionnx.graph import file_digest, weight_record
from mionnx.graph.hooked_model import HookedModel
file_digest.CHUNK = 2**12
print("ready", flush=True)
folder = Path(sys.argv[1])
weight_record.complete(folder, HookedModel.open(folder).metadata)
"""


@pytest.mark.slow
def test_killed_processes_leave_no_record_or_a_whole_one_and_two_are_fine(pending):
    for pause in (0.0, 0.005, 0.02):
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(pending)], stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stdout.readline()
        time.sleep(pause)
        child.kill()
        child.communicate()
        path = pending / weight_record.RECORD
        assert not path.exists() or json.loads(path.read_text())[WEIGHTS]["sha256"] == digest(pending)
    path.unlink(missing_ok=True)
    both = [subprocess.Popen([sys.executable, "-c", CHILD, str(pending)], stdout=subprocess.DEVNULL) for _ in "ab"]
    assert [child.wait() for child in both] == [0, 0]
    assert recorded(pending) == digest(pending)


def test_a_blob_of_the_hubs_cache_is_called_by_its_hash(tmp_path):
    named = tmp_path / "blobs" / ("ab" * 32)
    named.parent.mkdir()
    named.write_bytes(b"not read at all")
    (tmp_path / "snapshot").symlink_to(named)
    os.link(named, tmp_path / "linked")
    file_digest.start([tmp_path / "snapshot"])
    assert file_digest.peek(tmp_path / "linked") == "ab" * 32


def test_a_file_is_read_once_and_again_when_it_has_changed(tmp_path):
    first = tmp_path / "weights"
    first.write_bytes(b"one")
    assert file_digest.wait(first) == hashlib.sha256(b"one").hexdigest()
    os.link(first, tmp_path / "other")
    assert file_digest.peek(tmp_path / "other") == file_digest.wait(first)
    shutil.copy(first, tmp_path / "copy")
    assert file_digest.peek(tmp_path / "copy") is None
    first.write_bytes(b"two!")
    assert file_digest.peek(first) is None
    assert file_digest.wait(first) == hashlib.sha256(b"two!").hexdigest()
    first.unlink()
    with pytest.raises(OSError, match="No such file"):
        file_digest.wait(first)
