"""Interventions on the command line: their syntax, and the options of `run`, `generate` and `compile`.

HOOK[=VALUE][@LIMITS]

HOOK    a name, a glob, or several with commas --zero 'blocks.*.attn.hook_z'
VALUE   a number                              --scale blocks.1.hook_mlp_out=0.5
        FILE.safetensors:KEY[*FACTOR]         --add blocks.2.hook_resid_post=dir.safetensors:key*1.5
        QUERY>KEY, comma separated, * for all --knockout 'blocks.2.attn.hook_scores=-1>0,3>*'
        (a kind's own spelling: see `Kind.spelling` and `Kind.read` in mionnx.spec.kinds)
LIMITS  positions=..., heads=..., rows=...,   --zero 'blocks.1.attn.hook_z@heads=3;positions=0,-1'
        experts=..., neurons=...              --zero blocks.1.mlp.hook_act@neurons=7,12
        separated by semicolons; 2-5 is 2,3,4,5 --add blocks.2.hook_resid_post=dir.safetensors:key@positions=generated

State interventions of recurrent models name no hook point:

--state-knockout 'positions=3;layers=1,2;terms=write,erase'     terms: write (if left out), erase, decay, token_shift,
                                                                convolution
--state-knockout 'positions=3;terms=invisible'                  all of them
--state-steering '2.0@positions=0;heads=1;layers=0'
"""

import re
from dataclasses import dataclass, replace
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import typer
from numpy.typing import NDArray

from mionnx.cli.files import load_tensor
from mionnx.cli.parameters import Group, keyword, spread
from mionnx.errors import InterventionError, nearest
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.intervention import Intervention, find_kind
from mionnx.spec.kinds import KINDS
from mionnx.spec.limits import LIMITS, PHASES
from mionnx.spec.state_interventions import StateKnockoutSpec, StateSteeringSpec

PANEL = "Interventions"
WRITTEN = [kind for kind in KINDS.values() if kind.spelling is not None]  # others need a spec saved in Python
Captures = Annotated[list[str] | None, typer.Option("--capture", metavar="HOOK", help="Capture; globs allowed.")]
Target = TypeVar("Target", StateKnockoutSpec, StateSteeringSpec)
_FILE = re.compile(r"(?P<file>.+\.safetensors):(?P<key>.+?)(?:\*(?P<factor>[-+.\deE]+))?")


@dataclass(frozen=True)
class Interventions:
    """The interventions of a command line: option -> its texts, and "hooks" -> a saved spec, which comes first."""

    options: dict[str, Any]

    def spec(self, num_heads: int, seq_len: int | None, both: bool = False) -> HookSpec:
        """Parse into a spec; the model's head count and the prompt's length shape knockout masks.

        Raises:
            InterventionError: an intervention is not understood.
            SpecFileError: a file or a tensor in it is missing.
        """
        saved = self.options["hooks"]
        spec = HookSpec.load(str(saved)) if saved else HookSpec()
        for kind in WRITTEN:
            for text in self.options[kind.name] or ():
                spec.intervene(*parse(kind.name, text, num_heads, seq_len, both))
        for text in self.options["state_knockout"] or ():
            spec.set_state_knockout(parse_state_knockout(text))
        for text in self.options["state_steering"] or ():
            spec.set_state_steering(parse_state_steering(text))
        return spec


def intervention_group(prompt: bool = True) -> Group:
    """One option a kind; the argument is `Interventions`. Without a prompt, edges are of positions of every text."""
    anywhere = " Positions count from 0, as 4>2; from a text's end (-1) or of all (*) they are refused."
    options = []
    for kind in WRITTEN:
        value = f"HOOK={kind.spelling}[@LIMITS]" if kind.spelling else "HOOK[@LIMITS]"
        options.append(_option(kind.name, value, kind.help + anywhere * (kind.of_prompt and not prompt)))
    options.append(_option("state_knockout", "LIMITS", "RWKV: drop writes to the state."))
    options.append(_option("state_steering", "SCALE@LIMITS", "RWKV: scale writes to the state."))
    options.append(_option("hooks", "FILE", "A saved HookSpec to begin with.", Path))
    return Group(options, Interventions)


