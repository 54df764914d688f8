"""Worked examples of `mionnx demo --model smollm2`: a real language model of 135M parameters."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console

from mionnx.cli.demos import methods
from mionnx.cli.demos.methods import FRANCE, GERMANY, largest, write
from mionnx.graph.hook_points import HookPoint
from mionnx.machine.decimals import decimal
from mionnx.view import Table

if TYPE_CHECKING:
    from mionnx.analysis.sweep.result import SweepResult
    from mionnx.model import MIModel

GIFT, OTHER = (f"When Mary and John went to the store, {giver} gave a drink to" for giver in ("John", "Mary"))
SEA = ["The ocean waves and the ships at sea", "The boat sailed over the deep blue ocean"]
CITY = ["The city streets and the cars in town", "The car drove over the long grey street"]
LAYER, STRENGTH = 16, 0.6
ASKED = [{"role": "user", "content": "Tell me a story about a girl."}]
NEW = 28  # tokens of an answer


def answers(model: "MIModel", console: Console, folder: Path | None = None) -> None:
    """Continue two prompts by one token."""
    for prompt in (FRANCE, GIFT):
        console.print(f"{prompt!r}: {model.generate(prompt, max_new_tokens=1).new_texts[0]!r}")


def capital(model: "MIModel", console: Console, folder: Path | None = None) -> None:
    """Patch the stream of one country's prompt into another's, at each layer and position."""
    result = model.patch_sweep(FRANCE, GERMANY, "resid_pre")
    shares = result.normalized
    table = Table("layer", *result.labels["position"])
    for layer in layers_of_change(result):
        table.add_row(str(layer), *(decimal(share, 2) for share in shares[layer]))
    console.print(f"The stream of {FRANCE!r}, patched into {GERMANY!r} before a layer; 1: ' Paris':")
    console.print(table)
    console.print(f"{result.facts()}.")
    write(result, folder, "patching", console)


def layers_of_change(result: "SweepResult") -> list[int]:
    """The first and last layer, and those beside one with which the answer's position changes."""
    best = result.normalized.argmax(axis=1)
    change = np.flatnonzero(best[1:] != best[:-1])
    return sorted({0, len(best) - 1, *(int(i) + k for i in change for k in (-1, 0, 1, 2) if 0 <= i + k < len(best))})


def names(model: "MIModel", console: Console, folder: Path | None = None) -> None:
    """Patch each head by itself: which ones carry the name of who gets the drink."""
    result = model.patch_sweep(GIFT, OTHER, "z", ("layer", "head"))
    table = Table("head", "change of the logit difference", "share of it")
    for layer, head in largest(result.effect, 6):
        effect, share = result.effect[layer, head], result.normalized[layer, head]
        table.add_row(f"{layer}.{head}", decimal(effect, 2, sign=True), decimal(share, 2, sign=True))
    console.print(f"Each head of {GIFT!r}, patched into {OTHER!r}:")
    console.print(table)
    console.print(f"{result.facts()}.")
    write(result, folder, "names", console)


def steering(model: "MIModel", console: Console, folder: Path | None = None) -> None:
    """Add the direction from sentences of the city to those of the sea, while a chat goes on."""
    directions = model.contrast(SEA, CITY)
    chat = model.tokenize_chat(ASKED)
    console.print(f"{ASKED[0]['content']!r}")
    spec = directions[LAYER].spec(STRENGTH)
    for title, hooks in (("plain", None), (f"{STRENGTH} of the sea in layer {LAYER}", spec)):
        console.print(f"{title}: {model.generate(chat, hooks, max_new_tokens=NEW).new_texts[0]!r}")
    write(directions, folder, "sea", console)


EXAMPLES = (
    ("Two answers", answers, HookPoint.Embed),
    ("Where it knows the capital", capital, HookPoint.ResidPre(0)),
    ("Logit lens over the residual stream", methods.lens, HookPoint.ResidPost(0)),
    ("Heads that carry the name", names, HookPoint.AttnZ(0)),
    ("Induction heads", methods.induction, HookPoint.AttnZ(0)),
    ("A chat, steered to the sea", steering, HookPoint.ResidPost(0)),
)
