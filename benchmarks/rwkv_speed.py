"""mionnx beside the `rwkv` package on a CPU: prefill and decode, RWKV-4, RWKV-6 and RWKV-7, one thread and all.

    python benchmarks/rwkv_speed.py [--hidden 512] [--layers 12] [--repeats 5] [--save]

Both run in one process, by turns, on the same random checkpoint; each figure is a median. The package reads the version
from the environment when it is imported, so each version has a process of its own. `--save` writes
benchmarks/results/rwkv_speed.md.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
from rich.progress import track
from tables import present

HERE = Path(__file__).parent
LENGTHS = (128, 512, 2048)
DECODED = 32
VOCAB = 4096
COLUMNS = ("model", "threads", "what", "rwkv package", "mionnx", "ratio")


def measure(version: int, threads: int, hidden: int, layers: int, repeats: int) -> list[dict[str, float | str]]:
    """Rows of one process: seconds of both programs, prefill of each length and decoding after."""
    sys.path.insert(0, str(HERE.parent / "tests" / "shared"))
    import torch
    from rwkv.model import RWKV
    from rwkv_checkpoints import blinkdl, write

    from exporters.rwkv import export
    from mionnx import MIModel

    torch.set_num_threads(threads)
    rows: list[dict[str, float | str]] = []
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "checkpoint", Path(folder) / "hooked"
        write(f"{version}-pth", source, blinkdl(version, hidden=hidden, layers=layers, vocab=VOCAB))
        export(source, target)
        package = RWKV(str(source / "model"), "cpu fp32")
        model = MIModel.from_pretrained(target, threads=threads)
        for length in LENGTHS:
            ids = np.random.default_rng(length).integers(0, VOCAB, length)
            tokens = ids.tolist()

            def ours(ids: np.ndarray = ids) -> None:
                model.forward(ids)

            def theirs(tokens: list[int] = tokens) -> None:
                package.forward(tokens, None, full_output=True)

            rows.append({"what": f"prefill {length}", **alternate(theirs, ours, repeats)})
            state = model.forward(ids).state
            begun = package.forward(tokens, None)[1]

            def our_decoding(state: object = state) -> None:
                for token in range(DECODED):
                    state = model.forward([token], initial_state=state).state

            def their_decoding(begun: list = begun) -> None:
                state = [part.clone() for part in begun]
                for token in range(DECODED):
                    _, state = package.forward([token], state)

            rows.append(
                {"what": f"decode after {length}, a token", **alternate(their_decoding, our_decoding, repeats, DECODED)}
            )
    return rows


def alternate(theirs: Callable[[], None], ours: Callable[[], None], repeats: int, units: int = 1) -> dict[str, float]:
    """Median seconds of both per unit, by turns after a warm-up; median ratio of neighbours."""
    times: dict[str, list[float]] = {"theirs": [], "ours": []}
    for turn in range(repeats + 1):
        for name, program in (("theirs", theirs), ("ours", ours)):
            begin = time.perf_counter()
            program()
            if turn:
                times[name].append((time.perf_counter() - begin) / units)
    ratio = median(theirs / ours for theirs, ours in zip(times["theirs"], times["ours"], strict=True))
    return {"theirs": median(times["theirs"]), "ours": median(times["ours"]), "ratio": ratio}


def spell(seconds: float) -> str:
    """Milliseconds."""
    return f"{seconds * 1000:.1f} ms"


def run(version: int, threads: int, options: argparse.Namespace) -> list[tuple[str, ...]]:
    """The rows of one process."""
    command = [sys.executable, __file__, "--measure", f"{version},{threads}", "--hidden", str(options.hidden)]
    command += ["--layers", str(options.layers), "--repeats", str(options.repeats)]
    environment = {**os.environ, "RWKV_V7_ON": str(int(version == 7)), "RWKV_CUDA_ON": "0", "RWKV_JIT_ON": "1"}
    found = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    rows = json.loads(found.splitlines()[-1])
    return [
        (
            f"RWKV-{version}",
            str(threads),
            str(row["what"]),
            spell(row["theirs"]),
            spell(row["ours"]),
            f"{row['ratio']:.2f}",
        )
        for row in rows
    ]


def main() -> None:
    """Measure everything and print the table."""
    parser = argparse.ArgumentParser(description="mionnx beside the rwkv package on a CPU.")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        version, threads = map(int, options.measure.split(","))
        print(json.dumps(measure(version, threads, options.hidden, options.layers, options.repeats)))
        return
    cores = os.cpu_count() or 1
    jobs = [(version, threads) for version in (4, 6, 7) for threads in dict.fromkeys((1, cores))]
    rows = [row for job in track(jobs, "measuring") for row in run(*job, options)]
    title = f"hidden {options.hidden}, {options.layers} layers, fp32, {cores} cores; medians of {options.repeats}"
    title += f"; {platform.processor() or platform.machine()}"
    said = "A ratio above 1 means that mionnx is ahead."
    present("rwkv_speed", "mionnx beside the rwkv package", title, [(COLUMNS, rows)], options.save, said)


if __name__ == "__main__":
    main()