def _option(name: str, metavar: str, help: str, kind: Any = list[str]) -> Parameter:
    return keyword(name, kind, typer.Option(metavar=metavar, help=help, rich_help_panel=PANEL), None)


@dataclass
class Reader:
    """Reads values; the model's heads and the prompt's length shape knockout masks."""

    n_heads: int
    seq_len: int | None
    both: bool = False

    def array(self, text: str) -> NDArray[Any]:
        """A number, or FILE.safetensors:KEY[*FACTOR]."""
        try:
            return np.array(float(text))
        except ValueError:
            match = _FILE.fullmatch(text)
        if match is None:
            raise InterventionError(f"{text!r} is neither a number nor FILE.safetensors:KEY[*FACTOR]")
        tensor = load_tensor(Path(match["file"]), match["key"])
        return tensor * float(match["factor"]) if match["factor"] else tensor


def parse(
    kind: str, text: str, n_heads: int, seq_len: int | None, both: bool = False
) -> tuple[list[str], Intervention]:
    """Parse HOOK[=VALUE][@LIMITS]: the names and globs of hook points, and the intervention.

    Raises:
        InterventionError: the text is not understood.
    """
    rules = find_kind(kind)
    if rules.spelling is None:
        raise InterventionError(
            f"{kind} is not written on the command line: save a spec in Python, and give --hooks FILE"
        )
    body, _, limits = text.partition("@")
    hook, equals, value = body.partition("=")
    if bool(equals) != bool(rules.values):
        expected = "HOOK=VALUE[@LIMITS]" if rules.values else "HOOK[@LIMITS]"
        raise InterventionError(f"--{kind} takes {expected}, got {text!r}")
    chosen = {
        name: numbers if name == "positions" and numbers in PHASES else _integers(numbers, text)
        for name, numbers in _parts(limits, text, LIMITS).items()
    }
    reader = Reader(n_heads, seq_len, both)
    return hook.split(","), getattr(Intervention, rules.title)(*rules.read(value, reader), **chosen)


def parse_state_knockout(text: str) -> StateKnockoutSpec:
    """Parse LIMITS of a state knockout."""
    parts = _parts(text, text, ("positions", "layers", "terms"))
    knockout = _target(StateKnockoutSpec(), parts, text)
    named = parts.get("terms", "write").split(",")
    return knockout.invisible() if named == ["invisible"] else replace(knockout, terms=named)


def parse_state_steering(text: str) -> StateSteeringSpec:
    """Parse SCALE@LIMITS of a state steering."""
    scale, at, limits = text.partition("@")
    if not at:
        raise InterventionError(f"--state-steering takes SCALE@positions=..., got {text!r}")
    parts = _parts(limits, text, ("positions", "layers", "heads"))
    try:
        steering = _target(StateSteeringSpec(float(scale)), parts, text)
    except ValueError:
        raise InterventionError(f"state steering: the scale is a number, got {scale!r}") from None
    return steering.heads(_integers(parts["heads"], text)) if "heads" in parts else steering


def _target(spec: Target, parts: dict[str, str], option: str) -> Target:
    if positions := parts.get("positions"):
        spec.positions([positions] if positions in PHASES else _integers(positions, option))
    return spec.layers(_integers(parts["layers"], option)) if "layers" in parts else spec


def _parts(text: str, option: str, allowed: tuple[str, ...]) -> dict[str, str]:
    parts: dict[str, str] = {}
    for part in filter(None, text.split(";")):
        name, _, value = part.partition("=")
        if name not in allowed:
            raise InterventionError(f"{option!r}: no limit {name!r}, only {', '.join(allowed)}{nearest(name, allowed)}")
        parts[name] = value
    return parts


def _integers(text: str, option: str) -> list[int]:
    try:
        return [number for part in text.split(",") for number in spread(part, int)]
    except ValueError:
        raise InterventionError(f"{option!r}: {text!r} is no integer, nor several such as 0,3 or 2-5") from None
