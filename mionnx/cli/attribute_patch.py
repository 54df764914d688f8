"""The command `mionnx attribute-patch`: a patching sweep to first order, from one pass forward and back."""

from typing import Annotated, Any

import typer
from rich.console import Console

from mionnx.cli.options import Html, Json, Layers, Model, Png, Provider, Save, chosen, deliver
from mionnx.errors import InputError
from mionnx.model import MIModel


def attribute_patch(
    model: Model,
    clean: Annotated[str, typer.Argument(help="The clean prompt.")],
    corrupted: Annotated[str, typer.Argument(help="The corrupted prompt, of equal length.")],
    hook: Annotated[str, typer.Option(help="A hook point of any layer: resid_pre, z, mlp_out, ..")] = "resid_pre",
    over: Annotated[str, typer.Option(help="Axes: layer,position,head,source.")] = "layer,position",
    metric: Annotated[str, typer.Option(help="logit_diff, probability, log_probability or kl.")] = "logit_diff",
    answer: Annotated[str | None, typer.Option(help="A token; the clean prompt's top token if left out.")] = None,
    versus: Annotated[str | None, typer.Option(help="A token; the corrupted prompt's top token if left out.")] = None,
    at: Annotated[str, typer.Option(help="Where gradients are taken: corrupted, clean or mean.")] = "corrupted",
    steps: Annotated[int, typer.Option(min=1, help="Gradients averaged along the path between the values.")] = 1,
    method: Annotated[
        str, typer.Option(help="gradient, frozen_norm, relp, relp_frozen_pattern or frozen_norm_pattern.")
    ] = "gradient",
    confirm: Annotated[int, typer.Option(min=0, help="Leading cells to compute exactly besides.")] = 0,
    layers: Layers = None,
    position: Annotated[int, typer.Option(help="Position of the logits that the metric reads.")] = -1,
    top: Annotated[int, typer.Option(min=1, help="Number of cells to list where the map does not fit.")] = 12,
    html: Html = None,
    png: Png = None,
    save: Save = None,
    as_json: Json = False,
    provider: Provider = "cpu",
) -> None:
    """Estimate a patching sweep from gradients, and compute its leading cells exactly.

    Example: mionnx attribute-patch models/world-llama "The capital of France is" "The capital of Germany is" --steps 8
    """
    options: dict[str, Any] = {"at": at, "steps": steps, "method": method, "confirm": confirm, "position": position}
    options |= {"answer": answer, "versus": versus, "layers": chosen("layers", layers)}
    opened = MIModel.from_pretrained(model, provider=provider)
    result = opened.attribute_patch(clean, corrupted, hook, over.split(","), metric, **options)
    if isinstance(result, dict):
        raise InputError(f"--hook {hook} means several kinds, a table shows one: {', '.join(result)}")
    deliver(result, lambda: result.table(top), html, png, as_json, save)
    if not as_json:
        typer.echo(result.facts())
        if confirm:
            Console().print(result.confirmed())
