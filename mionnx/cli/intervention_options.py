"""The options in which `run`, `generate` and `compile` take interventions, declared once."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from mionnx.cli.intervention_syntax import parse, parse_state_knockout, parse_state_steering
from mionnx.cli.options import SpecFile
from mionnx.spec.hook_spec import HookSpec

EDITS = {  # kind -> what the option does, and how it is written
    "add": ("Add a value.", "HOOK=VALUE[@LIMITS]"),
    "scale": ("Multiply by a factor.", "HOOK=VALUE[@LIMITS]"),
    "zero": ("Replace by zero.", "HOOK[@LIMITS]"),
    "replace": ("Replace by a value.", "HOOK=VALUE[@LIMITS]"),
    "project_out": ("Remove a direction.", "HOOK=VALUE[@LIMITS]"),
    "knockout": ("Remove attention edges.", "HOOK=EDGES[@LIMITS]"),
}
PANEL = "Interventions"


@dataclass(frozen=True)
class Interventions:
    """The interventions of a command line, as text.

    Attributes:
        edits: kind -> HOOK[=VALUE][@LIMITS] of each.
        state_knockouts: LIMITS of each.
        state_steerings: SCALE@LIMITS of each.
        file: a saved spec, whose interventions come first.
    """

    edits: dict[str, list[str]] = field(default_factory=dict)
    state_knockouts: list[str] = field(default_factory=list)
    state_steerings: list[str] = field(default_factory=list)
    file: Path | None = None

    def spec(self, num_heads: int, seq_len: int) -> HookSpec:
        """Parse into a spec; the model's head count and the prompt's length shape knockout masks.

        Raises:
            InterventionError: an intervention is not understood.
            SpecFileError: a file or a tensor in it is missing.
        """
        spec = HookSpec.load(str(self.file)) if self.file else HookSpec()
        for kind, texts in self.edits.items():
            for text in texts:
                spec.intervene(*parse(kind, text, num_heads, seq_len))
        for text in self.state_knockouts:
            spec.set_state_knockout(parse_state_knockout(text))
        for text in self.state_steerings:
            spec.set_state_steering(parse_state_steering(text))
        return spec


def _option(name: str, says: str, metavar: str) -> Parameter:
    annotation = Annotated[list[str] | None, typer.Option(metavar=metavar, help=says, rich_help_panel=PANEL)]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def takes_interventions(without: tuple[str, ...] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add one option per kind to a command; its parameter `interventions` gets their values.

    Args:
        without: kinds that the command does not offer.
    """
    kinds = [kind for kind in EDITS if kind not in without]
    options = [_option(kind, *EDITS[kind]) for kind in kinds]
    options += [_option("state_knockout", "RWKV: drop writes to the state.", "LIMITS")]
    options += [_option("state_steering", "RWKV: scale writes to the state.", "SCALE@LIMITS")]
    options += [Parameter("spec", Parameter.KEYWORD_ONLY, default=None, annotation=SpecFile)]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def with_options(**given: Any) -> None:
            edits = {kind: given.pop(kind) or [] for kind in kinds}
            knockouts, steerings, file = (given.pop(name) for name in ("state_knockout", "state_steering", "spec"))
            command(**given, interventions=Interventions(edits, knockouts or [], steerings or [], file))

        own = [parameter for name, parameter in signature(command).parameters.items() if name != "interventions"]
        with_options.__dict__["__signature__"] = signature(command).replace(parameters=[*own, *options])
        return with_options

    return decorate
