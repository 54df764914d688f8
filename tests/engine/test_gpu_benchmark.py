"""The programs of `benchmarks/gpu`: parts, the cut wheel, and every step on tiny shapes on the CPU."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from repository import REPOSITORY

FOLDER = REPOSITORY / "benchmarks" / "gpu"


@pytest.fixture
def programs(monkeypatch):
    """The folder's modules can be imported."""
    monkeypatch.syspath_prepend(str(FOLDER))


def test_parts_are_joined_and_checked(programs, tmp_path):
    import parts

    base, target = tmp_path / "base", tmp_path / "target"
    contents = {"a/one.bin": bytes(range(250)) * 7, "two.bin": b"", "three.bin": b"abc" * 100, "same.bin": b"abc" * 100}
    for name, content in contents.items():
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_bytes(content)
    made = parts.split([base / name for name in contents], tmp_path / "parts", base, 600)
    assert [one.name for one in made] == ["1", "2", "3", "4"]
    assert all(sum(file.stat().st_size for file in one.glob("*-*")) <= 600 for one in made)
    assert {
        str(file.relative_to(target)): file.read_bytes() for file in parts.join(tmp_path / "parts", target)
    } == contents
    piece = made[1] / "1-1"
    piece.write_bytes(piece.read_bytes()[::-1])
    with pytest.raises(SystemExit, match=r"one\.bin is damaged"):
        parts.join(tmp_path / "parts", target)
    piece.unlink()
    with pytest.raises(SystemExit, match=r"one\.bin lacks .*1-1: bring that part too"):
        parts.join(tmp_path / "parts", target)


def test_a_wheel_keeps_one_architecture(programs, tmp_path):
    import slim_wheel

    def image(architecture, size):
        header = slim_wheel.INNER.pack(2, 0x101, 64, size, 0, 0, 0, 0, architecture)
        return header + bytes(64 - len(header)) + bytes([architecture]) * size

    inner = image(80, 40) + image(90, 24)
    library = b"ELF" * 11 + slim_wheel.OUTER.pack(slim_wheel.MAGIC, 1, 16, len(inner)) + inner + b"end"
    with zipfile.ZipFile(tmp_path / "whole.whl", "w") as wheel:
        wheel.writestr(slim_wheel.LIBRARY, library)
        wheel.writestr("x.dist-info/RECORD", f"{slim_wheel.LIBRARY},sha256=x,1\nother,,\n")
    assert slim_wheel.slim(tmp_path / "whole.whl", tmp_path / "cut.whl", 90) == {80: 40, 90: 24}
    with zipfile.ZipFile(tmp_path / "cut.whl") as wheel:
        assert wheel.read(slim_wheel.LIBRARY) == library.replace(bytes([80]) * 40, bytes(40))
        assert f",{len(library)}\nother,,\n" in wheel.read("x.dist-info/RECORD").decode()
    with pytest.raises(SystemExit, match=r"has code for \[80, 90\], not for 75"):
        slim_wheel.slim(tmp_path / "whole.whl", tmp_path / "none.whl", 75)


@pytest.mark.slow
def test_every_step_runs_on_tiny_shapes(tmp_path):
    work, out = tmp_path / "work", tmp_path / "out"

    def run(program, *arguments):
        command = [sys.executable, FOLDER / program, *arguments]
        ran = subprocess.run(command, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]

    run("gather.py", "--tiny", "--no-wheels", "--no-test-models", "--parts", tmp_path / "parts")
    run("run.py", "install", "--parts", tmp_path / "parts", "--work", work)
    steps = ["verify", "generation", "forward", "sweeps", "memory", "profile"]
    run("run.py", "--provider", "cpu", "--tiny", "--work", work, "--out", out, "--only", *steps)
    found = json.loads((out / "rows.json").read_text())
    assert {step: end.partition(" (")[0] for step, end in found["ends"].items()} == dict.fromkeys(steps, "done")
    assert all(found["rows"][step] for step in steps)
    cells = [cell for step in ("generation", "forward") for row in found["rows"][step] for cell in row]
    assert "failed" not in cells
    assert max(float(row[-1]) for row in found["rows"]["forward"]) < 1e-3
    assert max(float(row[-1]) for row in found["rows"]["sweeps"]) < 1e-4
    assert (out / "gpu.md").read_text().count("\n## ") == len(steps)
    assert Path(out / "log.txt").stat().st_size
