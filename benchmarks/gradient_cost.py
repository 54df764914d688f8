"""Opening and running a graph with gradients, beside a forward graph, with weights packed and mapped from their file.

    python benchmarks/gradient_cost.py [MODEL] [--save]

MODEL is a hooked model's folder; random weights of GPT-2's shape if left out. Each row is a process of its own on one
thread: processor seconds until the graph is open, memory before and after (MiB, resident), and the least processor
seconds of five calls of 64 tokens. `estimate` is what `model.estimate` says of the graph before. `--save` writes
benchmarks/results/gradient_cost.md.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
from tables import present

from mionnx import HookSpec, Logits, MIModel

HERE = Path(__file__).parent
HOOKS = ["blocks.*.hook_resid_pre", "blocks.*.attn.hook_z", "blocks.*.hook_mlp_out"]
TOKENS, REPEATS = 64, 5
COLUMNS = ("graph", "weights", "opening, s", "before", "opened", "after calls", "a call, s", "estimate")


def measure(folder: str, gradients: bool, packed: bool) -> list[str]:
    """A row, measured in this process."""
    model, process = MIModel.from_pretrained(folder, prepack=packed, threads=1), psutil.Process()
    plain = HookSpec().capture(HOOKS)
    spec = HookSpec().gradient(HOOKS).set_metric("logit", answer=7) if gradients else plain
    told = model.estimate(spec, 1, TOKENS)
    ids, part = np.arange(TOKENS)[None], Logits(positions=-1)
    sizes, begin = [process.memory_info().rss], time.process_time()
    model.warm(spec, part)
    opening = time.process_time() - begin
    sizes.append(process.memory_info().rss)
    seconds = []
    for _ in range(REPEATS):
        begin = time.process_time()
        model.forward(ids, spec, logits=part)
        seconds.append(time.process_time() - begin)
    sizes.append(process.memory_info().rss)
    what = "gradients" if gradients else "forward", "packed" if packed else "mapped"
    said = f"{told.graph / 2**20:.0f} MiB, {told.opening:.1f} s" if gradients else ""
    memory = [f"{size / 2**20:.0f}" for size in sizes]
    return [*what, f"{opening:.2f}", *memory, f"{min(seconds):.3f}", said]


def rows(folder: str) -> list[list[str]]:
    """All rows, each from a process of its own."""
    made = []
    for gradients in (False, True):
        for packed in (True, False):
            call = [sys.executable, __file__, folder, "--row", json.dumps([gradients, packed])]
            made.append(json.loads(subprocess.run(call, capture_output=True, text=True, check=True).stdout))
            print(*made[-1], sep=" | ", flush=True)
    return made


def random_gpt2(folder: Path) -> str:
    """A hooked model of GPT-2's shape with random weights."""
    sys.path.insert(0, str(HERE.parent / "tests" / "shared"))
    import families

    from exporters.transformers import export

    families.CONFIGS["gpt2"] = {}
    families.make_checkpoint("gpt2", folder / "checkpoint")
    export(folder / "checkpoint", folder / "hooked")
    return str(folder / "hooked")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--row", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    if given.row is not None:
        print(json.dumps(measure(given.model, *given.row)))
        return
    with tempfile.TemporaryDirectory() as folder:
        table = rows(given.model or random_gpt2(Path(folder)))
    title = f"{'GPT-2 shape' if given.model is None else given.model}, {TOKENS} tokens, one thread"
    present("gradient_cost", "What a graph with gradients costs", title, [(COLUMNS, table)], given.save)


if __name__ == "__main__":
    main()
