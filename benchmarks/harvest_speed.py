"""Harvesting activations: tokens a second to disk, beside the forward pass alone and beside a loop in transformers.

    pip install -e ".[cpu,export]"
    python benchmarks/harvest_speed.py [--rows 32] [--repeats 3] [--threads 0] [--smollm2 CHECKPOINT]
        [--saelens PYTHON] [--save]

A random GPT-2 of 124M parameters, and a checkpoint of SmolLM2-135M: the residual stream after five layers, windows of
128 tokens, batches of 8 rows, float32; all programs in one process, by turns, with the same threads. "forward" is
mionnx' pass over the same batches, nothing kept; "harvest" writes shards with checksums; "float16" the same with
`dtype="float16"`; "transformers" is a loop with `output_hidden_states`, of which the same five layers go into a file.
Values are compared first. The model is open before; a harvest's time is all of it, from texts (as ids) to a folder that
is complete. Ratios are medians over neighbouring runs, by the clock and (in brackets) by processor seconds, which a
busy machine moves less.

Reading is measured on the folder that was written, from the page cache: `made[hook][:]`, and `made.batches(4096)`.
Memory is the largest private memory of a process that harvests as many rows, and 4 times as many.

`--saelens` is the Python of an environment with SAELens: its `CacheActivationsRunner` writes one layer of SmolLM2 (the
last of the five), with `AutoModelForCausalLM`; beside it mionnx writes that layer in SAELens' form. Opening the model
is left out of both.

`--save` writes benchmarks/results/harvest_speed.md.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.progress import track
from tables import present
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

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


SAELENS = """
import json, sys, time
import datasets, torch
from sae_lens import CacheActivationsRunner, CacheActivationsRunnerConfig
source, ids, target, hook, width, threads, times = sys.argv[1:]
torch.set_num_threads(int(threads))
rows = datasets.Dataset.from_dict({"input_ids": json.load(open(ids))})
for turn in range(int(times)):
    config = CacheActivationsRunnerConfig(
        dataset_path="", model_name=source, model_class_name="AutoModelForCausalLM", model_batch_size=8,
        hook_name=hook, d_in=int(width), training_tokens=len(rows) * 128, context_size=128, shuffle=False,
        dtype="float32", device="cpu", prepend_bos=False, streaming=False, model_kwargs={},
        model_from_pretrained_kwargs={}, new_cached_activations_path=f"{target}/{turn}",
        buffer_size_gb=8 * 128 * int(width) * 4 / 1e9,
    )
    runner = CacheActivationsRunner(config, override_dataset=rows)
    begin, busy = time.perf_counter(), time.process_time()
    made = runner.run()
    assert len(made) == len(rows), "SAELens fills whole buffers: give a multiple of 8 rows"
    print("seconds", time.perf_counter() - begin, time.process_time() - busy, flush=True)
