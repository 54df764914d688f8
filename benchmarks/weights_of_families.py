"""x W + b is the hooked value, of every weight by name and every layer, in the families of the table.

    python benchmarks/weights_of_families.py [FAMILY ...] [--rows FILE] [--save]

A small random model of each family whose decoder the table of families has: queries, keys, values and outputs of heads
against W_Q, W_K, W_V, W_O, neurons and the MLP's output against W_in, W_gate, W_out, experts by the tokens that choose
them, to 2e-5 of the largest number. A weight that a family has not, or not as one matrix, is refused by name, and the
reason stands in its cell. About twenty minutes; `--rows` keeps what was measured in a file of JSON lines. Of named
families the saved table keeps the others' rows.
"""

import argparse
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
from family_models import for_each, make_decoder  # what stands in tests/shared is found by it
from tables import earlier, present
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from weights_law import check_attention, check_mlp

from exporters.transformers import export
from mionnx import HookCache, HookSpec, MIModel
from mionnx.errors import HookError

IDS = np.random.default_rng(0).integers(3, 101, (2, 7))
AGREES = "agrees"
NOTES = ("llama4_text: layers without rotation multiply queries by a number of each position.",)
VALUE = re.compile(r"'\w+_\d+'")  # the name of a value without a hook point
COLUMNS = ("family", "layers", "attention", "MLP")


def cell(check: Callable[[MIModel, HookCache, int], None], model: MIModel, cache: HookCache, layers: list[int]) -> str:
    """What a check says of some layers: agrees, differs, or why there is no such weight."""
    if not layers:
        return "-"
    said = set[str]()
    for layer in layers:
        try:
            check(model, cache, layer)
            said.add(AGREES)
        except AssertionError as error:
            said.add(f"DIFFERS: {str(error).partition(chr(10))[0]}")
        except HookError as error:
            reason = str(error).partition(": ")[2].replace(f" in layer {layer}", "").replace(f"blocks.{layer}.", "")
            told = VALUE.sub("it", reason).partition(";")[0]
            said.add(f"refused: {told}")
    return "; ".join(sorted(said))


def measure(family: str, folder: Path) -> tuple[list[str], bool]:
    """One row."""
    make_decoder(family, folder / "checkpoint")
    export(folder / "checkpoint", folder / "hooked")
    model = MIModel.from_pretrained(folder / "hooked", threads=1)
    cache = model.forward(IDS, HookSpec().capture("*"))
    kinds = model.hooked.metadata.layers
    attending = [layer for layer, kind in enumerate(kinds) if kind.attention]
    points = {str(point) for point in model.hook_points()}
    neurons = [layer for layer in range(len(kinds)) if f"blocks.{layer}.mlp.hook_pre" in points]
    cells = [
        cell(check, model, cache, layers) for check, layers in ((check_attention, attending), (check_mlp, neurons))
    ]
    return [family, str(len(kinds)), *cells], False


def main() -> None:
    """Measure, print, and save if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    names = given.families or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    kept = earlier("weights_of_families", COLUMNS, names) if given.families else {}
    found = for_each(names, measure, given.rows, {})
    # why others are missing: families.md
    by_name = kept | {name: tuple(entry["row"]) for name, entry in found.items() if "row" in entry}
    rows = [row for _, row in sorted(by_name.items())]
    agree = sum({*row[2:]} <= {AGREES, "-"} for row in rows)
    said = f"{agree} of {len(rows)} families agree in every weight; the others say which they have not, and why"
    present("weights_of_families", "x W + b is the hooked value", said, [(COLUMNS, rows)], given.save, notes=NOTES)


if __name__ == "__main__":
    main()
