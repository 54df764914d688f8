"""Worked examples of sweeps, run on a model that knows capitals, who gives what to whom, and repeated sequences.

Nothing in them is written down beforehand; with a folder, each also writes its page and picture there.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from scipy.special import softmax

from mionnx.graph.hook_points import HookPoint
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.intervention import Intervention

if TYPE_CHECKING:
    from mionnx.model import MIModel
    from mionnx.view import Shown

FRANCE, GERMANY = "The capital of France is", "The capital of Germany is"
GIFT, OTHER = (f"When Mary and John went to the store , {giver} gave a drink to" for giver in ("John", "Mary"))


def patching(model: "MIModel", console: Console, folder: Path | None = None) -> None:
    """Put the residual stream of one prompt into another, one layer and position at a time."""
    found = model.patch_sweep(FRANCE, GERMANY, "resid_mid")
    console.print(f"The stream of {FRANCE!r} put into {GERMANY!r}, one place at a time; 1 is the whole way back:")
    console.print(found.table())
    console.print(f"{found.facts()}; {found.cost['without effect']:.0f} of {found.values.size} cells cannot matter.")
    keep(found, folder, "patching", console)


def heads_of_the_answer(model: "MIModel", console: Console, folder: Path | None = None) -> None:
    """Zero one head after the other; then the ones that patching finds, together."""
    found = model.ablation_sweep(GIFT)
    console.print(f"{GIFT!r}, one head zeroed at a time:")
    console.print(found.table())
    keep(found, folder, "ablation", console)
    path = model.patch_sweep(GIFT, OTHER, "z", ("layer", "head"), direction="noising")
    chosen = np.transpose(np.unravel_index(np.argsort(path.effect, axis=None)[:4], path.values.shape)).tolist()
    spec = HookSpec()
    for layer, head in chosen:
        spec.intervene(HookPoint.AttnZ(layer), Intervention.Zero(heads=head))
    before, after = (softmax(model.forward(GIFT, hooks).output()[0, -1]) for hooks in (None, spec))
    answer = int(before.argmax())
    names = ", ".join(f"{layer}.{head}" for layer, head in chosen)
    console.print(
        f"Without the heads {names}, which carry the name by patching, P({spell(model, answer)}) falls from "
        f"{before[answer]:.3f} to {after[answer]:.3f}; the likeliest is {spell(model, int(after.argmax()))}."
    )


def induction(model: "MIModel", console: Console, folder: Path | None = None) -> None:
    """Which heads attend as induction heads do, and what becomes of repeated sequences without them."""
    scores = model.head_scores()
    console.print(scores.table(3))
    keep(scores, folder, "heads", console)
    best = [(layer, head) for layer, head, score in scores.top("induction", 4) if score > 0.5]
    words = np.random.default_rng(0).permutation(np.arange(20, min(400, model.vocab_size)))[:16]
    spec = HookSpec()
    for layer, head in best:
        spec.intervene(HookPoint.AttnZ(layer), Intervention.Zero(heads=head))
    rates = []
    for hooks in (None, spec):
        foreseen = model.forward(np.tile(words, 2), hooks).output()[0, 16:-1].argmax(-1)
        rates.append(float((foreseen == words[1:]).mean()))
    names = ", ".join(f"{layer}.{head}" for layer, head in best)
    console.print(
        f"A sequence of 16 random tokens, given twice: {rates[0]:.0%} of its second half is foreseen; without the "
        f"heads {names}, {rates[1]:.0%}."
    )


def keep(result: "Shown", folder: Path | None, name: str, console: Console) -> None:
    """Write a result's page and picture."""
    if folder is not None:
        console.print(f"the page: {result.save(folder / f'{name}.html')}", highlight=False)
        result.save(folder / f"{name}.png")


def spell(model: "MIModel", token: int) -> str:
    """A token as text, quoted."""
    return repr(model.tokenizer.decode([token], skip_special_tokens=False))
