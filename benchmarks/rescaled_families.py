"""Every family of the table, its residual stream divided by 16: it computes the same bits, or the node is named.

Random small models of `benchmarks/families.py`'s families, of encoders and of recurrent ones. A row says how many hook
points hold a power of two then, how many products with powers the graph has besides, and how many of the batches give
the same bits: of decoders plain, padded on either side, after a past, and both; of encoders padded on either side; with
every hook point of the stream captured, alone and with an edit.

    python benchmarks/rescaled_families.py [FAMILY ...] [--rows FILE] [--save]
"""

import argparse
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from family_models import RWKV4, for_each, make_decoder
from tables import earlier, present

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "shared"))

from encoders import PADDINGS, encoder_batch, make_encoder, usual_head  # noqa: E402
from family_batches import KINDS, batch, forward  # noqa: E402
from rescaled import rescaled  # noqa: E402

from exporters import rwkv  # noqa: E402
from exporters.transformers import export  # noqa: E402
from mionnx import HookSpec, Intervention, MIModel  # noqa: E402
from mionnx.graph.exponents import power_of  # noqa: E402
from mionnx.rewrite.exponent_types import ExponentError  # noqa: E402

# The table of families; its file has the name of one in tests/shared.
found_at = importlib.util.spec_from_file_location("table_of_families", HERE / "families.py")
assert found_at is not None
assert found_at.loader is not None
table = importlib.util.module_from_spec(found_at)
found_at.loader.exec_module(table)

AS_ENCODER = table.AS_ENCODER
EXPONENT = -4
COLUMNS = ("family", "hook points with a power", "products with powers", "batches of the same bits")


def made(name: str, folder: Path) -> MIModel:
    """A random small model of a family, exported."""
    checkpoint, family = folder / "checkpoint", name.removesuffix(AS_ENCODER)
    if name.endswith(AS_ENCODER):
        make_encoder(family, checkpoint, usual_head(family))
    else:
        make_decoder(family, checkpoint)
    (rwkv.export if family == RWKV4 else export)(checkpoint, folder / "hooked")
    return MIModel.from_pretrained(folder / "hooked", threads=1)


def runs(model: MIModel, encoder: bool, spec: HookSpec) -> Iterator[dict[str, Any]]:
    """The values of each batch, padding left out where it is undefined."""
    if encoder:
        for padding in PADDINGS:
            inputs = encoder_batch(padding)
            cache = model.forward(inputs["input_ids"], spec, attention_mask=inputs["attention_mask"])
            yield {**cache, "output": cache.output()}
        return
    for kind in KINDS:
        outcome = forward(model, batch(kind), spec)
        yield {**outcome.values, "output": outcome.logits}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether all values have the same bits."""
    return all(np.array_equal(one[name], other[name], equal_nan=True) for name in one)


def measure(name: str, folder: Path) -> tuple[list[str], bool]:
    """A family's row."""
    model = made(name, folder)
    try:
        other = rescaled(model, EXPONENT, folder / "rescaled")
    except ExponentError as error:
        return [name, "-", "-", f"refused: {error}"], False
    points = other.hooked.metadata.exponents
    edited = next(iter(points), None)
    specs = [HookSpec().capture("*hook_resid*")]
    if edited is not None:
        specs.append(HookSpec().capture("*hook_resid*").intervene(edited, Intervention.Scale(1.5)))
    encoder = name.endswith(AS_ENCODER)
    each = [zip(runs(model, encoder, spec), runs(other, encoder, spec), strict=True) for spec in specs]
    alike = [same(*pair) for pairs in each for pair in pairs]
    stored = other.hooked.proto.graph.node
    powers = sum(any(power_of(one) is not None for one in node.input) for node in stored) - 2 * len(points)
    return [name, str(len(points)), str(powers), f"{sum(alike)} of {len(alike)}"], False


def main() -> None:
    """Measure every family, print the table, and save it if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    names = given.families or [name for name, entry in table.saved().items() if "row" in entry]
    found = for_each(names, measure, given.rows, {})
    kept = earlier("rescaled_families", COLUMNS, names) if given.families else {}
    measured = {name: tuple(found[name].get("row") or (name, "-", "-", found[name]["missing"])) for name in names}
    order = sorted(kept | measured, key=lambda name: (name.endswith(AS_ENCODER), name))
    rows = [(kept | measured)[name] for name in order]
    refused = sum(row[3].startswith("refused: ") for row in rows)
    whole = sum(row[3].split(" of ")[0] == row[3].split(" of ")[-1] and row[1] != "-" for row in rows)
    said = f"{whole} of {len(rows)} give the same bits in every batch; {refused} refused by name."
    present("rescaled_families", "Streams times 2^-4, bit for bit", "random small models", [(COLUMNS, rows)],
            given.save, said)  # fmt: skip


if __name__ == "__main__":
    main()
