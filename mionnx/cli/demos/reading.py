"""Worked examples of the logit lens and of direct logit attribution."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console

from mionnx.bind.logit_selection import Logits
from mionnx.cli.demos.sweep import GERMANY, write
from mionnx.cli.tables import lens_table
from mionnx.errors import HookError
from mionnx.graph.hook_points import HookPoint
from mionnx.machine.decimals import decimal
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.intervention import Intervention
from mionnx.view import Table

if TYPE_CHECKING:
    from mionnx.model import MIModel

CAPITAL = "The capital of France is"
GIFT = "When Mary and John went to the store , John gave a drink to"


def lens(model: "MIModel", console: Console, folder: Path | None = None) -> None:
    """Apply the logit lens to the last position: top tokens, rank and KL divergence by layer."""
    other = int(model.forward(GERMANY, logits=Logits(positions=-1)).output()[0, 0].argmax())
    result = model.logit_lens(CAPITAL, k=3, token_ids=[other])
    answer = result.spell(int(result.answers[-1]))
    console.print(f"{CAPITAL!r}: {answer!r} is the top token from {result.converged[-1]} on.")
    console.print(lens_table(result, result.at(-1)))
    write(result, folder, "lens", console)


def attribution(model: "MIModel", console: Console, folder: Path | None = None) -> None:
    """Compare the direct contributions of heads to a logit with the effect of zeroing them."""
    tokens = model.tokenize(GIFT)
    result = model.attribute(tokens)
    heads, effects = result.heads, ablated(model, GIFT, result.answer)
    if heads is None:
        raise HookError(f"{model.hooked.metadata.family}: the stream has no heads to attribute a logit to")
    table = Table("head", "direct contribution", "logit lost when the head is zeroed", "rank of that effect")
    ranks = np.argsort(np.argsort(-np.abs(effects), axis=None)).reshape(effects.shape)
    for flat in np.argsort(-np.abs(heads), axis=None)[:5]:
        layer, head = map(int, np.unravel_index(flat, heads.shape))
        cells = (
            decimal(heads[layer, head], 3, sign=True),
            decimal(effects[layer, head], 3, sign=True),
            str(ranks[layer, head] + 1),
        )
        table.add_row(f"layer {layer}, head {head}", *cells)
    console.print(
        f"{GIFT!r}: the logit of {result.answer!r}, {decimal(result.logit, 3)}, is the sum of {len(result.labels)} "
        f"components (error {abs(result.total - result.logit):.1e}). The heads with the largest contributions:"
    )
    console.print(table)
    write(result, folder, "attribution", console)


def ablated(model: "MIModel", prompt: str, answer: str) -> np.ndarray:
    """[layer, head]: decrease of the answer's logit when a head is zeroed at the last position."""
    token, chosen = model.token_id(answer), Logits(positions=-1, token_ids=model.token_id(answer))
    baseline = model.forward(prompt).output()[0, -1, token]
    effects = np.zeros((model.num_layers, model.num_heads))
    for layer, head in np.ndindex(*effects.shape):
        spec = HookSpec().intervene(HookPoint.AttnZ(layer), Intervention.Zero(heads=head, positions=-1))
        effects[layer, head] = baseline - model.forward(prompt, spec, logits=chosen).output()[0, 0, 0]
    return effects
