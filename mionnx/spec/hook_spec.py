"""`HookSpec`: the captures and interventions of a forward pass."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from mionnx.errors import GradientError, HookError
from mionnx.graph.hook_points import HookPoint
from mionnx.machine.brief import Brief, count
from mionnx.machine.dialects import Translated
from mionnx.machine.files import write_atomic
from mionnx.machine.stored import Storable
from mionnx.machine.typed import typed
from mionnx.spec import spec_file
from mionnx.spec.hook_choice import Capture, Hook, HookChoice, Hooks, add_new, described, each, requests_of
from mionnx.spec.intervention import Intervention
from mionnx.spec.metric import Answers, MetricSpec, Tokens
from mionnx.spec.state_interventions import StateKnockoutSpec, StateSteeringSpec

# Interventions at one hook point: they take 10 s to insert, and four times as many sixteen times as long.
MOST_INTERVENTIONS = 2000

Where = HookPoint | HookChoice


@typed(HookError, leave=["intervention"])
@dataclass(repr=False)
class HookSpec(Brief, Storable, Translated):
    """Captures and interventions of one forward pass or generation.

    Hook points are written as `HookPoint` or string; methods return the spec itself, so that they chain. Interventions
    at one hook point apply in registration order, and a capture there sees their result.

    Example:
        spec = HookSpec().capture("blocks.*.attn.hook_pattern")
        spec.intervene(HookPoint.ResidPost(2), Intervention.Add(direction, positions=-1))
    """

    captures: list[Capture] = field(default_factory=list)
    interventions: list[tuple[Where, Intervention]] = field(default_factory=list)
    state_knockouts: list[StateKnockoutSpec] = field(default_factory=list)
    state_steerings: list[StateSteeringSpec] = field(default_factory=list)
    gradients: list[Capture] = field(default_factory=list, kw_only=True)
    metric: MetricSpec | None = field(default=None, kw_only=True)

    def capture(
        self,
        hook: Hooks,
        before: bool = False,
        *,
        positions: int | Iterable[int] | None = None,
        heads: int | Iterable[int] | None = None,
        dtype: str | None = None,
    ) -> HookSpec:
        """Capture the value at a hook point, or at every one selected by a glob or predicate.

        Args:
            hook: a hook point, its name, a glob ("blocks.*.hook_resid_post"), a function of the name, or a list of
                these, each a request of its own.
            before: capture the value before the interventions at the hook point, not after them.
            positions: only these token positions, in this order, counted in each row's own text, negative ones from its
                end; query positions at scores and patterns. The rest is never copied out of the graph.
            heads: only these heads.
            dtype: "float32", "float16" or "bfloat16", to which the graph casts it; a number too large becomes infinite.

        Raises:
            InterventionError: positions or heads that are no integers, or an unknown dtype.
            HookError: an empty list.

        Example:
            spec = HookSpec().capture("blocks.*.attn.hook_pattern", heads=[0, 3])
        """
        add_new(self.captures, requests_of(hook, before, positions, heads, dtype))
        return self

    def gradient(
        self,
        hook: Hooks,
        before: bool = False,
        *,
        positions: int | Iterable[int] | None = None,
        heads: int | Iterable[int] | None = None,
    ) -> HookSpec:
        """Ask for the gradient of the spec's metric with respect to the value at a hook point.

        `HookCache.grad` has the gradients, by the same names and in the same shapes as captures. The gradient is by the
        value that everything after the hook point reads, its interventions applied.

        Args:
            hook, before, positions, heads: as for `capture`.

        Example:
            spec = HookSpec().gradient("blocks.*.attn.hook_z").set_metric("logit", answer=" Paris")
        """
        add_new(self.gradients, requests_of(hook, before, positions, heads))
        return self

    def set_metric(
        self,
        name: str,
        *,
        answer: Answers = None,
        versus: Tokens = None,
        position: int | str | None = None,
        reference: ArrayLike | None = None,
        cotangent: ArrayLike | None = None,
        of: Hook | None = None,
        rules: str = "gradient",
    ) -> HookSpec:
        """Set the metric whose gradients are asked for, one number a row; `HookCache.metric` has it.

        Args:
            name: "logit", "logit_diff", "log_probability", "probability", "kl", "loss" or "cotangent", see
                `MetricSpec`.
            answer, versus: tokens, as ids or texts, one for all rows or one a row; of the "loss" of a masked language
                model the hidden tokens, of a row with several masks a list.
            position: of each row's own text, at which the logits are read; the last if left out. "loss", and a
                cotangent for every logit, read all.
            reference: of "kl", the logits of the distribution that is compared with, [vocab] or [batch, vocab].
            cotangent: of "cotangent", the derivative by the logits of a number that is no metric here, [vocab], [batch,
                vocab] or [batch, seq, vocab]; with `of`, in that value's shape.
            of: of "cotangent", a hook point whose value takes the place of the logits.
            rules: "gradient", the derivatives, or propagation rules in their place: "frozen_norm", "relp",
                "relp_frozen_pattern", "frozen_norm_pattern"; see `mionnx.rewrite.gradient.propagation`.

        Raises:
            GradientError: an unknown metric or one without a gradient, or a part or position that is missing or not
                read.

        Example:
            spec = HookSpec().gradient("*.hook_mlp_out").set_metric("logit_diff", answer=" John", versus=" Mary")
        """
        self.metric = MetricSpec(name, answer, versus, position, reference, cotangent, of, rules)
        return self

    def intervene(self, hook: Hooks, intervention: Intervention) -> HookSpec:
        """Register an intervention at a hook point, or at every one selected by a glob or predicate.

        A glob or predicate means one intervention at each hook point that a capture of it would take, in the order in
        which the model computes them. It is found out when the spec is used: it must select at least one, and the
        intervention must be possible, and have an effect, at each.

        Args:
            hook: a hook point, its name, a glob ("blocks.*.attn.hook_z"), a function of the name, or a list of these,
                which registers one after the other.

        Raises:
            HookError: an empty list, something else than an `Intervention`, or more than 2,000 at one place.

        Example:
            spec = HookSpec().intervene("blocks.1.attn.hook_z", Intervention.Zero(heads=3))
            spec.intervene("blocks.*.hook_mlp_out", Intervention.Scale(0.5))
        """
        if not isinstance(intervention, Intervention):
            raise HookError(f"intervene({str(hook)!r}, ...) takes an Intervention, got {type(intervention).__name__}")
        chosen = [what if isinstance(what, HookPoint) else HookChoice(what) for what in each(hook)]
        for where in chosen:
            several = len(self.interventions) >= MOST_INTERVENTIONS  # spares short specs the comparisons
            if several and sum(other == where for other, _ in self.interventions) >= MOST_INTERVENTIONS:
                raise HookError(
                    f"{where} has {MOST_INTERVENTIONS:,} interventions, the most: a value may have an entry a position"
                )
            self.interventions.append((where, intervention))
        return self

    def set_state_knockout(self, *specs: StateKnockoutSpec) -> HookSpec:
        """Register knockouts of tokens' writes into recurrent states; each of them applies.

        Example:
            spec = HookSpec().set_state_knockout(StateKnockoutSpec().position(0).layer(3))
        """
        self.state_knockouts += [_of(StateKnockoutSpec, spec) for spec in specs]
        return self

    def set_state_steering(self, *specs: StateSteeringSpec) -> HookSpec:
        """Register scales of tokens' writes into recurrent states; where several apply, they multiply.

        Example:
            spec = HookSpec().set_state_steering(StateSteeringSpec(2.0).position(0).head(1))
        """
        self.state_steerings += [_of(StateSteeringSpec, spec) for spec in specs]
        return self

    def extend(self, other: HookSpec) -> HookSpec:
        """Append the captures, gradients and interventions of another spec.

        Raises:
            GradientError: both have a metric.

        Example:
            both = HookSpec().extend(steering).extend(captures)
        """
        add_new(self.captures, other.captures)
        self.interventions += other.interventions
        self.state_knockouts += other.state_knockouts
        self.state_steerings += other.state_steerings
        add_new(self.gradients, other.gradients)
        if self.metric is not None and other.metric not in (None, self.metric):
            raise GradientError(f"a spec has one metric: this one has {self.metric}, the other {other.metric}")
        self.metric = self.metric or other.metric
        return self

    def is_empty(self) -> bool:
        """Whether the spec has no capture, no intervention, no gradient and no metric."""
        lists = self.captures, self.interventions, self.state_knockouts, self.state_steerings
        return not any((*lists, self.gradients, self.metric))

    def num_captures(self) -> int:
        """Number of capture requests; a glob or predicate counts once."""
        return len(self.captures)

    def num_interventions(self) -> int:
        """Number of interventions, without those in a state; a glob or predicate counts once."""
        return len(self.interventions)

    def is_captured(self, hook: Hook) -> bool:
        """Whether a request captures a hook point."""
        return any(request.selects(str(hook)) for request in self.captures)

    def has_intervention_at(self, hook: Hook) -> bool:
        """Whether any intervention targets a hook point."""
        places = (where for where, _ in self.interventions)
        return any(
            where.name == str(hook) if isinstance(where, HookPoint) else where.selects(str(hook)) for where in places
        )

    def _facts(self) -> Iterator[str]:
        yield from (count(len(self.captures), "capture"), count(len(self.interventions), "intervention"))
        if self.state_knockouts or self.state_steerings:
            yield count(len(self.state_knockouts), "state knockout")
            yield count(len(self.state_steerings), "state steering")
        if self.gradients:
            yield count(len(self.gradients), "gradient")

    def _lines(self) -> Iterator[str]:
        yield from (f"{where}: {intervention!r}" for where, intervention in self.interventions)
        yield from (str(one) for one in (*self.state_knockouts, *self.state_steerings))
        yield from (f"capture {described(request)}" for request in self.captures)
        yield from (f"gradient {described(request)}" for request in self.gradients)
        if self.metric is not None:
            yield f"metric {self.metric}"

    def save(self, path: str | Path) -> None:
        """Write the spec as one safetensors file; see `mionnx.spec.spec_file`.

        Raises:
            SpecFileError: a capture or intervention by predicate, a dtype that safetensors does not have, or a file
                that cannot be written.

        Example:
            HookSpec().capture("hook_embed").save("spec.safetensors")
        """
        write_atomic(Path(path), self.to_bytes())

    def to_bytes(self) -> bytes:
        """The bytes of the file that `save` writes; equal specs have equal bytes."""
        return spec_file.serialise(*self._declaration())

    @property
    def sha256(self) -> str:
        """SHA-256 of the file that `save` writes, hexadecimal; equal specs have equal ones."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def _declaration(self) -> tuple[dict[str, list[Any]], dict[str, np.ndarray]]:
        """Lists and tensors of a spec file."""
        tensors = {
            f"interventions.{n}.{name}": array
            for n, (_, intervention) in enumerate(self.interventions)
            for name, array in intervention.rules.stored(intervention).items()
        }
        if self.metric is not None:
            tensors |= {f"metric.{name}": array for name, array in self.metric.tensors.items()}
        declaration = {
            "captures": [request.to_entry() for request in self.captures],
            "interventions": [intervention.to_entry(_text(where)) for where, intervention in self.interventions],
            "state_knockouts": [knockout.to_entry() for knockout in self.state_knockouts],
            "state_steerings": [steering.to_entry() for steering in self.state_steerings],
            "gradients": [request.to_entry() for request in self.gradients],
            "metric": [] if self.metric is None else [self.metric.to_entry()],
        }
        return declaration, tensors

    def _contents(self) -> dict[str, Any]:
        return dict(zip(("declaration", "tensors"), self._declaration(), strict=True))

    @classmethod
    def _of_contents(cls, contents: dict[str, Any]) -> HookSpec:
        return spec_file.fill(HookSpec(), **contents)

    @staticmethod
    def load(path: str | Path) -> HookSpec:
        """Read a spec that `save` wrote; see `mionnx.spec.spec_file`.

        Raises:
            SpecFileError: the file is missing, damaged, or of another version.
            InterventionError: a value in it that no intervention may have (NaN, infinity), or a limit that is none.

        Example:
            spec = HookSpec.load("spec.safetensors")
        """
        return spec_file.load(path, HookSpec())


Spec = TypeVar("Spec")


def _text(where: Where) -> str:
    return where.name if isinstance(where, HookPoint) else where.text


def _of(kind: type[Spec], spec: object) -> Spec:
    if not isinstance(spec, kind):
        raise HookError(f"expected a {kind.__name__}, got {type(spec).__name__}")
    return deepcopy(spec)  # what the caller chains onto it later is not part of this spec
