"""Weights that are not those that were exported are noticed on opening, by a sample or by every byte."""

import json
import os
import shutil
import time
from itertools import pairwise

import numpy as np
import onnx
import pytest

from mionnx import InputError, MIModel, ModelError
from mionnx.graph import weight_check, weight_record
from mionnx.graph.hooked_model import HookedModel

WEIGHTS = "model.safetensors"


@pytest.fixture
def recorded(copy):
    """A model whose metadata has the sampled and the whole hash of its weight file."""
    proto = onnx.load(copy / "model.onnx", load_external_data=False)
    proto.metadata_props.add(key="mionnx.weight_files", value=json.dumps(weight_record.describe(copy, [WEIGHTS])))
    (copy / "model.onnx").write_bytes(proto.SerializeToString())
    return copy


def change(path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        file.write(data)


def between(path) -> int:
    """A place that no block of the sample covers."""
    last = path.stat().st_size - weight_check.BLOCK
    starts = [last * n // (weight_check.BLOCKS - 1) for n in range(weight_check.BLOCKS)]
    return next((one + weight_check.BLOCK + other) // 2 for one, other in pairwise(starts))


@pytest.mark.parametrize("made", ["copy", "recorded"])
def test_zeros_at_the_end_are_noticed_on_opening(made, request):
    folder = request.getfixturevalue(made)
    change(folder / WEIGHTS, -4000, bytes(4000))
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged or not the file that was exported"):
        MIModel.from_pretrained(folder)
    assert MIModel.from_pretrained(folder, check="none").num_layers == 4


def test_a_byte_between_the_blocks_is_found_by_the_full_check(recorded):
    at = between(recorded / WEIGHTS)
    held = (recorded / WEIGHTS).read_bytes()[at]
    change(recorded / WEIGHTS, at, bytes([held ^ 1]))
    HookedModel.open(recorded)
    with pytest.raises(ModelError, match="is damaged"):
        MIModel.from_pretrained(recorded, check="full")
    change(recorded / WEIGHTS, at, bytes([held]))
    assert MIModel.from_pretrained(recorded, check="full").num_layers == 4


@pytest.mark.parametrize("made", ["copy", "recorded"])
def test_copies_links_and_times_are_no_damage(made, request, tmp_path):
    folder = request.getfixturevalue(made)
    os.utime(folder / WEIGHTS, (1, 1))
    shutil.copytree(folder, tmp_path / "moved", copy_function=os.link)
    for place in (folder, tmp_path / "moved"):
        for level in ("sampled", "full"):
            assert HookedModel.open(place, check=level).metadata.family == "llama"


def test_another_size_is_noticed(recorded):
    with (recorded / WEIGHTS).open("ab") as file:
        file.write(b"more")
    with pytest.raises(ModelError, match="is damaged"):
        HookedModel.open(recorded)


def test_an_unknown_level_is_refused(copy):
    with pytest.raises(InputError, match="check='ful' must be one of sampled, full, none; did you mean 'full'"):
        MIModel.from_pretrained(copy, check="ful")


@pytest.mark.parametrize("value", ["5", "[1]", '{"model.safetensors": 7}', '{"model.safetensors": {}}'])
def test_damaged_records_are_refused(recorded, value):
    proto = onnx.load(recorded / "model.onnx", load_external_data=False)
    (entry,) = [entry for entry in proto.metadata_props if entry.key == "mionnx.weight_files"]
    entry.value = value
    (recorded / "model.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(ModelError):
        HookedModel.open(recorded)


def test_the_sample_takes_a_moment_even_of_a_large_file(tmp_path):
    """A file of 4 GB, sparse: its sample is read in a small share of what hashing it all would take."""
    with (tmp_path / "large").open("wb") as file:
        file.truncate(2**32)
    first = weight_check.sampled(tmp_path / "large")
    times = []
    for _ in range(5):
        begin = time.process_time()
        assert weight_check.sampled(tmp_path / "large") == first
        times.append(time.process_time() - begin)
    assert min(times) < 0.02
    change(tmp_path / "large", -1, b"\1")
    assert weight_check.sampled(tmp_path / "large") != first


def test_an_empty_file_has_a_sample(tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    assert np.array_equal(len(weight_check.sampled(tmp_path / "empty")), 64)
