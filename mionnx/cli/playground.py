"""The command `mionnx playground`: a model in the reader's browser, as a static folder or on localhost."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from mionnx.cli.opening import PLAIN, Opening, opens_model
from mionnx.cli.options import Json, Model, SpecFile
from mionnx.machine.decimals import decimal
from mionnx.playground import playground as write
from mionnx.playground import serve
from mionnx.playground.server import run
from mionnx.spec.hook_spec import HookSpec

Hooks = Annotated[list[str] | None, typer.Option("--hook", metavar="HOOK", help="Also change this; globs allowed.")]

LESSONS = "Prepared examples, as JSON; a shipped model may have its own."


@opens_model("dtype")
def playground(
    model: Model,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder to create.")] = None,
    spec: SpecFile = None,
    title: Annotated[str | None, typer.Option(help="Title of the page.")] = None,
    examples: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Prepared examples, as JSON; a shipped model has its own.")
    ] = None,
    hook: Hooks = None,
    opening: Opening = PLAIN,
    open_: Annotated[bool, typer.Option("--open", help="Serve it on localhost and open a browser.")] = False,
    serve_: Annotated[bool, typer.Option("--serve", help="Serve it on localhost.")] = False,
    port: Annotated[int | None, typer.Option(help="Of the server; else a free one.")] = None,
    as_json: Json = False,
) -> None:
    """Write a page that runs the model in the browser, shows its inside, and changes it.

    The folder is static: any file server serves it, GitHub Pages too. Node's npm is needed the first time.

    Example: mionnx playground models/world-llama -o site --title "Capitals"
    """
    if output is None and not (open_ or serve_):
        raise typer.BadParameter("give a folder with -o, or --open to see the page now")
    if port is not None and not (open_ or serve_):
        raise typer.BadParameter("--port is of the server, which --open or --serve starts")
    opened = opening.model(model)
    given = None if spec is None else HookSpec.load(str(spec))
    with TemporaryDirectory() as scratch:
        folder = write(
            opened, output or Path(scratch) / "site", spec=given, title=title, examples=examples, hooks=hook or ()
        )
        _say(folder, as_json)
        if open_ or serve_:
            server = serve(folder, port or 0)
            typer.echo(f"http://localhost:{server.server_address[1]}/ (Ctrl-C ends it)", err=as_json)
            run(server, browser=open_)


def _say(folder: Path, as_json: bool) -> None:
    files = [path for path in folder.rglob("*") if path.is_file()]
    size, manifest = sum(path.stat().st_size for path in files), json.loads((folder / "manifest.json").read_text())
    download, bits, asked = manifest["download"], manifest["model"]["bits"], manifest["model"]["source"]["dtype"]
    if as_json:
        facts = {"folder": str(folder), "bytes": size, "files": len(files), "download": download, "bits": bits}
        typer.echo(json.dumps(facts, indent=1))
        return
    held = f", {'- and '.join(map(str, bits))}-bit weights" if bits else ""
    kept = f" ({asked} was asked for: blocks of the model's own file are kept)" if asked == "int8" and 4 in bits else ""
    loaded, whole = (decimal(count / 1e6, 1) for count in (download, size))
    typer.echo(f"{folder}: {loaded} MB to download{held}{kept}; {len(files)} files, {whole} MB")
