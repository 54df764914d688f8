"""Memory of a process in which every analysis runs once, and what holds it.

    python benchmarks/memory.py --folder HOOKED [--checkout PATH] [--save]

Measured in a process of its own, with an empty store, three seconds after each analysis: the proportional set (PSS:
private memory, and the share of mapped files), in MB and in sizes of the weights, less what the process takes after its
imports.
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
import psutil
from tables import present

from mionnx.graph import onnx_file

MB = 10**6
TOKENS = 14
SETTLED = 3.0  # seconds after which a process has returned what it will
Steps = dict[str, Callable[[], Any]]


def analyses(model: Any, folder: Path) -> Steps:
    """A call of every analysis, by name."""
    from mionnx import HookPoint, HookSpec, Intervention

    clean = np.random.default_rng(0).integers(3, model.vocab_size, TOKENS)
    corrupted = clean.copy()
    corrupted[3] = (clean[3] + 1) % model.vocab_size
    answers = {"answer": int(clean[1]), "versus": int(clean[2])}
    vector, point = np.full(model.hidden_size, 0.1, np.float32), HookPoint.ResidPost(1)
    spec = HookSpec().intervene(point, Intervention.Add(vector))
    middle = model.num_layers // 2
    receivers = [f"blocks.{middle}.attn.hook_{name}" for name in "qkv"]

    def steering() -> None:
        directions = model.contrast("The capital of Germany is", "The capital of France is")
        model.calibrate(directions, "The capital of Italy is")
        model.dose_response("The capital of France is", directions[1], [0, 0.5, 1, 2])

    return {
        "forward": lambda: model.forward(clean),
        "30 residual streams": lambda: model.forward(clean, HookSpec().capture("blocks.*.hook_resid_post")),
        "capture of everything": lambda: model.forward(clean, HookSpec().capture("*")),
        "generate": lambda: model.generate(clean, max_new_tokens=8),
        "generate, steered": lambda: model.generate(clean, spec, max_new_tokens=8),
        "lens": lambda: model.logit_lens(clean),
        "project to vocabulary": lambda: model.project_to_vocab(np.ones(model.hidden_size, np.float32)),
        "nearest tokens": lambda: model.embedding_neighbors(vector + np.arange(model.hidden_size)),
        "attribution": lambda: model.attribute(clean, *answers.values()),
        "head scores": lambda: model.head_scores(),
        "attention patterns": lambda: model.attention(clean),
        "patch sweep, blocks": lambda: model.patch_sweep(clean, corrupted, **answers),
        "patch sweep, heads": lambda: model.patch_sweep(clean, corrupted, "hook_z", ("layer", "head"), **answers),
        "ablation sweep": lambda: model.ablation_sweep(clean),
        "path patching": lambda: model.path_patch(clean, corrupted, receivers, **answers),
        **({"steering": steering} if model.has_tokenizer else {}),
        "Python functions": lambda: model.run_with_hooks(
            clean, fwd_hooks=[("blocks.*.hook_resid_post", lambda value, hook: value * 1.0)]
        ),
        "compile": lambda: model.compile(spec, folder / "compiled"),
        "verify": lambda: model.verify([clean], ["ort-cpu", "ort-cpu:none"], greedy=2),
    }


def proportional() -> int:
    """Bytes of this process: private ones, and its share of mapped files."""
    return int(psutil.Process().memory_full_info().pss)


def holders() -> dict[str, int]:
    """Proportional bytes of this process by what they are: each mapped file, and memory of no file."""
    held: dict[str, int] = {}
    for part in psutil.Process().memory_maps(grouped=True):
        name = "anonymous" if part.path.startswith("[") else Path(part.path).name
        held[name] = held.get(name, 0) + int(part.pss)
    return held


def measure(folder: Path) -> dict[str, Any]:
    """Run every analysis once; bytes after each."""
    import mionnx

    baseline, begin, rows = proportional(), holders(), []
    model = mionnx.MIModel.from_pretrained(folder)
    weights = sum(size for size in onnx_file.locations(model.hooked.proto).values())
    with tempfile.TemporaryDirectory() as scratch:
        for name, work in analyses(model, Path(scratch)).items():
            start = time.perf_counter()
            work()
            seconds = time.perf_counter() - start
            time.sleep(SETTLED)
            held = {key: size - begin.get(key, 0) for key, size in holders().items()}
            rows.append({"name": name, "bytes": proportional() - baseline, "seconds": seconds, "held": held})
    return {"baseline": baseline, "weights": weights, "rows": rows}


def in_process(folder: Path, checkout: Path) -> dict[str, Any]:
    """The session of `measure` in a process of its own, with an empty store."""
    with tempfile.TemporaryDirectory() as store:
        known = {**os.environ, "MIONNX_CACHE": store, "PYTHONPATH": str(checkout)}
        command = [sys.executable, __file__, "--folder", str(folder), "--measure"]
        found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=known, cwd=checkout).stdout
    result: dict[str, Any] = json.loads(found.splitlines()[-1])
    return result


def rows_of(found: dict[str, Any], earlier: dict[str, Any] | None) -> list[list[str]]:
    """A row an analysis: bytes, sizes of the weights, and what the two largest holders hold."""
    rows = []
    for number, row in enumerate(found["rows"]):
        largest = sorted(row["held"].items(), key=lambda pair: -pair[1])[:2]
        held = ", ".join(f"{name} {size / MB:.0f}" for name, size in largest)
        before = [f"{earlier['rows'][number]['bytes'] / MB:.0f}"] if earlier else []
        rows.append([row["name"], *before, f"{row['bytes'] / MB:.0f}", f"{row['bytes'] / found['weights']:.2f}", held])
    return rows


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description="Memory of a session of every analysis.")
    parser.add_argument("--folder", type=Path, required=True, help="a hooked model")
    parser.add_argument("--checkout", type=Path, help="a checkout of an earlier commit, to be measured too")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.folder)))
        return
    found = in_process(options.folder, Path(__file__).parents[1])
    earlier = in_process(options.folder, options.checkout) if options.checkout else None
    columns = ["after", *(["before, MB"] if earlier else []), "MB", "of the weights", "held by, MB"]
    title = f"{options.folder.name}, {found['weights'] / MB:.0f} MB of weights, {os.cpu_count()} cores"
    said = (
        f"Proportional set of one process, less the {found['baseline'] / MB:.0f} MB that it takes after its imports; "
        f"{TOKENS} tokens, float32, {platform.machine()}"
    )
    rows = rows_of(found, earlier)
    present("memory", "Memory of a session of every analysis", title, [(columns, rows)], options.save, f"{said}.")


if __name__ == "__main__":
    main()
