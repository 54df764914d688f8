"""Commands of analyses: their verbs, and abilities of the command line besides."""

import sys
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from mionnx.analysis.attribution.attribution import Attributions
from mionnx.analysis.features.transcoder_set import TranscoderSet
from mionnx.analysis.gradients.attribute_patch import AttributedSweep
from mionnx.analysis.steering.directions import Directions
from mionnx.analysis.steering.dose_response import DoseResponse
from mionnx.analysis.sweep.corruption import Noise
from mionnx.analysis.sweep.sweep import Sweep
from mionnx.cli.command import Arguments, Command, Open
from mionnx.cli.files import Prompts, PromptsFile, read_pairs, texts_of
from mionnx.cli.tables import attention_table, attribution_table, dose_table, lens_table, mean_table
from mionnx.errors import InputError
from mionnx.graph.hooked_model import MASK_TOKENS
from mionnx.machine.memory import format_bytes
from mionnx.model import MIModel
from mionnx.spec.hook_spec import HookSpec

# As shells have it: 128 and the number of the signal.
STOPPED = 130  # the exit code of a program that was interrupted
DRAWS = 10  # of noise, if nothing is said
LLAMA, PROMPT = "models/world-llama", '"The capital of France is"'
BOTH = f'{LLAMA} {PROMPT} "The capital of Germany is"'
# Where an option of one verb stands beside another verb's.
GOES_WITH = {
    **dict.fromkeys(("reference", "by"), "--ablate"),
    **dict.fromkeys(("seed", "repeats"), "--noise, or --ablate resample"),
    **dict.fromkeys(("patching", "sender"), "patching"),
    "hook": "patching and ablation; with --receivers it is --sender",
    "receivers": "patching",
}
PAIRS = 'JSON lines with clean, answer, versus: {"clean": "The capital of France is", "answer": "Paris", ..}.'
Pairs = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Many pairs: JSON lines with clean, corrupted, answer, versus, positions."),
]
Cells = Annotated[int, typer.Option(min=1, help="Number of cells to list where the map does not fit.")]
Leading = Annotated[int, typer.Option(min=1, help="Number of rows to print, the largest ones.")]
Edges = Annotated[int, typer.Option(min=0, help="Number of leading edges to list.")]
Place = Annotated[int, typer.Option(help="Token of the prompt to print: from 0, or negative from its end.")]
PlaceOrMask = Annotated[
    int | None,
    typer.Option(help="Token of the prompt to print: from 0, or negative from its end; the mask, or the last."),
]
LAYER = (
    "Layer to steer; if left out, the one whose direction explains most of the pairs' differences, or the middle one "
    "for fewer than two pairs and for --gguf."
)
STRENGTHS = (0, 0.25, 0.5, 0.75, 1, 1.5, 2)


def compared(arguments: Arguments, pairs: Path | None, lacking: str) -> Arguments:
    """The arguments with the prompts of a file of pairs, or those of the command line."""
    clean = arguments.get("clean", arguments.get("prompt"))
    if (clean is None) == (pairs is None):
        raise typer.BadParameter("give a clean prompt, or --pairs FILE")
    columns = {} if pairs is None else read_pairs(pairs)
    for name in columns.keys() & arguments.keys():
        raise typer.BadParameter(f"--{name}: {pairs} has one for each pair")
    if lacking and "corrupted" not in columns | arguments:
        raise typer.BadParameter(lacking)
    return arguments | columns


