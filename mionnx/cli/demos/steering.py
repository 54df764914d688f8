"""The worked example of steering: a direction from France to Germany, added and removed."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console

from mionnx.cli.demos.sweep import write
from mionnx.cli.tables import dose_table
from mionnx.machine.decimals import decimal
from mionnx.machine.softmax import softmax
from mionnx.run.prompt import token_text
from mionnx.spec.hook_spec import HookSpec
from mionnx.view import Table

if TYPE_CHECKING:
    from mionnx.model import MIModel

FRAMES = (
    "The capital of {} is",
    "The capital city of {} is called",
    "{} has its capital in",
    "{} is governed from",
    "In {} the seat of power is",
    "People from {} call",
    "Ask for the capital of {} and hear",
)
PROMPT = FRAMES[0].format("France")


def show(model: "MIModel", console: Console, folder: Path | None = None) -> None:
    """Compute a direction from prompts about two countries, steer with it, and project it out.

    Args:
        model: a model that knows capitals.
        console: destination of the output.
        folder: destination of pages and pictures; none are written if left out.
    """
    positive, negative = ([frame.format(country) for frame in FRAMES] for country in ("Germany", "France"))
    directions = model.contrast(positive, negative)
    console.print(f"Mean difference of {len(FRAMES)} prompts about Germany and about France, at the last token:")
    table = Table("layer", "norm", "share of differences", "held-out accuracy", "cosine with next layer")
    separation, cosines = directions.separation, [*directions.convergence(), np.nan]
    for i, layer in enumerate(directions.layers):
        cells = [
            directions.norms[i],
            *((separation.explained[i], separation.held_out[i]) if separation else (np.nan, np.nan)),
        ]
        table.add_row(
            str(layer), *(decimal(cell, 2) for cell in cells), "" if i + 1 == len(cosines) else decimal(cosines[i], 2)
        )
    console.print(table)
    layer = directions.best_layer
    response = model.dose_response(PROMPT, directions[layer], np.linspace(0, 2, 9), positions=-1, bisect=1e-3)
    console.print(f"Layer {layer}'s direction, added to the last token of {PROMPT!r}:")
    console.print(dose_table(response, 0))
    flip = response.flips[0]
    console.print(
        f"The answer flips at {f'strength {decimal(flip, 3)}' if np.isfinite(flip) else 'none of these strengths'}."
    )
    _ablate(model, console, directions.ablation_spec())
    write(directions, folder, "directions", console)
    write(response, folder, "dose", console)


def _ablate(model: "MIModel", console: Console, spec: HookSpec) -> None:
    before, after = (softmax(model.forward(PROMPT, hooks).output()[0, -1]) for hooks in (None, spec))
    answer, now = int(before.argmax()), int(after.argmax())
    names = [repr(token_text(model, token)) for token in (answer, now)]
    console.print(
        f"With each layer's direction projected out of the stream, P({names[0]}) falls from "
        f"{decimal(before[answer], 3)} to {decimal(after[answer], 3)}; the top token is "
        f"{names[1]}, with {decimal(after[now], 3)}."
    )
