"""`Knob`: a strength that whoever runs a compiled graph may turn, and its place in the graph."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from mionnx.errors import InterventionError
from mionnx.graph.hook_points import HookPoint
from mionnx.machine.typed import typed

HookChoices = str | HookPoint | Sequence[str | HookPoint] | None


@typed(InterventionError, leave=["points"])
@dataclass(frozen=True)
class Knob:
    """A strength that stays an input of a compiled graph.

    It multiplies what is added or projected out, by default by 1, or is the factor of a scale.

    Attributes:
        points: the hook points whose interventions it turns, globs allowed; None for all that have a strength.
        low, high: the range that it makes sense in; open on a side that is None. Clients are told; a graph checks none.
        unit: of its number; by default that of the vector, or a factor.
        meaning: what turning it does, in words, for whoever runs the file.
        doses: write a graph for each of these strengths in place of an input, for clients that feed no other inputs.

    Raises:
        InterventionError: a range without numbers in it, or a dose outside of it.

    Example:
        model.compile(spec, "steered", knobs={"sea": Knob(low=0, high=2, meaning="0 is the plain model")})
    """

    points: HookChoices = None
    low: float | None = None
    high: float | None = None
    unit: str = ""
    meaning: str = ""
    doses: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "doses", tuple(float(dose) for dose in self.doses))
        bounds = [bound for bound in (self.low, self.high) if bound is not None]
        if not np.isfinite([*bounds, *self.doses]).all() or (len(bounds) > 1 and not bounds[0] < bounds[1]):
            raise InterventionError(f"a knob ranges between two finite numbers, the lower first, got {self.range}")
        for dose in self.doses:
            check_strength(self, "a dose", dose)

    @property
    def range(self) -> str:
        """The range in words."""
        low, high = (None if bound is None else f"{bound:g}" for bound in (self.low, self.high))
        if low is None or high is None:
            return f"{low} or more" if low else f"{high} or less" if high else "any number"
        return f"{low} to {high}"


def check_strength(knob: Knob, what: str, strength: float) -> None:
    """Refuse a strength outside of a knob's range."""
    below = knob.low is not None and strength < knob.low
    if below or (knob.high is not None and strength > knob.high):
        raise InterventionError(f"{what} of {strength:g} is outside of the knob's range, {knob.range}")


def knob_facts(knob: Knob, default: float, points: Sequence[str], required: bool) -> dict[str, Any]:
    """What card and metadata say of a knob."""
    return {
        "hooks": [*points],
        "default": default,
        "low": knob.low,
        "high": knob.high,
        "unit": knob.unit or "times the intervention's own strength",
        "meaning": knob.meaning or f"strength at {', '.join(points)}",
        "required": required,
    }


Knobs = Mapping[str, HookChoices | Knob]


def as_knobs(knobs: Knobs) -> dict[str, Knob]:
    """Knobs by name, those that are only hook points as knobs of any range."""
    for name in knobs:
        if not name.strip():
            raise InterventionError(f"a knob is an input of the graph, and {name!r} is no name for one")
    return {name: knob if isinstance(knob, Knob) else Knob(knob) for name, knob in knobs.items()}


def sentence(name: str, facts: Mapping[str, Any]) -> str:
    """A knob in a sentence, for the graph and the card."""
    range_ = Knob(low=facts["low"], high=facts["high"]).range
    fed = "must be fed" if facts["required"] else "may be left out"
    return f"{name}: {facts['meaning']}; {facts['unit']}; default {facts['default']:g}, range {range_}; {fed}"


def document(proto: onnx.ModelProto, knobs: Mapping[str, Mapping[str, Any]]) -> None:
    """Say of each knob in the graph what it is, and take the default of a required one."""
    for value in proto.graph.input:
        if value.name in knobs:
            value.doc_string = sentence(value.name, knobs[value.name])
    required = [one for one in proto.graph.initializer if one.name in knobs and knobs[one.name]["required"]]
    for tensor in required:
        proto.graph.initializer.remove(tensor)
