"""The command `mionnx quantise`: a model with its weights in 4 or 8 bits."""

import json
from pathlib import Path
from typing import Annotated

import typer

from mionnx.cli.options import Json, Model
from mionnx.graph.hooked_model import HookedModel
from mionnx.machine.progress import bars
from mionnx.quantise.quantise import quantise as quantise_hooked
from mionnx.quantise.settings import Quantisation
from mionnx.run import find_model

COUNTS = ("matrices", "matrices_left", "bytes_in_blocks", "bytes_left")
GLOBS = "Weights, by name or glob; may be repeated."


def quantise(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to create.")],
    bits: Annotated[int, typer.Option(help="Of a number: 4 or 8.")] = 4,
    block_size: Annotated[int, typer.Option(help="Numbers that share a scale: 16, 32, 64, 128 or 256.")] = 32,
    zero_points: Annotated[bool, typer.Option("--zero-points", help="Give blocks a zero point too.")] = False,
    accuracy_level: Annotated[int, typer.Option(help="0: products in floats; 4: in 8 bits, faster.")] = 0,
    keep: Annotated[list[str] | None, typer.Option(metavar="NAME", help=f"Stay in floats. {GLOBS}")] = None,
    in_8_bits: Annotated[
        list[str] | None, typer.Option("--in-8-bits", metavar="NAME", help=f"Take 8 bits. {GLOBS}")
    ] = None,
    embedding: Annotated[bool, typer.Option(help="Quantise the token table.")] = True,
    unembedding: Annotated[bool, typer.Option(help="Quantise the unembedding.")] = True,
    as_json: Json = False,
) -> None:
    """Write a model with its weights in blocks of 4 or 8 bits; it keeps all hook points.

    Example: mionnx quantise models/world-llama -o world-int4 --in-8-bits "*down_proj*"
    """
    patterns = tuple(keep or ()), tuple(in_8_bits or ())
    settings = Quantisation(bits, block_size, not zero_points, accuracy_level, *patterns, embedding, unembedding)
    with bars() as progress:
        hooked = HookedModel.open(find_model.find_model(model, "float32", progress))
        quantise_hooked(hooked, output, settings, progress)
    made = HookedModel.open(output)
    sizes = [sum(file.stat().st_size for file in one.folder.glob("*.safetensors")) for one in (hooked, made)]
    counts = {name: made.metadata.quantised[name] for name in COUNTS}
    if as_json:
        facts = {"dtype": made.metadata.weight_dtype, "bytes": sizes[1], "bytes_before": sizes[0], **counts}
        typer.echo(json.dumps({"folder": str(output), **facts}, indent=1))
        return
    typer.echo(f"{output}: {sizes[0]:,} -> {sizes[1]:,} bytes")
    typer.echo(
        f"{counts['matrices']} matrices of {counts['bytes_in_blocks']:,} bytes in {made.metadata.weight_dtype}, "
        f"{counts['matrices_left']} of {counts['bytes_left']:,} bytes left in floats"
    )
