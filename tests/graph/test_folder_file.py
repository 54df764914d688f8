"""Devices, pipes, folders and links where a file is expected are refused before a byte is read."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mionnx import ModelError
from mionnx.graph.folder_file import check_regular, inside, parse_json, read_json

OPEN = """
import sys
from pathlib import Path
from mionnx import Directions, HookSpec, Intervention, KVCache, MIError, MIModel
READERS = {
    "model": MIModel.from_pretrained,
    "splice": Intervention.Splice,
    "spec": HookSpec.load,
    "cache": KVCache.load,
    "directions": Directions.load,
    "gguf": Directions.from_gguf,
    "text": lambda path: MIModel.from_pretrained(path).tokenize("The capital"),
}
for reader, path in zip(sys.argv[1::2], sys.argv[2::2]):
    try:
        READERS[reader](path)
    except MIError as error:
        print(reader, type(error).__name__, error, flush=True)
"""


def replace(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")


@pytest.mark.parametrize("kind", ["device", "pipe", "folder"])
def test_what_is_no_file_is_refused_by_every_reader(copy, tmp_path, kind):
    """In a process of its own: a reader that waited for the end of a device or a pipe would not come back."""
    speechless = shutil.copytree(copy, tmp_path / "speechless")
    replace(copy / "model.onnx", kind)
    replace(speechless / "tokenizer.json", kind)
    asked = ["model", str(copy), "text", str(speechless)]
    for reader in ("splice", "spec", "cache", "directions", "gguf"):
        replace(tmp_path / reader, kind)
        asked += [reader, str(tmp_path / reader)]
    ran = subprocess.run([sys.executable, "-c", OPEN, *asked], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert [line.split()[0] for line in ran.stdout.splitlines()] == asked[::2], ran.stdout


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/passwd", "", ".", "..", "a\0b", "link", "x" * 5000, "inner/../../secret"]
)
def test_names_that_lead_out_of_a_folder(tmp_path, name):
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "secret").write_text("secret")
    (folder / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(ModelError):
        inside(folder, name)


def test_files_and_links_inside_a_folder(tmp_path):
    (tmp_path / "file").write_text("1")
    (tmp_path / "link").symlink_to("file")
    assert inside(tmp_path, "file") == inside(tmp_path, "link") == (tmp_path / "file").resolve()


def test_blobs_that_are_a_link_out_of_the_hub_cache(tmp_path):
    folder = tmp_path / "cache" / "snapshots" / "0123"
    folder.mkdir(parents=True)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "secret").write_text("secret")
    (tmp_path / "cache" / "blobs").symlink_to(tmp_path / "home")
    (folder / "file").symlink_to("../../blobs/secret")
    with pytest.raises(ModelError, match="points outside"):
        inside(folder, "file")


def test_a_large_file_is_refused_before_it_is_read(tmp_path):
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(2**40)
    began = time.process_time()
    with pytest.raises(ModelError, match="1,099,511,627,776 bytes"):
        read_json(tmp_path / "large.json")
    with pytest.raises(ModelError, match="more than the 10"):
        check_regular(tmp_path / "large.json", 10)
    assert time.process_time() - began < 1


@pytest.mark.parametrize("text", ["[" * 10**6, '{"a":' * 10**5, "1" * 5000, "{", b"\xff\xfe\xff", "[1,]"])
def test_json_that_no_parser_follows(text):
    with pytest.raises(ModelError):
        parse_json(text)
