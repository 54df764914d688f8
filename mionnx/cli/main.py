"""The command line `mionnx`: its commands, one file each."""

import sys
import warnings
from importlib.metadata import version
from typing import Annotated, Any

import typer
from rich.console import Console

from mionnx.cli import cache
from mionnx.cli.adopt import adopt
from mionnx.cli.attention import attention
from mionnx.cli.attribute import attribute
from mionnx.cli.attribute_patch import attribute_patch
from mionnx.cli.bisect import bisect
from mionnx.cli.check import check
from mionnx.cli.circuit import circuit
from mionnx.cli.compile import compile_
from mionnx.cli.demo import demo
from mionnx.cli.export import export
from mionnx.cli.generate import generate
from mionnx.cli.harvest import harvest
from mionnx.cli.heads import heads
from mionnx.cli.hooks import hooks
from mionnx.cli.lens import lens
from mionnx.cli.logit_diff import logit_diff
from mionnx.cli.playground import playground
from mionnx.cli.probe import probe
from mionnx.cli.quantise import quantise
from mionnx.cli.run import run
from mionnx.cli.steer import steer
from mionnx.cli.sweep import sweep
from mionnx.cli.verify import verify
from mionnx.errors import MIError

COMMANDS = (
    *(export, adopt, check, hooks, run, generate, sweep, attribute_patch, circuit, lens, attention, attribute, heads),
    *(logit_diff, steer, harvest, probe, quantise, compile_, playground, verify, bisect, demo),
)

app = typer.Typer(
    help="Interpretability on ONNX graphs: capture, ablate, patch and steer language models in ONNX Runtime.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"mionnx {version('mionnx')}")
        raise typer.Exit


@app.callback()
def options(
    show: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Options before a command."""


for command in COMMANDS:
    app.command(command.__name__.rstrip("_").replace("_", "-"))(command)
app.add_typer(cache.app, name="cache")


def main() -> None:
    """Run the command line; on stderr an `MIError` is one message, a warning a note."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _note
            app()
    except MIError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {type(error).__name__}:", error, markup=True, highlight=False)
        sys.exit(1)


def _note(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
    """Show a warning as a note, without the line of code that it came from."""
    Console(stderr=True).print("[bold]note:[/]", str(message), highlight=False)
