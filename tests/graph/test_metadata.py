"""Metadata of a hooked model that do not fit are refused."""

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from mionnx import MIModel, ModelError


def rewrite(folder: Path, change: Callable[[onnx.ModelProto], None]) -> None:
    proto = onnx.load(folder / "model.onnx", load_external_data=False)
    change(proto)
    (folder / "model.onnx").write_bytes(proto.SerializeToString())


def set_property(key: str, value: str | None) -> Callable[[onnx.ModelProto], None]:
    def change(proto: onnx.ModelProto) -> None:
        kept = [entry for entry in proto.metadata_props if entry.key != f"mionnx.{key}" and value is not None]
        kept = [(entry.key, entry.value) for entry in kept] + ([(f"mionnx.{key}", value)] if value else [])
        del proto.metadata_props[:]
        for name, text in kept:
            proto.metadata_props.add(key=name, value=text)

    return change


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("format", None, "not a hooked model"),
        ("format", "99", "format 99"),
        ("sizes", "{", "damaged"),
        ("sizes", '{"num_layers": 2}', "damaged"),
        ("hooks", '{"hook_nowhere": ["batch"]}', "hook_nowhere"),
        ("hooks", '{"hook_embed": ["batch"]}', "hook_embed"),
    ],
)
def test_metadata_that_do_not_fit(copy, key, value, message):
    rewrite(copy, set_property(key, value))
    with pytest.raises(ModelError, match=message):
        MIModel.from_pretrained(copy)
