"""Checkpoints from somebody else: none of their code runs, no file outside their folder is read."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import LLAMA, RWKV
from safetensors.numpy import save_file

from exporters.checkpoint_tensors import read_tensors
from mionnx import ExportError, MIModel
from mionnx.machine.progress import silent
from mionnx.run import exporting

CODE = """
from pathlib import Path
Path({sentinel!r}).write_text("executed")
from transformers import LlamaConfig as OwnConfig, LlamaForCausalLM as OwnModel
"""
OPEN = """
import sys
from mionnx import MIError, MIModel
for folder in sys.argv[1:]:
    try:
        MIModel.from_pretrained(folder)
        print("opened", flush=True)
    except MIError as error:
        print(type(error).__name__, error, flush=True)
"""


def without_graph(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.onnx")))


@pytest.fixture
def llama(tmp_path) -> Path:
    """The checkpoint of the small trained Llama."""
    return without_graph(LLAMA, tmp_path / "llama")


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def bring_code(folder: Path, sentinel: Path, **changes: object) -> None:
    """A module that writes a file when it is imported, and a config that names its classes."""
    (folder / "own.py").write_text(CODE.format(sentinel=str(sentinel)))
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    edit_json(folder / "config.json", auto_map=auto_map, **changes)
    tokenizer = {"auto_map": {"AutoTokenizer": ["own.Slow", None]}, "tokenizer_class": "Slow"}
    edit_json(folder / "tokenizer_config.json", **tokenizer)


def opened(store: Path, *folders: Path) -> list[str]:
    """`echo y | python -c ...`: folders are opened in one process that says yes to whatever is asked."""
    known = {**os.environ, "MIONNX_CACHE": str(store), "HF_HOME": str(store / "hf")}
    command = [sys.executable, "-c", OPEN, *map(str, folders)]
    ran = subprocess.run(command, input="y\n" * 9, capture_output=True, text=True, env=known, timeout=300)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "[y/N]" not in ran.stdout + ran.stderr
    return [line for line in ran.stdout.splitlines() if line.startswith(("opened", "ExportError", "ModelError"))]


def test_code_of_a_checkpoint_is_neither_executed_nor_asked_about(tmp_path):
    """A model type of its own, and an architecture of its own."""
    one, other = (without_graph(LLAMA, tmp_path / name) for name in ("one", "other"))
    bring_code(one, tmp_path / "sentinel", model_type="own")
    bring_code(other, tmp_path / "sentinel", architectures=["OwnModel"])
    said = opened(tmp_path / "store", one, other)
    assert not (tmp_path / "sentinel").exists()
    assert ["never run" in line for line in said] == [True, True], said


@pytest.mark.slow
def test_a_known_architecture_opens_without_the_code(llama, tmp_path):
    bring_code(llama, tmp_path / "sentinel")
    assert opened(tmp_path / "store", llama) == ["opened"]
    assert not (tmp_path / "sentinel").exists()


@pytest.mark.parametrize("kind", ["relative", "absolute", "in a folder", "a number", "through a link"])
@pytest.mark.parametrize("stem", ["model.safetensors", "pytorch_model.bin"])
def test_a_shard_outside_the_folder_is_refused(tmp_path, stem, kind):
    folder, secret = tmp_path / "checkpoint", tmp_path / "outside" / "secret.safetensors"
    for path in (folder / "inner", secret.parent):
        path.mkdir(parents=True)
    save_file({"secret": np.ones(4, np.float32)}, secret)
    shutil.copy(secret, folder / "inner" / secret.name)
    (folder / "link.safetensors").symlink_to(secret)
    names = {
        "relative": "../outside/secret.safetensors",
        "absolute": str(secret),
        "in a folder": "inner/secret.safetensors",
        "a number": 3,
        "through a link": "link.safetensors",
    }
    (folder / f"{stem}.index.json").write_text(json.dumps({"weight_map": {"secret": names[kind]}}))
    with pytest.raises(ExportError, match="refused"):
        read_tensors(folder, tmp_path)


def test_one_weight_file_that_is_a_link_out_of_the_folder_is_refused(llama, tmp_path):
    (llama / "model.safetensors").rename(tmp_path / "secret.safetensors")
    (llama / "model.safetensors").symlink_to(tmp_path / "secret.safetensors")
    with pytest.raises(ExportError, match=r"leads to .*secret"):
        read_tensors(llama, tmp_path)


def snapshot(source: Path, cache: Path) -> Path:
    """A folder as the Hub's cache has it: links into the blobs of the repository."""
    blobs, folder = cache / "models--a--b" / "blobs", cache / "models--a--b" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    folder.mkdir(parents=True)
    for number, path in enumerate(sorted(path for path in source.iterdir() if path.is_file())):
        shutil.copyfile(path, blobs / f"{number:064x}")
        (folder / path.name).symlink_to(f"../../blobs/{number:064x}")
    return folder


