"""A worked example of gradients: heads found in one pass, and the edges between them as a circuit."""

from pathlib import Path
from typing import TYPE_CHECKING, cast

from rich.console import Console

from mionnx.analysis.gradients.attributed_sweep import AttributedSweep
from mionnx.cli.demos.sweep import GIFT, OTHER, write
from mionnx.machine.decimals import decimal

if TYPE_CHECKING:
    from mionnx.model import MIModel

CONFIRMED = 5  # heads
STEPS = 8  # along the path between the two prompts' values
EDGES = (20, 50, 100, 200)


def heads_and_edges(model: "MIModel", console: Console, folder: Path | None = None) -> None:
    """Estimate every head's patching effect, confirm the largest, and keep the leading edges."""
    found = model.attribute_patch(GIFT, OTHER, "z", ("layer", "head"), steps=STEPS, confirm=CONFIRMED)
    console.print(
        f"{GIFT!r}, patched into {OTHER!r}: every head's effect from {STEPS} gradients, and the leading exactly:"
    )
    one = cast(AttributedSweep, found)  # of one kind of hook point
    console.print(one.confirmed())
    write(one, folder, "attribution_patching", console)
    edges = model.edge_attribution(GIFT, OTHER, steps=5)
    circuit = model.circuit(GIFT, OTHER, EDGES, scores=edges)
    kept = ", ".join(f"{count}: {decimal(share, 2)}" for count, share in zip(EDGES, circuit.faithfulness, strict=True))
    console.print(
        f"The leading of {edges.count} edges kept, every other one patched, and the share of the effect that is left: "
        f"{kept}."
    )
    write(circuit, folder, "circuit", console)
