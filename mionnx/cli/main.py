"""The command line: `mionnx run`, `generate`, `sweep`, `lens`, `steer`, `compile`, `demo`, `cache` and so on."""

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from safetensors.numpy import save as to_bytes
from scipy.special import softmax

from mionnx.analysis.ablation import AblationResult
from mionnx.cli import (
    heads,
    reading,
    steer,
    sweep,
    verify,
)
from mionnx.cli.cache import app as cache_app
from mionnx.cli.demos import tour
from mionnx.cli.intervention_syntax import parse, parse_state_knockout, parse_state_steering
from mionnx.cli.options import (
    Json,
    Model,
    Provider,
    SpecFile,
)
from mionnx.compile.package import Packaging, compile_spec
from mionnx.errors import InterventionError, MIError, ModelError
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.inputs.tokens import Tokens
from mionnx.machine.files import write_atomic
from mionnx.machine.progress import bars
from mionnx.model import MIModel
from mionnx.run import find_model
from mionnx.run.hook_cache import HookCache
from mionnx.run.streamer import TextStreamer
from mionnx.spec.hook_spec import HookSpec

app = typer.Typer(
    help="Interpretability on ONNX graphs: capture, ablate, patch and steer language models in ONNX Runtime.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
)
app.add_typer(cache_app, name="cache")
app.command("sweep")(sweep.sweep)
app.command("lens")(reading.lens)
app.command("attention")(reading.attention)
app.command("attribute")(reading.attribute)
app.command("steer")(steer.steer)
app.command("heads")(heads.heads)
app.command("verify")(verify.verify)
app.command("bisect")(verify.bisect)
Edits = Annotated[list[str] | None, typer.Option(metavar="HOOK[=VALUE][@LIMITS]")]
Steerings = Annotated[list[str] | None, typer.Option(metavar="SCALE@LIMITS")]
States = Annotated[list[str] | None, typer.Option(metavar="LIMITS")]


def main() -> None:
    """Run the command line; an `MIError` is one message on the error stream, and exit code 1."""
    try:
        app()
    except MIError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {type(error).__name__}:", error, markup=True, highlight=False)
        sys.exit(1)


@app.command()
def export(
    source: Annotated[str, typer.Argument(help="A Hugging Face checkpoint's folder, or a Hub id.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder of the hooked model; made new.")] = None,
    copy: Annotated[bool, typer.Option(help="Copy the weights instead of linking them.")] = False,
    in_place: Annotated[bool, typer.Option(help="Write model.onnx beside the checkpoint's own weights.")] = False,
    dtype: Annotated[
        str, typer.Option(help="float32, float16, bfloat16, or auto for the checkpoint's own.")
    ] = "float32",
) -> None:
    """Export a checkpoint as a hooked model: an ONNX graph whose activations carry their hook names.

    Weights that are already of the dtype are hard-linked, not copied. onnx's own checker and loader refuse files with
    several names: --copy makes a folder for them.

    Example: mionnx export meta-llama/Llama-3.2-1B -o llama-hooked
    """
    if (output is None) == (not in_place) or (in_place and copy):
        raise typer.BadParameter("give either --output FOLDER, with or without --copy, or --in-place")
    begin = time.monotonic()
    folder = find_model.checkpoint_folder(source)
    with bars() as progress:
        if output is None:
            find_model.export_in_place(folder, dtype, progress)
        else:
            find_model.export(folder, output, dtype, progress, copy)
    hooked = HookedModel.open(output or folder)
    size = (hooked.folder / "model.onnx").stat().st_size
    sizes = hooked.metadata.sizes
    typer.echo(
        f"{hooked.folder}: {hooked.metadata.family}, {sizes.num_layers} layers, "
        f"{len(hooked.hook_points())} hook points, {hooked.metadata.dtype}, graph {size / 1024:.0f} KiB, "
        f"{time.monotonic() - begin:.1f} s"
    )


@app.command()
def hooks(
    model: Model,
    layer: Annotated[int | None, typer.Option(help="The hook points of one layer, by their full names.")] = None,
    as_json: Json = False,
) -> None:
    """Show a model's hook points with their axes; {i} stands for the layer.

    Example: mionnx hooks models/world-llama --layer 2
    """
    with bars() as progress:
        hooked = HookedModel.open(find_model.find_model(model, "float32", progress))
    points = [point for point in hooked.hook_points() if layer is None or point.layer == layer]
    if not points:
        raise ModelError(f"no layer {layer}: the model has layers 0 to {hooked.metadata.sizes.num_layers - 1}")
    if as_json:
        typer.echo(json.dumps({str(point): hooked.axes(point) for point in points}, indent=1))
        return
    table = Table(
        Column("hook point", no_wrap=True),
        "variant",
        Column("shape", overflow="fold"),
        title=f"{hooked.metadata.family}, layers: {_layers(hooked)}",
    )
    for row in dict.fromkeys(_row(hooked, point, layer is None) for point in points):
        table.add_row(*map(escape, row))
    Console().print(table)


