"""Tensors of a file: all of them or some, and what is said of a file that is missing or damaged."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from mionnx.errors import ModelError, SpecFileError
from mionnx.machine.tensor_file import open_tensors, read_tensors


def test_metadata_and_tensors_come_back(tmp_path):
    save_file({"a": np.arange(3), "b": np.ones((2, 2))}, tmp_path / "file", metadata={"made": "here"})
    metadata, tensors = read_tensors(tmp_path / "file", "no file")
    assert metadata == {"made": "here"}
    assert {name: array.tolist() for name, array in tensors.items()} == {"a": [0, 1, 2], "b": [[1, 1], [1, 1]]}
    with open_tensors(tmp_path / "file", "no file") as file:
        assert file.get_tensor("a").tolist() == [0, 1, 2]


def test_a_file_that_cannot_be_read_is_said(tmp_path):
    (tmp_path / "damaged").write_bytes(b"\x10" + bytes(30))
    for name in ("missing", "damaged"):
        with pytest.raises(SpecFileError, match=f"{name} is no spec: "):
            read_tensors(tmp_path / name, f"{name} is no spec")
    with pytest.raises(ModelError), open_tensors(tmp_path / "missing", "no model", ModelError):
        pass
