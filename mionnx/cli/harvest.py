"""The command `mionnx harvest`: the activations of a dataset, written to disk."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from mionnx import distributed
from mionnx.analysis.features.sae import SAE
from mionnx.cli.opening import PLAIN, Opening, opens_model
from mionnx.cli.options import BatchSize, Json, Model, SpecFile, numbers, rows_of_pass
from mionnx.errors import InputError
from mionnx.spec.hook_spec import HookSpec


@opens_model("provider", "threads")
def harvest(
    model: Model,
    texts: Annotated[Path, typer.Argument(help=".txt, .jsonl, .parquet, or a folder of these or of datasets.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for the activations.")],
    hook: Annotated[list[str] | None, typer.Option("--hook", help="Hook point or glob; may be repeated.")] = None,
    spec: SpecFile = None,
    context: Annotated[int | None, typer.Option(min=1, help="Tokens of a window, or the most of a text.")] = None,
    packed: Annotated[bool, typer.Option("--packed", help="Windows over all texts, one after the other.")] = False,
    separator: Annotated[str | None, typer.Option(help="A token before each text of packed windows.")] = None,
    positions: Annotated[
        str | None, typer.Option(help="Only these tokens of each text: last, numbers as 0,-1, or a string in it.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, float16 or bfloat16; the model's own if left out.")
    ] = None,
    format_: Annotated[str, typer.Option("--format", help="safetensors, parquet or saelens.")] = "safetensors",
    sae: Annotated[Path | None, typer.Option(help="Write the features of this sparse autoencoder.")] = None,
    k: Annotated[int | None, typer.Option(min=1, help="Features of each token; 32 if left out.")] = None,
    batch_size: BatchSize = "auto",
    shard_bytes: Annotated[int, typer.Option(min=1, help="Size of a shard, about.")] = 2**28,
    column: Annotated[str | None, typer.Option(help="Column of the texts; text if left out.")] = None,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="By a Ray cluster's workers: local, auto or HOST:PORT.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="With --ray: processes; as many as there is room.")] = None,
    as_json: Json = False,
    opening: Opening = PLAIN,
) -> None:
    """Write the activations of a dataset to disk; interrupted, it goes on where it was.

    Example: mionnx harvest models/world-llama texts.txt -o activations --hook "blocks.*.hook_resid_post"
    """
    options: dict[str, Any] = {
        "hooks": None if spec is None else HookSpec.load(spec),
        "context": context,
        "packed": packed,
        "separator": separator,
        "dtype": dtype,
    }
    options |= {"format": format_, "column": column, "batch_size": rows_of_pass(batch_size), "k": k}
    options["shard_bytes"] = shard_bytes
    options |= {"positions": None if positions is None else _positions(positions)}
    options |= {"sae": None if sae is None else SAE.load(sae)}
    if ray is None and workers is not None:
        raise InputError("--workers are those of a Ray cluster: give --ray local, or its address")
    opened = opening.model(model)
    if ray is None:
        made = opened.harvest(texts, hook, output, **options)
    else:
        made = distributed.harvest(opened, texts, hook, output, address=ray, workers=workers, **options)
    told = {"tokens": made.tokens, "texts": made.texts, "columns": made.columns, "settings": made.settings}
    typer.echo(json.dumps(told, indent=1) if as_json else str(made))


def _positions(given: str) -> list[int] | str:
    """Positions by number, where these are numbers, and a string in the text else."""
    if given == "last":
        return [-1]
    try:
        return numbers("positions", given, int)
    except InputError:
        return given
