"""Tests and measurements on a machine with a GPU and without a network: the important first, each step by itself.

    python benchmarks/gpu/run.py install [--parts FOLDER]      join the parts of gather.py, install the wheels
    python benchmarks/gpu/run.py [--only STEP ..] [--budget 25] [--out FOLDER]
    python benchmarks/gpu/run.py --provider cpu --tiny         everything, small, where there is no GPU

A step is a process with a time limit: what it wrote before it crashed or ran out of time stays, with the reason below
its table. `OUT/gpu.md` and `OUT/rows.json` are written after every step. Steps that are done are not run again
(`--again`); `--rows FILE` takes up those of another machine.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
sys.path[:0] = [str(HERE)]

import parts  # noqa: E402


@dataclass(frozen=True)
class Step:
    """A step: its heading, columns and seconds at most."""

    heading: str
    columns: tuple[str, ...]
    seconds: int
    said: str = ""


SPEEDS = ("over plain", "eager / mionnx", "sdpa / mionnx")
STEPS: dict[str, Step] = {
    "environment": Step("Machine", ("what", "is"), 90),
    "tests": Step("Tests on the device", ("test", "outcome", "why"), 300),
    "families": Step(
        "Every family, small and random, beside the CPU in float32",
        ("family", "hook points", "largest difference", "same bits with all captured", "same text", "on the CPU"),
        240,
    ),
    "verify": Step("CPU, CUDA and torch beside each other", ("model", "dtype", "tolerance", "said"), 180),
    "generation": Step(
        "Generation, 64 tokens after 32, tokens a second",
        ("model", "dtype", "batch", "case", "mionnx", "CUDA graphs", *SPEEDS, "same ids as sdpa"),
        360,
        "Ratios are of seconds: above 1 in the last two, mionnx is faster.",
    ),
    "forward": Step(
        "Forward passes, milliseconds",
        ("model", "dtype", "batch x tokens", "case", "mionnx", "CUDA graphs", *SPEEDS, "logits apart"),
        300,
        "Captures and logits stay on the device, in mionnx and in torch; with CUDA graphs they are copied to the CPU, "
        "all logits too, and that is timed. `every` is all of "
        "mionnx' hook points, and the output of every module (with eager, attention patterns too) in torch.",
    ),
    "sweeps": Step(
        "Patching sweeps at 64 tokens, seconds",
        ("model", "dtype", "over", "cells", "mionnx, first", "again", "torch", "ratio", "again", "largest difference"),
        300,
        "Torch runs one forward pass a cell with hooks, eager, as TransformerLens' patching does; its time is that of "
        "a sample times the share. The first sweep opens its graphs.",
    ),
    "opening": Step(
        "A new structure to its first logits, seconds",
        ("model", "dtype", "model and first logits", "first rewritten", "second rewritten", "other values, ms"),
        150,
    ),
    "memory": Step(
        "Memory of eight variants, GiB",
        ("model", "dtype", "weights", "one variant", "eight", "ratio", "open"),
        120,
    ),
    "profile": Step(
        "Profiles",
        ("model", "call", "kind", "what", "count", "ms", "share"),
        180,
        "Kernels and copies by torch's profiler, which sees those of ONNX Runtime in the same process; shares of the "
        "wall clock. Python's functions by their own time, under a profiler that slows them.",
    ),
}
WHERE = "import nvidia; print('\\n'.join(nvidia.__path__))"


@dataclass(frozen=True)
class Machine:
    """What the steps are given.

    Attributes:
        provider: "cuda" or "cpu".
        tiny: whether the shapes are tiny ones.
        work: a folder that outlasts this process: wheels' site, graphs, weights, rows.
        out: a folder for the tables.
    """

    provider: str
    tiny: bool
    work: Path
    out: Path

    def environment(self) -> dict[str, str]:
        """Environment variables of a step."""
        paths = [str(self.work / "site"), str(REPOSITORY), str(HERE), os.environ.get("PYTHONPATH", "")]
        libraries = [*self._libraries(), os.environ.get("LD_LIBRARY_PATH", "")]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries)),
            "MIONNX_CACHE": str(self.work / "cache"),
            "MIONNX_TEST_MODELS": str(self.work / "tests"),
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
        }

    def _libraries(self) -> list[str]:
        """Folders of the CUDA and cuDNN libraries that came with torch."""
        found = subprocess.run([sys.executable, "-c", WHERE], capture_output=True, text=True).stdout.split()
        return sorted({str(one.parent) for root in found for one in Path(root).glob("*/lib/lib*.so*")})

    def rows(self, step: str) -> Path:
        """The file of a step's rows."""
        return self.work / "rows" / f"{step}.jsonl"


def install(folder: Path, work: Path) -> None:
    """Join the parts, and install the wheels into a folder of their own, which goes before all others."""
    made = parts.join(folder, work)
    wheels = [str(one) for one in made if one.suffix == ".whl"]
    if wheels:
        options = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--upgrade", "--target", work / "site"]
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", *options, *wheels], check=True)
    print(f"{len(made)} files, {len(wheels)} wheels in {work}")


