"""Two checkouts of mionnx by turns: is this one slower than that one?

    git worktree add ../before COMMIT
    python benchmarks/checkouts_speed.py ../before [--model FOLDER ...] [--repeats 15] [--threads 0] [--save]

Each checkout runs in a process of its own, on the same hooked models; a case is timed in one, then in the other, and
the other way round at the next repeat. Figures are medians in milliseconds and the ratio of this checkout to the
other: below 1 this one is faster. Logits and tokens are compared first, bit for bit. `--model` names folders of hooked
models that both can read (default: those that ship with both, from the other checkout: a hooked model's metadata may
have grown since); `--save` writes benchmarks/results/checkouts_speed.md.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from tables import present

REPOSITORY = Path(__file__).parent.parent
CASES = (
    *("forward 16", "forward 64", "captured 64", "everything 16", "steered 64", "generate 24", "generate steered 24"),
    *("streams swept 16", "opened and steered 16"),
)
COLUMNS = ("model", "case", "before, ms", "now, ms", "ratio")

WORKER = """
import hashlib, json, sys, time
import numpy as np
from mionnx import HookPoint, HookSpec, Intervention, MIModel

def opened():
    return MIModel.from_pretrained(sys.argv[1], threads=int(sys.argv[2]))

model = opened()
rng = np.random.default_rng(0)
ids = {length: rng.integers(3, model.vocab_size, (1, length)) for length in (16, 24, 64)}
middle = HookPoint.ResidPost(model.num_layers // 2)
steer = HookSpec().intervene(middle, Intervention.Add(rng.normal(size=model.hidden_size).astype(np.float32)))
streams, all_points = HookSpec().capture("blocks.*.hook_resid_post"), HookSpec().capture("*")

def run(case):
    kind, length = case.rsplit(" ", 1)
    tokens = ids[int(length)]
    if kind.startswith("generate"):
        spec = steer if "steered" in kind else None
        return model.generate(tokens[:, :8], spec, max_new_tokens=int(length), eos_token_id=[]).new_ids[0]
    if kind == "streams swept":
        return model.patch_sweep(tokens, ids[64][:, :16], "resid_pre", answer=5, versus=6).values
    if kind == "opened and steered":
        return opened().forward(tokens, steer).output()
    spec = {"forward": None, "captured": streams, "everything": all_points, "steered": steer}[kind]
    return model.forward(tokens, spec).output()

for line in sys.stdin:
    case = json.loads(line)
    started = time.perf_counter()
    result = run(case)
    took = time.perf_counter() - started
    print(json.dumps([took, hashlib.sha256(np.ascontiguousarray(result).tobytes()).hexdigest()]), flush=True)
"""


class Checkout:
    """A process that runs cases with the mionnx of one checkout."""

    def __init__(self, checkout: Path, model: Path, threads: int) -> None:
        command = [sys.executable, "-c", WORKER, str(model.resolve()), str(threads)]
        environment = {**os.environ, "PYTHONPATH": str(checkout.resolve())}
        self.process = subprocess.Popen(
            command, cwd=checkout, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, case: str) -> tuple[float, str]:
        """Seconds that a case took, and the hash of its result."""
        if self.process.stdin is None or self.process.stdout is None:
            raise TypeError("the worker has no pipes")
        print(json.dumps(case), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the worker ended while it ran {case!r}")
        took, digest = json.loads(line)
        return float(took), str(digest)


def compare(model: Path, before: Path, repeats: int, threads: int) -> list[tuple[str, ...]]:
    """The rows of one model."""
    sides = [Checkout(before, model, threads), Checkout(REPOSITORY, model, threads)]
    rows = []
    for case in CASES:
        digests = {side.run(case)[1] for side in sides for _ in range(2)}  # the first call opens the graph
        if len(digests) > 1:
            raise SystemExit(f"{model.name}, {case}: the two checkouts differ")
        times: list[list[float]] = [[], []]
        for repeat in range(repeats):
            for number in (0, 1) if repeat % 2 else (1, 0):
                times[number].append(sides[number].run(case)[0])
        old, new = (median(each) for each in times)
        rows.append((model.name, case, f"{1000 * old:.2f}", f"{1000 * new:.2f}", f"{new / old:.2f}"))
        print(*rows[-1], sep="  ", flush=True)
    for side in sides:
        side.process.kill()
    return rows


def main() -> None:
    """Compare, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("--model", type=Path, nargs="+")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--save", action="store_true")
    asked: Any = parser.parse_args()
    both = [
        model for model in (asked.before / "models").glob("world-*") if (REPOSITORY / "models" / model.name).exists()
    ]
    rows = [
        row
        for model in sorted(asked.model or both)
        for row in compare(model, asked.before, asked.repeats, asked.threads)
    ]
    title = f"median of {asked.repeats}, {platform.machine()}, {os.cpu_count()} cores"
    present("checkouts_speed", "This checkout beside another", title, [(COLUMNS, rows)], asked.save)


if __name__ == "__main__":
    main()
