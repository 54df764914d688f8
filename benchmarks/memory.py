"""Memory of a process in which every verb runs once: resident and proportional set, and the peak meanwhile.

    python benchmarks/memory.py --folder HOOKED [--checkout PATH] [--alone] [--save]

Measured in one process for all, with a store of its own that has the base already, four seconds after each verb: the
resident set (RSS, which a monitor of containers sees: a page of a file counts once for each mapping), the proportional
set (PSS: private memory, and the share of mapped files), and the largest resident set while the verb ran. All in sizes
of the weights, less what the process takes after its imports. With `--alone`, each verb in a process of its own too.
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
from model_memory import count_anew, peak
from rich.progress import track
from tables import present

from mionnx.graph import onnx_file

MB = 10**6
TOKENS = 14
SETTLED = 4.0  # seconds after which a process has returned what it will
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
        "gradients": lambda: model.gradients(clean, [point], "logit_diff", **answers),
        "integrated gradients": lambda: model.integrated_gradients(clean, answer=answers["answer"], steps=4),
        "attribution patching": lambda: model.attribute_patch(clean, corrupted, "hook_z", ("layer", "head"), **answers),
        "edge attribution": lambda: model.edge_attribution(clean, corrupted, **answers),
        "harvest": lambda: model.harvest([clean.tolist()] * 32, "blocks.*.hook_resid_post", folder / "harvest"),
        "Python functions": lambda: model.run_with_hooks(
            clean, fwd_hooks=[("blocks.*.hook_resid_post", lambda value, hook: value * 1.0)]
        ),
        "compile": lambda: model.compile(spec, folder / "compiled"),
        "verify": lambda: model.verify([clean], ["ort-cpu", "ort-cpu:none"], greedy=2),
    }


def measure(folder: Path, alone: str | None, settled: float) -> dict[str, Any]:
    """Run every verb once, or one; bytes after each."""
    from mionnx import MIModel

    process = psutil.Process()
    begin = process.memory_full_info()
    model = MIModel.from_pretrained(folder)
    weights, rows = sum(size for size in onnx_file.locations(model.hooked.proto).values()), []
    with tempfile.TemporaryDirectory() as scratch:
        works = analyses(model, Path(scratch))
        for name, work in works.items() if alone is None else [(alone, works[alone])]:
            count_anew()
            start = time.perf_counter()
            work()
            seconds, largest = time.perf_counter() - start, peak()
            time.sleep(settled)
            info = process.memory_full_info()
            sizes = {"RSS": info.rss - begin.rss, "PSS": info.pss - begin.pss, "peak": largest - begin.rss}
            rows.append({"name": name, "bytes": sizes["PSS"], "seconds": seconds, **sizes})
    return {"baseline": begin.rss, "weights": weights, "rows": rows}


def in_process(folder: Path, checkout: Path, store: str, alone: str | None = None) -> dict[str, Any]:
    """The session of `measure` in a process of its own."""
    known = {**os.environ, "MIONNX_CACHE": store, "PYTHONPATH": str(checkout)}
    command = [sys.executable, __file__, "--folder", str(folder), "--measure", *(["--verb", alone] if alone else [])]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=known, cwd=checkout).stdout
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def session(folder: Path, checkout: Path, alone: bool) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """All verbs in one process, and each in its own."""
    with tempfile.TemporaryDirectory() as store:
        prepare = "import sys, mionnx; mionnx.MIModel.from_pretrained(sys.argv[1]).prepare()"
        known = {**os.environ, "MIONNX_CACHE": store, "PYTHONPATH": str(checkout)}
        subprocess.run([sys.executable, "-c", prepare, str(folder)], check=True, env=known, cwd=checkout)
        together = in_process(folder, checkout, store)
        names = [row["name"] for row in together["rows"]] if alone else []
        each = {name: in_process(folder, checkout, store, name)["rows"][0] for name in track(names, "alone")}
        return together, each


def sizes_of(row: dict[str, Any] | None, weights: int) -> list[str]:
    """RSS, PSS and peak in sizes of the weights."""
    return ["" if row is None else f"{row[kind] / weights:.2f}" for kind in ("RSS", "PSS", "peak")]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description="Memory of a session of every verb.")
    parser.add_argument("--folder", type=Path, required=True, help="a hooked model")
    parser.add_argument("--checkout", type=Path, help="a checkout of an earlier commit, to be measured too")
    parser.add_argument("--alone", action="store_true", help="each verb in a process of its own too")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--verb", help=argparse.SUPPRESS)
    parser.add_argument("--settled", type=float, default=SETTLED, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.folder, options.verb, options.settled)))
        return
    measured, each = session(options.folder, Path(__file__).parents[1], options.alone)
    before = session(options.folder, options.checkout, False)[0] if options.checkout else None
    columns, weights = ["after", "RSS", "PSS", "peak"], measured["weights"]
    columns += ["alone: RSS", "PSS", "peak"] if options.alone else []
    columns += ["before: RSS", "PSS", "peak"] if before else []
    rows = []
    for number, row in enumerate(measured["rows"]):
        rows.append([row["name"], *sizes_of(row, weights)])
        rows[-1] += sizes_of(each[row["name"]], weights) if options.alone else []
        rows[-1] += sizes_of(before["rows"][number], weights) if before else []
    title = f"{options.folder.name}, {weights / MB:.0f} MB of weights, {os.cpu_count()} cores"
    said = (
        f"In sizes of the weights, less the {measured['baseline'] / MB:.0f} MB that a process takes after its imports; "
        f"{TOKENS} tokens, float32, {platform.machine()}"
    )
    present("memory", "Memory of a session of every verb", title, [(columns, rows)], options.save, f"{said}.")


if __name__ == "__main__":
    main()
