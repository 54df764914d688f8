"""Commands that make a hooked model of a checkpoint or an ONNX file, and look at one."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Column

from mionnx.analysis.numerics.dtypes import NARROW_KINDS
from mionnx.cli.files import read_text
from mionnx.cli.injection import PRINTS, TEXTS_HELP, AnyFolder, Opening, Output, opening, with_groups
from mionnx.cli.parameters import NUMBERS, integers
from mionnx.compile.layouts import CLIENT_LAYOUTS
from mionnx.errors import ExportError, ModelError
from mionnx.graph import onnx_file, weight_record
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.machine.memory import format_bytes
from mionnx.machine.progress import shown
from mionnx.run import exporting, find_model, stock_calls
from mionnx.verify.plain_model import export_narrowed, export_plain
from mionnx.view import Table

CHECKPOINT = opening("dtype", argument="source", help="Folder of a Hugging Face checkpoint, a GGUF file, or a Hub id.")
ONNX = opening(argument="source", help="A folder with ONNX files, one of them, or a Hub id.")
Layers = Annotated[
    list[str] | None, typer.Option("--layers", "--layer", metavar="NUMBERS", help=f"Only these. {NUMBERS}")
]


@with_groups(opening=CHECKPOINT, output=PRINTS)
def export(
    opening: Opening,
    output: Output,
    folder: AnyFolder = None,
    copy: Annotated[bool, typer.Option("--copy", help="Copy the weights instead of linking them.")] = False,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Write model.onnx beside the checkpoint's weights.")
    ] = False,
    graph_only: Annotated[bool, typer.Option("--graph-only", help="Export the config alone, without weights.")] = False,
    file: Annotated[str | None, typer.Option(help="The GGUF file to export, where there are several.")] = None,
    texts: Annotated[list[Path] | None, typer.Option("--texts", "--text", metavar="FILE", help=TEXTS_HELP)] = None,
    layout: Annotated[
        str | None, typer.Option(metavar="LAYOUT", help=f"A plain model for a client: {', '.join(CLIENT_LAYOUTS)}.")
    ] = None,
) -> None:
    """Write an ONNX graph whose activations carry their hook names.

    Weights already in the dtype are hard-linked, not copied. onnx's own checker and loader refuse files with several
    hard links: --copy makes a folder for them. --graph-only reads config.json alone: what it makes can be rewritten,
    compiled and estimated, not run. --layout writes a plain model, without hook points, for the client that is named;
    its file is run and compared with the checkpoint while it is written.

    Example: mionnx export meta-llama/Llama-3.2-1B -o llama-hooked
    """
    if graph_only and (folder is None or copy):
        raise typer.BadParameter("--graph-only goes with --folder FOLDER: there are no weights to copy or lie beside")
    if (folder is None) == (not in_place) or (in_place and copy):
        raise typer.BadParameter("give either --folder FOLDER, with or without --copy, or --in-place")
    if layout is not None and (folder is None or copy or graph_only):
        raise typer.BadParameter("--layout goes with --folder FOLDER alone")
    if layout is not None and layout not in CLIENT_LAYOUTS:
        raise typer.BadParameter(f"--layout {layout}: one of {', '.join(CLIENT_LAYOUTS)}")
    dtype, begin = opening.settings.get("dtype", exporting.DEFAULT), time.monotonic()
    if texts and (dtype not in NARROW_KINDS or folder is None or copy or graph_only):
        raise typer.BadParameter("--texts goes with --dtype float16 or bfloat16 and --folder FOLDER, and with --layout")
    measured = [read_text(path) for path in texts or ()]
    with shown() as progress:
        checkpoint = find_model.checkpoint_folder(
            opening.source, file, opening.version, progress, weights=not graph_only
        )
        if folder is not None and layout is not None:
            export_plain(checkpoint, folder, layout, dtype, progress, measured)
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            line = (
                f"{folder}: a plain model for {CLIENT_LAYOUTS[layout].client}, {format_bytes(size)}; see its README.md"
            )
            output.deliver(folder, {"folder": str(folder), "layout": layout, "bytes": size}, [line])
            return
        if folder is None:
            exporting.export_in_place(checkpoint, dtype, progress)
        elif measured:
            export_narrowed(checkpoint, folder, dtype, measured, progress)
        else:
            exporting.export(checkpoint, folder, dtype, progress, copy, graph_only)
    hooked = HookedModel.open(folder or checkpoint)
    metadata, points = hooked.metadata, len(hooked.hook_points())
    facts = {"folder": str(hooked.folder), "family": metadata.family, "dtype": metadata.weight_dtype}
    line = (
        f"{hooked.folder}: {metadata.family}, {metadata.sizes.num_layers} layers, {points} hook points, "
        f"{metadata.weight_dtype}, graph {(hooked.folder / 'model.onnx').stat().st_size / 1024:.0f} KiB, "
        f"{time.monotonic() - begin:.1f} s"
    )
    output.deliver(hooked, facts | {"hook_points": points}, [line])
    with shown() as progress:  # a folder that is given away has its hashes
        weight_record.complete(hooked.folder, metadata, progress)


@with_groups(opening=ONNX, output=PRINTS)
def adopt(
    opening: Opening,
    output: Output,
    folder: AnyFolder = None,
    file: Annotated[str | None, typer.Option(help="The file to adopt, where the folder has several.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Check a model that was adopted against the laws again.")
    ] = False,
    copy: Annotated[
        bool, typer.Option("--copy", help="Copy the weights: onnx's own loader refuses linked files.")
    ] = False,
    calls: Annotated[bool, typer.Option("--calls", help="Try now in which calls the file's own graph serves.")] = False,
) -> None:
    """Read files of optimum, transformers.js, onnxruntime-genai and torch's exporter.

    They may be optimised or quantised. Hook points are recognised by dataflow; weights stay in their files. The model
    is run once against laws that hold in every decoder, and refused if it breaks one. In which kinds of calls the
    file's own graph serves where a spec touches nothing is tried at the first call of a kind, or of all kinds with
    --calls.

    Example: mionnx adopt Llama-3.2-1B-ONNX --file model_q4.onnx -o llama-q4
    """
    if check == (folder is not None):
        raise typer.BadParameter("give either --folder FOLDER, or --check")
    begin, source = time.monotonic(), Path(opening.source)
    facts: dict[str, Any] = {}
    if folder is None:
        laws = find_model.check_laws(source)
    else:
        with shown() as progress:
            adopted = find_model.adopt(source, folder, file, progress, copy, opening.version)
        laws = adopted.laws
        facts = {
            "folder": str(folder),
            "file": str(adopted.file),
            "hook_points": len(adopted.hooks),
            "expanded": dict(adopted.expanded),
            "lacking": adopted.notes,
            # A file with two names is a hard link to the source's.
            "linked": sorted(path.name for path in folder.iterdir() if path.stat().st_nlink > 1),
        }
    names = ("law", "layer", "difference", "holds")
    facts["laws"] = [{name: getattr(law, name) for name in names} for law in laws]
    if calls:
        facts["calls"] = stock_calls.try_all(HookedModel.open(source if folder is None else folder))
    facts["seconds"] = round(time.monotonic() - begin, 2)
    output.deliver(laws, facts, _adopted(facts, laws))
    if broken := [law.law for law in laws if not law.holds]:
        raise ExportError(f"{source} breaks {', '.join(broken)}")


def _adopted(facts: dict[str, Any], laws: list[Any]) -> Iterator[RenderableType]:
    if "folder" in facts:
        yield f"{facts['folder']}: {facts['file']}, {facts['hook_points']} hook points, {facts['seconds']} s"
        if facts["expanded"]:
            yield "expanded: " + ", ".join(f"{count} {name}" for name, count in facts["expanded"].items())
        if facts["linked"]:
            yield (
                f"linked: {', '.join(facts['linked'])}: one file under two names, nothing copied; onnx's own loader "
                "refuses such files, the source too: --copy"
            )
        yield from (f"lacking: {note}" for note in facts["lacking"])
    table = Table("law", "layer", "difference", "allowed")
    for law in laws:
        layer = "" if law.layer is None else str(law.layer)
        table.add_row(law.law, layer, f"{law.difference:.1e}", f"{law.allowed:.1e}")
    yield table
    # Empty: `try_all` found no graph of a file as it came.
    if facts.get("calls") == {}:
        yield "calls: the adopted graph serves all, the model has none of a file as it came"
    for kind, against in facts.get("calls", {}).items():
        yield f"calls of {kind}: " + (f"the adopted graph: {against}" if against else "the file's own graph")


@with_groups(opening=opening("dtype"), output=PRINTS)
def check(opening: Opening, output: Output) -> None:
    """Read every file; opening a model reads a sample. Exit code 1 if one differs.

    Example: mionnx check models/world-llama
    """
    hooked = opening.model(check="full").hooked
    names = sorted(onnx_file.locations(hooked.proto))
    size = sum((hooked.folder / name).stat().st_size for name in names)
    # Opening raises if a byte differs.
    facts = {"folder": str(hooked.folder), "files": names, "bytes": size, "as_exported": True}
    output.deliver(hooked, facts, [f"{hooked.folder}: {', '.join(names)} ({format_bytes(size)}) as exported"])


@with_groups(opening=opening(), output=PRINTS)
def hooks(opening: Opening, output: Output, layers: Layers = None) -> None:
    """Print those of some layers by their full names, with --layers.

    Example: mionnx hooks models/world-llama --layer 2
    """
    hooked, among = opening.model().hooked, None if layers is None else integers("layers", layers)
    last = hooked.metadata.sizes.num_layers - 1
    if absent := {*(among or ())} - {*range(last + 1)}:
        raise ModelError(f"no layer {min(absent)}: the model has layers 0 to {last}")
    points = [point for point in hooked.hook_points() if among is None or point.layer in among]
    table = Table(
        Column("hook point", no_wrap=True),
        "variant",
        Column("shape", overflow="fold"),
        title=f"{hooked.metadata.family}, layers: 0 to {last}",
    )
    # A row for each kind: without the layer's number its hook points are the same row.
    for row in dict.fromkeys(_row(hooked, point, among is None) for point in points):
        table.add_row(*map(escape, row))
    output.deliver(hooked, {str(point): hooked.axes(point) for point in points}, [table])


def _row(hooked: HookedModel, point: HookPoint, template: bool) -> tuple[str, str, str]:
    """Name, variant and shape of a hook point; a template has {i} for the layer."""
    name, variant = str(point), repr(point).removeprefix("HookPoint.")
    if template and point.layer is not None:
        name, variant = name.replace(f".{point.layer}.", ".{i}.", 1), f"{point.variant}(i)"
    shape = [
        axis if axis == size else f"{axis}={size}"
        for axis, size in zip(point.axes or (), hooked.axes(point), strict=True)
    ]
    return name, variant, "[" + ", ".join(shape) + "]" + (" (capture only)" if point.derived else "")
