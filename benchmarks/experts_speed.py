"""Mixtures of experts on a CPU: mionnx beside transformers, prompts and decoding, memory and opening.

    python benchmarks/experts_speed.py [--repeats 7] [--threads 2] [--save]

Random checkpoints of two layers with 8 large and with 128 small experts, batch 1, fp32. All run in one process, by
turns, with the same threads; each figure is a median. "eager" loops over the experts in Python; "batched_mm" gathers
the weights of each token's experts, as mionnx did before. A step of decoding has 64 tokens in its cache. Memory is the
largest growth of the process's own (anonymous) pages while a prompt of 256 tokens runs, in a process for each. `--save`
writes benchmarks/results/experts_speed.md.
"""

import argparse
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.progress import track
from tables import present
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from exporters.transformers import export
from mionnx import MIModel

COMMON = {
    "hidden_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 1024,
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "8 experts, 2 chosen": (
        "mixtral",
        {**COMMON, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 2048},
    ),
    "128 experts, 8 chosen": (
        "qwen3_moe",
        {**COMMON, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 256},
    ),
}
PROMPTS, PAST = (64, 256), 64
WAYS = ("mionnx", "eager", "batched_mm")
COLUMNS = ("model", "tokens", "mionnx", "eager", "batched_mm", "over eager", "over batched_mm")
MEMORY = ("model", "opening, mionnx", "opening, transformers", "256 tokens, mionnx", "eager", "batched_mm")
Run = Callable[[], Any]


def make(name: str, folder: Path) -> None:
    """A random checkpoint, and its hooked model beside it."""
    family, changes = SHAPES[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    model.save_pretrained(folder)
    del model
    export(folder, folder / "hooked")


def load(folder: Path, way: str) -> PreTrainedModel:
    """The model in transformers, its experts computed in one of its ways."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation=way
    )
    return model.eval()


def ours(folder: Path, tokens: int, threads: int) -> Run:
    """A prompt, or with one token a step of decoding, in mionnx."""
    model = MIModel.from_pretrained(folder / "hooked", threads=threads)
    ids = prompt(model.vocab_size, PAST + 1 if tokens == 1 else tokens)
    if tokens > 1:
        return lambda: model.forward(ids).output()
    past = model.forward(ids[:, :-1], use_cache=True).kv_cache
    return lambda: model.forward(ids[:, -1:], cache=past).output()


def theirs(model: PreTrainedModel, tokens: int) -> Run:
    """The same in transformers."""
    ids = torch.from_numpy(prompt(model.config.vocab_size, PAST + 1 if tokens == 1 else tokens))
    with torch.no_grad():
        past = model(ids[:, :-1], use_cache=True).past_key_values if tokens == 1 else None

    def run() -> Any:
        with torch.no_grad():
            if past is None:
                return model(ids, use_cache=False).logits.numpy()
            if past.get_seq_length() > PAST:  # what the last run appended
                past.crop(PAST - past.get_seq_length())
            return model(ids[:, -1:], past_key_values=past, use_cache=True).logits.numpy()

    return run


def prompt(vocab: int, tokens: int) -> np.ndarray:
    """Random token ids, [1, tokens]."""
    return np.random.default_rng(tokens).integers(3, vocab, (1, tokens))


def by_turns(runs: dict[str, Run], repeats: int) -> dict[str, float]:
    """Median milliseconds of each, after their results were compared."""
    expected = runs["eager"]()
    for name, run in runs.items():
        off = float(np.abs(run() - expected).max())
        if off > 5e-5 * max(1.0, float(np.abs(expected).max())):
            raise SystemExit(f"{name} differs from eager by {off:.1e}")
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            times[name].append(1000 * (time.perf_counter() - begin))
    return {name: median(measured) for name, measured in times.items()}


def anonymous() -> int:
    """Bytes of this process's own pages."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Anonymous"))


def growth(run: Run) -> int:
    """The largest growth of `anonymous` while something runs."""
    before, most, done = anonymous(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.002):
            most = max(most, anonymous() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        run()
    finally:
        done.set()
        watcher.join()
    return most


def alone(folder: Path, way: str, threads: int) -> None:
    """Print the seconds of opening and the growth of memory of one way; run in a process of its own."""
    torch.set_num_threads(threads)
    begin = time.perf_counter()
    if way == "mionnx":
        model = MIModel.from_pretrained(folder / "hooked", threads=threads)
        model.forward([[3]])
        ids = prompt(model.vocab_size, 256)
    else:
        run = theirs(load(folder, way), 256)
    opened = time.perf_counter() - begin
    print(opened, growth((lambda: model.forward(ids).output()) if way == "mionnx" else run))


def in_process(folder: Path, way: str, threads: int) -> tuple[float, float]:
    """Seconds of opening, and MB of growth."""
    command = [sys.executable, __file__, "--alone", str(folder), "--way", way, "--threads", str(threads)]
    opened, grown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-2:]
    return float(opened), int(grown) / 1e6


def measure(name: str, repeats: int, threads: int) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    """The rows of one model: times, and memory."""
    rows = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make(name, folder)
        models = {way: load(folder, way) for way in WAYS[1:]}
        for tokens in (*PROMPTS, 1):
            runs = {"mionnx": ours(folder, tokens, threads)}
            runs |= {way: theirs(model, tokens) for way, model in models.items()}
            found = by_turns(runs, repeats)
            ratios = (f"{found[way] / found['mionnx']:.1f}" for way in WAYS[1:])
            label = f"1 after {PAST}" if tokens == 1 else str(tokens)
            rows.append((name, label, *(f"{found[way]:.1f} ms" for way in WAYS), *ratios))
        models.clear()
        memory = {way: in_process(folder, way, threads) for way in WAYS}
    opened = [f"{memory[way][0]:.1f} s" for way in WAYS[:2]]
    return rows, (name, *opened, *(f"{memory[way][1]:.0f} MB" for way in WAYS))


def main() -> None:
    """Measure, print, and save if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--alone", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.alone:
        alone(given.alone, given.way, given.threads)
        return
    torch.set_num_threads(given.threads)
    found = [measure(name, given.repeats, given.threads) for name in track(SHAPES)]
    times, memory = [row for rows, _ in found for row in rows], [row for _, row in found]
    title = f"2 layers, hidden {COMMON['hidden_size']}, fp32, {given.threads} threads, {platform.machine()}"
    said = "Ratios are how many times faster mionnx is."
    present("experts_speed", "Mixtures of experts", title, [(COLUMNS, times), (MEMORY, memory)], given.save, said)


if __name__ == "__main__":
    main()
