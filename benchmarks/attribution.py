"""Attribution patching beside the exact sweep: how well each method tells every kind of hook point, and how fast.

For each hook point of the layers: `patch_sweep` over layer x position (x head where there are heads; not in a model of
more than `--deep` layers, whose exact sweep would take hours), then
`attribute_patch` method by method: Pearson correlation of the effects, and how many of the ten leading cells are the
same. Times are processor seconds of this process, the second call of each, so that no graph is opened in them; "all
kinds" is one call for all hook points together.

    python benchmarks/attribution.py [MODEL ...] [--save]
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mionnx import MIModel
from mionnx.analysis.sweep.grid import axes_to_go_over
from mionnx.bind.gradients import differentiable
from mionnx.bind.hook_index import index_hooks
from mionnx.errors import MIError
from mionnx.graph.hook_points import VARIANTS, HookPoint
from mionnx.spec.hook_spec import HookSpec

SHIPPED = ("models/world-llama", "models/world-gpt2", "models/world-rwkv7")
METHODS: dict[str, dict[str, Any]] = {
    "gradient": {},
    "at clean": {"linearize_at": "clean"},
    "mean": {"linearize_at": "mean"},
    "8 steps": {"steps": 8},
    "frozen_norm": {"rules": "frozen_norm"},
    "relp": {"rules": "relp"},
    "relp, mean": {"rules": "relp", "linearize_at": "mean"},
    "relp_frozen_pattern": {"rules": "relp_frozen_pattern"},
    "frozen_norm_pattern": {"rules": "frozen_norm_pattern"},
}
GIFT = "When Mary and John went to the store{comma} {giver} gave a drink to"
TOP = 10


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """The result of a call, and processor seconds of its repetition."""
    call()
    begin = time.process_time()
    return call(), time.process_time() - begin


def kinds(model: MIModel) -> list[str]:
    """The kinds of hook points in layers that have a gradient, in the order of the graph."""
    points = [HookPoint.parse(name) for name in differentiable(index_hooks(HookSpec(), model.hooked))]
    return list(dict.fromkeys(VARIANTS[point.variant].template for point in points if point.layer is not None))


def axes(kind: str, heads: bool) -> tuple[str, ...]:
    """Layer, position, and heads where there are any and they are wanted."""
    has = axes_to_go_over(HookPoint.parse(kind.format(i=0)))
    wanted = ("layer", "head", "position") if heads else ("layer", "position")
    return tuple(axis for axis in wanted if axis in has)


def row(model: MIModel, clean: str, corrupted: str, kind: str, heads: bool) -> list[str]:
    """One line of the table: cells, then Pearson and common cells of each method, then times."""
    over = axes(kind, heads)
    exact, seconds = timed(lambda: model.patch_sweep(clean, corrupted, kind, over, progress=False))
    told = []
    for given in METHODS.values():
        try:
            agreement = model.attribute_patch(clean, corrupted, kind, over, **given).agreement(exact, TOP)
            told.append(f"{agreement.pearson:.3f}, {agreement.shared}")
        except MIError:  # hook points that these rules take for constant, or a model without patterns
            told.append("-")
    _, own = timed(lambda: model.attribute_patch(clean, corrupted, kind, over))
    return [kind.removeprefix("blocks.{i}."), str(exact.values.size), *told, f"{seconds:.3f}", f"{own:.3f}"]


def table(name: str, deep: int) -> list[str]:
    """The table of one model, in markdown."""
    model = MIModel.from_pretrained(name)
    comma = " ," if Path(name).name.startswith("world-") else ","
    clean, corrupted = (GIFT.format(comma=comma, giver=giver) for giver in ("John", "Mary"))
    names = kinds(model)
    _, whole = timed(lambda: model.attribute_patch(clean, corrupted, names, ("layer", "position")))
    head = ["hook point", "cells", *METHODS, "sweep, s", "attributed, s"]
    lines = [f"## {Path(name).name}", "", "| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for kind in names:
        lines.append("| " + " | ".join(row(model, clean, corrupted, kind, model.num_layers <= deep)) + " |")
        print(lines[-1], flush=True)
    return [*lines, "", f"All {len(names)} kinds of hook points in one call, layer x position: {whole:.3f} s.", ""]


def main() -> None:
    """Print the tables, and write them where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=SHIPPED)
    parser.add_argument("--deep", type=int, default=12)
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    about = (
        "Gift prompt, 14 tokens: John gives (clean) or Mary (corrupted); logit_diff of the two top tokens. Each entry: "
        f"Pearson with the exact sweep, and how many of its {TOP} leading cells are the same. Processor seconds.\n"
    )
    lines = ["# Attribution patching beside the exact sweep", "", about]
    for name in given.models:
        lines += table(name, given.deep)
    print("\n".join(lines))
    if given.save:
        (Path(__file__).parent / "results" / "attribution.md").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
