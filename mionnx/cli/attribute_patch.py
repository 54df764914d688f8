"""The command `mionnx attribute-patch`: a patching sweep to first order, from one pass forward and back."""

from typing import Annotated

import typer
from rich.console import Console

from mionnx.cli.opening import PLAIN, RUNS, Opening, opens_model
from mionnx.cli.options import Html, Json, Layers, Model, Png, Save, chosen, deliver
from mionnx.cli.pairs_file import Pairs
from mionnx.cli.sweep_options import OTHER, Answer, Cells, IfAny, Kind, Over, Read, Versus, axes, given, prompts
from mionnx.errors import InputError


@opens_model(*RUNS)
def attribute_patch(
    model: Model,
    clean: IfAny = None,
    corrupted: Annotated[str | None, typer.Argument(help=OTHER)] = None,
    hook: Kind = None,
    over: Over = None,
    metric: Annotated[str | None, typer.Option(help="logit_diff, probability, log_probability or kl.")] = None,
    answer: Answer = None,
    versus: Versus = None,
    linearize_at: Annotated[
        str, typer.Option(help="Where gradients are taken: corrupted, clean or mean.")
    ] = "corrupted",
    steps: Annotated[int, typer.Option(min=1, help="Gradients averaged along the path between the values.")] = 1,
    rules: Annotated[
        str, typer.Option(help="gradient, frozen_norm, relp, relp_frozen_pattern or frozen_norm_pattern.")
    ] = "gradient",
    confirm: Annotated[int, typer.Option(min=0, help="Leading cells to compute exactly besides.")] = 0,
    layers: Layers = None,
    pairs: Pairs = None,
    position: Read = -1,
    top: Cells = 12,
    html: Html = None,
    png: Png = None,
    save: Save = None,
    as_json: Json = False,
    opening: Opening = PLAIN,
) -> None:
    """Estimate a patching sweep from gradients, and compute its leading cells exactly.

    Example: mionnx attribute-patch models/world-llama "The capital of France is" "The capital of Germany is" --steps 8
    """
    texts = prompts(clean, corrupted, pairs, answer=answer, versus=versus)
    if "corrupted" not in texts:
        raise typer.BadParameter("give a corrupted prompt, of which each cell's effect is the difference")
    options = texts | given(hook=hook, over=axes(over), metric=metric)
    options |= {"linearize_at": linearize_at, "steps": steps, "rules": rules, "confirm": confirm, "position": position}
    opened = opening.model(model)
    result = opened.attribute_patch(layers=chosen("layers", layers), **options)
    if isinstance(result, dict):
        raise InputError(f"--hook {hook} means several kinds, a table shows one: {', '.join(result)}")
    deliver(result, lambda: result.table(top), html, png, as_json, save)
    if not as_json:
        typer.echo(result.facts())
        if confirm:
            Console().print(result.confirmed())
