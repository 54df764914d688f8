"""The command `mionnx verify`: one model in several runtimes, compared at every hook point."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.markup import escape

from mionnx.cli.opening import PLAIN, Opening, opens_model
from mionnx.cli.options import Html, Json, Model, Png, Save, SpecFile, deliver, numbers, read_text
from mionnx.model import MIModel
from mionnx.spec.hook_spec import HookSpec
from mionnx.verify import Verification
from mionnx.verify.result import Beside, Repeat
from mionnx.verify.result_table import repeats_table
from mionnx.verify.verbs import RUNTIMES, read_prompts

DISAGREES = 2  # the exit code where runtimes differ by more than the tolerance; 1 is an error
SHOWN = 20  # matrices that are listed; the page and the JSON have all
NAMES = "Names with commas between: torch, ort-cpu, ort-cpu:none, openvino, .."
Runtimes = Annotated[str, typer.Option(help=NAMES)]
Compared = Annotated[str | None, typer.Option(help=f"{NAMES}; ort-cpu with --other, else {','.join(RUNTIMES)}.")]
Prompts = Annotated[Path | None, typer.Option(metavar="FILE", help="One prompt per line, or a .json list.")]
Texts = Annotated[list[str] | None, typer.Option("--prompt", help="A prompt; may be repeated.")]
Other = Annotated[str | None, typer.Option(metavar="MODEL", help="A second model: a quantised file's checkpoint, say.")]
Tolerance = Annotated[float | None, typer.Option(help="Largest relative difference; 5e-5 in float32 if left out.")]


@opens_model("dtype")
def verify(
    model: Model,
    runtimes: Compared = None,
    prompts: Prompts = None,
    prompt: Texts = None,
    hooks: Annotated[str | None, typer.Option(help="Globs, with commas between; resid_* if left out.")] = None,
    spec: SpecFile = None,
    other: Other = None,
    record: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the first runtime's values.")] = None,
    against: Annotated[Path | None, typer.Option(metavar="FILE", help="Compare with a file of --record.")] = None,
    positions: Annotated[str | None, typer.Option(help="Positions to compare, as 0,-1; all if left out.")] = None,
    tolerance: Tolerance = None,
    local: Annotated[bool, typer.Option(help="Measure the error that each step adds by itself.")] = True,
    greedy: Annotated[int, typer.Option(min=0, help="Greedily chosen tokens to compare after each prompt.")] = 8,
    repeat: Annotated[bool, typer.Option(help="Test which runs are bit-identical when repeated.")] = False,
    checkpoint: Annotated[Path | None, typer.Option(help="Checkpoint folder for the torch runtime.")] = None,
    text: Annotated[list[Path] | None, typer.Option(metavar="FILE", help="A text, in windows of 256 tokens.")] = None,
    matrices: Annotated[bool | None, typer.Option(help="Measure each quantised matrix by itself.")] = None,
    experts: Annotated[bool, typer.Option("--experts", help="Measure each matrix of a stack of experts too.")] = False,
    html: Html = None,
    png: Png = None,
    save: Save = None,
    opening: Opening = PLAIN,
    as_json: Json = False,
) -> None:
    """Run one model in several runtimes and compare them hook point by hook point.

    Exit code 0 if they agree, 2 if they do not.

    Examples:

    mionnx verify models/world-llama --runtimes torch,ort-cpu,openvino --prompt "The capital of France is"

    mionnx verify models/world-llama --runtimes ort-cpu --prompts prompts.txt --record run.safetensors

    mionnx verify models/world-llama --runtimes ort-cpu --against run.safetensors

    mionnx verify model_q4.onnx --other checkpoint --hooks "*" --prompts text.txt --html lost.html

    mionnx verify models/world-llama --other world-int4 --text text.txt --html lost.html
    """
    opened = opening.model(model)
    given: list[Any] = [*(prompt or ()), *(read_prompts(prompts) if prompts else ())]
    result = opened.verify(
        given,
        RUNTIMES if runtimes is None else runtimes.split(","),
        points=hooks.split(",") if hooks else None,
        hooks=HookSpec.load(str(spec)) if spec else None,
        other=MIModel.from_pretrained(other) if other else None,
        record=record,
        against=against,
        tolerance=tolerance,
        local=local,
        greedy=greedy,
        positions=None if positions is None else numbers("positions", positions, int),
        repeat=repeat,
        checkpoint=checkpoint,
        texts=[read_text(path) for path in text or ()],
        matrices=matrices,
        experts=experts,
    )
    deliver(result, lambda: _shown(result), html, png, as_json, save)
    if not as_json:
        _tell(result)
    sys.exit(0 if result.agrees else DISAGREES)


def _shown(result: Verification) -> RenderableType:
    """The table of what was compared; a line if nothing was."""
    compared = result.besides or result.failed or result.skipped
    return result.table() if compared else escape(result.summary())


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
        console.print(repeats_table([*map(_repeat, result.repeats)]))
    for beside in result.besides:
        if beside.heaviest is not None:
            console.print(result.loss_table(beside.title))
            console.print(escape(_lost(beside)), highlight=False)
    if result.matrices:
        console.print(result.matrix_table(SHOWN))
    if result.besides:
        console.print(escape(result.summary()), highlight=False)


def _lost(beside: Beside) -> str:
    """A line on what the first model lost of another one."""
    layer, logits = beside.heaviest, beside.logits
    assert layer is not None
    return (
        f"layer {layer.layer} adds most: distance {layer.before:.1e} before, {layer.after:.1e} after; "
        f"KL({beside.title} || this) {logits['kl_back_mean']:.1e} nats, {logits['kl_back_max']:.1e} at most; "
        f"top 1 the same at {logits['top_1']:.1%} of {int(logits['positions'])} positions"
    )


def _repeat(one: Repeat) -> tuple[str, ...]:
    """The cells of a repeated run."""
    bits = "identical" if one.identical else "differ"
    return escape(one.runtime), one.what, bits, f"{one.relative:.1e}", one.first or ""
