"""The first minute with a model: what each verb takes the first time, in a fresh store, and in a second process.

    python benchmarks/first_minute.py [--models smollm2,llama-1.1b] [--checkpoint FOLDER] [--limit GB] [--save]

Each model in a process of its own with an empty store: opening it (which exports), a forward pass of 32 tokens, all
streams captured, a `Scale` at one layer and at another, gradients at all streams, a sweep over layers and positions;
then the same in a second process, whose store has what the first one left. Seconds, the proportional set two seconds
after, and the largest resident set meanwhile, in GB; beneath, the bytes of the store. `llama-1.1b` is a random
checkpoint of TinyLlama's shape in bfloat16 (22 layers, 2.2 GB), made in `--checkpoint` if it is not there. `--limit`
is that of the store, which else is 20 GB. transformers stands beside: opening and a forward pass, in a process too.
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
from typing import Any

import numpy as np
from model_memory import count_anew, peak
from tables import present

TOKENS, SETTLED, GB = 32, 2.0, 10**9
SHAPE = {
    "hidden_size": 2048,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "intermediate_size": 5632,
    "vocab_size": 32000,
}
COLUMNS = ("model", "verb", "seconds", "PSS", "peak", "with the store, seconds", "PSS", "peak")


def verbs(source: str) -> dict[str, Callable[[dict[str, Any]], Any]]:
    """The steps of a first session, in order; each reads and writes what the session holds."""
    from mionnx import HookPoint, HookSpec, Intervention, MIModel

    ids = np.random.default_rng(0).integers(3, 30000, TOKENS)
    other = np.where(np.arange(TOKENS) == 3, ids + 1, ids)

    def scaled(session: dict[str, Any], share: float) -> Any:
        point = HookPoint.ResidPost(int(share * session["model"].num_layers))
        return session["model"].forward(ids, HookSpec().intervene(point, Intervention.Scale(2.0))).output()

    return {
        "open": lambda session: session.update(model=MIModel.from_pretrained(source)),
        "forward": lambda session: session["model"].forward(ids).output(),
        "all streams captured": lambda session: session["model"].forward(
            ids, HookSpec().capture("blocks.*.hook_resid_post")
        ),
        "a Scale at a layer": lambda session: scaled(session, 0.25),
        "a Scale at another": lambda session: scaled(session, 0.75),
        "gradients at all streams": lambda session: session["model"].gradients(
            ids, "blocks.*.hook_resid_post", "logit_diff", answer=11, versus=12
        ),
        "sweep, layer x position": lambda session: session["model"].patch_sweep(
            ids[:12], other[:12], "resid_pre", answer=11, versus=12
        ),
    }


def of_transformers(source: str) -> dict[str, Callable[[dict[str, Any]], Any]]:
    """The same beside: opening and a forward pass."""
    import torch
    from transformers import AutoModelForCausalLM

    def forward(session: dict[str, Any]) -> Any:
        with torch.inference_mode():
            return session["model"](torch.arange(TOKENS)[None] + 100).logits

    return {
        "open": lambda session: session.update(
            model=AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
        ),
        "forward": forward,
    }


def measure(steps: dict[str, Callable[[dict[str, Any]], Any]]) -> list[dict[str, Any]]:
    """Run every step once; seconds and bytes of each."""
    import psutil

    process, rows, session = psutil.Process(), list[dict[str, Any]](), dict[str, Any]()
    for name, work in steps.items():
        count_anew()
        start = time.perf_counter()
        work(session)
        seconds, largest = time.perf_counter() - start, peak()
        time.sleep(SETTLED)
        rows.append({"name": name, "seconds": seconds, "PSS": process.memory_full_info().pss, "peak": largest})
    return rows


def in_process(source: str, store: Path, limit: str | None, peer: bool) -> list[dict[str, Any]]:
    """The steps in a process of its own."""
    known = {**os.environ, "MIONNX_CACHE": str(store)} | ({"MIONNX_CACHE_LIMIT": limit} if limit else {})
    command = [sys.executable, __file__, "--measure", source, *(["--peer"] if peer else [])]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=known).stdout
    result: list[dict[str, Any]] = json.loads(output.splitlines()[-1])
    return result


def on_disk(folder: Path) -> int:
    """Bytes that a store takes itself: files linked to others outside count there."""
    files = [path.stat() for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return sum(file.st_blocks * 512 for file in {one.st_ino: one for one in files if one.st_nlink == 1}.values())


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description="The first minute with a model.")
    parser.add_argument("--models", default="smollm2,llama-1.1b")
    parser.add_argument("--checkpoint", type=Path, help="the folder of the 1.1B checkpoint, kept")
    parser.add_argument("--limit", help="GB of the store")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--save", action="store_true")
    chosen = parser.parse_args()
    if chosen.measure:
        print(json.dumps(measure((of_transformers if chosen.peer else verbs)(chosen.measure))))
        return
    rows, notes = list[tuple[str, ...]](), list[str]()
    with tempfile.TemporaryDirectory() as scratch:
        for name in chosen.models.split(","):
            source = name
            if name == "llama-1.1b":
                folder = chosen.checkpoint or Path(scratch) / "checkpoint"
                if not (folder / "config.json").exists():
                    import torch  # not in the processes that are measured
                    from export_1b import make_checkpoint

                    folder.mkdir(parents=True, exist_ok=True)
                    make_checkpoint(folder, SHAPE, torch.bfloat16)
                source = str(folder)
            store = Path(scratch) / f"store of {name}"
            first, second = (in_process(source, store, chosen.limit, False) for _ in range(2))
            rows += [(name, one["name"], *cells(one), *cells(again)) for one, again in zip(first, second, strict=True)]
            notes.append(f"{name}: the store takes {on_disk(store) / GB:.2f} GB")
            if name != "smollm2":
                peer = in_process(source, store, chosen.limit, True)
                rows += [(f"{name}, transformers", one["name"], *cells(one), "", "", "") for one in peer]
    title = f"The first minute with a model: {os.cpu_count()} cores, {platform.machine()}, memory in GB"
    present("first_minute", "The first minute", title, [(COLUMNS, rows)], chosen.save, notes=notes)


def cells(row: dict[str, Any]) -> tuple[str, str, str]:
    """Seconds, and memory in GB."""
    return f"{row['seconds']:.2f}", f"{row['PSS'] / GB:.2f}", f"{row['peak'] / GB:.2f}"


if __name__ == "__main__":
    main()
