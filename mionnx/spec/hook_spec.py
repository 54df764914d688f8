"""`HookSpec`: the one object that says what to capture and where to intervene."""

from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TypeVar

import numpy as np

from mionnx.errors import HookError, InterventionError, nearest
from mionnx.graph.hook_points import HookPoint
from mionnx.spec.attention_knockout import naturals, whole
from mionnx.spec.intervention import Intervention
from mionnx.spec.state_interventions import StateKnockoutSpec, StateSteeringSpec

Hook = HookPoint | str
Predicate = Callable[[str], bool]


@dataclass(frozen=True)
class Capture:
    """One request to capture: a hook point, a glob over names, or a predicate on them; whole, or in part."""

    what: HookPoint | str | Predicate
    before: bool = False
    positions: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None

    def selects(self, name: str) -> bool:
        """Whether a hook point of this name is meant."""
        if isinstance(self.what, HookPoint):
            return self.what.name == name
        if not isinstance(self.what, str):
            return bool(self.what(name))
        return fnmatchcase(name, self.what) and (_names_one(self.what) or not HookPoint.parse(name).on_request)

    def __str__(self) -> str:
        return getattr(self.what, "__name__", None) or str(self.what)


@dataclass
class HookSpec:
    """What to capture and where to intervene in one forward pass.

    Hook points are given as `HookPoint` or string; methods return the spec itself, so that they chain. Interventions at
    one hook point apply in the order in which they were registered, and a capture there sees their result.

    Example:
        spec = HookSpec().capture("blocks.*.attn.hook_pattern")
        spec.intervene(HookPoint.ResidPost(2), Intervention.Add(direction, positions=-1))
    """

    captures: list[Capture] = field(default_factory=list)
    interventions: list[tuple[HookPoint, Intervention]] = field(default_factory=list)
    state_knockouts: list[StateKnockoutSpec] = field(default_factory=list)
    state_steerings: list[StateSteeringSpec] = field(default_factory=list)

    def capture(
        self,
        hook: Hook | Predicate,
        before: bool = False,
        *,
        positions: int | Iterable[int] | None = None,
        heads: int | Iterable[int] | None = None,
    ) -> "HookSpec":
        """Ask for the value at a hook point, or at all that a glob ("blocks.*.hook_resid_post") or predicate selects.

        Args:
            hook: a hook point, a string (a glob if it has `*`, `?` or `[`), or a function of the name.
            before: the value that came in, rather than what the interventions there made of it.
            positions: only these token positions, in this order, counted in each row's own text, negative ones from its
                end; at scores and patterns of the queries. The rest is never copied out of the graph.
            heads: only these heads.

        Raises:
            InterventionError: positions or heads that are no integers.
        """
        what = hook if callable(hook) or _is_glob(hook) else HookPoint.parse(hook)
        request = Capture(what, before, _limit("positions", positions), _limit("heads", heads))
        if request not in self.captures:
            self.captures.append(request)
        return self

    def intervene(self, hook: Hook, intervention: Intervention) -> "HookSpec":
        """Register an intervention at one hook point.

        Raises:
            HookError: a glob; interventions name their hook points one by one.
        """
        if not isinstance(intervention, Intervention):
            raise HookError(f"intervene({str(hook)!r}, ...) takes an Intervention, got {type(intervention).__name__}")
        if _is_glob(hook):
            raise HookError(f"intervene takes one hook point, and {hook!r} is a pattern: call it once for each")
        self.interventions.append((HookPoint.parse(hook), intervention))
        return self

    def set_state_knockout(self, *specs: StateKnockoutSpec) -> "HookSpec":
        """Leave tokens' writes into an RWKV state out. Several may be set, in one call or in several: each applies.

        Raises:
            HookError: something else than a `StateKnockoutSpec`.
        """
        self.state_knockouts += [_of(StateKnockoutSpec, spec) for spec in specs]
        return self

    def set_state_steering(self, *specs: StateSteeringSpec) -> "HookSpec":
        """Scale tokens' writes into an RWKV state. Several may be set; where they meet, their scales multiply.

        Raises:
            HookError: something else than a `StateSteeringSpec`.
        """
        self.state_steerings += [_of(StateSteeringSpec, spec) for spec in specs]
        return self

    def extend(self, other: "HookSpec") -> "HookSpec":
        """Add everything of another spec, after this one's own."""
        self.captures += [request for request in other.captures if request not in self.captures]
        self.interventions += other.interventions
        self.state_knockouts += other.state_knockouts
        self.state_steerings += other.state_steerings
        return self

    def is_empty(self) -> bool:
        """Whether nothing is captured and nothing changed."""
        return not any((self.captures, self.interventions, self.state_knockouts, self.state_steerings))

    def num_captures(self) -> int:
        """How many captures were requested; a glob or predicate counts once."""
        return len(self.captures)

    def num_interventions(self) -> int:
        """How many interventions are registered; state knockouts and steerings are not among them."""
        return len(self.interventions)

    def is_captured(self, hook: Hook) -> bool:
        """Whether a hook point will be captured."""
        return any(request.selects(str(hook)) for request in self.captures)

    def has_intervention_at(self, hook: Hook) -> bool:
        """Whether any intervention targets a hook point."""
        return any(point.name == str(hook) for point, _ in self.interventions)

    def save(self, path: str) -> None:
        """Write the spec as one safetensors file; see `mionnx.spec.spec_file`."""
        from mionnx.spec.spec_file import save

        save(self, path)

    @staticmethod
    def load(path: str) -> "HookSpec":
        """Read a spec that `save` wrote; see `mionnx.spec.spec_file`."""
        from mionnx.spec.spec_file import load

        return load(path)


Kind = TypeVar("Kind")


def _of(kind: type[Kind], spec: object) -> Kind:
    if not isinstance(spec, kind):
        raise HookError(f"expected a {kind.__name__}, got {type(spec).__name__}")
    return deepcopy(spec)  # what the caller chains onto it later is not part of this spec


def _limit(what: str, given: int | Iterable[int] | None) -> tuple[int, ...] | None:
    if given is None:
        return None
    found = [given] if isinstance(given, int | np.integer) else list(given)
    kept = tuple(whole(what, entry) for entry in found) if what == "positions" else tuple(naturals(what, found))
    if not kept:
        raise InterventionError(f"a capture of no {what} would be empty")
    return kept


def _is_glob(hook: object) -> bool:
    return isinstance(hook, str) and any(character in hook for character in "*?[")


def _names_one(glob: str) -> bool:
    """Whether a pattern says something about the name itself, after the last dot: `*.hook_eff*` does, `*` does not."""
    return bool(glob.rpartition(".")[2].removeprefix("hook_").strip("*?"))


def resolve(request: Capture, names: Iterable[str]) -> list[str]:
    """The hook points of a model that a capture means.

    Raises:
        HookError: none; the message names the nearest one.
    """
    names = list(names)
    found = [name for name in names if request.selects(name)]
    if not found:
        raise HookError(f"the model has no hook point {str(request)!r}{nearest(str(request), names)}")
    return found
