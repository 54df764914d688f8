"""Texts of files and folders come in their order; a dataset that cannot be read is refused by what is wrong with it."""

import json
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mionnx import InputError
from mionnx.analysis.harvest.texts import Texts


def test_a_folder_is_its_files_by_name_and_can_be_gone_through_again(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("third\n\n  \nfourth\n")  # blank lines are no texts
    (tmp_path / "a.jsonl").write_text('"first"\n{"text": "second", "id": 7}\n')
    (tmp_path / "notes.md").write_text("no text of the dataset")
    texts = Texts(tmp_path)
    assert [*texts] == [*texts] == ["first", "second", "third", "fourth"]
    assert (texts.again, texts.count) == (True, 0)  # it has not been read, and so not counted
    assert [*Texts(str(tmp_path / "a.jsonl"))] == ["first", "second"]


def test_lists_are_counted_and_iterators_are_gone_through_once() -> None:
    assert (Texts(["x", "y"]).count, Texts(["x", "y"]).again) == (2, True)
    once = Texts(iter(["x", "y"]))
    assert (once.count, once.again) == (0, False)
    assert [*once] == ["x", "y"]


def splits(folder: Path) -> None:
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))


def other_files(folder: Path) -> None:
    (folder / "notes.md").write_text("x")


def test_an_encoding_is_no_list_of_its_keys() -> None:
    for encoding in ({"input_ids": [[5, 6]], "attention_mask": [[1, 1]]}, UserDict(input_ids=[[5, 6]])):
        with pytest.raises(InputError, match="a dictionary's are its keys, 'input_ids'"):
            Texts(encoding)
    assert [*Texts([{"input_ids": [5, 6]}])] == [{"input_ids": [5, 6]}]


@pytest.mark.parametrize(
    ("make", "name", "message"),
    [
        (splits, "", r"has splits: choose one, .*train, .*test"),
        (other_files, "", r"holds no texts: .txt, .jsonl"),
        (other_files, "notes.md", r"notes.md: texts come in .txt, .jsonl"),
        (other_files, "a.txt", "is no file and no folder"),
        (other_files, "x" * 5000, "is no file and no folder"),
    ],
)
def test_what_is_no_dataset_is_refused(tmp_path: Path, make: Callable[[Path], None], name: str, message: str) -> None:
    make(tmp_path)
    with pytest.raises(InputError, match=message):
        Texts(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", b'"x"\nx\n', "a.jsonl, line 2 is no JSON"),
        ("a.jsonl", b'{"story": "x"}\n', "line 1 has no 'text'"),
        ("a.txt", b"caf\xe9\n", "a.txt cannot be read"),
        ("a.parquet", b"PAR1", "a.parquet cannot be read"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, data: Any, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError, match=message):
        [*Texts(tmp_path / name)]


def test_a_column_needs_a_table(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    for source in (["x"], tmp_path / "a.txt", tmp_path):
        with pytest.raises(InputError, match="only tables and JSON lines have columns"):
            Texts(source, "story")
    (tmp_path / "b.jsonl").write_text('{"story": "y"}')
    assert [*Texts(tmp_path, "story")] == ["x", "y"]
