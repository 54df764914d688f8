"""Harvesting by the workers of a Ray cluster: tokens a second of two workers, beside one process.

    pip install -e ".[cpu,export,ray]"
    python benchmarks/harvest_workers.py [--rows 192] [--repeats 3] [--save]

A random GPT-2 of 124M parameters, the residual stream after five layers, windows of 128 tokens, batches of 8 rows, a
batch a shard, float32. Programs by turns: one process with one thread, with two, and two workers of one thread each. A
rate is that from the first shard to the last; what comes before, starting the workers and opening the model in each,
stands beside it. The cluster is begun before. Folders are compared byte by byte.

`--save` writes benchmarks/results/harvest_workers.md.
"""

import argparse
import filecmp
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import ray
import torch
from rich.progress import track
from tables import present
from transformers import GPT2Config, GPT2LMHeadModel

from exporters.transformers import export
from mionnx import MIModel, distributed
from mionnx.machine.progress import reported_to

CONTEXT, BATCH = 128, 8
HOOKS = [f"blocks.{layer}.hook_resid_post" for layer in (0, 2, 5, 7, 10)]
Harvest = Callable[..., Any]


def timed(harvest: Harvest, rows: int) -> tuple[float, float]:
    """Tokens a second from the first shard to the last, and seconds before the first."""
    seen: list[tuple[float, int]] = []
    begin = time.perf_counter()
    with reported_to(lambda stage, done, total: seen.append((time.perf_counter() - begin, done))):
        harvest()
    per_shard = rows * CONTEXT / len(seen)
    return per_shard * (len(seen) - 1) / (seen[-1][0] - seen[0][0]), seen[0][0]


def same(one: Path, other: Path) -> bool:
    """Whether two folders have the same shards and manifest, byte for byte."""
    names = [path.name for path in one.iterdir() if not path.name.startswith(".")]
    return filecmp.cmpfiles(one, other, names, shallow=False)[1:] == ([], [])


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        torch.manual_seed(0)
        GPT2LMHeadModel(GPT2Config()).save_pretrained(folder / "checkpoint")
        export(folder / "checkpoint", folder / "hooked")
        one, two = (MIModel.from_pretrained(folder / "hooked", threads=threads) for threads in (1, 2))
        ids = [*np.random.default_rng(0).integers(3, one.vocab_size, (options.rows, CONTEXT))]
        how = {"context": CONTEXT, "packed": True, "batch_size": BATCH, "shard_bytes": 2**23}
        programs: dict[str, Harvest] = {
            "one process, 1 thread": lambda target, **more: one.harvest(ids, HOOKS, target, **how, **more),
            "one process, 2 threads": lambda target, **more: two.harvest(ids, HOOKS, target, **how, **more),
            "two workers, 1 thread each": lambda target, **more: distributed.harvest(
                one, ids, HOOKS, target, workers=2, **how, **more
            ),
        }
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in programs}
        equal = True
        for turn in track(range(options.repeats + 1), "turns"):
            with tempfile.TemporaryDirectory(dir=folder) as turned:
                for name, program in programs.items():
                    target = Path(turned) / name
                    one_run = timed(lambda progress, run=program, to=target: run(to, progress=progress), options.rows)
                    found[name] += [one_run] if turn else []
                    equal &= same(Path(turned) / next(iter(programs)), target)
    rates = {name: median(rate for rate, _ in runs) for name, runs in found.items()}
    rows = [
        [
            name,
            f"{rates[name]:,.0f}",
            f"{rates[name] / rates['one process, 2 threads']:.2f}",
            f"{median(before for _, before in runs):.1f}",
        ]
        for name, runs in found.items()
    ]
    columns = ("", "tokens a second", "of one process, 2 threads", "seconds before the first shard")
    title = f"{options.rows} x {CONTEXT} tokens, fp32, two cores, {platform.machine()}, {options.repeats} turns"
    notes = [f"the folders have {'the same' if equal else 'OTHER'} bytes"]
    said = __doc__.split("\n\n")[2]
    present("harvest_workers", "Harvesting by workers", title, [(columns, rows)], options.save, said, notes)


if __name__ == "__main__":
    main()
