"""Folders and Hub ids that hold no model are refused."""

import pytest

from mionnx import MIError, MIModel, ModelError


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