def _sweep(
    open: Open,
    arguments: Arguments,
    pairs: Pairs = None,
    noise: Annotated[
        str | None, typer.Option(metavar="SUBJECT", help="Corrupt by Gaussian noise at the embeddings of this string.")
    ] = None,
    corrupted_spec: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Corrupt by the interventions of a saved HookSpec.")
    ] = None,
) -> Any:
    arguments = compared(arguments, pairs, "")
    ablates, receives = "kind" in arguments, "receivers" in arguments
    if ("corrupted" in arguments) + (noise is not None) + (corrupted_spec is not None) > 1:
        raise typer.BadParameter("a corrupted prompt, --noise and --corrupted-spec: give one of them")
    if noise is not None:
        # Beside --noise these are of the draw; the sweep has neither.
        draws = {"repeats": DRAWS} | {name: arguments.pop(name) for name in ("repeats", "seed") if name in arguments}
        arguments["corrupted"] = Noise(noise, **draws)
    elif corrupted_spec is not None:
        arguments["corrupted"] = HookSpec.load(corrupted_spec)
    if ("corrupted" in arguments) == ablates:
        raise typer.BadParameter("give a corrupted prompt to patch with, --noise, --corrupted-spec, or --ablate")
    verb = MIModel.ablation_sweep if ablates else MIModel.path_patch if receives else MIModel.patch_sweep
    if ablates:
        arguments["prompts"] = arguments.pop("clean")
    for name in arguments.keys() - signature(verb).parameters.keys():
        raise typer.BadParameter(f"--{name.replace('_', '-')} goes with {GOES_WITH[name]}")
    try:
        # From the store, whose file is deleted when the sweep is done: the same command goes on where it was
        # interrupted.
        return verb(open(), **arguments, resume=True)
    except KeyboardInterrupt:
        typer.echo("interrupted; the same command goes on where this one stopped", err=True)
        sys.exit(STOPPED)


def _announce(sweep: Sweep) -> None:
    """Print the estimated cost of a sweep on the error stream, before it starts."""
    cost = sweep.estimate()
    Console(stderr=True).print(
        f"{cost.cells} cells, {cost.computed} to compute in {cost.calls} calls: about {cost.seconds:.1f} s, "
        f"{format_bytes(cost.memory)}",
        style="dim",
        highlight=False,
    )


def _map(result: Any, k: Cells = 12) -> Iterator[Any]:
    yield result.table(k)
    yield result.facts()


SWEEP = Command(
    [MIModel.patch_sweep, MIModel.path_patch, MIModel.ablation_sweep],
    [
        f"mionnx sweep {BOTH} --html sweep.html",
        f"mionnx sweep {LLAMA} {PROMPT} --ablate zero --hook z --over layer,head",
        f"mionnx sweep {LLAMA} {PROMPT} --noise France --metric probability --answer Paris",
        f"mionnx sweep {LLAMA} --pairs pairs.jsonl --hook mlp.hook_act --over layer,neuron",
    ],
    "With --receivers paths are patched, with --ablate values are ablated. An interrupted sweep continues when the "
    "same command is given again.",
    call=_sweep,
    show=_map,
    before=_announce,
    positional=("clean", "corrupted"),
    optional=("clean", "corrupted", "receivers"),
    words={"kind": "ablate"},
    without=("positions", "prompts"),
)


def _attribute_patch(open: Open, arguments: Arguments, pairs: Pairs = None) -> AttributedSweep:
    arguments = compared(arguments, pairs, "give a corrupted prompt, of which each cell's effect is the difference")
    result = open().attribute_patch(**arguments)
    if isinstance(result, dict):
        raise InputError(f"--hook means several kinds of hook points, a table shows one: {', '.join(result)}")
    return result


def _estimates(result: AttributedSweep, k: Cells = 12) -> Iterator[Any]:
    yield from _map(result, k)
    if not np.isnan(result.exact).all():
        yield result.confirmed()


ATTRIBUTE_PATCH = Command(
    [MIModel.attribute_patch],
    [f"mionnx attribute-patch {BOTH} --steps 8"],
    call=_attribute_patch,
    show=_estimates,
    positional=("clean", "corrupted"),
    optional=("clean", "corrupted"),
    without=("positions",),
)


