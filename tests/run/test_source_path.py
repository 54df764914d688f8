"""Paths given for a model: what can be opened opens, anything else says what to give instead."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from command_line import LLAMA, mionnx
from rwkv_checkpoints import write

from mionnx import ExportError, HookSpec, Intervention, MIError, MIModel, ModelError
from mionnx.run.source_path import local_path

IDS = np.arange(3, 9)[None]


@pytest.fixture
def store(tmp_path, monkeypatch) -> Path:
    """A store of the test's own."""
    monkeypatch.setenv("MIONNX_CACHE", str(tmp_path / "store"))
    return tmp_path / "store"


@pytest.fixture(scope="module")
def pth(tmp_path_factory) -> Path:
    """A folder with two RWKV `.pth` files, and the config of neither."""
    folder = tmp_path_factory.mktemp("pth")
    for layout, name in (("7-pth", "goose.pth"), ("6-pth", "finch.pth")):
        write(layout, folder / layout)
        shutil.move(next((folder / layout).glob("*.pth")), folder / name)
    (folder / "config.json").write_text('{"model_type": "llama", "hidden_size": 5}')
    (folder / "rwkv_vocab_v1.txt").write_text("1 'a' 1\n2 'b' 1\n")
    return folder


@pytest.mark.parametrize(("name", "family"), [("goose.pth", "rwkv7"), ("finch.pth", "rwkv6")])
def test_a_pth_file_opens(pth, store, rwkv, name, family):
    """Beside another `.pth` and another model's config; the vocabulary comes with it."""
    model = MIModel.from_pretrained(pth / name, threads=1)
    assert model.hooked.metadata.family == family
    assert np.array_equal(model.forward(IDS).output(), rwkv(f"{family[-1]}-pth").forward(IDS).output())
    assert model.tokenizer.encode("ab").ids == [1, 2]
    assert MIModel.from_pretrained(str(pth / name)).hooked.folder == model.hooked.folder
    assert model.hooked.folder.is_relative_to(store)


def test_a_pth_file_on_the_command_line(pth, store, tmp_path):
    ran = mionnx("export", pth / "goose.pth", "-o", tmp_path / "hooked")
    assert ran.returncode == 0, ran.stderr
    assert MIModel.from_pretrained(tmp_path / "hooked").hooked.metadata.family == "rwkv7"
    refused = mionnx("export", pth / "goose.pth", "--in-place")
    assert refused.returncode
    assert "folder of its own" in " ".join(refused.stderr.split())


def test_a_pth_file_of_something_else(tmp_path, store):
    (tmp_path / "other.pth").write_bytes(b"text")
    with pytest.raises(ExportError, match=r"other\.pth holds neither"):
        MIModel.from_pretrained(tmp_path / "other.pth")


def test_a_hooked_models_own_graph_opens_as_its_folder():
    model = MIModel.from_pretrained(LLAMA / "model.onnx")
    assert model.hooked.folder == LLAMA
    assert mionnx("hooks", LLAMA / "model.onnx").returncode == 0


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("model.safetensors", b"", r"one file of a model: give its folder, .*model$"),
        ("config.json", None, "one file of a model: give its folder"),
        ("other.onnx", b"\x08\x0a", "it is empty or truncated"),
        ("weights.gguf", b"GGUF", r"weights\.gguf is truncated or damaged"),
    ],
)
def test_other_files_say_what_to_give_instead(copy, name, content, said):
    if content is not None:
        (copy / name).write_bytes(content)
    with pytest.raises(MIError, match=said):
        MIModel.from_pretrained(copy / name)
    ran = mionnx("hooks", copy / name)
    assert ran.returncode
    assert "Traceback" not in ran.stderr


def test_a_graph_without_hook_names_is_adopted(copy, store, shipped):
    """A compiled folder's or another exporter's `model.onnx`: its hook points are recognised."""
    import onnx

    proto = onnx.load(copy / "model.onnx", load_external_data=False)
    del proto.metadata_props[:]
    (copy / "model.onnx").write_bytes(proto.SerializeToString())
    model = MIModel.from_pretrained(copy / "model.onnx", threads=1)
    assert [str(point) for point in model.hook_points()] == [str(point) for point in shipped.hook_points()]
    found, expected = (one.forward(IDS, HookSpec().capture("blocks.*")) for one in (model, shipped))
    off = {
        name: np.abs(found[name] - expected[name]).max() / max(1.0, np.abs(expected[name]).max()) for name in expected
    }
    assert max(off.values()) < 1e-5


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("models/world-lama", "models/world-llama"),
        ("./models/world-lama", "models/world-llama"),
        ("model/world-llama", "models"),
        ("models/world-gpt-2", "models/world-gpt2"),
    ],
)
def test_a_mistyped_path_names_the_nearest_folder(given, meant, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(LLAMA.parent.parent)
    with pytest.raises(ModelError, match=f"did you mean '{meant}'"):
        MIModel.from_pretrained(given)
    with pytest.raises(ModelError, match=f"did you mean '.*{meant}'"):
        MIModel.from_pretrained(Path(given).absolute())


def test_a_folder_of_models_names_them():
    with pytest.raises(
        ExportError, match="it holds folders of models: world-bert, world-gpt2, world-hybrid, world-llama, world-rwkv7"
    ):
        MIModel.from_pretrained(LLAMA.parent)


@pytest.mark.parametrize(
    ("name", "said"), [("m.gguf", r"m\.gguf is truncated or damaged"), ("m.onnx", "cannot be read as an ONNX model")]
)
def test_a_folder_of_another_kind_says_what_to_give(tmp_path, name, said):
    (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ExportError, match=said):
        MIModel.from_pretrained(tmp_path)


def test_what_is_no_path_is_refused(shipped):
    import torch

    for source in (None, 3, torch.nn.Linear(2, 2), shipped, ["models"]):
        with pytest.raises(MIError, match=type(source).__name__):
            MIModel.from_pretrained(source)
    with pytest.raises(MIError, match="save_pretrained"):
        local_path(torch.nn.Linear(2, 2))
    for name in ("", "a" * 300, "/" + "a" * 300, "x/" * 3000, "a\0b", "~nobody-here/model"):
        with pytest.raises(ModelError):
            MIModel.from_pretrained(name)


def test_a_home_folder_is_found(monkeypatch):
    monkeypatch.setenv("HOME", str(LLAMA.parent))
    assert local_path("~/world-llama") == LLAMA


def test_a_folder_that_may_not_be_read(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root reads everything")
    (tmp_path / "closed").mkdir(mode=0)
    with pytest.raises(MIError):
        MIModel.from_pretrained(tmp_path / "closed" / "model")


def test_a_compiled_graph_is_not_opened_as_the_checkpoint_beside_it(shipped, tmp_path):
    """Its weights would make a model without the interventions."""
    spec = HookSpec().intervene("blocks.1.hook_mlp_out", Intervention.Zero())
    shipped.compile(spec, tmp_path / "compiled")
    for source in (tmp_path / "compiled", tmp_path / "compiled" / "model.onnx"):
        with pytest.raises(ModelError, match="is a compiled graph"):
            MIModel.from_pretrained(source)
    answer = HookSpec.load(tmp_path / "compiled" / "spec.safetensors")
    assert answer.sha256 == spec.sha256
