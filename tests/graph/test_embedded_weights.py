"""Files with weights inside, read without them."""

import mmap
import time
from concurrent.futures import Future

import numpy as np
import onnx
import pytest
from google.protobuf.message import DecodeError

from mionnx.errors import ModelError
from mionnx.graph import embedded_weights, weight_check, weight_record
from mionnx.graph.embedded_weights import read_light, read_properties
from mionnx.graph.onnx_file import embed

LARGE, SMALL = 3 * embedded_weights.KEPT_INSIDE, 8


@pytest.fixture
def file(tmp_path):
    """A product with a large and a small weight inside, metadata before and after the graph."""
    rng = np.random.default_rng(0)
    weights = {"large": rng.normal(size=(LARGE // 4, 8)).astype(np.float32), "small": np.ones(SMALL, np.float32)}
    text = (
        '<ir_version: 10, opset_import: ["" : 23], producer_name: "test">\n'
        f"g (float[n, {LARGE // 4}] x) => (float[n, 8] y) {{ z = MatMul(x, large)\n y = Add(z, small) }}"
    )
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in weights.items())
    proto.metadata_props.add(key="mionnx.format", value="7")
    path = tmp_path / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


def test_a_light_model_is_the_file_with_its_weights_put_back(file):
    light = read_light(file)
    assert light.ByteSize() < LARGE < file.stat().st_size
    assert [bool(tensor.external_data) for tensor in light.graph.initializer] == [True, False]
    embed(light, file.parent)
    for tensor in light.graph.initializer:
        tensor.ClearField("data_location")
    assert light == onnx.load(file)


def test_metadata_are_read_without_the_graph(file):
    assert read_properties(file) == {"mionnx.format": "7"}


def test_bytes_of_weights_are_not_touched(file, monkeypatch):
    touched = []

    class Watched(mmap.mmap):
        def __getitem__(self, place):
            touched.append(len(range(*place.indices(len(self)))) if isinstance(place, slice) else 1)
            return super().__getitem__(place)

    monkeypatch.setattr(embedded_weights.mmap, "mmap", Watched)
    read_light(file)
    assert 0 < sum(touched) < LARGE


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"\x07" * 99])
def test_a_damaged_file_is_refused(file, damage):
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises((ModelError, DecodeError), match=r"cannot be read as an ONNX model|[Pp]ars"):
        read_light(file)


def test_hashes_of_a_thread_are_those_of_the_files(tmp_path):
    sizes = {"a": 3 * weight_check.PART + 5, "b": 0, "c": 70_000}
    for seed, (name, size) in enumerate(sizes.items()):
        (tmp_path / name).write_bytes(np.random.default_rng(seed).bytes(size))
    with weight_check.hashed_beside(tmp_path, ["c", "a", "b"]) as hashes:
        whole, each = hashes()
    assert whole == weight_check.sha256([tmp_path / name for name in "abc"])
    assert each == weight_record.describe(tmp_path, "abc")


def test_a_thread_that_hashes_is_stopped_when_nobody_waits(tmp_path, monkeypatch):
    (tmp_path / "weights").write_bytes(bytes(64))
    monkeypatch.setattr(weight_check, "PART", 1)
    read = Future()

    class Slow:
        def __init__(self):
            self.parts = 0

        def update(self, chunk):
            self.parts += 1
            time.sleep(0.05)

        def hexdigest(self):
            read.set_result(self.parts)
            return ""

    monkeypatch.setattr(weight_check.hashlib, "sha256", Slow)
    monkeypatch.setattr(weight_check, "sampled", lambda file: "")
    with weight_check.hashed_beside(tmp_path, ["weights"]):
        pass
    assert read.result() < 64