@pytest.mark.slow
def test_a_weight_of_fractions_whose_header_says_integers_is_refused(llama, tmp_path):
    """FINDINGS, part 4, 4: its bits were taken as integers."""
    data = (llama / "model.safetensors").read_bytes()
    assert b'"dtype":"F32"' in data
    (llama / "model.safetensors").write_bytes(data.replace(b'"dtype":"F32"', b'"dtype":"I32"', 1))
    with pytest.raises(ExportError, match="int32 in the checkpoint, where the model has fractions"):
        exporting.export(llama, tmp_path / "hooked", "float32", silent)


def test_links_into_the_blobs_of_the_hub_cache_are_followed(tmp_path):
    """A checkpoint and a hooked model, as `snapshot_download` leaves them."""
    folder = snapshot(LLAMA, tmp_path / "cache")
    assert len(read_tensors(folder, tmp_path)) > 30
    ids = np.arange(3, 9)[None]
    found = MIModel.from_pretrained(folder).forward(ids).output()
    assert np.array_equal(found, MIModel.from_pretrained(LLAMA).forward(ids).output())


def test_a_checkpoint_in_the_hub_cache_is_exported(tmp_path):
    source = without_graph(RWKV, tmp_path / "source")
    folder = snapshot(source, tmp_path / "cache")
    exporting.export(folder, tmp_path / "hooked", "float32", silent)
    assert (tmp_path / "hooked" / "model.safetensors").is_file()
    assert MIModel.from_pretrained(tmp_path / "hooked").num_layers == 4


class Hostile:
    """Unpickled by a careless reader, it writes a file."""

    def __init__(self, sentinel: Path) -> None:
        self.sentinel = sentinel

    def __reduce__(self) -> tuple[object, ...]:
        return Path.write_text, (self.sentinel, "executed")


@pytest.mark.parametrize("how", ["torch", "pickle", "no tensors"])
def test_code_in_a_bin_is_refused(llama, tmp_path, how):
    (llama / "model.safetensors").unlink()
    file, hostile = llama / "pytorch_model.bin", {"model.norm.weight": Hostile(tmp_path / "sentinel")}
    if how == "pickle":
        file.write_bytes(pickle.dumps(hostile))
    else:
        torch.save(hostile if how == "torch" else {"model.norm.weight": "text"}, file)
    with pytest.raises(ExportError, match=r"pytorch_model\.bin"):
        exporting.export(llama, tmp_path / "hooked", "float32", silent)
    assert not (tmp_path / "sentinel").exists()


@pytest.mark.slow
def test_devices_and_pipes_in_a_checkpoint(tmp_path):
    """None of them is read: a process that did would not end."""
    folders = []
    for name in ("config.json", "model.safetensors", "vocab.txt", "model.safetensors.index.json"):
        for kind in ("device", "pipe"):
            folders.append(without_graph(LLAMA, tmp_path / f"{name} {kind}"))
            for file in {name, "model.safetensors"}:  # an index is read where there is no single file
                (folders[-1] / file).unlink(missing_ok=True)
            if kind == "pipe":
                os.mkfifo(folders[-1] / name)
            else:
                (folders[-1] / name).symlink_to("/dev/zero")
    said = opened(tmp_path / "store", *folders)
    assert len(said) == len(folders)
    assert {line.partition(" ")[0] for line in said} == {"ExportError", "ModelError"}, said


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", "[" * 100_000 + "]" * 100_000),
        ("config.json", '{"model_type": "llama", "a":' + "[" * 100_000 + "]" * 100_000 + "}"),
        ("config.json", '{"model_type": "llama", "hidden_size": "large"}'),
        ("config.json", '{"model_type": "llama", "num_hidden_layers": 1000000000}'),
        ("model.safetensors.index.json", '{"weight_map": ' + "[" * 100_000 + "]" * 100_000 + "}"),
        ("model.safetensors.index.json", '{"weight_map": []}'),
        ("model.safetensors.index.json", '{"weight_map": {"a": null}}'),
    ],
    ids=["nested", "nested inside", "text for a number", "a billion layers", "nested index", "list", "null"],
)
def test_absurd_tables_are_refused(llama, tmp_path, file, content):
    (llama / file).write_text(content)
    if file != "config.json":  # an index is read where there is no single file
        (llama / "model.safetensors").unlink()
    with pytest.raises(ExportError):
        exporting.export(llama, tmp_path / "hooked", "float32", silent)


def test_what_is_thrown_in_an_export_is_one_sentence(llama, tmp_path, monkeypatch):
    """Of the config alone too, where no weight contradicts it; Ctrl-C is no damage."""
    linear = {"rope_type": "linear", "rope_theta": 1e4, "factor": "x"}
    for changes in ({"rope_parameters": linear}, {"pad_token_id": 10**9}):
        shutil.rmtree(tmp_path / "changed", ignore_errors=True)
        edit_json(Path(shutil.copytree(llama, tmp_path / "changed")) / "config.json", **changes)
        with pytest.raises(ExportError, match=r"cannot export .*changed: (TypeError|AssertionError): "):
            exporting.export(tmp_path / "changed", tmp_path / "hooked", "float32", silent, graph_only=True)

    def stopped(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(exporting.exporter_for(llama), "export", stopped)
    with pytest.raises(KeyboardInterrupt):
        exporting.export(llama, tmp_path / "hooked", "float32", silent)
