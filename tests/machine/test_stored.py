"""The format of saved results: each kind of value, and what is refused although its checksum is right."""

import json
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from alike import alike

from mionnx.errors import SpecFileError
from mionnx.machine.stored import Storable, Stored
from mionnx.machine.tensor_file import read_metadata, write_tensors


@dataclass
class Inner(Storable):
    numbers: Any


@dataclass
class Outer(Stored):
    value: Any
    INSIDE: ClassVar = (Inner,)


VALUES = {
    "plain": [None, True, 1, -2.5, float("inf"), "text", "\ud800", []],
    "nested": {"a": (1, [2, ()]), 3: {"b": None}, (1, "x"): "pair"},
    "arrays": {
        "one.0": np.arange(3),
        "one": [np.zeros((2, 0), np.float16)],
        "one.0'": np.ones(1),
        "scalar": np.float32(0.1),
        "axes": np.ones(()),
    },
    "objects": [Inner(np.eye(2)), Inner([Inner(3)])],
}


@pytest.mark.parametrize("name", VALUES)
def test_values_come_back_in_their_own_types(tmp_path, name):
    again = Outer.load(Outer(VALUES[name]).save(tmp_path / "x.safetensors"))
    assert alike(again, Outer(VALUES[name]))


def test_nan_comes_back(tmp_path):
    assert np.isnan(Outer.load(Outer(float("nan")).save(tmp_path / "x.safetensors")).value)


class Inside(Storable):
    """None that `Outer` names."""


@pytest.mark.parametrize("value", [{1, 2}, Inside(), Outer(1), lambda: 0, b"bytes", np.array([None])])
def test_what_the_format_lacks_is_refused(tmp_path, value):
    with pytest.raises(SpecFileError):
        Outer([value]).save(tmp_path / "x.safetensors")
    assert not [*tmp_path.iterdir()]


def test_the_page_in_the_module_says_what_is_in_a_file(tmp_path):
    path = Outer([(1, np.arange(2)), Inner(np.float64(2))]).save(tmp_path / "x.safetensors")
    metadata = read_metadata(path, "no file")
    assert sorted(metadata) == ["contents", "kind", "mionnx_result", "mionnx_sha256"]
    assert (metadata["mionnx_result"], metadata["kind"]) == ("1", "Outer")
    array, scalar = {"array": "value.0.1"}, {"scalar": "value.1.numbers"}
    assert json.loads(metadata["contents"]) == {"value": [{"tuple": [1, array]}, {"Inner": {"numbers": scalar}}]}


DAMAGED = {
    "[]": "damaged",
    "{}": "damaged",
    "{": "damaged",
    '{"value": 1, "more": 2}': "damaged",
    '{"value": {"array": "missing"}}': "damaged",
    '{"value": {"os.system": {}}}': "damaged",
    '{"value": {"Inner": 3}}': "damaged",
    '{"value": {"Inner": {"numbers": 1, "more": 2}}}': "damaged",
    '{"value": {}}': "damaged",
    '{"value": {"dict": [[1]]}}': "damaged",
    '{"value": {"dict": [[[1], 2]]}}': "damaged",
    '{"value": ' + "[" * 90_000 + "]" * 90_000 + "}": "damaged",
    '{"value": 1}': "tensors that nothing in it uses: spare",
}


@pytest.mark.parametrize("contents", DAMAGED, ids=lambda text: text[:40])
def test_contents_that_are_no_result_are_refused(tmp_path, contents):
    metadata = {"mionnx_result": "1", "kind": "Outer", "contents": contents}
    write_tensors(tmp_path / "x.safetensors", {"spare": np.zeros(2)}, metadata)
    with pytest.raises(SpecFileError, match=rf"x\.safetensors.*{DAMAGED[contents]}"):
        Outer.load(tmp_path / "x.safetensors")


def test_another_version_is_refused(tmp_path):
    metadata = {"mionnx_result": "2", "kind": "Outer", "contents": "{}"}
    write_tensors(tmp_path / "x.safetensors", {"spare": np.zeros(2)}, metadata)
    with pytest.raises(SpecFileError, match=r"no saved Outer of version 1: its metadata says '2'"):
        Outer.load(tmp_path / "x.safetensors")
    del metadata["contents"], metadata["kind"]
    write_tensors(tmp_path / "x.safetensors", {"spare": np.zeros(2)}, metadata)
    with pytest.raises(SpecFileError, match="no saved Outer"):
        Outer.load(tmp_path / "x.safetensors")
