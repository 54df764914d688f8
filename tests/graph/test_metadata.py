"""Metadata of a hooked model that do not fit are refused."""

import json
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
        kept = [entry for entry in proto.metadata_props if entry.key != f"mionnx.{key}"]
        kept = [(entry.key, entry.value) for entry in kept] + ([(f"mionnx.{key}", value)] if value else [])
        del proto.metadata_props[:]
        for name, text in kept:
            proto.metadata_props.add(key=name, value=text)

    return change


def sizes(**changes: object) -> str:
    known = {"num_layers": 4, "num_heads": 8, "num_kv_heads": 4, "head_dim": 16, "hidden_size": 128, "vocab_size": 471}
    return json.dumps({**known, **changes})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("format", None, "not a hooked model"),
        ("format", "99", "format 99"),
        ("sizes", "{", "damaged"),
        ("sizes", '{"num_layers": 2}', "damaged"),
        ("hooks", '{"hook_nowhere": ["batch"]}', "hook_nowhere"),
        ("hooks", '{"hook_embed": ["batch"]}', "hook_embed"),
        ("hooks", '{"hook_embed": ["batch", "seq", 64]}', "hook_embed has the shape"),
        ("hooks", '{"logits": 5}', r"hooks\['logits'\] 5 must"),
        ("hooks", '{"hook_embed": ["batch", "seq", true]}', "list of axes"),
        ("hooks", "5", "hooks 5 must"),
        ("hooks", "[" * 100_000 + "]" * 100_000, "nested too deep"),
        ("sizes", "[" * 100_000 + "]" * 100_000, "nested too deep"),
        ("sizes", sizes(num_layers=10**9), "hook points of 4 layers"),
        ("sizes", sizes(num_layers=5), "hook points of 4 layers"),
        ("sizes", sizes(num_layers=10**30), "num_layers 1000"),
        ("sizes", sizes(num_layers="4"), "num_layers '4' must"),
        ("sizes", sizes(num_heads=4.0), "num_heads 4.0 must"),
        ("sizes", sizes(num_heads=True), "num_heads True must"),
        ("sizes", sizes(num_heads=2**30), "n_heads"),
        ("sizes", sizes(hidden_size=2**30), "hidden"),
        ("sizes", sizes(vocab_size=10**9), "vocab"),
        ("sizes", sizes(head_dim=-16), "head_dim -16 must"),
        ("sizes", sizes(max_positions="many"), "max_positions"),
        ("dtype", '"int8"', "dtype 'int8' must be one of float32, float16, bfloat16"),
        ("dtype", "[]", "dtype"),
        ("family", '"' + "x" * 10**6 + '"', "family"),
        ("family", '"' + "x" * 10**8 + '"', "characters: refused"),
        ("attention", "[1, 2, 3, 4]", "damaged"),
        ("attention", "4", "damaged"),
        ("exporter", "[]", "exporter"),
        ("unknown", "1", "damaged"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_metadata_that_do_not_fit(copy, key, value, message):
    rewrite(copy, set_property(key, value))
    with pytest.raises(ModelError, match=message):
        MIModel.from_pretrained(copy)
