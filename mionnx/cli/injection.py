"""Groups of options that many commands have, put into a command's signature in one place.

A command has one parameter for a group (`opening`, `output`), and on the command line all options of the group.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import wraps
from inspect import Parameter, Signature, signature
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType

from mionnx.analysis.numerics.dtypes import NARROW_KINDS
from mionnx.cli.parameters import Group, keyword, options_of
from mionnx.machine.stored import ENDING
from mionnx.model import MIModel
from mionnx.run.repository import Version
from mionnx.view.page import plain

SOURCE = "Folder of a model, a .pth file, a shipped model's name, or a Hub id."
VERSION = ("revision", "subfolder")  # of models of the Hub: in each command that opens a model
RUNS = ("dtype", "accuracy_level", "provider", "threads")
TEXTS_HELP = (
    "With --dtype float16 or bfloat16: rescale what overflows on this text, as `mionnx narrow`. May be repeated."
)
Function = Callable[..., Any]
Folder = Annotated[Path, typer.Option("--folder", "-o", help="Folder to create.")]
AnyFolder = Annotated[Path | None, typer.Option("--folder", "-o", help="Folder to create.")]


def with_groups(**groups: Group) -> Callable[[Function], Function]:
    """Put groups of options in the place of a command's parameters: parameter -> group."""

    def decorate(command: Function) -> Function:
        @wraps(command)
        def grouped(*passed: Any, **values: Any) -> Any:
            arguments = {
                name: group.argument({option.name: values.pop(option.name) for option in group.parameters})
                for name, group in groups.items()
            }
            return command(*passed, **values, **arguments)

        # The model is the first argument on the command line; options of groups follow the command's own.
        own = [option for name, option in signature(command).parameters.items() if name not in groups]
        model = groups["opening"].parameters if "opening" in groups else ()
        others = [group.parameters for name, group in groups.items() if name != "opening"]
        options = [option.replace(kind=Parameter.KEYWORD_ONLY) for option in chain(model[:1], own, *others, model[1:])]
        grouped.__dict__["__signature__"] = Signature(options)
        return grouped

    return decorate


def own_options(function: Callable[..., Any], passed: int) -> Group:
    """The parameters of a function, annotated as typer reads them, except the first ones, which its caller passes."""
    options = [*signature(function).parameters.values()][passed:]
    return Group([option.replace(kind=Parameter.KEYWORD_ONLY) for option in options], lambda values: values)


@dataclass(frozen=True)
class Opening:
    """A model that is not open yet: arguments of `MIModel.from_pretrained`."""

    source: str
    settings: dict[str, Any]

    def __call__(self) -> MIModel:
        return self.model()

    def model(self, check: str = "sampled") -> MIModel:
        return MIModel.from_pretrained(self.source, check=check, **self.settings)

    def to_be_narrowed(self, arguments: dict[str, Any]) -> MIModel:
        """Open it; where there are texts as it is, and the verb's own arguments narrow it to the dtype."""
        if not arguments.keys() & {"texts", "bound"}:
            return self.model()
        dtype = self.settings.get("dtype")
        if "texts" not in arguments or dtype not in NARROW_KINDS:
            names = " or ".join(NARROW_KINDS)
            why = f"--texts goes with --dtype {names}: what overflows on them is rescaled; --bound goes with --texts"
            raise typer.BadParameter(why)
        arguments["dtype"] = dtype
        settings = {name: value for name, value in self.settings.items() if name != "dtype"}
        return replace(self, settings=settings).model()

    def once(self) -> MIModel:
        """Open it for graphs that run once each: weights are not packed, except blocks."""
        model = self.model()
        # Packing weights costs more than it saves in a single run.
        model.variants.settle(prepack=False)
        return model

    @property
    def version(self) -> Version:
        """The version of a repository of the Hub."""
        return Version(self.settings.get("revision"), self.settings.get("subfolder", ""))


def opening(*names: str, argument: str = "model", help: str = SOURCE, required: bool = True) -> Group:
    """The model as the first argument, and options with which it is opened: names of `MIModel.from_pretrained`'s."""
    settings = options_of([MIModel.from_pretrained], only=(*names, *VERSION), panel="The model")
    source = keyword(argument, str, typer.Argument(metavar=argument.upper(), help=help), ... if required else None)
    return Group([source, *settings.parameters], lambda values: Opening(values[argument], settings.argument(values)))


@dataclass(frozen=True)
class Output:
    """Files that a command writes, and whether it prints JSON in place of tables."""

    files: list[tuple[Path | None, str]]  # the path and the ending of each form of a result
    as_json: bool

    def check(self) -> None:
        """Refuse names of files with another ending, before any work."""
        for path, ending in self.files:
            if path is not None and path.suffix.lower() != ending:
                raise typer.BadParameter(f"{path} should end in {ending}")

    def deliver(self, result: Any, facts: Any, pieces: Iterable[RenderableType]) -> None:
        """Write the files of a result, then print its facts as JSON, or the pieces: texts as they are, and tables."""
        # Pieces are taken one after the other, and only if they are printed.
        for path, _ in self.files:
            if path is not None:
                result.save(path)
        if self.as_json:
            values = facts.to_dict() if hasattr(facts, "to_dict") else facts
            # All digits, since programs read it; infinities and NaN are null, as JSON has none.
            typer.echo(json.dumps(plain(values, None), indent=1, allow_nan=False))
            return
        for piece in pieces:
            if isinstance(piece, str):
                typer.echo(piece)
            else:
                Console().print(piece)


NO_MODEL = Group([], lambda values: None)
JSON = keyword("as_json", bool, typer.Option("--json", help="Print JSON instead of tables."), False)
PRINTS = Group([JSON], lambda values: Output([], values["as_json"]))
FORMS = {
    "html": (".html", "Write an HTML page that works offline."),
    "png": (".png", "Write a picture."),
    "save": (ENDING, "Write a .safetensors file to load in Python."),
}
FILES = [keyword(name, Path, typer.Option(metavar="FILE", help=help), None) for name, (_, help) in FORMS.items()]
WRITES = Group(
    [*FILES, JSON],
    lambda values: Output([(values[name], ending) for name, (ending, _) in FORMS.items()], values["as_json"]),
)
