"""Lists of unequal texts, short ones with one long one among them and a mixture: one padded batch, and several.

    pip install -e ".[cpu]"
    python benchmarks/batching_speed.py [--rows 1000] [--short 6] [--long 128] [--mixed 200] [--repeats 3]
        [--model MODEL] [--save]

`forward` over a list, the residual stream after every layer and the logits at the last position of each text, of the
models that ship: of `--rows` short texts with one long one, and of `--mixed` texts of any length between. Each figure
is from a process of its own, with one thread: processor seconds of the pass, the median, the model open and run once
before; and the growth of the resident memory over it. What each text gives is compared with what it gives alone, for
the text in the middle and some others.

`--save` writes benchmarks/results/batching_speed.md.
"""

import argparse
import json
import platform
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
from rich.progress import track
from tables import present

from mionnx import HookSpec, Logits, MIModel
from mionnx.run.batching import batches_of

MODELS = ("world-llama", "world-rwkv7")
SIZES = (None, 32, "auto")
HEAD = ("model", "batch_size", "batches", "processor s", "texts / s", "MB", "differs by, relative")
SPEC = HookSpec().capture("*.hook_resid_post", positions=-1)
COMPARED = 8


def texts_of(given: argparse.Namespace, mixed: bool, vocabulary: int) -> list[np.ndarray]:
    """Rows of ids: of any length, or short ones with a long one in the middle."""
    random = np.random.default_rng(0)
    lengths = random.integers(given.short, given.long, given.mixed) if mixed else np.full(given.rows, given.short)
    lengths[len(lengths) // 2] = given.long
    return [random.integers(3, vocabulary, length) for length in lengths]


def measured(name: str, size: Any, mixed: bool, given: argparse.Namespace) -> dict[str, float]:
    """Processor seconds and memory of one way, and the largest difference from texts alone."""
    model = MIModel.from_pretrained(name, threads=1)
    texts = texts_of(given, mixed, model.vocab_size)
    asked = {"logits": Logits(positions=-1), "batch_size": size}
    model.forward(texts[:4], SPEC, **asked)
    seconds, used = [], []
    for _ in range(given.repeats):
        with Peak() as peak:
            begin = time.process_time()
            found = model.forward(texts, SPEC, **asked)
            seconds.append(time.process_time() - begin)
        used.append(peak.bytes)
    chosen = [len(texts) // 2, *range(COMPARED - 1)]
    last = model.num_layers - 1
    gaps = []
    for row in chosen:
        alone = model.forward(texts[row], SPEC, logits=Logits(positions=-1))["resid_post", last][0]
        gaps.append(np.abs(found["resid_post", last][row] - alone).max() / np.abs(alone).max())
    batches = 1 if size is None else len([*batches_of([*map(len, texts)], size)])
    rate = len(texts) / median(seconds)
    return {"seconds": median(seconds), "rate": rate, "bytes": max(used), "gap": float(max(gaps)), "batches": batches}


class Peak:
    """The growth of the resident memory, looked at every 5 ms."""

    def __enter__(self) -> "Peak":
        self.own, self.going = psutil.Process(), True
        self.before = self.most = self.own.memory_info().rss
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def _watch(self) -> None:
        while self.going:
            self.most = max(self.most, self.own.memory_info().rss)
            time.sleep(0.005)

    def __exit__(self, *error: object) -> None:
        self.going = False
        self.thread.join()

    @property
    def bytes(self) -> int:
        return self.most - self.before


def in_a_process(name: str, size: Any, mixed: bool, arguments: list[str]) -> dict[str, float]:
    """`measured`, in a process of its own."""
    told = json.dumps([name, size, mixed])
    run = subprocess.run([sys.executable, __file__, *arguments, "--one", told], capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(run.stderr)
    found: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return found


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("rows", 1000), ("short", 6), ("long", 128), ("mixed", 200), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--model", action="append", help="in the place of the models that ship; may be repeated")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    given = options()
    if given.one:
        name, size, mixed = json.loads(given.one)
        print(json.dumps(measured(name, size, mixed, given)))
        return
    ways = [(mixed, name, size) for mixed in (False, True) for name in given.model or MODELS for size in SIZES]
    rows: dict[bool, list[list[str]]] = {False: [], True: []}
    for mixed, name, size in track(ways, "measuring"):
        found = in_a_process(name, size, mixed, sys.argv[1:])
        told = [Path(name).name, str(size), str(found["batches"]), f"{found['seconds']:.2f}", f"{found['rate']:.0f}"]
        rows[mixed].append([*told, f"{found['bytes'] / 1e6:.0f}", f"{found['gap']:.0e}"])
    title = f"{platform.machine()}, one thread, median of {given.repeats}"
    said = (
        f"First table: {given.rows - 1} texts of {given.short} tokens and one of {given.long}; second: {given.mixed} "
        f"of {given.short} to {given.long}. Processor seconds of `forward`, the growth of the resident memory, and the "
        "distance from texts run alone."
    )
    tables = [(HEAD, rows[False]), (HEAD, rows[True])]
    present("batching_speed", "Lists of unequal texts", title, tables, given.save, said)


if __name__ == "__main__":
    main()
