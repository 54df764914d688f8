"""The command `mionnx adopt`: an ONNX file made by another tool becomes a hooked model."""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from mionnx.cli.opening import PLAIN, Opening, opens_model
from mionnx.cli.options import Json
from mionnx.errors import ExportError
from mionnx.machine.progress import shown
from mionnx.run import adopt as adoption


@opens_model()
def adopt(
    source: Annotated[Path, typer.Argument(help="A folder with ONNX files, one of them, or a Hub id.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder to create for the model.")] = None,
    file: Annotated[str | None, typer.Option(help="The file to adopt, where the folder has several.")] = None,
    check: Annotated[bool, typer.Option(help="Check a model that was adopted against the laws again.")] = False,
    copy: Annotated[bool, typer.Option(help="Copy the weights: onnx's own loader refuses linked files.")] = False,
    calls: Annotated[bool, typer.Option(help="Try now in which calls the file's own graph serves.")] = False,
    opening: Opening = PLAIN,
    as_json: Json = False,
) -> None:
    """Adopt an ONNX file of another tool as a hooked model.

    Files of optimum, transformers.js, onnxruntime-genai and torch's exporter, optimised or quantised. Hook points are
    recognised by dataflow; weights stay in their files. The model is run once against laws that hold in every decoder,
    and refused if it breaks one. In which kinds of calls the file's own graph serves where a spec touches nothing is
    tried at the first call of a kind, or of all kinds with --calls.

    Example: mionnx adopt Llama-3.2-1B-ONNX --file model_q4.onnx -o llama-q4
    """
    if check == (output is not None):
        raise typer.BadParameter("give either --output FOLDER, or --check")
    begin = time.monotonic()
    if output is None:
        laws, facts = adoption.check_laws(source), dict[str, Any]()
    else:
        with shown() as progress:
            adopted = adoption.adopt(source, output, file, progress, copy, opening.version)
        laws, facts = adopted.laws, _facts(adopted, output)
    tried = adoption.try_calls(source if output is None else output) if calls else {}
    seconds = round(time.monotonic() - begin, 2)
    if as_json:
        held = [{"law": law.law, "layer": law.layer, "difference": law.difference, "holds": law.holds} for law in laws]
        told = {"calls": tried} if calls else {}
        typer.echo(json.dumps({**facts, "laws": held, **told, "seconds": seconds}, indent=1))
    else:
        _show(facts, laws, seconds)
        _show_calls(tried if calls else None)
    if any(not law.holds for law in laws):
        raise ExportError(f"{source} breaks {', '.join(law.law for law in laws if not law.holds)}")


def _facts(adopted: Any, output: Path) -> dict[str, Any]:
    return {
        "folder": str(output),
        "file": str(adopted.file),
        "hook_points": len(adopted.hooks),
        "expanded": dict(adopted.expanded),
        "lacking": adopted.notes,
        "linked": sorted(path.name for path in output.iterdir() if path.stat().st_nlink > 1),
    }


def _show(facts: dict[str, Any], laws: list[Any], seconds: float) -> None:
    if facts:
        typer.echo(f"{facts['folder']}: {facts['file']}, {facts['hook_points']} hook points, {seconds} s")
        if facts["expanded"]:
            typer.echo("expanded: " + ", ".join(f"{count} {name}" for name, count in facts["expanded"].items()))
        if facts["linked"]:
            typer.echo(
                f"linked: {', '.join(facts['linked'])}: one file under two names, nothing copied; onnx's own loader "
                "refuses such files, the source too: --copy"
            )
        for note in facts["lacking"]:
            typer.echo(f"lacking: {note}")
    table = Table("law", "layer", "difference", "allowed")
    for law in laws:
        table.add_row(
            law.law, "" if law.layer is None else str(law.layer), f"{law.difference:.1e}", f"{law.allowed:.1e}"
        )
    Console().print(table)


def _show_calls(tried: dict[str, str] | None) -> None:
    """Print the graph of each kind of call; None if nobody asked for it."""
    if tried == {}:
        typer.echo("calls: the adopted graph serves all, the model has none of a file as it came")
    for kind, against in (tried or {}).items():
        serves = f"the adopted graph: {against}" if against else "the file's own graph"
        typer.echo(f"calls of {kind}: {serves}")