def _circuit(open: Open, arguments: Arguments, pairs: Pairs = None) -> Any:
    arguments = compared(arguments, pairs, "give a corrupted prompt, or one of each pair")
    if "positions" in arguments:
        raise typer.BadParameter(f"{pairs} names positions, and edges go from all positions to all")
    return open().circuit(**arguments)


def _edges(result: Any, k: Edges = 10) -> Iterator[Any]:
    yield result.table()
    if k:
        yield result.attribution.table(k)


CIRCUIT = Command(
    [MIModel.circuit],
    [f"mionnx circuit {BOTH} --edges 20,50,100", f"mionnx circuit {LLAMA} --pairs pairs.jsonl --edges 20,50,100"],
    call=_circuit,
    show=_edges,
    positional=("clean", "corrupted"),
    optional=("clean", "corrupted"),
)


def _trace(
    open: Open,
    arguments: Arguments,
    hook: Annotated[str, typer.Option(help="Hook point that features read, where the files do not say.")] = "",
    hook_out: Annotated[str, typer.Option(help="Hook point that features stand for.")] = "",
) -> Any:
    if arguments.get("transcoders") is not None:  # files are looked at before the model is opened
        arguments["transcoders"] = TranscoderSet.load(arguments["transcoders"], hook, hook_out)
    elif hook or hook_out:
        raise InputError("--hook and --hook-out are of --transcoders, which are not given")
    return open().trace(**arguments)


TRACE = Command(
    [MIModel.trace],
    [
        f"mionnx trace {LLAMA} {PROMPT} --transcoders FOLDER --html graph.html",
        f"mionnx trace {LLAMA} {PROMPT} --transcoders FOLDER --json > graph.json",
    ],
    "JSON is circuit-tracer's file (schema 1), which its pages and Neuronpedia show.",
    call=_trace,
    positional=("prompt",),
)


def _lens(result: Any, position: PlaceOrMask = None) -> Iterator[Any]:
    masks = [index for index, token in enumerate(result.tokens) if token in MASK_TOKENS]
    last = masks[0] if len(masks) == 1 else -1
    yield lens_table(result, result.at(result.positions[last] if position is None else position))


LENS = Command(
    [MIModel.logit_lens],
    [f"mionnx lens {LLAMA} {PROMPT} --token-ids Berlin --html lens.html"],
    "The table is of one position; page, picture and JSON hold all.",
    show=_lens,
    positional=("source",),
    words={"source": "prompt"},
    without=("batch_size",),
    once=True,
)


PATCHSCOPE = Command(
    [MIModel.patchscope],
    [
        f'mionnx patchscope {LLAMA} "France has its capital in" --position 0 --target "The capital of Japan is" \\\n'
        "  --placeholder Japan --token-ids Paris"
    ],
    positional=("source",),
    without=("target_model", "mapping"),
)


def _attention(result: Any, position: Place = -1) -> Iterator[Any]:
    yield attention_table(result, result.at(position))


ATTENTION = Command(
    [MIModel.attention],
    [f"mionnx attention {LLAMA} {PROMPT} --html attention.html"],
    "The table is of one position and the key that each head attends to most; the page has everything. An RWKV has its "
    "effective attention.",
    show=_attention,
    positional=("prompt",),
    without=("batch_size",),
    once=True,
)


def _attribute(
    open: Open,
    arguments: Arguments,
    pairs: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Many prompts: JSON lines with clean, answer, versus; the rest is not read."),
    ] = None,
) -> Any:
    arguments = compared(arguments, pairs, "")
    arguments["prompt"] = arguments.pop("clean", arguments.get("prompt"))
    return open().attribute(
        **{name: value for name, value in arguments.items() if name not in ("corrupted", "positions")}
    )


def _contributions(result: Any, k: Leading = 15) -> Iterator[Any]:
    yield (mean_table if isinstance(result, Attributions) else attribution_table)(result, k)


