"""The command `mionnx check`: every byte of a model's weights."""

import json

import typer

from mionnx.cli.opening import PLAIN, Opening, opens_model
from mionnx.cli.options import Json, Model
from mionnx.graph import onnx_file
from mionnx.machine.memory import format_bytes


@opens_model("dtype")
def check(model: Model, opening: Opening = PLAIN, as_json: Json = False) -> None:
    """Compare every byte of a model's weights with what was exported; else exit code 1.

    Opening a model checks sizes and a sample of each file.

    Example: mionnx check models/world-llama
    """
    hooked = opening.hooked(model, check="full")
    names = sorted(onnx_file.locations(hooked.proto))
    size = sum((hooked.folder / name).stat().st_size for name in names)
    if as_json:
        typer.echo(
            json.dumps({"folder": str(hooked.folder), "files": names, "bytes": size, "as_exported": True}, indent=1)
        )
        return
    typer.echo(f"{hooked.folder}: {', '.join(names)} ({format_bytes(size)}) as exported")
