"""Harvesting activations: tokens a second to disk, beside the forward pass alone and beside a loop in transformers.

    pip install -e ".[cpu,export,bench]"
    python benchmarks/harvest_speed.py [--rows 64] [--repeats 3] [--threads 0] [--smollm2 CHECKPOINT] [--save]

A random GPT-2 of 124M parameters, and a checkpoint of SmolLM2-135M: the residual stream after five
layers, windows of 128 tokens, batches of 8 rows, float32; all programs in one process, by turns, with the same threads.
"forward" is mionnx' pass over the same batches, nothing kept; "harvest" writes shards with checksums; "transformers" is
a loop with `output_hidden_states`, of which the same five layers go into a file. Values are compared first. The model
is open before; a harvest's time is all of it, from texts (as ids) to a folder that is complete.

Reading is measured on the folder that was written, from the page cache: `made[hook][:]`, and `made.batches(4096)`.
Memory is the growth of the process' resident set over a harvest of 1 and of 8 times as many rows, in a process of its
own.

`--save` writes benchmarks/results/harvest_speed.md.
"""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from generation_speed import make
from rich.progress import track
from tables import present
from transformers import AutoModelForCausalLM
from turns import alternate, ratio

from exporters.transformers import export
from mionnx import HookSpec, MIModel

CONTEXT, BATCH, LAYERS = 128, 8, 5
MEMORY = """
import sys, psutil, numpy as np, tempfile, threading, time
from mionnx import MIModel
folder, layers, rows = sys.argv[1], sys.argv[2].split(","), int(sys.argv[3])
model = MIModel.from_pretrained(folder)
texts = np.random.default_rng(0).integers(3, model.vocab_size, (rows, 128))
own, most, going = psutil.Process(), 0, True
def watch():
    global most
    while going:
        most = max(most, own.memory_info().rss - own.memory_info().shared)
        time.sleep(0.01)
with tempfile.TemporaryDirectory() as target:
    thread = threading.Thread(target=watch); thread.start()
    model.harvest(list(texts), layers, target + "/made", context=128, packed=True, batch_size=8, shard_bytes=2**25)
    going = False; thread.join()
print(most)
"""


def batches(ids: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
    """Rows, eight at a time."""
    yield from (ids[at : at + BATCH] for at in range(0, len(ids), BATCH))


def by_transformers(model: Any, layers: list[int], ids: np.ndarray[Any, Any], path: Path) -> None:
    """Write the hidden states after some layers, [rows, context, layers, hidden]."""
    with path.open("wb") as file, torch.no_grad():
        for batch in batches(ids):
            states = model.base_model(torch.from_numpy(batch), output_hidden_states=True, use_cache=False).hidden_states
            torch.stack([states[layer + 1] for layer in layers], dim=2).numpy().tofile(file)


def compare(
    name: str, source: Path, rows: int, repeats: int, threads: int, folder: Path
) -> tuple[list[str], list[str]]:
    """The rows of one model in both tables."""
    export(source, folder / "hooked")
    model = MIModel.from_pretrained(folder / "hooked", threads=threads)
    theirs = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    layers = np.linspace(0, model.num_layers - 2, LAYERS).astype(int).tolist()  # the last one is normed in theirs
    hooks = [f"blocks.{layer}.hook_resid_post" for layer in layers]
    ids = np.random.default_rng(0).integers(3, model.vocab_size, (rows, CONTEXT))
    spec, places = HookSpec().capture(hooks), iter(range(10**6))

    def harvest() -> Any:
        target = folder / f"made {next(places)}"
        return model.harvest(list(ids), hooks, target, context=CONTEXT, packed=True, batch_size=BATCH)

    programs = {
        "forward": lambda: [model.forward(batch, spec, logits=False) for batch in batches(ids)],
        "harvest": harvest,
        "transformers": lambda: by_transformers(theirs, layers, ids, folder / "theirs"),
    }
    made = harvest()
    programs["transformers"]()
    other = np.fromfile(folder / "theirs", np.float32).reshape(-1, LAYERS, model.hidden_size)
    found = np.stack([made[hook][:] for hook in hooks], axis=1)
    apart = float(np.abs(found - other).max() / np.abs(other).max())
    times = alternate(programs, repeats)
    rates = [f"{ids.size / median(times[one]):,.0f}" for one in programs]
    shares = [ratio(times["forward"], times["harvest"]), ratio(times["transformers"], times["harvest"], 2)]
    read = alternate(
        {
            "whole": lambda: [made[hook][:] for hook in hooks],
            "batches": lambda: [None for _ in made.batches(4096, hooks=hooks)],
        },
        repeats,
    )
    size = sum(made[hook].nbytes for hook in hooks) / 1e9
    memory = [_memory(folder / "hooked", hooks, count) for count in (rows, 8 * rows)]
    second = [name, f"{size * 1000:.0f}", *(f"{size / median(read[one]):.1f}" for one in read)]
    return [name, *rates, *shares, f"{apart:.1e}"], [*second, *(f"{one:.0f}" for one in memory)]


def _memory(hooked: Path, hooks: list[str], rows: int) -> float:
    """The largest private memory of a harvest, MB."""
    command = [sys.executable, "-c", MEMORY, str(hooked), ",".join(hooks), str(rows)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) / 1e6


def main() -> None:
    """Measure everything and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--smollm2", type=Path, help="SmolLM2 as a checkpoint.")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    threads = options.threads or os.cpu_count() or 1
    torch.set_num_threads(threads)
    first, second = [], []
    for name in track(["gpt2 124M", *(["SmolLM2 135M"] if options.smollm2 else [])], "harvests"):
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            if name == "gpt2 124M":
                make(name, folder / "checkpoint")
            source = folder / "checkpoint" if name == "gpt2 124M" else options.smollm2
            one, other = compare(name, source, options.rows, options.repeats, threads, folder)
            first.append(one)
            second.append(other)
    columns = (
        "model",
        "forward",
        "harvest",
        "transformers",
        "harvest / forward",
        "harvest / transformers",
        "difference",
    )
    heads = (columns, ("model", "MB written", "read, GB/s", "in batches, GB/s", "memory, MB", "8 times the rows, MB"))
    title = f"Tokens a second, {options.rows} x {CONTEXT}, fp32, {threads} threads, {platform.machine()}"
    tables = list(zip(heads, (first, second), strict=True))
    present("harvest_speed", "Harvesting activations", title, tables, options.save, __doc__.split("\n\n")[2])


if __name__ == "__main__":
    main()