def _layers(hooked: HookedModel) -> str:
    return f"0 to {hooked.metadata.sizes.num_layers - 1}"


def _row(hooked: HookedModel, point: HookPoint, template: bool) -> tuple[str, str, str]:
    name, variant = str(point), repr(point).removeprefix("HookPoint.")
    if template and point.layer is not None:
        name, variant = name.replace(f".{point.layer}.", ".{i}.", 1), f"{point.variant}(i)"
    spelled = [
        axis if axis == dim else f"{axis}={dim}" for axis, dim in zip(point.axes or (), hooked.axes(point), strict=True)
    ]
    return name, variant, "[" + ", ".join(spelled) + "]" + (" (capture only)" if point.derived else "")


@app.command()
def run(
    model: Model,
    prompt: Annotated[str, typer.Argument(help="The text to run on.")],
    capture: Annotated[list[str] | None, typer.Option(metavar="HOOK", help="Capture; globs allowed.")] = None,
    add: Edits = None,
    scale: Edits = None,
    zero: Edits = None,
    replace: Edits = None,
    project_out: Edits = None,
    knockout: Edits = None,
    state_knockout: States = None,
    state_steering: Steerings = None,
    spec: SpecFile = None,
    top: Annotated[int, typer.Option(min=1, help="How many next tokens to show.")] = 5,
    save: Annotated[Path | None, typer.Option(help="Write captures and logits to a safetensors file.")] = None,
    as_json: Json = False,
    provider: Provider = "cpu",
) -> None:
    """Run a prompt, and again with interventions: top next tokens side by side, and their KL divergence.

    Interventions are written HOOK[=VALUE][@LIMITS]; a value is a number, FILE.safetensors:KEY[*FACTOR], or for
    --knockout edges QUERY>KEY; limits are positions=..;heads=..;rows=.. State interventions of RWKV models have limits
    only: positions=..;layers=..;terms=.. (or heads=.. for --state-steering).

    Examples:

    mionnx run models/world-llama "The capital of France is" --zero "blocks.1.attn.hook_z@heads=3"

    mionnx run models/world-llama "The capital of France is" --knockout "blocks.2.attn.hook_scores=-1>3"

    mionnx run models/world-rwkv7 "The capital of France is" --state-knockout "positions=3;layers=1"
    """
    opened = MIModel.from_pretrained(model, provider=provider, prepack=False)  # each graph runs once
    tokens = opened.tokenize(prompt)
    given = {"add": add, "scale": scale, "zero": zero, "replace": replace, "project_out": project_out}
    hooks = _hooks(opened.num_heads, len(tokens), {**given, "knockout": knockout}, state_knockout, state_steering, spec)
    changes = hooks.num_interventions() + len(hooks.state_knockouts) + len(hooks.state_steerings)
    for hook in capture or ():
        hooks.capture(hook)
    cache = opened.forward(tokens, hooks)
    treated = cache.output()[0, -1]
    baseline = opened.forward(tokens).output()[0, -1] if changes else None
    if save:
        write_atomic(save, to_bytes({"logits": cache.output(), **{key: value.copy() for key, value in cache.items()}}))
    if as_json:
        typer.echo(json.dumps(_as_json(opened, cache, baseline, treated, top), indent=1))
    else:
        _print(opened, cache, baseline, treated, top)


Logits = NDArray[Any]


def _best(model: MIModel, logits: Logits, top: int) -> list[tuple[str, float]]:
    chances = softmax(logits.astype(np.float64))
    order = np.argsort(-chances, kind="stable")[:top]
    return [(model.tokenizer.decode([int(i)], skip_special_tokens=False), float(chances[i])) for i in order]


