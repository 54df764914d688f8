"""The options with which a command opens its model, declared once."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter, signature
from typing import Annotated, Any

import typer

from mionnx.graph.hooked_model import HookedModel
from mionnx.machine.progress import shown
from mionnx.model import MIModel
from mionnx.run import find_model, model_dtype
from mionnx.run.repository import Version

PANEL = "The model"
REVISION, SUBFOLDER = ("revision", "subfolder")  # of models of the Hub: in each command that opens a model
RUNS = ("dtype", "accuracy_level", "provider", "threads")
DTYPE = "float32, float16, bfloat16, int4, int8 or auto; float32, or the file's own."
OPTIONS: dict[str, tuple[Any, Any]] = {
    "dtype": (Annotated[str | None, typer.Option(help=DTYPE, rich_help_panel=PANEL)], None),
    "accuracy_level": (
        Annotated[
            int | None,
            typer.Option(
                help="Of weights in blocks: 0, products in floats, or 4, in 8 bits and fast. By default the file's.",
                rich_help_panel=PANEL,
            ),
        ],
        None,
    ),
    "provider": (
        Annotated[str, typer.Option(help="cpu, cuda, or an execution provider's full name.", rich_help_panel=PANEL)],
        "cpu",
    ),
    "threads": (
        Annotated[int, typer.Option(min=0, help="Inside one operator; 0: the engine chooses.", rich_help_panel=PANEL)],
        0,
    ),
    REVISION: (
        Annotated[str | None, typer.Option(help="Of a Hub model: a branch, tag or commit.", rich_help_panel=PANEL)],
        None,
    ),
    SUBFOLDER: (
        Annotated[str | None, typer.Option(help="The model's, in its repository or folder.", rich_help_panel=PANEL)],
        None,
    ),
}


@dataclass(frozen=True)
class Opening:
    """Options with which a command opens its model.

    Attributes:
        dtype, accuracy_level, provider, threads, revision, subfolder: see `MIModel.from_pretrained`.
    """

    dtype: str = model_dtype.DEFAULT
    accuracy_level: int | None = None
    provider: str = "cpu"
    threads: int = 0
    revision: str | None = None
    subfolder: str = ""

    def model(self, source: str) -> MIModel:
        """Open a model that runs."""
        return MIModel.from_pretrained(
            source,
            dtype=self.dtype,
            accuracy_level=self.accuracy_level,
            provider=self.provider,
            threads=self.threads,
            revision=self.revision,
            subfolder=self.subfolder,
        )

    def once(self, source: str) -> MIModel:
        """Open a model whose graphs run once each: weights are not packed, but for blocks."""
        opened = self.model(source)
        opened.variants.settle(prepack=False)
        return opened

    def hooked(self, source: str, check: str = "sampled") -> HookedModel:
        """Open a hooked model that does not run."""
        model_dtype.check_name(self.dtype)
        with shown() as progress:
            hooked = find_model.open_model(source, self.dtype, check, progress, version=self.version)
        model_dtype.refuse_other(hooked, self.dtype)
        return hooked

    @property
    def version(self) -> Version:
        """The version of a repository of the Hub."""
        return Version(self.revision, self.subfolder)


PLAIN = Opening()


def opens_model(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add options to a command, whose parameter `opening` gets their values.

    Args:
        names: of `OPTIONS`; `revision` and `subfolder` are added to each command.
    """
    offered = (*names, REVISION, SUBFOLDER)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def with_options(**given: Any) -> None:
            chosen = {name: given.pop(name) for name in offered}
            # Where nobody said a dtype, the default is another one than float32: see `model_dtype`.
            said = {name: value for name, value in chosen.items() if value is not None}
            command(**given, opening=Opening(**said))

        own = [parameter for name, parameter in signature(command).parameters.items() if name != "opening"]
        with_options.__dict__["__signature__"] = signature(command).replace(parameters=[*own, *map(_option, offered)])
        return with_options

    return decorate


def _option(name: str) -> Parameter:
    annotation, default = OPTIONS[name]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
