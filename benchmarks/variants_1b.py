"""Variants of a Llama-shaped model of one billion parameters: time to the first logits, and memory of eight of them.

    python benchmarks/variants_1b.py [--folder HOOKED] [--save]

Exports a random checkpoint (4 GB) unless a hooked model is given, prepares its base (10 GB, in a store of its own), and
measures, in processes of their own: (c) a new structure from `forward` to logits with the base ready, with and without
packing; new values of the same structure, beside the bare session run that they come down to; (d) the memory (PSS, the
share of mapped files included) of one variant and of eight. `--save` writes benchmarks/results/variants_1b.md.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
from tables import present

from mionnx import HookPoint, HookSpec, Intervention, MIModel, Options
from mionnx.graph.hooked_model import HookedModel

VARIANTS = 8
TOKENS = 16
Rows = list[tuple[str, str]]


def opened(folder: Path, **options: Any) -> MIModel:
    """The model, as a process finds it."""
    return MIModel(HookedModel.open(folder), Options(**options))


def variant(model: MIModel, number: int, strength: float = 1.0) -> HookSpec:
    """One of several structures: steering at one layer, and all residual streams."""
    vector = np.full(model.hidden_size, 0.01 * strength, np.float32)
    spec = HookSpec().capture("blocks.*.hook_resid_post")
    return spec.intervene(HookPoint.ResidPost(number), Intervention.Add(vector))


def seconds(work: Any) -> float:
    """Seconds that a call takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def new_structures(folder: Path, prepack: bool) -> dict[str, float]:
    """Median seconds to the logits of a new structure, the base ready; and of new values then."""
    model = opened(folder, prepack=prepack)
    model.prepare()
    ids = np.random.default_rng(0).integers(3, model.vocab_size, (1, TOKENS))
    model.forward(ids)  # the base is looked up, and read from the disk
    first = [seconds(lambda n=n: model.forward(ids, variant(model, n))) for n in range(VARIANTS)]
    bare, again = [], []
    compiled = model.compile_graph(variant(model, 0))
    feeds = _feeds(model, ids, variant(model, 0))
    names = ["logits", *(want.fetched for want in compiled.plan.captures)]
    for turn in range(15):
        bare.append(seconds(lambda: compiled.session.run(names, feeds)))
        again.append(seconds(lambda turn=turn: model.forward(ids, variant(model, 0, turn))))
    ratios = [one / other for one, other in zip(again, bare, strict=True)]
    return {"first": median(first), "values": median(again), "run": median(bare), "ratio": median(ratios)}


def _feeds(model: MIModel, ids: np.ndarray, spec: HookSpec) -> dict[str, np.ndarray]:
    from mionnx.bind.bound_spec import bind
    from mionnx.inputs.token_batch import make_token_batch

    bound = bind(spec, model.hooked)
    inputs = bound.inputs(make_token_batch(ids, None, None, model.hooked))
    read = {entry.name for entry in model.variants.get(bound.plan).session.get_inputs()}
    return {name: value for name, value in inputs.items() if name in read}


def memory_of(folder: Path, count: int, based: bool) -> dict[str, float]:
    """GiB of a process after so many different variants have each run once."""
    model = opened(folder, base=based, max_bytes=2**40)
    if based:
        model.prepare()
    ids = np.random.default_rng(0).integers(3, model.vocab_size, (1, TOKENS))
    for number in range(count):
        model.forward(ids, variant(model, number))
    return {"pss": psutil.Process().memory_full_info().pss / 2**30}


def in_process(what: str, *arguments: object) -> dict[str, float]:
    """One measurement, in a process of its own."""
    command = [sys.executable, __file__, "--measure", json.dumps([what, *map(str, arguments)])]
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(found.splitlines()[-1])


def measure(what: str, folder: str, *rest: str) -> dict[str, float]:
    """Run one measurement, in a process of its own."""
    if what == "prepare":
        return {"seconds": seconds(opened(Path(folder)).prepare)}
    if what == "structures":
        return new_structures(Path(folder), rest[0] == "True")
    return memory_of(Path(folder), int(rest[0]), rest[1] == "True")


def rows_of(folder: Path) -> Rows:
    """Everything measured."""
    prepared = in_process("prepare", folder)["seconds"]
    rows = [("preparing the base, once for the machine", f"{prepared:.1f} s")]
    for prepack in (False, True):
        found, how = in_process("structures", folder, prepack), "packed" if prepack else "without packing"
        rows += [
            (f"(c) new structure to first logits, {how}", f"{found['first']:.2f} s"),
            (f"    new values, {how}", f"{found['values'] * 1000:.0f} ms, {found['ratio']:.3f} of the bare run"),
        ]
    one, eight = (in_process("memory", folder, count, True)["pss"] for count in (1, VARIANTS))
    rows.append(("(d) memory of one variant", f"{one:.2f} GiB"))
    rows.append((f"    memory of {VARIANTS} variants", f"{eight:.2f} GiB, {eight / one:.2f} of one"))
    plain = in_process("memory", folder, 1, False)["pss"]
    rows.append(("    one variant the plain way, without a base", f"{plain:.2f} GiB"))
    return rows


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description="Variants of a 1B model: first logits, memory.")
    parser.add_argument("--folder", type=Path, help="a hooked model; a random 1B Llama is exported if left out")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(*json.loads(options.measure))))
        return
    with tempfile.TemporaryDirectory() as name:
        os.environ["MIONNX_CACHE"] = str(Path(name) / "store")
        folder = options.folder
        if folder is None:
            from export_1b import make_checkpoint

            from exporters.transformers import export

            folder = Path(name) / "hooked"
            make_checkpoint(Path(name) / "checkpoint")
            export(Path(name) / "checkpoint", folder)
        rows = rows_of(folder)
    title = f"{TOKENS} tokens, fp32, {os.cpu_count()} cores, {platform.machine()}"
    heading = "Variants of a Llama-shaped 1B model"
    present("variants_1b", heading, title, [(("what", "measured"), rows)], options.save)


if __name__ == "__main__":
    main()
