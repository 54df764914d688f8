"""The checked arguments of a comparison, alone or beside a recorded run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mionnx.bind.bound_spec import bind
from mionnx.errors import HookError, InputError, RuntimeMissingError, SpecFileError
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.inputs.token_batch import TokenBatch, make_token_batch
from mionnx.machine.ranges import at_least
from mionnx.spec.hook_spec import HookSpec
from mionnx.verify.compare import ComparisonSettings
from mionnx.verify.graph_under_test import GraphUnderTest
from mionnx.verify.recorded_values import RecordedValues
from mionnx.verify.runtimes import Runtime, runtime_of

POINTS = "blocks.*.hook_resid_*"
# Largest difference as a share of a value's largest entry that is agreement. Of half precision, five times its unit.
TOLERANCES = {"float32": 5e-5, "float16": 5e-3, "bfloat16": 4e-2}
Points = str | HookPoint | Sequence[str | HookPoint]


@dataclass(frozen=True)
class Request:
    """Request of a comparison; `verify` says what each argument means."""

    runtimes: Sequence[str]
    points: Points | None
    spec: HookSpec
    other: HookedModel | None
    against: Path | None
    record: Path | None
    tolerance: float | None
    local: bool
    greedy: int
    positions: Sequence[int] | None
    repeat: bool
    checkpoint: Path | None
    matrices: bool | None
    experts: bool

    def check(self) -> None:
        """Refuse what contradicts itself or would have no effect."""
        if not self.runtimes:
            raise InputError("runtimes must be a list of names, at least one, got []")
        double = [title for title in self.runtimes if list(self.runtimes).count(title) > 1]
        if double:
            raise InputError(f"runtime {double[0]!r} is there twice; to run one twice, ask for `repeat`")
        check_tolerance(self.tolerance)
        at_least("greedy", self.greedy, 0)
        if self.positions is not None and not len(self.positions):
            raise InputError("positions must be a list of integers, at least one, got []")
        if self.checkpoint is not None:
            if not any(title.split(":")[0] == "torch" for title in self.runtimes):
                raise InputError("checkpoint= is for torch, which is not among the runtimes")
            if self.other is not None:
                raise InputError("checkpoint= with other=: torch would run one checkpoint in place of both models")
        if self.record and not self.record.parent.is_dir():
            raise SpecFileError(f"cannot write {self.record}: there is no folder {self.record.parent}")
        if self.record and self.against:
            raise InputError("give either record or against: a run that is compared with a recorded one is not kept")

    def tolerance_of(self, model: HookedModel, recording: RecordedValues | None) -> float:
        """The largest difference that is agreement, by default that of the coarsest dtype."""
        if self.tolerance is not None:
            return self.tolerance
        dtypes = [one.metadata.dtype for one in (model, self.other) if one]
        return max(TOLERANCES[dtype] for dtype in (*dtypes, *([recording.facts["dtype"]] if recording else ())))

    def names(self, model: HookedModel, notes: list[str]) -> list[str]:
        """The compared hook points that both models have; a note on those of the first only."""
        points = POINTS if self.points is None else self.points
        names, other = names_of(model, points, self.spec), self.other
        missing = [] if other is None else [name for name in names if name not in other.order]
        if other is None or not missing:
            return names
        # What was asked for by its name is missed; what a glob means besides is left out.
        absent = next((name for name in missing if name in _globs(points)), None)
        shared = [name for name in names if name not in missing]
        if absent or not shared:
            raise HookError(f"{other.name} has no hook point {absent or missing[0]!r}: choose hooks that both have")
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        notes.append(f"{other.name} has no {', '.join(missing[:3])}{more}: left out of the comparison")
        return shared

    def split_runtimes(self, graph: GraphUnderTest) -> tuple[list[Runtime], dict[str, str]]:
        """Split the requested runtimes into those that can run here, and reasons for the others."""
        runtimes = [runtime_of(title, self.checkpoint) for title in self.runtimes]
        why = {runtime.title: runtime.missing(graph) for runtime in runtimes}
        ready = [runtime for runtime in runtimes if why[runtime.title] is None]
        skipped = {title: reason for title, reason in why.items() if reason is not None}
        # A recorded run, a second model or a repetition is the other side of a single runtime.
        least = 1 if self.against or self.record or self.other or self.repeat else 2
        if len(ready) < least:
            reasons = "; ".join(f"{title}: {reason}" for title, reason in skipped.items())
            raise RuntimeMissingError(
                f"{len(ready)} of the runtimes {', '.join(self.runtimes)} can run here, and a comparison needs "
                f"{least}. {reasons}"
            )
        return ready, skipped


def path_of(path: str | Path | None) -> Path | None:
    """A path that may be left out; an empty one is not."""
    return None if path is None else Path(path)


def check_tolerance(tolerance: float | None) -> None:
    """Refuse a tolerance that is no number of 0 or above."""
    if tolerance is not None and not (np.isfinite(tolerance) and tolerance >= 0):
        raise InputError(f"tolerance must be a number of 0 or above, got {tolerance!r}")


def _globs(points: Points) -> list[str]:
    return [str(point) for point in ([points] if isinstance(points, str | HookPoint) else points)]


def names_of(model: HookedModel, points: Points, spec: HookSpec) -> list[str]:
    """The hook points that are compared, in execution order, the main output's last."""
    captures, globs = HookSpec().extend(spec), _globs(points)
    output = model.metadata.main_point
    for glob in (*globs, output):
        captures.capture(glob)
    named = {*globs, *(str(request.what) for request in spec.captures)}
    values = [
        want
        for want in bind(captures, model).plan.captures
        # a glob selects nothing inside a splice, nor what derives from other hook points, which are compared
        if want.hook in named or (want.inner is None and not HookPoint.parse(want.hook).derived)
    ]
    odd = [want.fetched for want in values if want.fetched != want.hook or want.inner is not None]
    if odd:
        raise HookError(f"{odd[0]}: runtimes are compared at whole values of the model, after their interventions")
    chosen = {want.hook for want in values}
    if globs and chosen <= {output} and output not in named:
        raise HookError(f"{globs[0]!r} means derived hook points only: give them by their full names")
    return sorted(chosen, key=lambda name: model.order[name])


