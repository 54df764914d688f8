"""The command `mionnx sweep`: patching, ablation and path patching over layers, positions and heads."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from mionnx.analysis.sweep.result import SweepResult
from mionnx.analysis.sweep.sweep import Sweep
from mionnx.cli.corruption import corruption
from mionnx.cli.opening import PLAIN, RUNS, Opening, opens_model
from mionnx.cli.options import Html, Json, Layers, Model, Png, Save, chosen, deliver
from mionnx.cli.pairs_file import Pairs, lines_of
from mionnx.cli.sweep_options import OTHER, Answer, Cells, IfAny, Kind, Over, Read, Versus, axes, given, prompts
from mionnx.machine.memory import format_bytes
from mionnx.model import MIModel

STOPPED = 130  # the exit code of a program that was interrupted


@opens_model(*RUNS)
def sweep(
    model: Model,
    clean: IfAny = None,
    corrupted: Annotated[str | None, typer.Argument(help=OTHER)] = None,
    hook: Kind = None,
    over: Over = None,
    metric: Annotated[str | None, typer.Option(help="logit_diff, probability, log_probability, rank or kl.")] = None,
    answer: Answer = None,
    versus: Versus = None,
    noising: Annotated[bool, typer.Option(help="Patch corrupted values into the clean run.")] = False,
    ablate: Annotated[
        str | None, typer.Option(metavar="zero|mean|resample", help="Ablate instead of patching.")
    ] = None,
    receiver: Annotated[
        list[str] | None, typer.Option(metavar="HOOK", help="Path patching: a receiver, or all.")
    ] = None,
    layers: Layers = None,
    pairs: Pairs = None,
    noise: Annotated[
        str | None, typer.Option(metavar="SUBJECT", help="Corrupt by Gaussian noise at the embeddings of this string.")
    ] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Draws of the noise (10), or of a resampling (1).")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the noise, or of a resampling; 0 if left out.")] = None,
    reference: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Texts, one a line, for --ablate mean and resample.")
    ] = None,
    by: Annotated[str | None, typer.Option(metavar="position|token", help="Means of --ablate mean by class.")] = None,
    corrupted_spec: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Corrupt by the interventions of a saved HookSpec.")
    ] = None,
    position: Read = -1,
    top: Cells = 12,
    html: Html = None,
    png: Png = None,
    save: Save = None,
    as_json: Json = False,
    opening: Opening = PLAIN,
) -> None:
    """Patch or ablate every layer, position or head, and measure the effect on the answer.

    An interrupted sweep continues when the same command is given again.

    Examples:

    mionnx sweep models/world-llama "The capital of France is" "The capital of Germany is" --html sweep.html

    mionnx sweep models/world-llama "The capital of France is" --ablate zero --hook z --over layer,head

    mionnx sweep models/world-llama "The capital of France is" --noise France --metric probability --answer Paris

    mionnx sweep models/world-llama --pairs pairs.jsonl --hook mlp.hook_act --over layer,neuron
    """
    texts = prompts(clean, corrupted, pairs, answer=answer, versus=versus)
    draws = (None, None) if ablate else (repeats, seed)
    texts |= corruption(noise, *draws, corrupted_spec, "corrupted" in texts)
    if ("corrupted" in texts) == (ablate is not None):
        raise typer.BadParameter("give a corrupted prompt to patch with, --noise, --corrupted-spec, or --ablate")
    if ablate and (receiver or noising):
        raise typer.BadParameter("--receiver and --noising are for patching")
    if not ablate and (reference or by):
        raise typer.BadParameter("--reference and --by are for --ablate")
    opened = opening.model(model)
    options = given(metric=metric, layers=chosen("layers", layers), over=axes(over))
    options |= given(**{"sender" if receiver else "hook": hook})
    options |= {"position": position, "before": lambda ready: _announce(ready, as_json), "resume": True}
    try:
        if ablate is not None:
            drawn = given(seed=seed, repeats=repeats, by=by, reference=lines_of(reference))
            result = opened.ablation_sweep(texts.pop("clean"), kind=ablate, **texts, **options, **drawn)
        else:
            options["patching"] = "noising" if noising else "denoising"
            result = _patch(opened, receiver, texts | options)
    except KeyboardInterrupt:
        typer.echo("interrupted; the same command goes on where this one stopped", err=True)
        sys.exit(STOPPED)
    deliver(result, lambda: result.table(top), html, png, as_json, save)
    if not as_json:
        typer.echo(result.facts())


def _patch(model: MIModel, receiver: list[str] | None, options: dict[str, Any]) -> SweepResult:
    if receiver:
        return model.path_patch(receivers="all" if receiver == ["all"] else receiver, **options)
    return model.patch_sweep(**options)


def _announce(ready: Sweep, quiet: bool) -> None:
    """Print the estimated cost of a sweep on the error stream, before it starts."""
    if not quiet:
        cost = ready.estimate()
        Console(stderr=True).print(
            f"{cost.cells} cells, {cost.computed} to compute in {cost.calls} calls: about {cost.seconds:.1f} s, "
            f"{format_bytes(cost.memory)}",
            style="dim",
            highlight=False,
        )
