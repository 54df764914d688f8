"""Atomic writes: a file or folder appears complete, or the target is as it was. Links, and copies in their place."""

import errno
import os

import pytest

from mionnx.errors import ModelError, SpecFileError
from mionnx.machine.files import atomic_path, link_or_copy, make_folder, write_atomic


def test_a_file_is_replaced_whole(tmp_path):
    for data in (b"first", b"second"):
        write_atomic(tmp_path / "file", data)
        assert (tmp_path / "file").read_bytes() == data
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_appears_at_the_end(tmp_path):
    with atomic_path(tmp_path / "folder") as partial:
        partial.mkdir()
        (partial / "inside").write_text("here")
        assert not (tmp_path / "folder").exists()
    assert (tmp_path / "folder" / "inside").read_text() == "here"


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_what_fails_leaves_the_target_as_it_was(tmp_path, error):
    write_atomic(tmp_path / "file", b"old")

    def fail() -> None:
        with atomic_path(tmp_path / "file") as partial:
            partial.write_bytes(b"half")
            raise error

    with pytest.raises(type(error)):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"old"


def test_what_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(SpecFileError, match="cannot write"):
        write_atomic(tmp_path / "none" / "file", b"")
    with pytest.raises(SpecFileError, match="cannot write"):
        write_atomic(tmp_path / "a\0b", b"")
    with pytest.raises(SpecFileError, match="cannot make the folder"):
        make_folder(tmp_path / "file" / "inner")
    with (
        pytest.raises(ModelError, match="cannot write"),
        atomic_path(tmp_path / "none" / "file", ModelError) as partial,
    ):
        partial.write_bytes(b"")


def test_a_file_is_linked_or_copied_with_its_times(tmp_path, monkeypatch):
    """A file system without hard links is one that refuses the call; the copy says how far it is."""
    file, reports = tmp_path / "file", []
    file.write_bytes(b"weights")
    os.utime(file, ns=(1, 10**18))
    link_or_copy(file, tmp_path / "link", lambda *report: reports.append(report))
    assert (tmp_path / "link").samefile(file)
    assert reports == []

    def refuse(*names: object) -> None:
        raise OSError(errno.EXDEV, "another file system")

    monkeypatch.setattr(os, "link", refuse)
    link_or_copy(file, tmp_path / "copy", lambda *report: reports.append(report))
    copy = tmp_path / "copy"
    assert not copy.samefile(file)
    assert (copy.read_bytes(), copy.stat().st_mtime_ns) == (b"weights", 10**18)
    assert reports == [("copying file", 0, 7), ("copying file", 7, 7)]
