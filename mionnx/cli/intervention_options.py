"""The options in which `run`, `generate` and `compile` take interventions, declared once."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from mionnx.cli.intervention_syntax import parse, parse_state_knockout, parse_state_steering, spelling
from mionnx.cli.options import SpecFile
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.kinds import KINDS

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

    def spec(self, num_heads: int, seq_len: int | None) -> HookSpec:
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


def _option(name: str, metavar: str, says: str) -> Parameter:
    annotation = Annotated[list[str] | None, typer.Option(metavar=metavar, help=says, rich_help_panel=PANEL)]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def takes_interventions(prompt: bool = True) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add one option per kind to a command; its parameter `interventions` gets their values.

    Args:
        prompt: whether the command has a prompt; without one, edges are of positions that every text has.
    """
    offered = [kind for kind in KINDS.values() if kind.spelling is not None]
    kinds = [kind.name for kind in offered]
    anywhere = " Positions count from 0, as 4>2; from a text's end (-1) or of all (*) they are refused."
    options = [
        _option(kind.name, spelling(kind), kind.help + anywhere * (kind.of_prompt and not prompt)) for kind in offered
    ]
    options += [_option("state_knockout", "LIMITS", "RWKV: drop writes to the state.")]
    options += [_option("state_steering", "SCALE@LIMITS", "RWKV: scale writes to the state.")]
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
