"""The command `mionnx playground`: a model in the reader's browser, as a static folder or on localhost."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from mionnx.cli.injection import PRINTS, AnyFolder, Opening, Output, opening, with_groups
from mionnx.machine.decimals import decimal
from mionnx.playground import playground as write
from mionnx.playground import serve
from mionnx.playground.server import run
from mionnx.spec.hook_spec import HookSpec

Spec = Annotated[Path | None, typer.Option(metavar="FILE", help="A saved HookSpec to begin with.")]
Examples = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Prepared examples, as JSON; a shipped model has its own.")
]
Points = Annotated[list[str] | None, typer.Option("--points", metavar="HOOK", help="Also change this; globs allowed.")]


@with_groups(opening=opening("dtype"), output=PRINTS)
def playground(
    opening: Opening,
    output: Output,
    folder: AnyFolder = None,
    hooks: Spec = None,
    title: Annotated[str | None, typer.Option(help="Title of the page.")] = None,
    examples: Examples = None,
    points: Points = None,
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
    model = opening.model()
    spec = None if hooks is None else HookSpec.load(hooks)
    with TemporaryDirectory() as scratch:
        site = write(
            model, folder or Path(scratch) / "site", hooks=spec, title=title, examples=examples, points=points or ()
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