def _tokens(call: TokenBatch) -> tuple[Any, Any]:
    types = call.token_type_ids
    return call.input_ids.tolist(), None if types is None else types.tolist()


def as_recorded(
    recording: RecordedValues,
    calls: Sequence[TokenBatch],
    names: Sequence[str],
    model: HookedModel,
    settings: ComparisonSettings,
) -> tuple[list[TokenBatch], list[str], ComparisonSettings]:
    """Take prompts, hook points and positions from a recorded run; a request that contradicts it is refused."""
    facts, path = recording.facts, recording.path
    batches = [make_token_batch(np.array(ids, np.int64), None, None, model) for ids in facts["prompts"]]
    if "types" in facts:  # of pairs of texts
        own = [None if types is None else np.array(types, np.int64) for types in facts["types"]]
        batches = [replace(batch, token_type_ids=types) for batch, types in zip(batches, own, strict=True)]
    if calls and [_tokens(call) for call in calls] != [_tokens(batch) for batch in batches]:
        raise InputError(f"these prompts are not those of {path}: leave them out to use the recorded ones")
    missing = [name for name in facts["names"] if name not in model.order]
    if missing:
        raise HookError(f"{path} has {missing[0]!r}, and this {model.metadata.family} model has no such hook point")
    absent = [name for name in names if name not in facts["names"]]
    if absent:
        raise HookError(f"{absent[0]} was not recorded in {path}; it has {', '.join(facts['names'])}")
    # No more tokens than were chosen when it was recorded.
    greedy, positions = min(settings.greedy, facts["count"]), facts["positions"]
    if greedy < settings.greedy:
        settings.notes.append(f"{greedy} tokens were chosen after each prompt when it was recorded, and are here")
    if settings.positions is not None and list(settings.positions) != positions:
        raise InputError(f"{path} has positions {positions or 'all'}: leave them out to use the recorded ones")
    chosen = [name for name in facts["names"] if name in names]
    return batches, chosen, replace(settings, greedy=greedy, positions=positions)
