"""The command `mionnx steer`: dose-response of a contrastive direction or a control vector."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.markup import escape
from rich.table import Column

from mionnx.analysis.steering.directions import VECTOR_HOOK, Directions
from mionnx.analysis.steering.dose_result import DoseResponse
from mionnx.cli.opening import PLAIN, RUNS, Opening, opens_model
from mionnx.cli.options import BatchSize, Html, Json, Model, Png, deliver, numbers, rows_of_pass
from mionnx.machine.decimals import decimal
from mionnx.machine.progress import shown
from mionnx.view import Table

Many = list[str] | None
LAYER = (
    "Layer to steer; if left out, the one whose direction explains most of the pairs' differences, or the middle one "
    "for fewer than two pairs and for --gguf."
)


@opens_model(*RUNS)
def steer(
    model: Model,
    prompt: Annotated[list[str], typer.Option(help="A text to steer; may be repeated.")],
    positive: Annotated[Many, typer.Option(help="A prompt to steer towards; the n-th pairs with ...")] = None,
    negative: Annotated[Many, typer.Option(help="... the n-th of these, to steer away from.")] = None,
    gguf: Annotated[Path | None, typer.Option(metavar="FILE", help="A control vector of llama.cpp instead.")] = None,
    load: Annotated[Path | None, typer.Option(metavar="FILE", help="Directions saved earlier instead.")] = None,
    hook: Annotated[
        str | None, typer.Option(help=f"Variant of hook point, such as mlp_out; {VECTOR_HOOK} if left out.")
    ] = None,
    method: Annotated[str | None, typer.Option(help="mean_difference, the default, or pca.")] = None,
    layer: Annotated[int | None, typer.Option("--layer", "--layers", help=LAYER)] = None,
    strengths: Annotated[str, typer.Option(help="Factors of the direction.")] = "0,0.25,0.5,0.75,1,1.5,2",
    positions: Annotated[str | None, typer.Option(help="Steer these tokens only, such as -1 or 0,1.")] = None,
    target: Annotated[str | None, typer.Option(help="Token to follow; the strongest answer if left out.")] = None,
    bisect: Annotated[
        float | None, typer.Option(help="Find the strength at which the answer flips, to within this.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the directions: .safetensors, or .gguf for llama.cpp.")
    ] = None,
    batch_size: BatchSize = "auto",
    html: Html = None,
    png: Png = None,
    as_json: Json = False,
    opening: Opening = PLAIN,
) -> None:
    """Steer prompts along a direction, computed from contrasting prompts, at several strengths.

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
    doses, at = numbers("strengths", strengths, float), _positions(positions)
    opened = opening.model(model)
    with shown():
        shared: dict[str, Any] = {"batch_size": rows_of_pass(batch_size)}
        if positive is not None and negative is not None:
            directions = opened.contrast(
                positive, negative, hook or VECTOR_HOOK, method=method or "mean_difference", **shared
            )
        else:
            directions = Directions.from_gguf(gguf) if gguf is not None else Directions.load(str(load))
        where = directions.best_layer if layer is None else layer
        response = opened.dose_response(
            prompt, directions[where], doses, target=target, positions=at, bisect=bisect, **shared
        )
    if save is not None:
        directions.save(save)
    deliver(response, lambda: _tables(response), html, png, as_json)


def _positions(text: str | None) -> Sequence[int] | str | None:
    if text is None or text in ("prompt", "generated"):
        return text
    return numbers("positions", text, int)


def _tables(response: DoseResponse) -> Group:
    return Group(*(_table(response, i) for i in range(len(response.prompts))))


def _table(response: DoseResponse, i: int) -> Table:
    target = repr(response.names[int(response.targets[i])])
    columns = ["strength", "of the stream", "top token", "probability", escape(f"P({target})"), "KL (nats)"]
    title, caption = (
        escape(text)
        for text in (f"{response.prompts[i]!r}, steered at {response.hook}", f"{target} {response.turn(i)}")
    )
    table = Table(*(Column(name, justify="right") for name in columns), title=title, caption=caption)
    for n, strength in enumerate(response.strengths):
        table.add_row(
            f"{strength:g}",
            f"{decimal(100 * response.share * strength, 1)} %",
            escape(repr(response.top(i)[n])),
            decimal(response.answers.top_probabilities[i, n], 4),
            decimal(response.probabilities[i, n], 4),
            decimal(response.kl[i, n], 4),
        )
    return table
