"""Damaged graphs and weight files: a `ModelError` that says what is wrong; nothing crashes."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_line import LLAMA
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mionnx import MIError, MIModel, ModelError
from mionnx.graph.onnx_file import locations

IDS = np.arange(3, 13)[None]


def rewrite(folder: Path, change: Callable[[onnx.ModelProto], None]) -> None:
    proto = onnx.load(folder / "model.onnx", load_external_data=False)
    change(proto)
    (folder / "model.onnx").write_bytes(proto.SerializeToString())


def point_at(location: str, **entries: int) -> Callable[[onnx.ModelProto], None]:
    """A change that lets the first external weight lie elsewhere."""

    def change(proto: onnx.ModelProto) -> None:
        tensor = next(t for t in proto.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL)
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
            if entry.key in entries:
                entry.value = str(entries[entry.key])

    return change


@pytest.mark.parametrize(
    "name", [b"mionnx.weights_sha256", b"node_embedding", b"blocks.1.hook_resid_post", b"input_ids"]
)
def test_a_name_that_is_no_text(copy, name):
    data = (copy / "model.onnx").read_bytes()
    assert name in data
    (copy / "model.onnx").write_bytes(data.replace(name, name[:-1] + b"\x80"))
    with pytest.raises(ModelError, match=r"no text in UTF-8|damaged"):
        MIModel.from_pretrained(copy).forward(IDS)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.7, 0.99, 0.9999])
def test_a_truncated_graph(copy, share):
    data = (copy / "model.onnx").read_bytes()
    (copy / "model.onnx").write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ModelError):
        MIModel.from_pretrained(copy).forward(IDS)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=4))
def test_flipped_bytes_in_the_graph(tmp_path_factory, flips):
    """An `MIError`, or an answer of the right shape where the damage hit a constant or a name."""
    folder = tmp_path_factory.mktemp("flipped") / "model"
    shutil.copytree(LLAMA, folder, copy_function=shutil.copyfile)
    data = bytearray((folder / "model.onnx").read_bytes())
    for at, by in flips:
        data[int(at * len(data))] ^= by
    (folder / "model.onnx").write_bytes(data)
    try:
        found = MIModel.from_pretrained(folder, threads=1).forward(IDS).output()
    except MIError:
        return
    assert found.shape[:2] == IDS.shape


def test_text_that_is_no_onnx(copy):
    (copy / "model.onnx").write_text("not a graph")
    with pytest.raises(ModelError, match="corrupt or truncated"):
        MIModel.from_pretrained(copy)


def test_a_missing_weight_file(copy):
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors is missing"):
        MIModel.from_pretrained(copy)


def test_a_short_weight_file(copy):
    data = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors").write_bytes(data[:-100])
    with pytest.raises(ModelError, match="short"):
        MIModel.from_pretrained(copy)


@pytest.mark.parametrize("location", ["../secret.bin", "/etc/passwd", "a/../../secret.bin", ""])
def test_a_weight_outside_the_folder(copy, location):
    (copy.parent / "secret.bin").write_bytes(bytes(1_000_000))
    rewrite(copy, point_at(location))
    with pytest.raises(ModelError, match="outside the model's folder"):
        MIModel.from_pretrained(copy)


def test_a_weight_behind_a_link_that_leaves_the_folder(copy):
    (copy.parent / "secret.bin").write_bytes(bytes(1_000_000))
    (copy / "inside.bin").symlink_to(copy.parent / "secret.bin")
    rewrite(copy, point_at("inside.bin"))
    with pytest.raises(ModelError, match="outside the model's folder"):
        MIModel.from_pretrained(copy)


@pytest.mark.parametrize("entries", [{"offset": 10**12}, {"offset": -8}, {"length": 10**15}, {"length": -1}])
def test_a_weight_beyond_its_file(copy, entries):
    rewrite(copy, point_at("model.safetensors", **entries))
    with pytest.raises(ModelError, match="bytes"):
        MIModel.from_pretrained(copy)


def test_bytes_that_two_weights_share_count_once(copy):
    """A tied table: two tensors of the same bytes."""
    proto = onnx.load(copy / "model.onnx", load_external_data=False)
    before = locations(proto)
    twin = proto.graph.initializer.add()
    twin.CopyFrom(next(one for one in proto.graph.initializer if one.external_data))
    twin.name = "twin"
    assert locations(proto) == before
    for entry in twin.external_data:
        if entry.key == "offset":
            entry.value = str(int(entry.value) + 4)
    assert sum(locations(proto).values()) > sum(before.values())