"""
Seconds = tuple[float, float]  # by the clock, of the processor


def alternate(programs: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[Seconds]]:
    """Seconds of each program, run by turns after a warm-up."""
    found: dict[str, list[Seconds]] = {name: [] for name in programs}
    for turn in range(repeats + 1):
        for name, program in programs.items():
            begin, busy = time.perf_counter(), time.process_time()
            program()
            if turn:
                found[name].append((time.perf_counter() - begin, time.process_time() - busy))
    return found


def ratio(one: list[Seconds], other: list[Seconds]) -> str:
    """The medians of the ratios of neighbouring runs, by the clock and by processor seconds."""
    clock, busy = (median(a[n] / b[n] for a, b in zip(one, other, strict=True)) for n in (0, 1))
    return f"{clock:.2f} ({busy:.2f})"


def rate(tokens: int, seconds: list[Seconds]) -> str:
    """Tokens a second, and in a second of the processor."""
    return f"{tokens / median(one[0] for one in seconds):,.0f} ({tokens / median(one[1] for one in seconds):,.0f})"


def batches(ids: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
    """Rows, eight at a time."""
    yield from (ids[at : at + BATCH] for at in range(0, len(ids), BATCH))


def by_transformers(model: Any, layers: list[int], ids: np.ndarray[Any, Any], path: Path) -> None:
    """Write the hidden states after some layers, [rows, context, layers, hidden]."""
    with path.open("wb") as file, torch.no_grad():
        for batch in batches(ids):
            states = model.base_model(torch.from_numpy(batch), output_hidden_states=True, use_cache=False).hidden_states
            torch.stack([states[layer + 1] for layer in layers], dim=2).numpy().tofile(file)


class Programs:
    """A model in mionnx and in transformers, and the windows that both run on."""

    def __init__(self, source: Path, rows: int, threads: int, folder: Path) -> None:
        export(source, folder / "hooked")
        self.model = MIModel.from_pretrained(folder / "hooked", threads=threads)
        self.theirs = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
        # the last layer is normed in theirs
        self.layers = np.linspace(0, self.model.num_layers - 2, LAYERS).astype(int).tolist()
        self.hooks = [f"blocks.{layer}.hook_resid_post" for layer in self.layers]
        self.ids = np.random.default_rng(0).integers(3, self.model.vocab_size, (rows, CONTEXT))
        self.folder, self.source, self.threads = folder, source, threads

    def forward(self) -> None:
        """The passes alone."""
        spec = HookSpec().capture(self.hooks)
        for batch in batches(self.ids):
            self.model.forward(batch, spec, logits=False)

    def harvest(self, hooks: list[str] | None = None, **options: Any) -> Any:
        """Write activations into a new folder."""
        shutil.rmtree(self.folder / "made", ignore_errors=True)
        options = {"context": CONTEXT, "packed": True, "batch_size": BATCH, **options}
        return self.model.harvest(list(self.ids), hooks or self.hooks, self.folder / "made", **options)

    def loop(self) -> None:
        """The same in transformers."""
        by_transformers(self.theirs, self.layers, self.ids, self.folder / "theirs")

    def difference(self) -> float:
        """The largest difference between the two, as a part of the largest value."""
        made = self.harvest()
        self.loop()
        other = np.fromfile(self.folder / "theirs", np.float32).reshape(-1, LAYERS, self.model.hidden_size)
        found = np.stack([made[hook][:] for hook in self.hooks], axis=1)
        return float(np.abs(found - other).max() / np.abs(other).max())


def speed(one: Programs, repeats: int) -> list[str]:
    """Tokens a second of each program, and their ratios."""
    apart = one.difference()
    half = {"dtype": "float16"}
    programs = {
        "forward": one.forward,
        "harvest": one.harvest,
        "float16": lambda: one.harvest(**half),
        "transformers": one.loop,
    }
    times = alternate(programs, repeats)
    rates = [rate(one.ids.size, times[name]) for name in programs]
    pairs = (("forward", "harvest"), ("forward", "float16"), ("transformers", "harvest"))
    return [*rates, *(ratio(times[a], times[b]) for a, b in pairs), f"{apart:.1e}"]


def reading(one: Programs, repeats: int) -> list[str]:
    """Megabytes that were written, gigabytes a second that are read, and memory."""
    made, hooks = one.harvest(), one.hooks
    whole = {"whole": lambda: [made[hook][:] for hook in hooks]}
    read = alternate(whole | {"batches": lambda: [None for _ in made.batches(4096, points=hooks)]}, repeats)
    size = sum(made[hook].nbytes for hook in hooks) / 1e9
    memory = [_memory(one.folder / "hooked", hooks, count) for count in (len(one.ids), 4 * len(one.ids))]
    speeds = [f"{size / median(seconds for seconds, _ in read[name]):.1f}" for name in read]
    return [f"{size * 1000:.0f}", *speeds, *(f"{one:.0f}" for one in memory)]


def saelens(one: Programs, python: str, repeats: int) -> list[str]:
    """Tokens a second of SAELens' runner and of mionnx, one layer in SAELens' form."""
    (one.folder / "ids.json").write_text(json.dumps(one.ids.tolist()))
    layer, width = one.layers[-1], one.model.hidden_size
    given = [one.source, one.folder / "ids.json", one.folder / "saelens", f"model.layers.{layer}", width, one.threads]
    command = [python, "-c", SAELENS, *map(str, given), str(repeats + 1)]
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    lines = [line.split()[1:] for line in ran.stdout.splitlines() if line.startswith("seconds")]
    theirs = [(float(clock), float(busy)) for clock, busy in lines[1:]]
    ours = alternate({"harvest": lambda: one.harvest([one.hooks[-1]], format="saelens")}, repeats)["harvest"]
    return [rate(one.ids.size, ours), rate(one.ids.size, theirs), ratio(theirs, ours)]


def _memory(hooked: Path, hooks: list[str], rows: int) -> float:
    """The largest private memory of a harvest, MB."""
    command = [sys.executable, "-c", MEMORY, str(hooked), ",".join(hooks), str(rows)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) / 1e6


def main() -> None:
    """Measure everything and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--smollm2", type=Path, help="SmolLM2 as a checkpoint.")
    parser.add_argument("--saelens", help="Python of an environment with SAELens; needs --smollm2.")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    threads = options.threads or os.cpu_count() or 1
    torch.set_num_threads(threads)
    tables: list[list[list[str]]] = [[], [], []]
    for name in track(["gpt2 124M", *(["SmolLM2 135M"] if options.smollm2 else [])], "harvests"):
        with tempfile.TemporaryDirectory() as place:
            folder, source = Path(place), options.smollm2
            if name == "gpt2 124M":
                torch.manual_seed(0)
                source = folder / "checkpoint"
                GPT2LMHeadModel(GPT2Config()).save_pretrained(source)
            one = Programs(source, options.rows, threads, folder)
            tables[0].append([name, *speed(one, options.repeats)])
            tables[1].append([name, *reading(one, options.repeats)])
            if options.saelens and source == options.smollm2:
                tables[2].append([name, *saelens(one, options.saelens, options.repeats)])
    programs = ("forward", "harvest", "float16", "transformers")
    shares = ("harvest / forward", "float16 / forward", "harvest / transformers")
    heads = (
        ("model", *programs, *shares, "difference"),
        ("model", "MB written", "read, GB/s", "in batches, GB/s", "memory, MB", "4 times the rows, MB"),
        ("model, one layer", "mionnx", "SAELens", "mionnx / SAELens"),
    )
    title = f"Tokens a second (in a second of the processor), {options.rows} x {CONTEXT}, fp32, {threads} threads, "
    shown = [(head, rows) for head, rows in zip(heads, tables, strict=True) if rows]
    said = __doc__.split("\n\n")[2]
    present("harvest_speed", "Harvesting activations", title + platform.machine(), shown, options.save, said)


if __name__ == "__main__":
    main()
