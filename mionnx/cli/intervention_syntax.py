"""The syntax of interventions on the command line.

HOOK[=VALUE][@LIMITS]

HOOK    a name, a glob, or several with commas --zero 'blocks.*.attn.hook_z'
VALUE   a number                              --scale blocks.1.hook_mlp_out=0.5
        FILE.safetensors:KEY[*FACTOR]         --add blocks.2.hook_resid_post=dir.safetensors:key*1.5
        QUERY>KEY, comma separated, * for all --knockout 'blocks.2.attn.hook_scores=-1>0,3>*'
        (a kind's own spelling: see `Kind.spelling` and `Kind.read` in mionnx.spec.kinds)
LIMITS  positions=..., heads=..., rows=...,   --zero 'blocks.1.attn.hook_z@heads=3;positions=0,-1'
        experts=..., neurons=...              --zero blocks.1.mlp.hook_act@neurons=7,12
        separated by semicolons; 2-5 is 2,3,4,5 --add blocks.2.hook_resid_post=dir.safetensors:key@positions=generated

State interventions of RWKV name no hook point:

--state-knockout 'positions=3;layers=1,2;terms=write,erase'     terms: write (if left out), erase, decay, token_shift
--state-knockout 'positions=3;terms=invisible'                  all of them
--state-steering '2.0@positions=0;heads=1;layers=0'
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mionnx.cli.parameters import spread
from mionnx.errors import InterventionError, SpecFileError, nearest
from mionnx.machine.tensor_file import open_tensors
from mionnx.spec.intervention import Intervention, find_kind
from mionnx.spec.kinds.kind import Kind
from mionnx.spec.limits import LIMITS, PHASES
from mionnx.spec.state_interventions import StateKnockoutSpec, StateSteeringSpec

_FILE = re.compile(r"(?P<file>.+\.safetensors):(?P<key>.+?)(?:\*(?P<factor>[-+.\deE]+))?")


class Reader:
    """Reads values; the model's heads and the prompt's length shape knockout masks."""

    def __init__(self, n_heads: int, seq_len: int | None) -> None:
        self.n_heads, self.seq_len = n_heads, seq_len

    def array(self, text: str) -> NDArray[Any]:
        """A number, or FILE.safetensors:KEY[*FACTOR].

        Raises:
            InterventionError: neither of the two.
            SpecFileError: a file or key that is not there.
        """
        try:
            return np.array(float(text))
        except ValueError:
            match = _FILE.fullmatch(text)
        if match is None:
            raise InterventionError(f"{text!r} is neither a number nor FILE.safetensors:KEY[*FACTOR]")
        tensor = load_tensor(Path(match["file"]), match["key"])
        return tensor * float(match["factor"]) if match["factor"] else tensor


def spelling(kind: Kind) -> str:
    """The argument of a kind's option, such as HOOK=VALUE[@LIMITS]."""
    return f"HOOK={kind.spelling}[@LIMITS]" if kind.spelling else "HOOK[@LIMITS]"


def parse(kind: str, text: str, n_heads: int, seq_len: int | None) -> tuple[list[str], Intervention]:
    """Parse an intervention option: the names and globs of hook points, and the intervention.

    Args:
        kind: name of a kind that has a spelling.
        text: HOOK[=VALUE][@LIMITS], see the module's text.
        n_heads, seq_len: of the model and the prompt, None if there is none; they shape knockout masks.

    Raises:
        InterventionError: the text is not understood.
        SpecFileError: a file or key is missing.
    """
    rules = find_kind(kind)
    if rules.spelling is None:
        raise InterventionError(f"{kind} has no spelling on the command line; save a spec in Python, and give --spec")
    body, _, limits = text.partition("@")
    hook, equals, value = body.partition("=")
    if bool(equals) != bool(rules.values):
        expected = "HOOK=VALUE[@LIMITS]" if rules.values else "HOOK[@LIMITS]"
        raise InterventionError(f"--{kind} takes {expected}, got {text!r}")
    chosen = _limits(limits, text)
    return hook.split(","), getattr(Intervention, rules.title)(*rules.read(value, Reader(n_heads, seq_len)), **chosen)


def parse_state_knockout(text: str) -> StateKnockoutSpec:
    """Parse a state knockout; see the module's text."""
    parts = _parts(text, text, ("positions", "layers", "terms"))
    knockout = _target(StateKnockoutSpec(), parts, text)
    named = parts.get("terms", "write").split(",")
    return knockout.invisible() if named == ["invisible"] else replace(knockout, terms=named)


def parse_state_steering(text: str) -> StateSteeringSpec:
    """Parse a state steering; see the module's text."""
    scale, at, limits = text.partition("@")
    if not at:
        raise InterventionError(f"--state-steering takes SCALE@positions=..., got {text!r}")
    parts = _parts(limits, text, ("positions", "layers", "heads"))
    try:
        steering = _target(StateSteeringSpec(float(scale)), parts, text)
    except ValueError:
        raise InterventionError(f"state steering: the scale is a number, got {scale!r}") from None
    return steering.heads(_integers(parts["heads"], text)) if "heads" in parts else steering


Target = TypeVar("Target", StateKnockoutSpec, StateSteeringSpec)


def _target(spec: Target, parts: dict[str, str], whole: str) -> Target:
    positions = parts.get("positions", "")
    spec.positions([positions] if positions in PHASES else _integers(positions, whole) if positions else [])
    return spec.layers(_integers(parts["layers"], whole)) if "layers" in parts else spec


def _limits(text: str, whole: str) -> dict[str, Any]:
    return {
        name: numbers if name == "positions" and numbers in PHASES else _integers(numbers, whole)
        for name, numbers in _parts(text, whole, LIMITS).items()
    }


def _parts(text: str, whole: str, allowed: tuple[str, ...]) -> dict[str, str]:
    parts: dict[str, str] = {}
    for part in filter(None, text.split(";")):
        name, _, value = part.partition("=")
        if name not in allowed:
            raise InterventionError(f"{whole!r}: no limit {name!r}, only {', '.join(allowed)}{nearest(name, allowed)}")
        parts[name] = value
    return parts


def _integers(text: str, whole: str) -> list[int]:
    try:
        return [number for part in text.split(",") for number in spread(part, int)]
    except ValueError:
        raise InterventionError(f"{whole!r}: {text!r} is no integer, nor several such as 0,3 or 2-5") from None


def load_tensor(path: Path, key: str) -> NDArray[Any]:
    """Read one tensor of a safetensors file.

    Raises:
        SpecFileError: no such file, or no such tensor in it.
    """
    with open_tensors(path, f"cannot read {path}") as file:
        names = list(file.keys())
        if key in names:
            return file.get_tensor(key)
    raise SpecFileError(f"{path} has no tensor {key!r}, only {', '.join(names)}{nearest(key, names)}")
