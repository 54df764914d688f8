"""The command `mionnx hooks`: a model's hook points and their shapes."""

import json

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column

from mionnx.cli.opening import PLAIN, Opening, opens_model
from mionnx.cli.options import Json, Layers, Model, chosen
from mionnx.errors import ModelError
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.view import Table


@opens_model()
def hooks(
    model: Model,
    layers: Layers = None,
    opening: Opening = PLAIN,
    as_json: Json = False,
) -> None:
    """List a model's hook points with their axes; {i} stands for the layer.

    With --layers by their full names, those of some layers.

    Example: mionnx hooks models/world-llama --layer 2
    """
    hooked, among = opening.hooked(model), chosen("layers", layers)
    last = hooked.metadata.sizes.num_layers - 1
    points = [point for point in hooked.hook_points() if among is None or point.layer in among]
    absent = {*(among or ())} - {*range(last + 1)}
    if absent:
        raise ModelError(f"no layer {min(absent)}: the model has layers 0 to {last}")
    if as_json:
        typer.echo(json.dumps({str(point): hooked.axes(point) for point in points}, indent=1))
        return
    table = Table(
        Column("hook point", no_wrap=True),
        "variant",
        Column("shape", overflow="fold"),
        title=f"{hooked.metadata.family}, layers: 0 to {last}",
    )
    for row in dict.fromkeys(_row(hooked, point, among is None) for point in points):
        table.add_row(*map(escape, row))
    Console().print(table)


def _row(hooked: HookedModel, point: HookPoint, template: bool) -> tuple[str, str, str]:
    """Name, variant and shape of a hook point; a template has {i} for the layer."""
    name, variant = str(point), repr(point).removeprefix("HookPoint.")
    if template and point.layer is not None:
        name, variant = name.replace(f".{point.layer}.", ".{i}.", 1), f"{point.variant}(i)"
    shape = [
        axis if axis == size else f"{axis}={size}"
        for axis, size in zip(point.axes or (), hooked.axes(point), strict=True)
    ]
    return name, variant, "[" + ", ".join(shape) + "]" + (" (capture only)" if point.derived else "")
