"""The command `mionnx circuit`: the leading edges between heads and MLPs, and how faithful circuits of them are."""

from typing import Annotated, Any

import typer
from rich.console import Console

from mionnx.cli.opening import PLAIN, RUNS, Opening, opens_model
from mionnx.cli.options import Html, Json, Model, Png, Save, deliver, numbers
from mionnx.cli.pairs_file import Pairs
from mionnx.cli.sweep_options import OTHER, Answer, IfAny, Read, Versus, prompts


@opens_model(*RUNS)
def circuit(
    model: Model,
    clean: IfAny = None,
    corrupted: Annotated[str | None, typer.Argument(help=OTHER)] = None,
    edges: Annotated[str | None, typer.Option(help="Numbers of kept edges, as 10,50; by default up to all.")] = None,
    metric: Annotated[str, typer.Option(help="logit_diff, probability, log_probability or kl.")] = "logit_diff",
    answer: Answer = None,
    versus: Versus = None,
    steps: Annotated[int, typer.Option(min=1, help="Gradients averaged between the two prompts; 1 is plain EAP.")] = 5,
    rules: Annotated[str, typer.Option(help="gradient, frozen_norm or relp.")] = "gradient",
    pairs: Pairs = None,
    position: Read = -1,
    top: Annotated[int, typer.Option(min=0, help="Number of leading edges to list.")] = 10,
    html: Html = None,
    png: Png = None,
    save: Save = None,
    as_json: Json = False,
    opening: Opening = PLAIN,
) -> None:
    """Find the leading edges between heads and MLPs, and run the model on these alone.

    Examples:

    mionnx circuit models/world-llama "The capital of France is" "The capital of Germany is" --edges 20,50,100

    mionnx circuit models/world-llama --pairs pairs.jsonl --edges 20,50,100
    """
    texts = prompts(clean, corrupted, pairs, answer=answer, versus=versus)
    if "corrupted" not in texts:
        raise typer.BadParameter("give a corrupted prompt, or one of each pair")
    if "positions" in texts:
        raise typer.BadParameter(f"{pairs} names positions, and edges go from all positions to all")
    options: dict[str, Any] = {**texts, "steps": steps, "rules": rules}
    sizes = None if edges is None else numbers("edges", edges, int)
    opened = opening.model(model)
    result = opened.circuit(edges=sizes, metric=metric, position=position, **options)
    deliver(result, result.table, html, png, as_json, save)
    if not as_json and top:
        Console().print(result.attribution.table(top))
