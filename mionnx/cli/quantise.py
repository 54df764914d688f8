"""The command `mionnx quantise`: a model with its weights in 4 or 8 bits."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from mionnx.analysis.quantisation.quantise_by_text import quantise_by_text
from mionnx.cli.opening import PLAIN, Opening, opens_model
from mionnx.cli.options import Json, Model, read_text
from mionnx.errors import InputError
from mionnx.graph.hooked_model import HookedModel
from mionnx.machine.progress import shown
from mionnx.model import MIModel
from mionnx.quantise.quantise import quantise as quantise_hooked
from mionnx.quantise.settings import Quantisation

COUNTS = ("matrices", "matrices_left", "bytes_in_blocks", "bytes_left")
SHOWN = 20  # matrices that are named
GLOBS = "Weights, by name or glob; may be repeated."


@opens_model()
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
    budget: Annotated[
        float | None, typer.Option(help="Largest KL in nats: matrices that cost more get 8 bits.")
    ] = None,
    text: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="To measure KL on; the model's own if left out.")
    ] = None,
    importance: Annotated[
        bool, typer.Option("--importance", help="Scales by what multiplies the weights, on the model's own text.")
    ] = False,
    importance_text: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="The same, on this text; may be repeated.")
    ] = None,
    opening: Opening = PLAIN,
    as_json: Json = False,
) -> None:
    """Write a model with its weights in blocks of 4 or 8 bits; it keeps all hook points.

    Examples:

    mionnx quantise models/world-llama -o world-int4 --in-8-bits "*down_proj*"

    mionnx quantise models/world-llama -o world-mixed --budget 0.005 --text text.txt
    """
    patterns = tuple(keep or ()), tuple(in_8_bits or ())
    settings = Quantisation(bits, block_size, not zero_points, accuracy_level, *patterns, embedding, unembedding)
    if text and budget is None:
        raise InputError("--text is what a budget is measured on: give --budget too")
    hooked = opening.hooked(model)
    with shown() as progress:
        if budget is None and not (importance or importance_text):
            quantise_hooked(hooked, output, settings, progress)
        else:
            texts, read = ([read_text(path) for path in paths or ()] for paths in (text, importance_text))
            quantise_by_text(MIModel(hooked), output, settings, budget, texts or None, read or importance, progress)
    made = HookedModel.open(output)
    sizes = [sum(file.stat().st_size for file in one.folder.glob("*.safetensors")) for one in (hooked, made)]
    counts = {name: made.metadata.quantised[name] for name in COUNTS}
    if as_json:
        facts = {"dtype": made.metadata.weight_dtype, "bytes": sizes[1], "bytes_before": sizes[0], **counts}
        facts |= {"budget": made.metadata.quantised["budget"]} if budget is not None else {}
        typer.echo(json.dumps({"folder": str(output), **facts}, indent=1))
        return
    typer.echo(f"{output}: {sizes[0]:,} -> {sizes[1]:,} bytes")
    typer.echo(
        f"{counts['matrices']} matrices of {counts['bytes_in_blocks']:,} bytes in {made.metadata.weight_dtype}, "
        f"{counts['matrices_left']} of {counts['bytes_left']:,} bytes left in floats"
    )
    if budget is not None:
        typer.echo(_reached(made.metadata.quantised["budget"]))


def _reached(found: Mapping[str, Any]) -> str:
    """Describe the result of a budget: KL, bytes, and the matrices that moved."""
    moved = {"8 bits": found["moved_to_8_bits"], "floats": found["moved_to_floats"]}
    counts = ", ".join(
        f"{len(names)} {'of them moved ' * (not at)}to {to}" for at, (to, names) in enumerate(moved.items())
    )
    kl = f"KL {found['kl']:.4g} nats (at most {found['bound']:g}; {found['kl_without']:.4g} without a bound)"
    bytes_ = f"{found['bytes']:,} bytes of matrices ({found['bytes_without']:,} without a bound)"
    told = f"{kl}, the same top token at {found['top_1']:.1%} of {found['tokens']:,} tokens; {bytes_}: {counts}"
    return "\n".join([told, *(f"to {to}: {_named(names)}" for to, names in moved.items() if names)])


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more (all with --json)" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
