"""The options in which `run`, `generate` and `compile` take interventions, declared once."""

from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any

import typer

from mionnx.cli.intervention_syntax import parse, parse_state_knockout, parse_state_steering, spelling
from mionnx.cli.parameters import Group, keyword
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.kinds import KINDS

PANEL = "Interventions"
Captures = Annotated[list[str] | None, typer.Option("--capture", metavar="HOOK", help="Capture; globs allowed.")]


@dataclass(frozen=True)
class Interventions:
    """The interventions of a command line, as text.

    Attributes:
        edits: kind -> HOOK[=VALUE][@LIMITS] of each.
        state_knockouts: LIMITS of each.
        state_steerings: SCALE@LIMITS of each.
        file: a saved spec, whose interventions come first.
    """

    edits: dict[str, list[str]]
    state_knockouts: list[str]
    state_steerings: list[str]
    file: Path | None

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


def _option(name: str, metavar: str, help: str, kind: Any = list[str]) -> Parameter:
    return keyword(name, kind, typer.Option(metavar=metavar, help=help, rich_help_panel=PANEL), None)


def intervention_group(prompt: bool = True) -> Group:
    """One option a kind; the argument is `Interventions`.

    Args:
        prompt: whether the command has a prompt; without one, edges are of positions that every text has.
    """
    kinds = [kind for kind in KINDS.values() if kind.spelling is not None]
    anywhere = " Positions count from 0, as 4>2; from a text's end (-1) or of all (*) they are refused."
    options = [
        _option(kind.name, spelling(kind), kind.help + anywhere * (kind.of_prompt and not prompt)) for kind in kinds
    ]
    options.append(_option("state_knockout", "LIMITS", "RWKV: drop writes to the state."))
    options.append(_option("state_steering", "SCALE@LIMITS", "RWKV: scale writes to the state."))
    options.append(_option("hooks", "FILE", "A saved HookSpec to begin with.", Path))

    def interventions(values: dict[str, Any]) -> Interventions:
        edits = {kind.name: values[kind.name] or [] for kind in kinds}
        return Interventions(edits, values["state_knockout"] or [], values["state_steering"] or [], values["hooks"])

    return Group(options, interventions)
