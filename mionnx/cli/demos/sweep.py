"""Worked examples of patching, ablation, induction heads, and circuits of edges."""

from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
from rich.console import Console

from mionnx.analysis.gradients.attribute_patch import AttributedSweep
from mionnx.graph.hook_points import HookPoint
from mionnx.machine.decimals import decimal
from mionnx.machine.softmax import softmax
from mionnx.run.prompt import token_text
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.intervention import Intervention

if TYPE_CHECKING:
    from mionnx.model import MIModel
    from mionnx.view import Shown

FRANCE, GERMANY = "The capital of France is", "The capital of Germany is"
GIFT, OTHER = (f"When Mary and John went to the store , {giver} gave a drink to" for giver in ("John", "Mary"))
CONFIRMED = 5  # heads
STEPS = 8  # along the path between the two prompts' values
EDGES = (20, 50, 100, 200)


def patching(model: "MIModel", console: Console, folder: Path | None = None) -> None:
    """Patch the residual stream of one prompt into another, one layer and position at a time."""
    sweep = model.patch_sweep(FRANCE, GERMANY, "resid_mid")
    console.print(f"The stream of {FRANCE!r}, patched into {GERMANY!r} at one layer and position; 1 is full recovery:")
    console.print(sweep.table())
    console.print(
        f"{sweep.facts()}; {sweep.cost['without effect']:.0f} of {sweep.values.size} cells cannot have an effect."
    )
    write(sweep, folder, "patching", console)


def heads_of_the_answer(model: "MIModel", console: Console, folder: Path | None = None) -> None:
    """Zero each head by itself; then, together, the four with the largest patching effect."""
    sweep = model.ablation_sweep(GIFT)
    console.print(f"{GIFT!r}, each head zeroed by itself:")
    console.print(sweep.table())
    write(sweep, folder, "ablation", console)
    path = model.patch_sweep(GIFT, OTHER, "z", ("layer", "head"), patching="noising")
    chosen = np.transpose(np.unravel_index(np.argsort(path.effect, axis=None)[:4], path.values.shape)).tolist()
    spec = HookSpec()
    for layer, head in chosen:
        spec.intervene(HookPoint.AttnZ(layer), Intervention.Zero(heads=head))
    before, after = (softmax(model.forward(GIFT, hooks).output()[0, -1]) for hooks in (None, spec))
    answer = int(before.argmax())
    names = ", ".join(f"{layer}.{head}" for layer, head in chosen)
    console.print(
        f"Without heads {names}, which have the largest patching effects, P({quoted(model, answer)}) falls "
        f"from {decimal(before[answer], 3)} to {decimal(after[answer], 3)}; the top token is "
        f"{quoted(model, int(after.argmax()))}."
    )


def induction(model: "MIModel", console: Console, folder: Path | None = None) -> None:
    """Find induction heads, and measure the prediction of repeated sequences without them."""
    scores = model.head_scores()
    console.print(scores.table(3))
    write(scores, folder, "heads", console)
    best = [(layer, head) for layer, head, score in scores.top("induction", 4) if score > 0.5]
    words = np.random.default_rng(0).permutation(np.arange(20, min(400, model.vocab_size)))[:16]
    spec = HookSpec()
    for layer, head in best:
        spec.intervene(HookPoint.AttnZ(layer), Intervention.Zero(heads=head))
    rates = []
    for hooks in (None, spec):
        predicted = model.forward(np.tile(words, 2), hooks).output()[0, 16:-1].argmax(-1)
        rates.append(float((predicted == words[1:]).mean()))
    names = ", ".join(f"{layer}.{head}" for layer, head in best)
    console.print(
        f"A sequence of 16 random tokens, repeated: {rates[0]:.0%} of the repetition is predicted; without heads "
        f"{names}, {rates[1]:.0%}."
    )


def heads_and_edges(model: "MIModel", console: Console, folder: Path | None = None) -> None:
    """Estimate every head's patching effect, confirm the largest, and keep the leading edges."""
    result = cast(  # of one kind of hook point
        AttributedSweep, model.attribute_patch(GIFT, OTHER, "z", ("layer", "head"), steps=STEPS, confirm=CONFIRMED)
    )
    console.print(
        f"{GIFT!r}, patched into {OTHER!r}: every head's effect from {STEPS} gradients, and the leading exactly:"
    )
    console.print(result.confirmed())
    write(result, folder, "attribution_patching", console)
    edges = model.edge_attribution(GIFT, OTHER, steps=5)
    circuit = model.circuit(GIFT, OTHER, EDGES, scores=edges)
    shares = ", ".join(
        f"{count}: {decimal(share, 2)}" for count, share in zip(EDGES, circuit.faithfulness, strict=True)
    )
    console.print(
        f"The leading of {edges.count} edges kept, every other one patched, and the share of the effect that is left: "
        f"{shares}."
    )
    write(circuit, folder, "circuit", console)


def write(result: "Shown", folder: Path | None, name: str, console: Console) -> None:
    """Write a result's page and picture, if there is a folder for them."""
    if folder is not None:
        console.print(f"the page: {result.save(folder / f'{name}.html')}", highlight=False)
        result.save(folder / f"{name}.png")


def quoted(model: "MIModel", token: int) -> str:
    """A token as text, quoted."""
    return repr(token_text(model, token))
