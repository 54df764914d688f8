"""The command `mionnx logit-diff`: how often a model gives the answer the larger logit, and by how much."""

from pathlib import Path
from typing import Annotated, Any

import typer

from mionnx.cli.opening import PLAIN, RUNS, Opening, opens_model
from mionnx.cli.options import BatchSize, Html, Json, Model, Png, Position, Save, deliver, rows_of_pass
from mionnx.cli.pairs_file import read_pairs

FILE = 'JSON lines with clean, answer, versus: {"clean": "The capital of France is", "answer": "Paris", ..}.'


@opens_model(*RUNS)
def logit_diff(
    model: Model,
    pairs: Annotated[Path, typer.Argument(metavar="PAIRS", help=FILE)],
    corrupted: Annotated[bool, typer.Option("--corrupted", help="Read the corrupted prompts of the file.")] = False,
    position: Position = -1,
    batch_size: BatchSize = "auto",
    html: Html = None,
    png: Png = None,
    save: Save = None,
    as_json: Json = False,
    opening: Opening = PLAIN,
) -> None:
    """Print differences of two logits over a file of prompts: accuracy, mean, spread.

    Example: mionnx logit-diff models/world-llama pairs.jsonl
    """
    found, prompts = read_pairs(pairs), "corrupted" if corrupted else "clean"
    if lacking := [name for name in (prompts, "answer", "versus") if name not in found]:
        raise typer.BadParameter(f"{pairs} has no {', no '.join(lacking)}")
    opened = opening.model(model)
    asked: dict[str, Any] = {"position": position, "batch_size": rows_of_pass(batch_size)}
    result = opened.get_logit_diff(found[prompts], found["answer"], found["versus"], **asked)
    deliver(result, result.table, html, png, as_json, save)
    if not as_json:
        typer.echo(result.facts())