def _print(model: MIModel, cache: HookCache, baseline: Logits | None, treated: Logits, top: int) -> None:
    console = Console()
    columns = [_best(model, logits, top) for logits in (baseline, treated) if logits is not None]
    titles = ["next token"] if baseline is None else ["baseline", "treated"]
    table = Table(*(heading for title in titles for heading in (title, "probability")))
    for cells in zip(*columns, strict=True):
        table.add_row(*(text for token, chance in cells for text in (repr(token), f"{chance:.4f}")))
    console.print(table)
    if baseline is not None:
        console.print(f"KL(baseline || treated) = {AblationResult(baseline, treated).kl_divergence():.6f} nats")
    if cache:
        _print_captures(console, cache)


def _print_captures(console: Console, cache: HookCache) -> None:
    table = Table(Column("captured", no_wrap=True), "shape", "mean", "deviation")
    for name, value in cache.items():
        seen = value[value > np.finfo(value.dtype).min / 2].astype(np.float64)  # masked scores say nothing
        table.add_row(name, escape(str(list(value.shape))), f"{seen.mean():.4g}", f"{seen.std():.4g}")
    console.print(table)


def _as_json(model: MIModel, cache: HookCache, baseline: Logits | None, treated: Logits, top: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "top": _best(model, treated, top),
        "captures": {name: list(value.shape) for name, value in cache.items()},
    }
    if baseline is not None:
        found["baseline"] = _best(model, baseline, top)
        found["kl_divergence"] = AblationResult(baseline, treated).kl_divergence()
    return found


@app.command()
def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="How many tokens at most.")] = 32,
    add: Edits = None,
    scale: Edits = None,
    zero: Edits = None,
    replace: Edits = None,
    project_out: Edits = None,
    knockout: Edits = None,
    state_knockout: States = None,
    state_steering: Steerings = None,
    spec: SpecFile = None,
    compare: Annotated[bool, typer.Option(help="Generate without the interventions too, first.")] = False,
    temperature: Annotated[float | None, typer.Option(help="Sample at this temperature; greedy if left out.")] = None,
    top_k: Annotated[int, typer.Option(min=0, help="Sample among the k likeliest; 0 for all.")] = 50,
    top_p: Annotated[float, typer.Option(help="Sample among those that reach this probability together.")] = 1.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: less of what stands in the text.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Of the sampling.")] = None,
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End when this text appears.")] = None,
    as_json: Json = False,
    provider: Provider = "cpu",
) -> None:
    """Continue a prompt, with interventions in force at every step; tokens appear as they are made.

    Interventions are written as for `mionnx run`; positions=prompt and positions=generated are the phases of the text.

    Example:

    mionnx generate models/world-llama "The capital of France is" --scale "blocks.2.hook_attn_out=0" --compare
    """
    opened = MIModel.from_pretrained(model, provider=provider)
    tokens = opened.tokenize(prompt)
    given = {"add": add, "scale": scale, "zero": zero, "replace": replace, "project_out": project_out}
    hooks = _hooks(opened.num_heads, len(tokens), {**given, "knockout": knockout}, state_knockout, state_steering, spec)
    if compare and hooks.is_empty():
        raise InterventionError("--compare shows what interventions change, and none was given")
    sampling = {"temperature": temperature, "do_sample": True} if temperature is not None else {}
    options: dict[str, Any] = {
        "top_k": top_k,
        "top_p": top_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        **sampling,
    }
    runs = {"baseline": HookSpec(), "steered": hooks} if compare else {"text": hooks}
    found = {}
    for title, chosen in runs.items():
        if not as_json:
            typer.echo((f"{title}: " if compare else "") + prompt, nl=False)
        made = opened.generate(
            tokens,
            chosen,
            max_new_tokens=max_new_tokens,
            stop_strings=stop,
            streamer=None if as_json else TextStreamer(opened.tokenizer, _after_space(opened, tokens)),
            **options,
        )
        found[title] = {"text": made.texts[0], "new_text": made.new_texts[0], "new_ids": made.new_ids[0].tolist()}
        if not as_json:
            typer.echo()
    if as_json:
        typer.echo(json.dumps(found, indent=1))


def _after_space(model: MIModel, tokens: Tokens) -> Callable[[str], None]:
    """Writes pieces of a continuation; the first after a space where the tokenizer puts one between the two."""
    ids = tokens.ids.tolist()
    apart = model.tokenizer.decode([*ids, ids[-1]])[len(model.tokenizer.decode(ids)) :].startswith(" ")
    begun: list[str] = []

    def write(text: str) -> None:
        typer.echo(" " + text if apart and not begun and not text.startswith(" ") else text, nl=False)
        begun.append(text)

    return write


