"""Largest differences from transformers in eager mode: every hook point and intervention of every family.

    python benchmarks/families.py [--save]

The same oracle and the same inputs as the tests. `--save` writes benchmarks/results/families.md.
"""

import argparse
import platform
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from tables import present
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "shared"))

from families import CONFIGS, make_checkpoint  # noqa: E402
from family_batches import KINDS, batch, difference, forward, interventions  # noqa: E402
from oracle import Inputs, run  # noqa: E402

from exporters.transformers import export  # noqa: E402
from mionnx import HookPoint, HookSpec, MIModel  # noqa: E402

COLUMNS = ("family", "hook points", *(f"captures, {kind}" for kind in KINDS), "interventions", "how many")


def measure(family: str, folder: Path) -> tuple[str, ...]:
    """One row: the largest differences of a family."""
    make_checkpoint(family, folder / "checkpoint")
    export(folder / "checkpoint", folder / "hooked")
    model = MIModel.from_pretrained(folder / "hooked")
    reference = AutoModelForCausalLM.from_pretrained(
        folder / "checkpoint", attn_implementation="eager", dtype=torch.float32
    ).eval()
    captures = [f"{worst_capture(model, reference, batch(kind)):.1e}" for kind in KINDS]
    worst, count = worst_intervention(model, reference, batch("left past"))
    return (family, str(len(model.hook_points())), *captures, f"{worst:.1e}", str(count))


def worst_capture(model: MIModel, reference: torch.nn.Module, inputs: Inputs) -> float:
    """The largest difference over all hook points."""
    expected = run(reference, inputs).values
    found = forward(model, inputs, HookSpec().capture(lambda name: not name.endswith("hook_result"))).values
    points = map(HookPoint.parse, found)
    return max(difference(point, found[str(point)], expected[str(point)], inputs) for point in points)


def worst_intervention(model: MIModel, reference: torch.nn.Module, inputs: Inputs) -> tuple[float, int]:
    """Largest difference of logits, all kinds at all hook points of the last layer; their number."""
    plain = run(reference, inputs)
    worst, count = 0.0, 0
    for point in [p for p in model.hook_points() if not p.derived and p.layer in (None, model.num_layers - 1)]:
        for edit in interventions(point, plain.values[str(point)].shape):
            expected = run(reference, inputs, [(point, edit)]).logits
            found = forward(model, inputs, HookSpec().intervene(point, edit)).logits
            scale = max(1.0, float(np.abs(expected[inputs.real]).max()))
            worst, count = max(worst, float(np.abs(found - expected)[inputs.real].max()) / scale), count + 1
    return worst, count


def for_each(names: list[str], function: Callable[[str, Path], tuple[str, ...]]) -> list[tuple[str, ...]]:
    """One row a family, each in a folder that is deleted afterwards, with progress."""
    rows = []
    for name in track(names, "families", console=Console(stderr=True)):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(function(name, Path(folder)))
    return rows


def main() -> None:
    """Measure, print, and save if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true")
    save = parser.parse_args().save
    rows = for_each(list(CONFIGS), measure)
    title = f"random small models, eager, fp32; {platform.machine()}"
    present("families", "Largest difference from transformers", title, [(COLUMNS, rows)], save)


if __name__ == "__main__":
    main()
