"""No reader follows a link out of the folder it was given, waits for a pipe or reads a device (FINDINGS, part 4, 6)."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf_files import write_small
from packed_files import Form, write_packed
from repository import REPOSITORY

from exporters import adopt, gguf, rwkv, transformers
from exporters.rwkv.checkpoint import read_config
from mionnx import HookSpec, Intervention, MIError, MIModel
from mionnx.graph.hooked_model import KEPT
from mionnx.machine.progress import silent
from mionnx.playground import playground
from mionnx.quantise.quantise import quantise_into
from mionnx.quantise.settings import BLOCK_DTYPES
from mionnx.run.exporting import export

SHIPPED = REPOSITORY / "models" / "world-llama"
OPTIMUM = REPOSITORY / "tests" / "shared" / "foreign" / "optimum"
SECRET = "root:x:0:0: a line of a file that lies elsewhere"
NAMES = [pattern.replace("*", "_20230424") for pattern in KEPT]


def link(place: Path, outside: Path) -> None:
    outside.write_text(SECRET)
    place.symlink_to(outside)


def chain(place: Path, outside: Path) -> None:
    """A link to a link that leads out."""
    link(place.with_name("inner"), outside)
    place.symlink_to("inner")


def pipe(place: Path, outside: Path) -> None:
    os.mkfifo(place)


def device(place: Path, outside: Path) -> None:
    place.symlink_to("/dev/zero")


HOSTILE = [link, chain, pipe, device]


@pytest.fixture
def source(tmp_path) -> Path:
    return tmp_path / "source"


def told(folder: Path) -> list[Path]:
    """Files that hold the secret."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()] if folder.exists() else []
    return [path for path in files if SECRET.encode() in path.read_bytes()]


def replaced(folder: Path, name: str, place: Callable[[Path, Path], None]) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    place(folder / name, folder.parent / "outside")


def beside(source: Path) -> Path:
    return Path(shutil.copytree(OPTIMUM, source))


def above(source: Path) -> Path:
    """A repository of the Hub: the graph in `onnx`, config and tokenizer above it."""
    source.mkdir()
    shutil.copytree(OPTIMUM, source / "onnx")
    for name in KEPT:
        if (source / "onnx" / name).exists():
            (source / "onnx" / name).rename(source / name)
    return source


def hooked(source: Path) -> Path:
    return Path(shutil.copytree(SHIPPED, source))


@pytest.mark.parametrize("layout", [beside, above])
@pytest.mark.parametrize("name", NAMES)
def test_adopt_reads_nothing_outside_its_folder(layout, name, source, tmp_path):
    for place in HOSTILE:
        shutil.rmtree(source, ignore_errors=True)
        replaced(layout(source), name, place)
        with pytest.raises(MIError, match=r"refused|points outside"):
            adopt.adopt(source, tmp_path / "hooked")
        assert told(tmp_path / "hooked") == []


@pytest.mark.parametrize("place", HOSTILE)
def test_the_config_of_genai_is_not_elsewhere(place, source, tmp_path):
    replaced(beside(source), "genai_config.json", place)
    (source / "config.json").unlink()  # which counts where there are both
    with pytest.raises(MIError, match=r"refused|points outside"):
        adopt.adopt(source, tmp_path / "hooked")
    assert told(tmp_path / "hooked") == []


def test_the_hubs_own_cache_is_adopted(tmp_path):
    """Its snapshots are links into blobs beside them."""
    blobs, folder = (tmp_path / "models--a--b" / name for name in ("blobs", "snapshots/0123"))
    for path in (blobs, folder / "onnx"):
        path.mkdir(parents=True)
    for number, path in enumerate(sorted(OPTIMUM.iterdir())):
        shutil.copyfile(path, blobs / str(number))
        inner = "" if path.name in KEPT else "onnx/"
        (folder / inner / path.name).symlink_to(f"../../{'../' * bool(inner)}blobs/{number}")
    adopt.adopt(folder, tmp_path / "hooked")
    assert (tmp_path / "hooked" / "config.json").read_bytes() == (OPTIMUM / "config.json").read_bytes()


