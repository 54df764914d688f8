"""The command `mionnx check`: every byte of a model's weights."""

import typer

from mionnx.cli.options import Model
from mionnx.graph import onnx_file
from mionnx.graph.hooked_model import HookedModel
from mionnx.machine.memory import format_bytes
from mionnx.machine.progress import shown
from mionnx.run import find_model


def check(model: Model) -> None:
    """Compare every byte of a model's weights with what was exported; else exit code 1.

    Opening a model checks sizes and a sample of each file.

    Example: mionnx check models/world-llama
    """
    with shown() as progress:
        hooked = HookedModel.open(find_model.find_model(model, "float32", progress), check="full", progress=progress)
    names = sorted(onnx_file.locations(hooked.proto))
    size = sum((hooked.folder / name).stat().st_size for name in names)
    typer.echo(f"{hooked.folder}: {', '.join(names)} ({format_bytes(size)}) as exported")
