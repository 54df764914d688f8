"""The command `mionnx export`: a checkpoint becomes a hooked model."""

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from mionnx.cli.opening import PLAIN, Opening, opens_model
from mionnx.cli.options import Json
from mionnx.graph import weight_record
from mionnx.graph.hooked_model import HookedModel
from mionnx.machine.progress import shown
from mionnx.run import exporting, find_model, model_dtype

DTYPES = (
    "float32, float16, bfloat16, int4, int8, or auto for the checkpoint's own. By default float32, or a checkpoint's "
    "own integers."
)


@opens_model()
def export(
    source: Annotated[str, typer.Argument(help="Folder of a Hugging Face checkpoint, a GGUF file, or a Hub id.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder to create for the model.")] = None,
    copy: Annotated[bool, typer.Option(help="Copy the weights instead of linking them.")] = False,
    in_place: Annotated[bool, typer.Option(help="Write model.onnx beside the checkpoint's own weights.")] = False,
    dtype: Annotated[str | None, typer.Option(help=DTYPES)] = None,
    graph_only: Annotated[bool, typer.Option("--graph-only", help="Export the config alone, without weights.")] = False,
    file: Annotated[str | None, typer.Option(help="The GGUF file to export, where there are several.")] = None,
    opening: Opening = PLAIN,
    as_json: Json = False,
) -> None:
    """Export a checkpoint as a hooked model.

    A hooked model is an ONNX graph whose activations carry their hook names. Weights already in the dtype are
    hard-linked, not copied. onnx's own checker and loader refuse files with several hard links: --copy makes a folder
    for them. --graph-only reads config.json alone: what it makes can be rewritten, compiled and estimated, not run.

    Example: mionnx export meta-llama/Llama-3.2-1B -o llama-hooked
    """
    if graph_only and (output is None or copy):
        raise typer.BadParameter("--graph-only goes with --output FOLDER: there are no weights to copy or lie beside")
    if (output is None) == (not in_place) or (in_place and copy):
        raise typer.BadParameter("give either --output FOLDER, with or without --copy, or --in-place")
    kind, begin = model_dtype.DEFAULT if dtype is None else dtype, time.monotonic()
    with shown() as progress:
        folder = find_model.checkpoint_folder(source, file, opening.version, progress, weights=not graph_only)
        if output is None:
            exporting.export_in_place(folder, kind, progress)
        else:
            exporting.export(folder, output, kind, progress, copy, graph_only)
    hooked = HookedModel.open(output or folder)
    seconds = time.monotonic() - begin
    _print(hooked, seconds, as_json)
    with shown() as progress:  # a folder that is given away has its hashes
        weight_record.complete(hooked.folder, hooked.metadata, progress)


def _print(hooked: HookedModel, seconds: float, as_json: bool) -> None:
    size, metadata = (hooked.folder / "model.onnx").stat().st_size, hooked.metadata
    if as_json:
        facts = {"family": metadata.family, "dtype": metadata.weight_dtype, "hook_points": len(hooked.hook_points())}
        typer.echo(json.dumps({"folder": str(hooked.folder), **facts}, indent=1))
        return
    typer.echo(
        f"{hooked.folder}: {metadata.family}, {metadata.sizes.num_layers} layers, "
        f"{len(hooked.hook_points())} hook points, {metadata.weight_dtype}, graph {size / 1024:.0f} KiB, "
        f"{seconds:.1f} s"
    )
