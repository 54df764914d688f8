"""Folders are whole or not there; what killed processes left of them goes, and nothing that a process works on."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from filelock import FileLock

from mionnx.errors import ExportError
from mionnx.machine.leftovers import LOCK_FILE, new_folder, remove_leftovers

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def dead_pid() -> int:
    """The number of a process that is no more."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def left(folder: Path, pid: int, file: str = "converted.safetensors") -> Path:
    """What a process with this number left without a lock."""
    partial = folder / f".llama-0123.{pid}.partial"
    partial.mkdir(parents=True)
    (partial / file).write_bytes(b"half")
    return partial


def in_child(work: Callable[[], None]) -> multiprocessing.process.BaseProcess:
    child = FORK.Process(target=work, daemon=True)
    child.start()
    return child


def test_a_new_folder_is_whole_or_not_there(tmp_path):
    with new_folder(tmp_path / "deep" / "whole", ExportError) as partial:
        (partial / "file").write_text("text")
        assert not (tmp_path / "deep" / "whole").exists()
    assert [path.name for path in (tmp_path / "deep" / "whole").iterdir()] == ["file"]

    def half(reason: BaseException) -> None:
        with new_folder(tmp_path / "deep" / "half", ExportError) as partial:
            (partial / "file").write_text("text")
            raise reason

    with pytest.raises(ExportError, match=r"cannot write .*half.*No space left"):
        half(OSError(28, "No space left on device"))
    with pytest.raises(KeyboardInterrupt):
        half(KeyboardInterrupt())
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["whole"]


def test_two_makers_of_one_process_do_not_meet(tmp_path):
    with new_folder(tmp_path / "one", OSError) as first:
        with new_folder(tmp_path / "one", OSError) as second:
            assert first != second
            assert remove_leftovers(tmp_path) == 0
        (first / "late").write_text("")
        (tmp_path / "one").rename(tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "other"]


def test_what_a_killed_process_left_goes(tmp_path):
    """The lock in it is free, although its name could be that of a living process."""
    ready = FORK.Event()

    def make() -> None:
        with new_folder(tmp_path / "model", OSError) as partial:
            (partial / "weights").write_bytes(b"half")
            ready.set()
            time.sleep(60)

    child = in_child(make)
    assert ready.wait(20)
    assert remove_leftovers(tmp_path) == 0
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    (partial,) = tmp_path.iterdir()
    ours = partial.rename(partial.with_name(f".model.{os.getpid()}.partial"))  # the number is this process' now
    assert remove_leftovers(tmp_path) == 0  # which may be about to take the lock
    os.utime(ours, (time.time() - 10,) * 2)
    assert remove_leftovers(tmp_path) == 1
    assert [*tmp_path.iterdir()] == []


def test_a_lock_that_is_held_counts_more_than_the_number(tmp_path, dead_pid):
    """As the processes of another container have numbers of their own."""
    partial = left(tmp_path, dead_pid)
    with FileLock(partial / LOCK_FILE):
        assert remove_leftovers(tmp_path) == 0
    assert remove_leftovers(tmp_path) == 1


def test_folders_without_a_lock_go_by_the_number(tmp_path, dead_pid):
    mine, dead = left(tmp_path, os.getpid()), left(tmp_path, dead_pid)
    assert remove_leftovers(tmp_path) == 1
    assert (mine.exists(), dead.exists()) == (True, False)
    before = psutil.Process().create_time() - 60  # its maker is dead, and this process got the number later
    for path in [*mine.iterdir(), mine]:
        os.utime(path, (before, before))
    assert remove_leftovers(tmp_path) == 1


def test_what_is_not_left_by_mionnx_stays(tmp_path, dead_pid):
    other = left(tmp_path, dead_pid, "photo.jpg")
    target = tmp_path / "target"
    (target / "data").mkdir(parents=True)
    (tmp_path / f".link.{dead_pid}.partial").symlink_to(target)
    (tmp_path / f".half.{dead_pid}.part").mkdir()
    assert remove_leftovers(tmp_path, holding=("model.onnx", "converted.safetensors")) == 0
    assert [path.exists() for path in (other, target / "data")] == [True, True]
    (other / "converted.safetensors").write_bytes(b"half")
    assert remove_leftovers(tmp_path, holding=("model.onnx", "converted.safetensors")) == 1


def test_partial_files_go_after_an_hour(tmp_path, dead_pid):
    file = tmp_path / f".0123.safetensors.{dead_pid}.partial"
    file.write_bytes(b"half")
    assert remove_leftovers(tmp_path) == 0
    os.utime(file, (time.time() - 4000, time.time() - 4000))
    assert remove_leftovers(tmp_path) == 1


TEMPORARY = "from mionnx.machine.leftovers import temporary_folder as make; print(make(), make() == make()); "


def test_a_temporary_folder_goes_with_its_process(tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", TEMPORARY + "(make() / 'model').mkdir()"]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
    assert (Path(found[0]).parent, found[1]) == (tmp_path, "True")
    assert [*tmp_path.glob(".mionnx*")] == []
    killed = [sys.executable, "-c", TEMPORARY + "import os; (make() / 'model').mkdir(); os.kill(os.getpid(), 9)"]
    assert subprocess.run(killed, env=environment, capture_output=True, check=False).returncode == -9
    assert [path.name for path in tmp_path.glob(".mionnx*/*") if path.is_dir()] == ["model"]
    subprocess.run(command, env=environment, capture_output=True, check=True)
    assert [*tmp_path.glob(".mionnx*")] == []


def test_a_folder_that_is_just_being_finished_is_no_leftover(tmp_path):
    """Whoever tidies up at the moment of the renaming neither removes a file of it nor leaves one in it."""
    going = True

    def tidy() -> None:
        while going:
            remove_leftovers(tmp_path)

    with ThreadPoolExecutor(3) as pool:
        tidying = [pool.submit(tidy) for _ in range(3)]
        try:
            for number in range(300):
                with new_folder(tmp_path / str(number), OSError) as partial:
                    (partial / "value").write_text("1")
                assert [path.name for path in (tmp_path / str(number)).iterdir()] == ["value"], number
        finally:
            going = False
    assert all(one.result() is None for one in tidying)


def test_folders_that_go_while_they_are_looked_at(tmp_path):
    """Other threads finish theirs between the listing and the look: FileNotFoundError until then."""

    def make(number: int) -> None:
        for i in range(60):
            with new_folder(tmp_path / f"{number} {i}", ExportError):
                pass

    with ThreadPoolExecutor(4) as pool:
        makers = [pool.submit(make, number) for number in range(4)]
        while not all(maker.done() for maker in makers):
            assert remove_leftovers(tmp_path, ("manifest.json",), re.compile(".*")) == 0
    assert all(maker.result() is None for maker in makers)