def command_of(step: str, machine: Machine) -> list[str]:
    """The command of a step."""
    if step == "environment":
        return [sys.executable, str(HERE / "environment.py"), machine.provider]
    if step == "tests":
        marked = "gpu" if machine.provider == "cuda" else "not slow and not gpu"
        chosen = ["-k", "llama or knockout or lens"] if machine.tiny else []
        workers = ["-p", "no:xdist"] if machine.tiny else ["-n", "8", "--dist", "worksteal"]
        options = [*workers, "-o", "addopts=--import-mode=importlib", "-m", marked, *chosen, "-rA", "--tb=short"]
        return [sys.executable, "-m", "pytest", "tests/engine/test_cuda.py", *options]
    words = [
        sys.executable,
        str(HERE / "steps.py"),
        step,
        "--to",
        str(machine.rows(step)),
        "--provider",
        machine.provider,
    ]
    words += ["--graphs", str(machine.work / "graphs"), "--work", str(machine.work / "weights")]
    return [*words, *(["--tiny"] if machine.tiny else [])]


def run_step(step: str, machine: Machine, seconds: float) -> str:
    """Run a step; returns what became of it."""
    machine.rows(step).parent.mkdir(parents=True, exist_ok=True)
    machine.rows(step).unlink(missing_ok=True)
    begin = time.monotonic()
    log = machine.work / f"{step}.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            command_of(step, machine), cwd=REPOSITORY, env=machine.environment(), stdout=file,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(max(seconds, 1))
            end = "done" if code == 0 or step == "tests" else f"ended with {code}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            end = f"stopped after {seconds:.0f} s"
    if step in ("environment", "tests"):
        _rows_of_output(step, machine, log.read_text(errors="replace"))
    if end != "done":
        last = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        end += ": " + " ".join(last[-3:])[-500:]
    return f"{end} ({time.monotonic() - begin:.0f} s)"


def _rows_of_output(step: str, machine: Machine, text: str) -> None:
    """The rows of steps that print them."""
    rows: list[list[str]] = []
    for line in text.splitlines():
        if step == "environment" and ": " in line:
            rows.append([*line.split(": ", 1)])
        elif step == "tests" and line.startswith(("PASSED ", "FAILED ", "ERROR ")):
            outcome, _, rest = line.partition(" ")
            name, _, why = rest.partition(" - ")
            rows.append([name.rpartition("::")[2], outcome.lower(), why[:300]])
        elif step == "tests" and line.startswith("=") and (" passed" in line or " failed" in line):
            rows.append(["all", line.strip("= "), ""])
    with machine.rows(step).open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def write(machine: Machine, ends: dict[str, str]) -> None:
    """Write all tables, and all rows."""
    machine.out.mkdir(parents=True, exist_ok=True)
    found = {step: _read(machine.rows(step)) for step in STEPS}
    lines = ["# On a GPU", f"{platform.node() and platform.machine()}, Python {platform.python_version()}; "
             f"provider {machine.provider}{', tiny shapes' * machine.tiny}; `benchmarks/gpu/run.py`."]  # fmt: skip
    for step, rows in found.items():
        if not rows and step not in ends:
            continue
        about = STEPS[step]
        lines += ["", f"## {about.heading}", *([about.said] if about.said else []), ""]
        table = [about.columns, ["---"] * len(about.columns), *rows]
        lines += [" | ".join(str(cell).replace("|", "/").replace("\n", " ") for cell in row) for row in table]
        if not ends.get(step, "done").startswith("done"):
            lines += ["", f"Not finished: {ends[step]}"]
    (machine.out / "gpu.md").write_text("\n".join(lines) + "\n")
    (machine.out / "rows.json").write_text(json.dumps({"rows": found, "ends": ends}, indent=1))
    logs = [
        f"==== {one.stem}\n{one.read_text(errors='replace')[-200_000:]}" for one in sorted(machine.work.glob("*.log"))
    ]
    (machine.out / "log.txt").write_text("\n".join(logs))


def _read(path: Path) -> list[list[str]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("]")]


def take_up(machine: Machine, file: Path) -> dict[str, str]:
    """Write down the rows of another machine; returns what became of its steps."""
    known = json.loads(file.read_text())
    for step, rows in known["rows"].items():
        machine.rows(step).parent.mkdir(parents=True, exist_ok=True)
        machine.rows(step).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return dict(known["ends"])


def main() -> None:
    """Install, or run the steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", default="run", choices=("run", "install"))
    parser.add_argument("--parts", type=Path, default=HERE / "parts")
    parser.add_argument("--work", type=Path, default=Path("/tmp/mionnx-gpu"))
    parser.add_argument("--out", type=Path, default=Path("/tmp/mionnx-gpu/out"))
    parser.add_argument("--provider", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", nargs="+", choices=STEPS, default=[*STEPS])
    parser.add_argument("--again", action="store_true", help="run steps that are done too")
    parser.add_argument("--budget", type=float, default=25, help="minutes of all steps together")
    parser.add_argument("--rows", type=Path, help="rows.json of an earlier run")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    if options.what == "install":
        install(options.parts, options.work)
        return
    machine = Machine(options.provider, options.tiny, options.work, options.out)
    kept = options.work / "ends.json"
    ends = take_up(machine, options.rows) if options.rows else json.loads(kept.read_text()) if kept.exists() else {}
    deadline = time.monotonic() + options.budget * 60
    for step in options.only:
        left = deadline - time.monotonic() - 5
        if (ends.get(step, "").startswith("done") and not options.again) or left < 15:
            print(f"{step}: {'no time left' if left < 15 else 'done before'}", flush=True)
            continue
        ends[step] = run_step(step, machine, min(left, STEPS[step].seconds))
        print(f"{step}: {ends[step]}", flush=True)
        kept.write_text(json.dumps(ends))
        write(machine, ends)
    write(machine, ends)
    print((machine.out / "gpu.md").read_text())


if __name__ == "__main__":
    main()
