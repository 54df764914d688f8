"""The command line `mionnx`: its commands, each loaded when it is called."""

import re
import sys
import warnings
from importlib import import_module
from inspect import getdoc
from textwrap import TextWrapper
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from mionnx.errors import MIError
from mionnx.graph.own_version import own_version

# name -> where it stands, and its first sentence: a list of commands imports none of them
COMMANDS = {
    "export": ("hooked_models.export", "Export a checkpoint as a hooked model."),
    "adopt": ("hooked_models.adopt", "Adopt an ONNX file of another tool as a hooked model."),
    "check": ("hooked_models.check", "Compare every byte of a model's weights with what was exported."),
    "hooks": ("hooked_models.hooks", "List a model's hook points with their axes; {i} stands for the layer."),
    "run": ("run.run", "Run a prompt without and with interventions, and compare the next tokens."),
    "generate": ("run.generate", "Continue a prompt with interventions in force at every step."),
    "sweep": ("analyses.SWEEP", "Patch or ablate every layer, position or head; measure the effect on the answer."),
    "attribute-patch": ("analyses.ATTRIBUTE_PATCH", "Estimate a patching sweep from gradients, leading cells exactly."),
    "circuit": ("analyses.CIRCUIT", "Find the leading edges between heads and MLPs, and run the model on these alone."),
    "trace": ("analyses.TRACE", "Trace a prompt through features of transcoders: its attribution graph."),
    "lens": ("analyses.LENS", "Show the next token that every layer would predict, were it the last (logit lens)."),
    "patchscope": ("analyses.PATCHSCOPE", "Read each layer's stream by what a model says with it in another prompt."),
    "attention": ("analyses.ATTENTION", "Show the tokens that each head attends to."),
    "attribute": ("analyses.ATTRIBUTE", "Decompose a logit into contributions of embeddings, heads and MLPs."),
    "heads": ("analyses.HEADS", "Score previous-token, duplicate-token and induction heads on repeated sequences."),
    "logit-diff": ("analyses.LOGIT_DIFF", "Print differences of two logits over a file of prompts."),
    "steer": ("analyses.STEER", "Steer prompts along a direction, computed from contrasting prompts."),
    "fill-mask": ("encoders.FILL_MASK", "Show the most probable tokens at each mask, by a masked language model."),
    "classify": ("encoders.CLASSIFY", "Show the labels of texts with their probabilities, by a classifier."),
    "tag": ("encoders.TAG", "Label the words of texts, as named entities for one."),
    "answer-span": ("encoders.ANSWER_SPAN", "Find the parts of a context that answer a question."),
    "embed": ("encoders.EMBED", "Embed texts by an embedding model, as sentence-transformers does."),
    "similarity": ("encoders.SIMILARITY", "Measure how alike texts are, by an embedding model."),
    "attribute-similarity": ("encoders.ATTRIBUTE_SIMILARITY", "Show which pairs of tokens make two texts alike."),
    "harvest": ("deployment.HARVEST", "Write the activations of a dataset to disk."),
    "probe": ("deployment.PROBE", "Fit a linear probe at each hook point of a harvest; scores are of texts held out."),
    "quantise": ("deployment.QUANTISE", "Write a model with its weights in blocks of 4 or 8 bits."),
    "range": ("numerics.RANGE", "Find values that float16 or bfloat16 cannot hold, with the token that reaches them."),
    "forecast": ("numerics.FORECAST", "Forecast what float16 or bfloat16 costs, before there is such a file."),
    "narrow": ("numerics.NARROW", "Write a model in float16 or bfloat16, with an exact remedy where it overflows."),
    "doctor": ("numerics.DOCTOR", "Diagnose a model for float16: range, forecast, cure and check, on one page."),
    "compile": ("deployment.COMPILE", "Bake interventions into a plain ONNX model that runs without mionnx."),
    "playground": ("deployment.playground", "Write a page that runs the model in the browser, and changes it."),
    "verify": ("deployment.VERIFY", "Run one model in several runtimes and compare them hook point by hook point."),
    "bisect": ("deployment.BISECT", "Find the smallest part at which two runtimes, or two models, disagree."),
    "demo": ("demos.tour.demo", "Run the worked examples on a model."),
    "cache": ("cache.app", "Show and tidy the disk cache: models, rewritten graphs, interrupted sweeps."),
}
OTHER_WORDS = {"patch": "sweep", "ablate": "sweep", "convert": "export", "logit-lens": "lens", "serve": "playground"}
MARKUP: Literal["markdown"] = "markdown"  # as Rich markup, the help lost `[@LIMITS]`


class Commands(TyperGroup):
    """The commands; one that other libraries call by another word is named."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # Names and sentences alone, for the list of commands: a command is imported when it is called.
        self.commands = {name: TyperCommand(name, help=sentence) for name, (_, sentence) in COMMANDS.items()}

    def resolve_command(self, context: Any, arguments: list[str]) -> Any:
        """Find the command of a command line, and load it."""
        word = OTHER_WORDS.get(arguments[0])
        if word is not None:
            context.fail(f"No such command {arguments[0]!r}. Did you mean {word!r}?")
        name, _, others = super().resolve_command(context, arguments)
        return name, load(str(name)), others


app = typer.Typer(
    cls=Commands,
    help="Interpretability on ONNX graphs: capture, ablate, patch and steer language models in ONNX Runtime.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=MARKUP,
)


def load(name: str) -> Any:
    """Import one of `COMMANDS`."""
    place, sentence = COMMANDS[name]
    module, _, member = place.rpartition(".")
    command = getattr(import_module(f"mionnx.cli.{module}"), member)
    if isinstance(command, typer.Typer):
        return typer.main.get_command(command)
    function, details = (command.function(), command.help) if hasattr(command, "verbs") else (command, getdoc(command))
    single = typer.Typer(add_completion=False, rich_markup_mode=MARKUP)
    single.command(name, help=f"{sentence}\n\n{details}")(function)
    return typer.main.get_command(single)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"mionnx {own_version()}")
        raise typer.Exit


@app.callback()
def options(
    show: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Options before a command."""


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
    """Show a warning without the line of code that it came from."""
    _say("note:", "bold", str(message))


def _say(title: str, style: str, message: str) -> None:
    """Print a message on stderr, in a terminal in lines of its width."""
    console = Console(stderr=True)
    # Only a terminal has a width: in a file or a pipe a message stays one line.
    lines = wrapped(f"{title} {message}", console.width) if console.is_terminal else [f"{title} {message}"]
    text = Text("\n".join(lines))
    text.stylize(style, 0, len(title))
    # The lines are as wide as the terminal already.
    console.print(text, soft_wrap=True)


def wrapped(text: str, width: int) -> list[str]:
    """The lines of a text: a word that is too long for one goes on behind a separator of paths."""
    wrapper = TextWrapper(width, break_long_words=False)
    # By default TextWrapper divides at hyphens too, which names of models have.
    wrapper.wordsep_re = re.compile(r"(\s+|[^\s/\\]*[/\\]+)")
    return [line for paragraph in text.split("\n") for line in wrapper.wrap(paragraph) or [""]]
