"""The command line `mionnx`: its commands, one file each."""

import re
import sys
import warnings
from importlib.metadata import version
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

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

OTHER_WORDS = {"patch": "sweep", "ablate": "sweep", "convert": "export", "logit-lens": "lens", "serve": "playground"}


class Commands(TyperGroup):
    """The commands; one that other libraries call by another word is named."""

    def resolve_command(self, context: Any, arguments: list[str]) -> Any:
        """Find the command of a command line."""
        meant = OTHER_WORDS.get(arguments[0])
        if meant is not None:
            context.fail(f"No such command {arguments[0]!r}. Did you mean {meant!r}?")
        return super().resolve_command(context, arguments)


app = typer.Typer(
    cls=Commands,
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
        _say("error:", "bold red", str(error))
        sys.exit(1)


def _note(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
    """Show a warning as a note, without the line of code that it came from."""
    _say("note:", "bold", str(message))


def _say(title: str, style: str, message: str) -> None:
    """Print a message on stderr, in a terminal in lines of its width."""
    console = Console(stderr=True)
    lines = wrapped(f"{title} {message}", console.width) if console.is_terminal else [f"{title} {message}"]
    text = Text("\n".join(lines))
    text.stylize(style, 0, len(title))
    console.print(text, soft_wrap=True)


def wrapped(text: str, width: int) -> list[str]:
    """The lines of a text: a word that is too long for one goes on behind a separator of paths.

    Args:
        text: one or several lines.
        width: characters of a line.
    """
    lines: list[str] = []
    for whole in text.split("\n"):
        lines.append("")
        for word in whole.split(" "):
            for n, piece in enumerate(re.findall(r"[^/\\]*[/\\]+|[^/\\]+", word)):
                space = " " if n == 0 and lines[-1] else ""
                if lines[-1] and len(lines[-1]) + len(space) + len(piece) > width:
                    lines.append(piece)
                else:
                    lines[-1] += space + piece
    return lines
