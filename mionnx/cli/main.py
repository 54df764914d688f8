"""The command line `mionnx`: its commands, one file each."""

import sys

import typer
from rich.console import Console

from mionnx.cli import cache
from mionnx.cli.attention import attention
from mionnx.cli.attribute import attribute
from mionnx.cli.bisect import bisect
from mionnx.cli.check import check
from mionnx.cli.compile import compile_
from mionnx.cli.demo import demo
from mionnx.cli.export import export
from mionnx.cli.generate import generate
from mionnx.cli.heads import heads
from mionnx.cli.hooks import hooks
from mionnx.cli.lens import lens
from mionnx.cli.run import run
from mionnx.cli.steer import steer
from mionnx.cli.sweep import sweep
from mionnx.cli.verify import verify
from mionnx.errors import MIError

COMMANDS = (
    *(export, check, hooks, run, generate, sweep, lens, attention, attribute, heads, steer),
    *(compile_, verify, bisect, demo),
)

app = typer.Typer(
    help="Interpretability on ONNX graphs: capture, ablate, patch and steer language models in ONNX Runtime.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
)
for command in COMMANDS:
    app.command(command.__name__.rstrip("_"))(command)
app.add_typer(cache.app, name="cache")


def main() -> None:
    """Run the command line; an `MIError` becomes one message on stderr and exit code 1."""
    try:
        app()
    except MIError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {type(error).__name__}:", error, markup=True, highlight=False)
        sys.exit(1)
