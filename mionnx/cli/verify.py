"""The command line's part about reproducibility: `mionnx verify` and `mionnx bisect`."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mionnx.cli.options import (
    Html,
    Json,
    Model,
    Png,
    SpecFile,
    deliver,
)
from mionnx.errors import InputError
from mionnx.machine.progress import bars
from mionnx.model import MIModel
from mionnx.spec.hook_spec import HookSpec
from mionnx.verify import Verification
from mionnx.verify.result import WIDE
from mionnx.verify.verbs import read_prompts
from mionnx.view.page import plain

DISAGREES = 2  # the exit code where runtimes differ by more than the tolerance; 1 is an error
Runtimes = Annotated[str, typer.Option(help="Names with commas between: torch, ort-cpu, ort-cpu:none, openvino, ..")]
Prompts = Annotated[Path | None, typer.Option(metavar="FILE", help="A prompt a line, or a .json list.")]
Texts = Annotated[list[str] | None, typer.Option("--prompt", help="A prompt.")]
Other = Annotated[str | None, typer.Option(metavar="MODEL", help="A second model: another dtype, say.")]
Tolerance = Annotated[float | None, typer.Option(help="Largest relative difference; 5e-5 in float32 if left out.")]


def verify(
    model: Model,
    runtimes: Runtimes = "ort-cpu,ort-cpu:none,reference",
    prompts: Prompts = None,
    prompt: Texts = None,
    hooks: Annotated[str | None, typer.Option(help="Globs, with commas between; resid_* if left out.")] = None,
    spec: SpecFile = None,
    other: Other = None,
    record: Annotated[Path | None, typer.Option(metavar="FILE", help="Keep the first runtime's values.")] = None,
    against: Annotated[Path | None, typer.Option(metavar="FILE", help="Compare with such a file.")] = None,
    positions: Annotated[str | None, typer.Option(help="Positions to compare, as 0,-1; all if left out.")] = None,
    tolerance: Tolerance = None,
    local: Annotated[bool, typer.Option(help="Measure what each step adds by itself.")] = True,
    greedy: Annotated[int, typer.Option(min=0, help="Tokens to choose after each prompt, and compare.")] = 8,
    repeat: Annotated[bool, typer.Option(help="Say which runs are bit-identical when repeated.")] = False,
    checkpoint: Annotated[Path | None, typer.Option(help="Where torch finds the weights.")] = None,
    html: Html = None,
    png: Png = None,
    as_json: Json = False,
) -> None:
    """Run one model in several runtimes and compare them hook point by hook point.

    Exit code 0 if they agree, 2 if they do not.

    Examples:

    mionnx verify models/world-llama --runtimes torch,ort-cpu,openvino --prompt "The capital of France is"

    mionnx verify models/world-llama --runtimes ort-cpu --prompts prompts.txt --record run.safetensors

    mionnx verify models/world-llama --runtimes ort-cpu --against run.safetensors
    """
    opened = MIModel.from_pretrained(model)
    given: list[Any] = [*(prompt or ()), *(read_prompts(prompts) if prompts else ())]
    with bars() as progress:
        result = opened.verify(
            given,
            runtimes.split(","),
            hooks=hooks.split(",") if hooks else None,
            spec=HookSpec.load(str(spec)) if spec else None,
            other=MIModel.from_pretrained(other) if other else None,
            record=record,
            against=against,
            tolerance=tolerance,
            local=local,
            greedy=greedy,
            positions=_numbers(positions),
            repeat=repeat,
            checkpoint=checkpoint,
            progress=progress,
        )
    deliver(result, lambda: result.table(Console().width >= WIDE), html, png, as_json)
    if not as_json:
        _tell(result)
    sys.exit(0 if result.agrees else DISAGREES)


def _tell(result: Verification) -> None:
    console = Console()
    for titles, verdict in ((result.failed, "[red]failed[/]"), (result.skipped, "[yellow]skipped[/]")):
        for title, why in titles.items():
            console.print(f"{escape(title)} {verdict}: {escape(why)}", highlight=False)
    for note in result.notes:
        console.print(f"[yellow]note:[/] {escape(note)}", highlight=False)
    for beside in result.besides:
        trouble = beside.trouble(result.tolerance)
        if trouble:
            console.print(f"[red]{escape(beside.title)}[/]: {escape(trouble)}", highlight=False)
    if result.repeats:
        table = Table("runtime", "repeated", "bits", "largest relative", "first at")
        for one in result.repeats:
            bits = "identical" if one.identical else "differ"
            table.add_row(escape(one.runtime), one.what, bits, f"{one.relative:.1e}", one.first or "")
        console.print(table)
    if result.besides:
        console.print(escape(result.summary()), highlight=False)


def _numbers(given: str | None) -> list[int] | None:
    try:
        return None if given is None else [int(part) for part in given.split(",")]
    except ValueError:
        raise InputError(f"--positions {given!r}: numbers with commas between, as 0,-1") from None


def bisect(
    model: Model,
    runtimes: Runtimes,
    prompt: Annotated[str, typer.Option(help="The text to run on.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder for a bug report; made new.")] = None,
    spec: SpecFile = None,
    other: Other = None,
    tolerance: Tolerance = None,
    as_json: Json = False,
) -> None:
    """Find the smallest part of a model whose inputs agree in two runtimes, or models, and whose output does not.

    Exit code 0 if there is none, 2 if there is one.

    Examples:

    mionnx bisect models/world-llama --runtimes ort-cpu,openvino --prompt "The capital of France is" -o report

    mionnx bisect MODEL --runtimes ort-cpu --other EDITED_MODEL --prompt "The capital of France is"
    """
    opened = MIModel.from_pretrained(model)
    with bars() as progress:
        found = opened.bisect(
            prompt,
            runtimes.split(","),
            folder=output,
            spec=HookSpec.load(str(spec)) if spec else None,
            other=MIModel.from_pretrained(other) if other else None,
            tolerance=tolerance,
            progress=progress,
        )
    typer.echo(json.dumps(plain(found.to_dict(), None), indent=1, allow_nan=False) if as_json else str(found))
    sys.exit(DISAGREES if found.hook else 0)
