"""Commands on files: activations and probes on them, quantised and compiled models, playgrounds, runtimes compared."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.text import Text

from mionnx import distributed
from mionnx.analysis.harvest.activations import Activations
from mionnx.analysis.probes.probe import probe
from mionnx.bind.hook_index import index_hooks
from mionnx.cli.command import Arguments, Command, Open
from mionnx.cli.files import Prompts, PromptsFile, read_text, texts_of
from mionnx.cli.injection import PRINTS, TEXTS_HELP, AnyFolder, Opening, Output, opening, with_groups
from mionnx.cli.interventions import Captures, Interventions, intervention_group
from mionnx.compile.packaging import Packaging
from mionnx.errors import InputError
from mionnx.graph.hooked_model import HookedModel
from mionnx.machine.brief import count
from mionnx.machine.decimals import decimal
from mionnx.machine.memory import format_bytes
from mionnx.model import MIModel
from mionnx.playground import playground as write_playground
from mionnx.playground import serve
from mionnx.playground.server import run
from mionnx.spec.hook_spec import HookSpec
from mionnx.verify import Bisection, Verification
from mionnx.verify.result import Beside

COUNTS = ("matrices", "matrices_left", "bytes_in_blocks", "bytes_left")
DISAGREES = 2  # the exit code where runtimes differ by more than the tolerance; 1 is an error
SHOWN = 20  # matrices that are listed; the page and the JSON have all
LLAMA = "models/world-llama"


def _harvest(open: Open, arguments: Arguments) -> Activations:
    if "address" not in arguments and (excess := arguments.keys() & {"workers", "cpus"}):
        raise InputError(f"--{min(excess)} is of a Ray cluster: give --ray local, or its address")
    if not arguments.keys() & {"points", "hooks"}:
        raise typer.BadParameter("give --points, or captures in a file of --hooks")
    verb = distributed.harvest if "address" in arguments else MIModel.harvest
    arguments.setdefault("points", None)
    return verb(open(), **arguments)


HARVEST = Command(
    [MIModel.harvest, distributed.harvest],
    [f'mionnx harvest {LLAMA} texts.txt -o activations --points "blocks.*.hook_resid_post"'],
    "An interrupted harvest goes on where it was. With --ray the processes of a Ray cluster run it.",
    call=_harvest,
    show=lambda activations: [str(activations)],
    facts=lambda activations: {name: getattr(activations, name) for name in ("tokens", "texts", "columns", "settings")},
    positional=("texts",),
    optional=("address", "points"),
    words={"address": "ray"},
    settings=("provider", "threads"),
    files=False,
)

PROBE = Command(
    [probe],
    ["mionnx probe activations labels.txt --html probe.html"],
    "The file of labels has a label a line, one a text or one a token; an empty line is none.",
    call=lambda open, arguments: probe(**arguments),
    positional=("activations", "labels"),
    words={"activations": "folder"},
    settings=None,
)


def _quantise(
    open: Open,
    arguments: Arguments,
    importance_texts: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="--importance on this text; may be repeated.")
    ] = None,
) -> dict[str, Any]:
    if importance_texts:
        arguments["importance"] = [read_text(path) for path in importance_texts]
    if "texts" in arguments and "budget" not in arguments:
        raise InputError("--texts is what a budget is measured on: give --budget too")
    model = open()
    folder = model.quantise(**arguments)
    metadata = HookedModel.open(folder).metadata
    before, after = (
        sum(file.stat().st_size for file in each.glob("*.safetensors")) for each in (model.hooked.folder, folder)
    )
    facts = {"folder": str(folder), "dtype": metadata.weight_dtype, "bytes": after, "bytes_before": before}
    names = (*COUNTS, "budget") if "budget" in arguments else COUNTS
    return facts | {name: metadata.quantised[name] for name in names}


def _blocks(facts: dict[str, Any]) -> Iterator[str]:
    yield f"{facts['folder']}: {facts['bytes_before']:,} -> {facts['bytes']:,} bytes"
    yield (
        f"{facts['matrices']} matrices of {facts['bytes_in_blocks']:,} bytes in {facts['dtype']}, "
        f"{facts['matrices_left']} of {facts['bytes_left']:,} bytes left in floats"
    )
    if "budget" in facts:
        yield from _reached(facts["budget"])


def _reached(budget: Mapping[str, Any]) -> Iterator[str]:
    """The result of a budget: KL, bytes, and the matrices that moved."""
    moved = {"8 bits": budget["moved_to_8_bits"], "floats": budget["moved_to_floats"]}
    counts = ", ".join(
        f"{len(names)} {'of them moved ' * (not at)}to {to}" for at, (to, names) in enumerate(moved.items())
    )
    kl = f"KL {budget['kl']:.4g} nats (at most {budget['bound']:g}; {budget['kl_without']:.4g} without a bound)"
    size = f"{budget['bytes']:,} bytes of matrices ({budget['bytes_without']:,} without a bound)"
    yield f"{kl}, the same top token at {budget['top_1']:.1%} of {budget['tokens']:,} tokens; {size}: {counts}"
    yield from (f"to {to}: {_listed(names)}" for to, names in moved.items() if names)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more (all with --json)" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


QUANTISE = Command(
    [MIModel.quantise],
    [
        f'mionnx quantise {LLAMA} -o world-int4 --in-8-bits "*down_proj*"',
        f"mionnx quantise {LLAMA} -o world-mixed --budget 0.005 --texts text.txt",
    ],
    call=_quantise,
    show=_blocks,
    settings=(),
    files=False,
)


@with_groups(interventions=intervention_group(prompt=False))
def _compile(
    open: Opening, arguments: Arguments, interventions: Interventions, capture: Captures = None
) -> dict[str, Any]:
    model = open.to_be_narrowed(arguments)
    spec = interventions.spec(
        model.num_heads, None, model.bidirectional
    )  # no prompt: edges are between positions of any text
    for hook in capture or ():
        spec.capture(hook)
    folder = model.compile(spec, **arguments)
    edits = len(index_hooks(spec, model.hooked).interventions)  # those of a glob one by one
    packaging = Packaging(**{name: arguments[name] for name in ("weights", "target") if name in arguments})
    return {
        "folder": str(folder),
        "interventions": edits + len(spec.state_knockouts) + len(spec.state_steerings),
        "bytes": sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
        "target": packaging.target,
        "weights": packaging.placed,
        "knobs": [*arguments.get("knobs", ())],
        "monitors": [*arguments.get("monitors", ())],
    }


def _baked(facts: dict[str, Any]) -> Iterator[str]:
    edits = count(facts["interventions"], "intervention")
    size = format_bytes(facts["bytes"])
    yield f"{facts['folder']}: {edits} baked in, {size}, {facts['target']}, weights {facts['weights']}"
    if facts["knobs"]:
        yield 'ONNX Runtime warns of each knob ("appears in graph inputs"), which is harmless: see the card'


COMPILE = Command(
    [MIModel.compile],
    [
        f'mionnx compile {LLAMA} -o no-attention --scale "blocks.2.hook_attn_out=0" --knobs strength',
        f"mionnx compile {LLAMA} -o watched --monitors lens=blocks.2.hook_resid_post@top3",
        f"mionnx compile {LLAMA} -o half --plain --dtype float16 --text text.txt",
    ],
    "Interventions are written as for `mionnx run`, or come from a saved HookSpec. A knob without HOOK controls every "
    "strength that can be one; HOOK may be a glob. With --texts the model is narrowed to --dtype, and what overflows "
    "on them is rescaled exactly.",
    call=_compile,
    show=_baked,
    without=("hooks", "captures", "dtype"),
    settings=("dtype",),
    files=False,
)


@with_groups(opening=opening("dtype"), output=PRINTS)
def playground(
    opening: Opening,
    output: Output,
    folder: AnyFolder = None,
    hooks: Annotated[Path | None, typer.Option(metavar="FILE", help="A saved HookSpec to begin with.")] = None,
    title: Annotated[str | None, typer.Option(help="Title of the page.")] = None,
    examples: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Prepared examples, as JSON; a shipped model has its own.")
    ] = None,
    points: Annotated[
        list[str] | None, typer.Option("--points", metavar="HOOK", help="Also change this; globs allowed.")
    ] = None,
    texts: Annotated[list[Path] | None, typer.Option("--texts", "--text", metavar="FILE", help=TEXTS_HELP)] = None,
    lens: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Read layers through this lens too; else lens.safetensors of the model."),
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Serve it on localhost and open a browser.")] = False,
    serve_: Annotated[bool, typer.Option("--serve", help="Serve it on localhost.")] = False,
    port: Annotated[int | None, typer.Option(help="Of the server; else a free one.")] = None,
) -> None:
    """Write a static folder: any file server serves it, GitHub Pages too.

    Node's npm is needed the first time.

    Example: mionnx playground models/world-llama -o site --title "Capitals"
    """
    if folder is None and not (open_ or serve_):
        raise typer.BadParameter("give a folder with -o, or --open to see the page now")
    if port is not None and not (open_ or serve_):
        raise typer.BadParameter("--port is of the server, which --open or --serve starts")
    narrowing: Arguments = {"texts": [read_text(path) for path in texts]} if texts else {}
    model = opening.to_be_narrowed(narrowing)
    spec = None if hooks is None else HookSpec.load(hooks)
    with TemporaryDirectory() as scratch:
        # Without a folder the page is there as long as the server runs.
        site = folder or Path(scratch) / "site"
        site = write_playground(
            model, site, hooks=spec, title=title, examples=examples, points=points or (), lens=lens, **narrowing
        )
        facts, line = _summary(site)
        output.deliver(site, facts, [line])
        if open_ or serve_:
            server = serve(site, port or 0)
            typer.echo(f"http://localhost:{server.server_address[1]}/ (Ctrl-C ends it)", err=output.as_json)
            run(server, browser=open_)


def _summary(site: Path) -> tuple[dict[str, Any], str]:
    files = [path for path in site.rglob("*") if path.is_file()]
    size, manifest = sum(path.stat().st_size for path in files), json.loads((site / "manifest.json").read_text())
    download, bits, dtype = manifest["download"], manifest["model"]["bits"], manifest["model"]["source"]["dtype"]
    facts = {"folder": str(site), "bytes": size, "files": len(files), "download": download, "bits": bits}
    weights = f", {'- and '.join(map(str, bits))}-bit weights" if bits else ""
    if dtype == "int8" and 4 in bits:
        weights += " (int8 was asked for: blocks of the model's own file are kept)"
    loaded, total = (decimal(count / 1e6, 1) for count in (download, size))
    return facts, f"{site}: {loaded} MB to download{weights}; {len(files)} files, {total} MB"


def _verify(open: Open, arguments: Arguments, prompt: Prompts = None, prompts: PromptsFile = None) -> Verification:
    return open().verify(texts_of(prompt, prompts, required=False), **arguments)


def _compared(result: Verification) -> Iterator[Any]:
    compared = result.besides or result.failed or result.skipped
    yield result.table() if compared else Text(result.summary())
    for titles, verdict in ((result.failed, "[red]failed[/]"), (result.skipped, "[yellow]skipped[/]")):
        yield from (Text.from_markup(f"{escape(title)} {verdict}: {escape(why)}") for title, why in titles.items())
    yield from (Text.from_markup(f"[yellow]note:[/] {escape(note)}") for note in result.notes)
    for beside in result.besides:
        if trouble := beside.trouble(result.tolerance):
            yield Text.from_markup(f"[red]{escape(beside.title)}[/]: {escape(trouble)}")
    if result.repeats:
        yield result.repeats_table()
    for beside in result.besides:
        if beside.heaviest is not None:
            losses = result.model_losses(beside.title)
            yield losses.table(len(losses.rows))
            yield Text(_loss(beside))
    if result.matrices:
        yield result.matrix_losses().table(SHOWN)
    if result.besides:
        yield Text(result.summary())


def _loss(beside: Beside) -> str:
    """A line on what the first model lost of another one."""
    layer, logits = beside.heaviest, beside.logits
    assert layer is not None
    return (
        f"layer {layer.layer} adds most: distance {layer.before:.1e} before, {layer.after:.1e} after; "
        f"KL({beside.title} || this) {logits['kl_back_mean']:.1e} nats, {logits['kl_back_max']:.1e} at most; "
        f"top 1 the same at {logits['top_1']:.1%} of {int(logits['positions'])} positions"
    )


VERIFY = Command(
    [MIModel.verify],
    [
        f'mionnx verify {LLAMA} --runtimes torch,ort-cpu,openvino --prompt "The capital of France is"',
        f"mionnx verify {LLAMA} --runtimes ort-cpu --prompts prompts.txt --record run.safetensors",
        f"mionnx verify {LLAMA} --runtimes ort-cpu --against run.safetensors",
        'mionnx verify model_q4.onnx --other checkpoint --points "*" --prompts text.txt --html lost.html',
        f"mionnx verify {LLAMA} --other world-int4 --texts text.txt --html lost.html",
    ],
    "Exit code 0 if they agree, 2 if they do not.",
    call=_verify,
    show=_compared,
    exit_code=lambda result: 0 if result.agrees else DISAGREES,
    without=("prompts",),
    settings=("dtype",),
)


def _bisected(result: Bisection) -> list[str]:
    return [str(result)]


BISECT = Command(
    [MIModel.bisect],
    [
        f'mionnx bisect {LLAMA} --runtimes ort-cpu,openvino --prompt "The capital of France is" -o report',
        'mionnx bisect MODEL --runtimes ort-cpu --other EDITED_MODEL --prompt "The capital of France is"',
    ],
    "Exit code 0 if there is no such part, 2 if there is one.",
    show=_bisected,
    exit_code=lambda result: DISAGREES if result.hook else 0,
    settings=("dtype",),
    files=False,
)
