"""State interventions: tokens' writes into the recurrent state, knocked out or scaled.

What a token does to the state has up to four terms:

write        it adds k (x) v
erase        RWKV-7 and delta rules: it takes out what the state has at its key
decay        it lets the state decay
token_shift  RWKV: the next token's projections are mixed with it
convolution  other recurrent layers: the short convolution at the next tokens reads it

A knockout turns off the write; `erase()`, `decay()`, `token_shift()` and `convolution()` turn off more, `invisible()`
everything: then later positions are what they would be had the token never been there. In models with convolutions or
attention beside the states it hides the token from these too, in all layers; the positions of later tokens still count
it, windows of attention do not.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from mionnx.errors import InterventionError, nearest
from mionnx.graph.layers import TERMS
from mionnx.machine.ranges import listed
from mionnx.machine.typed import typed
from mionnx.spec.attention_knockout import HeadTargets, LayerTargets, at_most, integer
from mionnx.spec.limits import PHASES


@typed(InterventionError)
@dataclass(repr=False)
class StateTargets(LayerTargets):
    """Positions and layers, chained: `.position(0).layer_range(2, 5)`; all layers by default.

    Positions count from 0 in each row's own text, negative ones from the end of its prompt; "prompt" and "generated"
    are the phases of a text.
    """

    positions_: list[int | str] = field(default_factory=list)
    terms: list[str] = field(default_factory=lambda: ["write"])

    def __post_init__(self) -> None:
        super().__post_init__()
        self.positions_ = [_position(position) for position in listed("positions", self.positions_, InterventionError)]

    def position(self, position: int | str) -> Self:
        """Add one position, or a phase: "prompt" or "generated"."""
        return self.positions([position])

    def positions(self, positions: Iterable[int | str]) -> Self:
        """Add positions, or phases."""
        self.positions_ += [_position(position) for position in listed("positions", positions, InterventionError)]
        return self

    def erase(self) -> Self:
        """Apply to the removal term too (RWKV-7, delta rules)."""
        return self._with("erase")

    def _with(self, *terms: str) -> Self:
        self.terms += [term for term in terms if term not in self.terms]
        return self

    @property
    def title(self) -> str:
        return "state knockout" if isinstance(self, StateKnockoutSpec) else "state steering"

    def to_entry(self) -> dict[str, Any]:
        """The entry of these targets in a spec file."""
        return {"positions": self.positions_, "layers": self.layers_, "terms": self.terms}

    def _targeting(self, entry: dict[str, Any]) -> Self:
        terms = entry["terms"]
        if not isinstance(terms, list) or not {*terms} <= {*TERMS}:
            raise ValueError(f"terms must be among {', '.join(TERMS)}, got {terms!r}")
        self.terms = terms
        self.positions(entry["positions"])
        return self if entry["layers"] is None else self.layers(entry["layers"])

    def validate(self, num_layers: int, seq_len: int, num_heads: int | None = None) -> None:
        """Check against a model and a text of `seq_len` tokens, before anything runs."""
        self.target_layers(num_layers)
        if not self.positions_:
            raise InterventionError(f"{self.title}: no position was given, so it would do nothing")
        for position in self.positions_:
            if not isinstance(position, str) and not -seq_len <= position < seq_len:
                raise InterventionError(
                    f"{self.title}: position {position} does not exist in a text of {seq_len} tokens "
                    f"(0 to {seq_len - 1})"
                )
        for term in self.terms:
            if term not in TERMS:
                raise InterventionError(
                    f"{self.title}: no term {term!r}, only {', '.join(TERMS)}{nearest(term, TERMS)}"
                )
        if not self.terms:
            raise InterventionError(f"{self.title}: no term was given, so it would do nothing")


def _position(position: int | str) -> int | str:
    if isinstance(position, str):
        if position not in PHASES:
            raise InterventionError(f"a position is an integer, {' or '.join(map(repr, PHASES))}, got {position!r}")
        return position
    return integer("position", position)


@typed(InterventionError)
@dataclass(repr=False)
class StateKnockoutSpec(StateTargets):
    """Drop tokens' writes into the recurrent state: `StateKnockoutSpec().position(0).layer(12)`."""

    @classmethod
    def from_entry(cls, entry: dict[str, Any]) -> Self:
        """The knockout of an entry in a spec file."""
        return cls()._targeting(entry)

    def decay(self) -> Self:
        """Do not let the state decay at these tokens either."""
        return self._with("decay")

    def token_shift(self) -> Self:
        """Mix the token after with the one before these, as if they were not there."""
        return self._with("token_shift")

    def convolution(self) -> Self:
        """Let short convolutions at later tokens pass over these, as if they were not there.

        The convolution at these tokens themselves reads them. Where a layer is a convolution alone, its columns are all
        that a token writes; where it has a state too, `StateKnockoutSpec(terms=["convolution"])` leaves its write.
        """
        return self._with("convolution")

    def invisible(self) -> Self:
        """Turn off every term: later positions cannot see these tokens in the targeted layers.

        Of other models than RWKV in all layers, their convolutions and attention included, in the calls that the spec
        is given to (each step of a generation is one): keys in a cache are still there for calls without it, those that
        padding would have. What is captured at the token itself is padding's too.
        """
        return self._with(*TERMS)


@typed(InterventionError)
@dataclass(repr=False)
class StateSteeringSpec(StateTargets, HeadTargets):
    """Scale tokens' writes into the recurrent state: `StateSteeringSpec(2.0).position(0)`.

    A scale of 0 knocks out, 1 changes nothing, below 1 dampens, above 1 amplifies. Where a knockout applies to the same
    position and layer, the knockout wins.
    """

    scale: float = 1.0
    heads_: list[int] | None = None

    # The scale comes first, before the fields of the targets.
    def __init__(self, scale: float) -> None:
        super().__init__()
        try:
            self.scale = float(scale)
        except (TypeError, ValueError):
            raise InterventionError(f"state steering: the scale is a number, got {scale!r}") from None
        if not np.isfinite(self.scale):
            raise InterventionError(f"state steering: the scale must be finite, got {scale}")
        self.heads_ = None

    def to_entry(self) -> dict[str, Any]:
        return {**super().to_entry(), "scale": self.scale, "heads": self.heads_}

    @classmethod
    def from_entry(cls, entry: dict[str, Any]) -> Self:
        """The steering of an entry in a spec file."""
        steering = cls(entry["scale"])._targeting(entry)
        return steering if entry["heads"] is None else steering.heads(entry["heads"])

    def target_heads(self, num_heads: int) -> list[int]:
        """The selected heads of a model with `num_heads` heads; others are refused."""
        if self.heads_ is None:
            return list(range(at_most("heads", num_heads)))
        if max(self.heads_) >= num_heads:
            raise InterventionError(f"state steering: head {max(self.heads_)} of {num_heads} (0 to {num_heads - 1})")
        return sorted(set(self.heads_))

    def validate(self, num_layers: int, seq_len: int, num_heads: int | None = None) -> None:
        """Check heads too."""
        super().validate(num_layers, seq_len)
        if num_heads is not None:
            self.target_heads(num_heads)
        if not {*self.terms} <= {"write", "erase"}:
            raise InterventionError("state steering scales the write and erase terms; knock out the others")
