"""Cost of comparing two runtimes at every hook point, beside running one of them.

    python benchmarks/verify_cost.py [--tokens 64 256] [--save]

A GPT-2 of 124 M parameters with random weights. Every measurement is a process of its own: first each runtime alone,
opening the model and running the prompt once for its logits; then `verify` with ONNX Runtime beside it, at every hook
point, without and with measuring what each step adds by itself. Memory is the process' largest resident set, mapped
files included; its ratio is to the larger of the two runtimes alone. `--save` writes benchmarks/results/verify_cost.md.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from rich.progress import track
from tables import present

FIRST, OTHERS = "ort-cpu", ("ort-cpu:none", "torch", "openvino")
COLUMNS = ("tokens", "beside ort-cpu", "hook points", "alone", "verify", "and each step", "memory alone", "verify",
           "and each step", "largest relative")  # fmt: skip
MIB = 2**20


def alone(folder: Path, runtime: str, tokens: int) -> dict[str, float]:
    """One runtime, one prompt, its logits."""
    from mionnx import HookSpec
    from mionnx.graph.hooked_model import HookedModel
    from mionnx.inputs.token_batch import make_token_batch
    from mionnx.verify.graph_under_test import GraphUnderTest
    from mionnx.verify.runtimes import runtime_of

    model = HookedModel.open(folder)
    call = make_token_batch(prompt(model.vocab_size, tokens), None, None, model)
    subject = GraphUnderTest(model, HookSpec(), ["hook_logits"], [call])
    with runtime_of(runtime, folder.parent).passes(subject, ["hook_logits"]) as run:
        run(call, lambda _name, _value: None)
    return {}


def prompt(vocab: int, tokens: int) -> np.ndarray:
    """Ids [1, tokens]."""
    return np.random.default_rng(0).integers(3, vocab, (1, tokens))


def verified(folder: Path, runtime: str, tokens: int, local: bool) -> dict[str, float]:
    """Two runtimes at every hook point."""
    from mionnx import MIModel

    model = MIModel.from_pretrained(folder)
    ids = prompt(model.vocab_size, tokens)
    asked = {
        "local": local,
        "greedy": 0,
        "tolerance": 1e-3,
        "checkpoint": folder.parent if runtime == "torch" else None,
    }
    found = model.verify([ids], [FIRST, runtime], points="*", **asked)
    assert not found.failed, found.failed
    (beside,) = found.besides
    return {"relative": beside.worst.relative, "hooks": len(beside.rows)}


def measured(what: str, folder: Path, runtime: str, tokens: int) -> dict[str, float]:
    """Run one measurement in a process of its own: what it found, its seconds and its memory."""
    arguments = ["--measure", what, "--folder", str(folder), "--runtime", runtime, "--tokens", str(tokens)]
    ran = subprocess.run([sys.executable, __file__, *arguments], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(ran.stdout.splitlines()[-1])


def rows_of(folder: Path, lengths: list[int]) -> list[list[str]]:
    """A row for each length and runtime."""
    rows = []
    for tokens in lengths:
        first = measured("alone", folder, FIRST, tokens)
        for runtime in track(OTHERS, f"{tokens} tokens"):
            other, quick, whole = (measured(what, folder, runtime, tokens) for what in ("alone", "verify", "steps"))
            least = max(first["memory"], other["memory"])
            rows.append(
                [str(tokens), runtime, f"{quick['hooks']:.0f}"]
                + [f"{other['seconds']:.1f} s", f"{quick['seconds']:.1f} s", f"{whole['seconds']:.1f} s"]
                + [f"{least / MIB:.0f} MiB"]
                + [f"{one['memory'] / MIB:.0f} MiB, {one['memory'] / least:.2f}" for one in (quick, whole)]
                + [f"{whole['relative']:.1e}"]
            )
    return rows


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Run one measurement, in a process of its own."""
    begin = time.perf_counter()
    if options.measure == "alone":
        found = alone(options.folder, options.runtime, options.tokens[0])
    else:
        found = verified(options.folder, options.runtime, options.tokens[0], options.measure == "steps")
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {**found, "seconds": time.perf_counter() - begin, "memory": memory}


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description="What comparing two runtimes costs.")
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--runtime", help=argparse.SUPPRESS)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options)))
        return
    from transformers import AutoConfig, AutoModelForCausalLM

    from exporters.transformers import export

    with tempfile.TemporaryDirectory() as name:
        AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2")).save_pretrained(name)
        export(Path(name), Path(name) / "hooked")
        rows = rows_of(Path(name) / "hooked", options.tokens)
    title = f"GPT-2 124M, fp32, {os.cpu_count()} cores, {platform.machine()}"
    said = __doc__.split("\n\n")[2]
    present("verify_cost", "Comparing runtimes", title, [(COLUMNS, rows)], options.save, said)


if __name__ == "__main__":
    main()