ATTRIBUTE = Command(
    [MIModel.attribute],
    [
        f"mionnx attribute {LLAMA} {PROMPT} --answer Paris --versus Berlin",
        f"mionnx attribute {LLAMA} --pairs pairs.jsonl",
    ],
    call=_attribute,
    show=_contributions,
    positional=("prompt",),
    optional=("prompt",),
    once=True,
)


def _heads(result: Any, k: Leading = 5) -> Iterator[Any]:
    yield result.table(k)


HEADS = Command([MIModel.head_scores], [f"mionnx heads {LLAMA} --html heads.html"], show=_heads, once=True)


def _logit_diff(
    open: Open,
    arguments: Arguments,
    pairs: Annotated[Path, typer.Argument(metavar="PAIRS", help=PAIRS)],
    corrupted: Annotated[bool, typer.Option("--corrupted", help="Read the corrupted prompts of the file.")] = False,
) -> Any:
    columns, prompts = read_pairs(pairs), "corrupted" if corrupted else "clean"
    if lacking := [name for name in (prompts, "answer", "versus") if name not in columns]:
        raise typer.BadParameter(f"{pairs} has no {', no '.join(lacking)}")
    return open().get_logit_diff(columns[prompts], columns["answer"], columns["versus"], **arguments)


LOGIT_DIFF = Command(
    [MIModel.get_logit_diff],
    [f"mionnx logit-diff {LLAMA} pairs.jsonl"],
    call=_logit_diff,
    show=lambda result: [result.table(), result.facts()],
    without=("prompt", "answer", "versus"),
)


def _steer(
    open: Open,
    arguments: Arguments,
    prompt: Prompts = None,
    prompts: PromptsFile = None,
    gguf: Annotated[Path | None, typer.Option(metavar="FILE", help="A control vector of llama.cpp instead.")] = None,
    load: Annotated[Path | None, typer.Option(metavar="FILE", help="Directions saved earlier instead.")] = None,
    layer: Annotated[int | None, typer.Option("--layer", "--layers", help=LAYER)] = None,
    save_directions: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the directions: .safetensors, or .gguf for llama.cpp.")
    ] = None,
) -> DoseResponse:
    contrasts = {"positive", "negative"} <= arguments.keys()
    # One of the three; and of the first both sides, or none.
    if contrasts + (gguf is not None) + (load is not None) != 1 or contrasts != bool(
        {"positive", "negative"} & arguments.keys()
    ):
        raise typer.BadParameter("give --positive and --negative, or --gguf, or --load")
    if not contrasts and arguments.keys() & {"hook", "method"}:
        raise typer.BadParameter("--hook and --method say how directions are made of --positive and --negative")
    # Read before the model is opened, which takes longer.
    texts = texts_of(prompt, prompts)
    pairs = {name: arguments.pop(name) for name in ("positive", "negative", "hook", "method") if name in arguments}
    shared = {name: arguments[name] for name in ("batch_size", "progress") if name in arguments}
    model = open()
    if contrasts:
        directions = model.contrast(**pairs, **shared)
    else:
        directions = Directions.from_gguf(gguf) if gguf is not None else Directions.load(str(load))
    direction = directions[directions.best_layer if layer is None else layer]
    arguments.setdefault("strengths", STRENGTHS)
    response = model.dose_response(texts, direction, **arguments)
    if save_directions is not None:
        directions.save(save_directions)
    return response


STEER = Command(
    [MIModel.dose_response, MIModel.contrast],
    [
        f'mionnx steer {LLAMA} --positive "The capital of Germany is" --negative {PROMPT} --prompt {PROMPT} '
        "--positions=-1 --bisect 0.001"
    ],
    "The n-th --positive pairs with the n-th --negative: the direction leads from these to those. If left out, "
    "strengths go from 0 to 2.",
    call=_steer,
    show=lambda response: [dose_table(response, number) for number in range(len(response.prompts))],
    optional=("positive", "negative", "strengths"),
    without=("prompts", "layers"),
)