def _hooks(
    num_heads: int,
    seq_len: int,
    edits: dict[str, list[str] | None],
    knockouts: list[str] | None,
    steerings: list[str] | None,
    file: Path | None,
) -> HookSpec:
    """The spec that the command line asks for."""
    hooks = HookSpec.load(str(file)) if file else HookSpec()
    for kind, texts in edits.items():
        for text in texts or ():
            hooks.intervene(*parse(kind, text, num_heads, seq_len))
    for text in knockouts or ():
        hooks.set_state_knockout(parse_state_knockout(text))
    for text in steerings or ():
        hooks.set_state_steering(parse_state_steering(text))
    return hooks


@app.command("compile")
def compile_(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder; made new.")],
    spec: SpecFile = None,
    add: Edits = None,
    scale: Edits = None,
    zero: Edits = None,
    replace: Edits = None,
    project_out: Edits = None,
    state_knockout: States = None,
    state_steering: Steerings = None,
    capture: Annotated[list[str] | None, typer.Option(metavar="HOOK", help="Keep as an output; globs allowed.")] = None,
    knob: Annotated[
        list[str] | None, typer.Option(metavar="NAME[=HOOK]", help="Leave a strength as an input with a default.")
    ] = None,
    last_logits: Annotated[bool, typer.Option(help="Logits of the last position only.")] = False,
    weights: Annotated[str | None, typer.Option(help="embedded, alongside (as files), or referenced (links).")] = None,
    target: Annotated[str, typer.Option(help="generic, ort-cpu, ort-cuda or web.")] = "generic",
    optimum: Annotated[bool, typer.Option(help="Lay it out for optimum's ORTModelForCausalLM.")] = False,
    triton: Annotated[bool, typer.Option(help="Lay it out as a Triton Inference Server repository.")] = False,
) -> None:
    """Bake interventions into a plain ONNX model that runs anywhere, mionnx not installed.

    Interventions are written as for `mionnx run`, or come from a saved HookSpec. A knob without HOOK turns all it can.

    Example:

    mionnx compile models/world-llama -o no-attention --scale "blocks.2.hook_attn_out=0" --knob strength
    """
    if optimum and triton:
        raise typer.BadParameter("give either --optimum or --triton")
    with bars() as progress:
        hooked = HookedModel.open(find_model.find_model(model, "float32", progress))
    given = {"add": add, "scale": scale, "zero": zero, "replace": replace, "project_out": project_out}
    hooks = _hooks(hooked.metadata.sizes.num_heads, 1, given, state_knockout, state_steering, spec)
    for hook in capture or ():
        hooks.capture(hook)
    knobs: dict[str, Any] = {}
    for text in knob or ():
        name, _, where = text.partition("=")
        knobs[name] = [*(knobs.get(name) or []), where] if where else None
    packaging = Packaging(weights, target, "optimum" if optimum else "triton" if triton else "plain")
    with bars() as progress:
        made = compile_spec(
            hooked, hooks, output, knobs=knobs, last_logits=last_logits, packaging=packaging, progress=progress
        )
    size = sum(path.stat().st_size for path in made.rglob("*") if path.is_file())
    typer.echo(
        f"{made}: {_changes(hooks)} baked in, {size / 2**20:.1f} MiB, {packaging.target}, weights {packaging.placed}"
    )


def _changes(hooks: HookSpec) -> str:
    count = hooks.num_interventions() + len(hooks.state_knockouts) + len(hooks.state_steerings)
    return f"{count} intervention{'s' * (count != 1)}"


@app.command()
def demo(
    model: Annotated[
        str | None, typer.Argument(help="A model; models/world-llama and models/world-rwkv7 if left out.")
    ] = None,
    pages: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Write pages and pictures there.")] = None,
    provider: Provider = "cpu",
) -> None:
    """Run the worked examples: patterns, lens, knockout, patching, ablation, heads, attribution, steering, RWKV states.

    A model runs those that it has the hook points for.
    """
    chosen = [model] if model else [shipped_model("world-llama"), shipped_model("world-rwkv7")]
    tour.run_all([MIModel.from_pretrained(name, provider=provider) for name in chosen], Console(), pages)


def shipped_model(name: str, folders: Sequence[Path] = (Path(), Path(__file__).parents[2])) -> Path:
    """A model that ships with the repository.

    Raises:
        ModelError: neither the current folder nor mionnx' own has a `models` folder with it.
    """
    for folder in folders:
        if (folder / "models" / name / "config.json").is_file():
            return folder / "models" / name
    raise ModelError(f"models/{name} is not here: run in the repository, or name a model")
