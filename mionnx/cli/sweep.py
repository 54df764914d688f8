"""The command line's part about sweeps: `mionnx sweep`."""

import sys
from typing import Annotated, Any

import typer
from rich.console import Console

from mionnx.analysis.sweep.result import SweepResult
from mionnx.analysis.sweep.sweep import Sweep
from mionnx.cli.options import (
    Html,
    Json,
    Model,
    Png,
    Provider,
    deliver,
)
from mionnx.errors import InputError
from mionnx.machine.memory import format_bytes
from mionnx.model import MIModel

STOPPED = 130  # the exit code of a program that was interrupted


def sweep(
    model: Model,
    clean: Annotated[str, typer.Argument(help="The prompt that is answered as it should be.")],
    corrupted: Annotated[str | None, typer.Argument(help="The other prompt, of as many tokens; for patching.")] = None,
    hook: Annotated[str | None, typer.Option(help="A hook point of any layer: resid_pre, z, mlp_out, ..")] = None,
    over: Annotated[str | None, typer.Option(help="Axes: layer,position,head,source.")] = None,
    metric: Annotated[str | None, typer.Option(help="logit_diff, probability, log_probability, rank or kl.")] = None,
    answer: Annotated[str | None, typer.Option(help="A token; the clean prompt's likeliest if left out.")] = None,
    versus: Annotated[str | None, typer.Option(help="A token; the corrupted prompt's likeliest if left out.")] = None,
    noising: Annotated[bool, typer.Option(help="Put corrupted values into the clean run.")] = False,
    ablate: Annotated[str | None, typer.Option(metavar="zero|mean", help="Ablate instead of patching.")] = None,
    receiver: Annotated[list[str] | None, typer.Option(metavar="HOOK", help="Path patching: who reads it.")] = None,
    layers: Annotated[str | None, typer.Option(help="Layers, as 0,3,5; all if left out.")] = None,
    at: Annotated[int, typer.Option(help="The position whose logits are read.")] = -1,
    top: Annotated[int, typer.Option(min=1, help="How many cells to list, where the map does not fit.")] = 12,
    html: Html = None,
    png: Png = None,
    as_json: Json = False,
    provider: Provider = "cpu",
) -> None:
    """Patch or ablate every place of a model, one a cell, and measure what it does to the answer.

    A sweep that is interrupted goes on where it stopped when the same command is given again.

    Examples:

    mionnx sweep models/world-llama "The capital of France is" "The capital of Germany is" --html sweep.html

    mionnx sweep models/world-llama "The capital of France is" --ablate zero --hook z --over layer,head
    """
    if (corrupted is None) == (ablate is None):
        raise typer.BadParameter("give a corrupted prompt to patch with, or --ablate")
    if ablate and (receiver or noising):
        raise typer.BadParameter("--receiver and --noising are for patching")
    opened = MIModel.from_pretrained(model, provider=provider)
    named: dict[str, Any] = {"metric": metric, "answer": answer, "versus": versus, "layers": _numbers(layers)}
    named |= {"sender" if receiver else "hook": hook, "over": over.split(",") if over else None}
    given = {name: value for name, value in named.items() if value is not None}
    given |= {"at": at, "before": lambda ready: _announce(ready, as_json), "resume": True}
    try:
        if corrupted is None:
            result = opened.ablation_sweep(clean, kind=str(ablate), **given)
        else:
            given["direction"] = "noising" if noising else "denoising"
            result = _patch(opened, clean, corrupted, receiver, given)
    except KeyboardInterrupt:
        typer.echo("interrupted; the same command goes on where this one stopped", err=True)
        sys.exit(STOPPED)
    deliver(result, lambda: result.table(top), html, png, as_json)
    if not as_json:
        typer.echo(result.facts())


def _patch(
    model: MIModel, clean: str, corrupted: str, receiver: list[str] | None, given: dict[str, Any]
) -> SweepResult:
    if receiver:
        return model.path_patch(clean, corrupted, "all" if receiver == ["all"] else receiver, **given)
    return model.patch_sweep(clean, corrupted, **given)


def _numbers(given: str | None) -> list[int] | None:
    try:
        return None if given is None else [int(part) for part in given.split(",")]
    except ValueError:
        raise InputError(f"--layers {given!r}: numbers with commas between, as 0,3,5") from None


def _announce(ready: Sweep, quiet: bool) -> None:
    """Say what a sweep will take, on the error stream, before it starts."""
    if not quiet:
        found = ready.estimate()
        Console(stderr=True).print(
            f"{found.cells} cells, {found.computed} to compute in {found.calls} calls: about {found.seconds:.1f} s, "
            f"{format_bytes(found.memory)}",
            style="dim",
            highlight=False,
        )
