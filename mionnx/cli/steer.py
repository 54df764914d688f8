"""The command line: `mionnx steer`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Group
from rich.markup import escape
from rich.table import Column, Table

from mionnx.analysis.steering.directions import STREAM, Directions
from mionnx.analysis.steering.dose_result import DoseResponse
from mionnx.cli.options import (
    Html,
    Json,
    Model,
    Png,
    Provider,
    deliver,
)
from mionnx.errors import InputError
from mionnx.machine.progress import bars
from mionnx.model import MIModel

Many = list[str] | None
LAYER = (
    "Where to steer; if left out, the layer whose direction holds most of what the pairs differ in, and the middle one "
    "of fewer than two pairs or of --gguf."
)


def steer(
    model: Model,
    prompt: Annotated[list[str], typer.Option(help="A text to steer; several may be given.")],
    positive: Annotated[Many, typer.Option(help="A prompt of the kind to steer to; the n-th pairs with ...")] = None,
    negative: Annotated[Many, typer.Option(help="... the n-th of these, of the kind to steer away from.")] = None,
    gguf: Annotated[Path | None, typer.Option(metavar="FILE", help="A control vector of llama.cpp instead.")] = None,
    load: Annotated[Path | None, typer.Option(metavar="FILE", help="Directions saved earlier instead.")] = None,
    hook: Annotated[
        str | None, typer.Option(help=f"The kind of hook point: mlp_out, ...; {STREAM} if left out.")
    ] = None,
    method: Annotated[str | None, typer.Option(help="pca, or mean_difference, which it is if left out.")] = None,
    layer: Annotated[int | None, typer.Option(help=LAYER)] = None,
    strengths: Annotated[str, typer.Option(help="Factors of the direction.")] = "0,0.25,0.5,0.75,1,1.5,2",
    positions: Annotated[str | None, typer.Option(help="Steer these tokens only, such as -1 or 0,1.")] = None,
    target: Annotated[str | None, typer.Option(help="The token to follow; the strongest answer if left out.")] = None,
    bisect: Annotated[
        float | None, typer.Option(help="Find the strength that flips the answer to within this.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the directions: .safetensors, or .gguf for llama.cpp.")
    ] = None,
    html: Html = None,
    png: Png = None,
    as_json: Json = False,
    provider: Provider = "cpu",
) -> None:
    """Steer prompts along a direction made of contrasting ones, at several strengths.

    Example:

    mionnx steer models/world-llama --positive "The capital of Germany is" --negative "The capital of France is"
    --prompt "The capital of France is" --positions=-1 --bisect 0.001
    """
    if (positive is not None) + (gguf is not None) + (load is not None) != 1 or (positive is None) != (
        negative is None
    ):
        raise typer.BadParameter("give --positive and --negative, or --gguf, or --load")
    if positive is None and (hook, method) != (None, None):
        raise typer.BadParameter("--hook and --method say how directions are made of --positive and --negative")
    doses, at = _numbers("strengths", strengths, float), _positions(positions)
    opened = MIModel.from_pretrained(model, provider=provider)
    with bars() as progress:
        if positive is not None and negative is not None:
            directions = opened.contrast(
                positive, negative, hook or STREAM, method=method or "mean_difference", progress=progress
            )
        else:
            directions = Directions.from_gguf(gguf) if gguf is not None else Directions.load(str(load))
        where = directions.best_layer if layer is None else layer
        found = opened.dose_response(
            prompt, directions[where], doses, target=target, positions=at, bisect=bisect, progress=progress
        )
    if save is not None:
        _write(directions, save)
    deliver(found, lambda: _tables(found), html, png, as_json)


def _write(directions: Directions, path: Path) -> None:
    first = path.suffix.lower() == ".gguf" and directions.layers[0] == 0
    kept = directions.only(directions.layers[1:]) if first else directions
    kept.save(path)
    if first:
        typer.echo(
            f"{path} holds layers {kept.layers[0]} to {kept.layers[-1]}: a control vector has no layer 0", err=True
        )


def _numbers(what: str, text: str, kind: type) -> list[float]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--{what} {text!r}: numbers with commas between them") from None


def _positions(text: str | None) -> Sequence[int] | str | None:
    if text is None or text in ("prompt", "generated"):
        return text
    return [int(number) for number in _numbers("positions", text, int)]


def _tables(found: DoseResponse) -> Group:
    return Group(*(_table(found, i) for i in range(len(found.prompts))))


def _table(found: DoseResponse, i: int) -> Table:
    target = repr(found.names[int(found.targets[i])])
    flip = f"from strength {found.flips[i]:.4g}" if np.isfinite(found.flips[i]) else "at none of these strengths"
    flip = "without steering already" if found.baseline[i] == found.targets[i] else flip
    columns = ["strength", "of the stream", "likeliest token", "probability", escape(f"P({target})"), "KL (nats)"]
    title, caption = (escape(text) for text in (f"{found.prompts[i]!r}, steered at {found.hook}", f"{target} {flip}"))
    table = Table(*(Column(name, justify="right") for name in columns), title=title, caption=caption)
    for n, strength in enumerate(found.strengths):
        table.add_row(
            f"{strength:g}",
            f"{100 * found.share * strength:.1f} %",
            escape(repr(found.top(i)[n])),
            f"{found.answers.top_probabilities[i, n]:.4f}",
            f"{found.probabilities[i, n]:.4f}",
            f"{found.kl[i, n]:.4f}",
        )
    return table