@pytest.mark.parametrize("place", HOSTILE)
def test_a_graph_that_is_a_link_out_of_the_folder_is_refused(place, source, tmp_path):
    replaced(beside(source), "model.onnx", place)
    with pytest.raises(MIError):
        adopt.adopt(source, tmp_path / "hooked")


@pytest.mark.parametrize("place", HOSTILE)
def test_a_gguf_file_of_a_folder_is_not_elsewhere(place, source, tmp_path):
    source.mkdir()
    write_small(tmp_path / "m.gguf", {}, {"a": np.zeros(1, np.float32)})
    replaced(source, "m.gguf", place)
    with pytest.raises(MIError, match=r"points outside|holds no GGUF file"):
        gguf.export(source, tmp_path / "hooked")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja"])
def test_a_packed_checkpoint_reads_nothing_outside_its_folder(name, source, tmp_path):
    write_packed(Form("gptq", "gptq"), source)
    for place in HOSTILE:
        replaced(source, name, place)
        with pytest.raises(MIError):
            export(source, tmp_path / "hooked", "int4", silent)
        assert told(tmp_path / "hooked") == []
        (source / "inner").unlink(missing_ok=True)


COPIES = {
    "compile": lambda model, to: model.compile(HookSpec().intervene("hook_embed", Intervention.Scale(2.0)), to),
    "playground": lambda model, to: playground(model, to),
    "quantise": lambda model, to: (to.mkdir(), quantise_into(model.hooked, to, BLOCK_DTYPES["int4"], silent)),
}


@pytest.mark.parametrize("verb", COPIES)
@pytest.mark.parametrize("place", HOSTILE)
def test_what_is_made_of_a_hooked_model_holds_nothing_from_outside(verb, place, source, tmp_path):
    replaced(hooked(source), "chat_template.jinja", place)
    with pytest.raises(MIError, match=r"refused|points outside"):
        COPIES[verb](MIModel.from_pretrained(source), tmp_path / "made")
    assert told(tmp_path / "made") == []


@pytest.mark.parametrize("place", HOSTILE)
def test_texts_of_a_hooked_model_are_not_read_with_rules_from_outside(place, source):
    for name in ("tokenizer.json", "chat_template.jinja", "tokenizer_config.json"):
        shutil.rmtree(source, ignore_errors=True)
        replaced(hooked(source), name, place)
        model = MIModel.from_pretrained(source)
        read = model.tokenize if name == "tokenizer.json" else model.tokenize_chat
        with pytest.raises(MIError):
            read("The capital" if name == "tokenizer.json" else [{"role": "user", "content": "The capital"}])


@pytest.mark.parametrize("place", HOSTILE)
def test_a_world_vocabulary_is_not_read_from_outside(place, source):
    shutil.copytree(REPOSITORY / "models" / "world-rwkv7", source)
    (source / "tokenizer.json").unlink(missing_ok=True)
    replaced(source, "rwkv_vocab_20230424.txt", place)
    with pytest.raises(MIError):
        MIModel.from_pretrained(source).tokenize("The capital")


@pytest.mark.parametrize("place", HOSTILE)
def test_a_config_from_outside_makes_no_checkpoint(place, source, tmp_path):
    """A table that an exporter would know, in a file that lies elsewhere."""
    write_packed(Form("gptq", "gptq"), source)
    known = (source / "config.json").read_text()
    replaced(source, "config.json", place)
    if (tmp_path / "outside").is_file():
        (tmp_path / "outside").write_text(known)
    assert not transformers.recognises(source)
    with pytest.raises(MIError, match=r"refused|points outside"):
        MIModel.from_pretrained(source)
    with pytest.raises(MIError, match=r"refused|points outside"):
        read_config(source)


@pytest.mark.parametrize("place", HOSTILE)
def test_weights_of_rwkv_are_not_those_of_another_folder(place, source, tmp_path):
    shutil.copytree(REPOSITORY / "models" / "world-rwkv7", source)
    (source / "model.onnx").unlink()
    weights = (source / "model.safetensors").read_bytes()
    replaced(source, "model.safetensors", place)
    if (tmp_path / "outside").is_file():
        (tmp_path / "outside").write_bytes(weights)
    with pytest.raises(MIError):
        rwkv.export(source, tmp_path / "hooked")
    assert not (tmp_path / "hooked" / "model.onnx").exists()
