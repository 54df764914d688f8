"""`verify`: the arguments of a comparison, checked, and its parts in order."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.quantisation.matrix_comparison import losses
from mionnx.bind.bound_spec import bind
from mionnx.errors import HookError, InputError, InterventionError, ModelError, RuntimeMissingError, SpecFileError
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.inputs.token_batch import TokenBatch
from mionnx.machine.progress import Progress, silent
from mionnx.rewrite.plan import CaptureNode
from mionnx.spec.hook_spec import HookSpec
from mionnx.verify.compare import ComparisonSettings, Side, compare, record, stream
from mionnx.verify.difference import Difference
from mionnx.verify.environment import environment, hashes
from mionnx.verify.graph_under_test import LOGITS_POINT, GraphUnderTest
from mionnx.verify.recorded import as_recorded, keep, other_machine
from mionnx.verify.recorded_values import RecordedValues
from mionnx.verify.result import IN_BATCH, ONE_THREAD, TWICE, Beside, Repeat, Verification
from mionnx.verify.runtime import GraphRuntime, Runtime
from mionnx.verify.runtime_names import WITH_THREADS, runtime_of

HOOKS = "blocks.*.hook_resid_*"
# Largest difference as a share of a value's largest entry that is agreement. Of half precision, five times its unit.
TOLERANCES = {"float32": 5e-5, "float16": 5e-3, "bfloat16": 4e-2}


@dataclass(frozen=True)
class Request:
    """Request of a comparison.

    Attributes:
        runtimes: titles; all are compared with the first, or with a recorded run.
        hooks: globs of hook points; `hook_logits` is always compared. None for `HOOKS`, or all that were recorded.
        other: a second model, run in each of the runtimes too.
        against: a recorded run, which is then what all are compared with.
        tolerance: None for that of the dtype.
        local, greedy, positions: see `ComparisonSettings`.
        repeat: whether to look for bits that differ when a run is repeated.
        matrices: whether each quantised matrix is measured by itself; None where one model is the floats of the other.
    """

    runtimes: Sequence[str]
    hooks: str | HookPoint | Sequence[str | HookPoint] | None = None
    spec: HookSpec | None = None
    other: HookedModel | None = None
    against: Path | None = None
    record: Path | None = None
    tolerance: float | None = None
    local: bool = True
    greedy: int = 8
    positions: Sequence[int] | None = None
    repeat: bool = False
    checkpoint: Path | None = None
    matrices: bool | None = None
    experts: bool = False


def names_of(model: HookedModel, hooks: str | HookPoint | Sequence[str | HookPoint], spec: HookSpec) -> list[str]:
    """The hook points that are compared, in execution order, `hook_logits` last.

    A pattern leaves out what is derived from other hook points, which are compared; a name does not.

    Raises:
        HookError: a glob that matches nothing, or a capture of the spec that is not the whole of a value.
    """
    captures = HookSpec().extend(spec)
    globs = [str(hook) for hook in ([hooks] if isinstance(hooks, str | HookPoint) else hooks)]
    for glob in globs:
        captures.capture(glob)
    captures.capture(LOGITS_POINT)
    named = {*globs, *(str(request.what) for request in spec.captures)}
    values = [want for want in bind(captures, model).plan.captures if want.hook in named or _plain(want)]
    odd = [want.fetched for want in values if want.fetched != want.hook or want.inner is not None]
    if odd:
        raise HookError(f"{odd[0]}: runtimes are compared at whole values of the model, after their interventions")
    chosen = {want.hook for want in values}
    if globs and chosen <= {LOGITS_POINT} and LOGITS_POINT not in named:
        raise HookError(f"{globs[0]!r} means derived hook points only: give them by their full names")
    return sorted(chosen, key=lambda name: model.order[name])


def _plain(want: CaptureNode) -> bool:
    """Whether a glob may select a value: not a derived one, nor one inside a splice."""
    return want.inner is None and not HookPoint.parse(want.hook).derived


def verify(
    model: HookedModel,
    calls: Sequence[TokenBatch],
    prompts: Sequence[str],
    request: Request,
    progress: Progress = silent,
) -> Verification:
    """See `MIModel.verify`."""
    _check(request, calls)
    spec = request.spec or HookSpec()
    names = names_of(model, HOOKS if request.hooks is None else request.hooks, spec)
    notes: list[str] = []
    names = _shared(model, names, request, notes)
    recording = RecordedValues.open(request.against) if request.against else None
    tolerance = _tolerance(request, model, recording)
    settings = ComparisonSettings(tolerance, request.local, request.greedy, request.positions, progress, notes)
    if recording is not None:
        if not request.hooks:
            captured = names_of(model, (), spec)
            names = [*recording.facts["names"], *(name for name in captured if name not in recording.facts["names"])]
        calls, names, prompts, settings = as_recorded(recording, calls, names, prompts, model, settings)
    if settings.positions is not None:
        notes.append(f"positions {list(settings.positions)} only: what steps add by themselves is not measured")
    calls = [_with_horizon(call, settings.greedy) for call in calls]
    graph = GraphUnderTest(model, spec, names, calls, "this model" if request.other else "")
    runtimes, skipped = _runtimes(request, graph)
    hashed = hashes(graph) if request.record or recording else {"graph": graph.graph_hash()}
    with TemporaryDirectory() as scratch:
        first, rest, where = _first(graph, runtimes, recording, hashed, notes, Path(scratch), settings)
        rest += _others(request, names, runtimes, graph, skipped)
        besides, failed = _all_compared(first, rest, Path(scratch), settings)
        if request.record:
            notes.append(keep(first, request.record, prompts, hashed, where, settings))
    matrices = losses(model, request.other, calls, spec, request.matrices, progress, notes, request.experts)
    again = runtimes if request.repeat else []
    repetitions = [one for runtime in again for one in _repeats(runtime, graph, request, failed, settings)]
    title = _title(model, request.other, graph)
    return Verification(title, first.title, besides, skipped, failed, settings.tolerance, notes,
                        list(prompts), hashed, where, repetitions, matrices)  # fmt: skip


def _shared(model: HookedModel, names: list[str], request: Request, notes: list[str]) -> list[str]:
    """The hook points of both models; a note on those of the first only."""
    other = request.other
    missing = [name for name in names if other is not None and name not in other.order]
    if other is None or not missing:
        return names
    hooks = request.hooks if request.hooks is not None else HOOKS
    patterns = {str(hook) for hook in ([hooks] if isinstance(hooks, str | HookPoint) else hooks)}
    absent = next((name for name in missing if name in patterns), None)
    shared = [name for name in names if name not in missing]
    if absent or not shared:
        raise HookError(f"{other.name} has no hook point {absent or missing[0]!r}: choose hooks that both have")
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    notes.append(f"{other.name} has no {', '.join(missing[:3])}{more}: left out of the comparison")
    return shared


def _check(request: Request, calls: Sequence[TokenBatch]) -> None:
    if isinstance(request.runtimes, str) or not request.runtimes:
        raise InputError(f"runtimes must be a list of names, got {request.runtimes!r}")
    double = [title for title in request.runtimes if list(request.runtimes).count(title) > 1]
    if double:
        raise InputError(f"runtime {double[0]!r} is there twice; to run one twice, ask for `repeat`")
    if not calls and request.against is None:
        raise InputError("there is no prompt to run on")
    tolerance = request.tolerance
    if tolerance is not None and not (np.isfinite(tolerance) and tolerance >= 0):
        raise InputError(f"tolerance must be a number of 0 or above, got {tolerance!r}")
    _check_positions(request.positions)
    if request.checkpoint is not None:
        if not any(title.split(":")[0] == "torch" for title in request.runtimes):
            raise InputError("checkpoint= is for torch, which is not among the runtimes")
        if request.other is not None:
            raise InputError("checkpoint= with other=: torch would run one checkpoint in place of both models")
    if not isinstance(request.greedy, int) or request.greedy < 0:
        raise InputError(f"greedy must be an integer of 0 or above, got {request.greedy!r}")
    if request.record and not request.record.parent.is_dir():
        raise SpecFileError(f"cannot write {request.record}: there is no folder {request.record.parent}")
    if request.record and request.against:
        raise InputError("give either record or against: a run that is compared with a recorded one is not kept")


def _check_positions(positions: Sequence[int] | None) -> None:
    integers = isinstance(positions, Sequence) and all(isinstance(one, int | np.integer) for one in positions)
    if positions is not None and not (integers and len(positions)):
        raise InputError(f"positions must be a list of integers, at least one, got {positions!r}")


def _with_horizon(call: TokenBatch, greedy: int) -> TokenBatch:
    """Mark a batch as the first step of a generation: interventions may reach later tokens."""
    return replace(call, prompt_lengths=call.lengths, final_lengths=call.lengths + greedy - 1) if greedy > 1 else call


def _tolerance(request: Request, model: HookedModel, recording: RecordedValues | None) -> float:
    dtypes = [model.metadata.dtype, *([request.other.metadata.dtype] if request.other else [])]
    dtypes += [recording.facts["dtype"]] if recording else []
    return max(TOLERANCES[dtype] for dtype in dtypes) if request.tolerance is None else request.tolerance


def _title(model: HookedModel, other: HookedModel | None, graph: GraphUnderTest) -> str:
    count = len(graph.calls)
    changes = graph.spec.num_interventions()
    steered = f", {changes} intervention{'s' * (changes != 1)}" if changes else ""
    names = model.name if other is None else f"{model.name} and {other.name}"
    return (
        f"{names}: {len(graph.names)} hook points, {count} prompt{'s' * (count != 1)}, {model.metadata.dtype}{steered}"
    )


def _runtimes(request: Request, graph: GraphUnderTest) -> tuple[list[Runtime], dict[str, str]]:
    """Split the requested runtimes into those that can run here, and reasons for the others."""
    runtimes = [runtime_of(title, request.checkpoint) for title in request.runtimes]
    why = {runtime.title: runtime.missing(graph) for runtime in runtimes}
    ready = [runtime for runtime in runtimes if why[runtime.title] is None]
    skipped = {title: reason for title, reason in why.items() if reason is not None}
    alone = request.against or request.record or request.other or request.repeat
    if len(ready) < (1 if alone else 2):
        reasons = "; ".join(f"{title}: {reason}" for title, reason in skipped.items())
        raise RuntimeMissingError(
            f"{len(ready)} of the runtimes {', '.join(request.runtimes)} can run here, and a comparison needs "
            f"{1 if alone else 2}. {reasons}"
        )
    return ready, skipped


def _first(
    graph: GraphUnderTest,
    runtimes: Sequence[Runtime],
    recording: RecordedValues | None,
    hashed: dict[str, str],
    notes: list[str],
    scratch: Path,
    settings: ComparisonSettings,
) -> tuple[Side, list[Side], dict[str, Any]]:
    """Make the reference side, the other sides, and the reference's environment."""
    sides = [Side(graph, runtime) for runtime in runtimes]
    if recording is None:
        record(sides[0], RecordedValues(scratch / "first"), settings)
        return sides[0], sides[1:], environment(runtimes[0])
    facts = recording.facts
    notes += [
        f"the recorded run has another {what}: {facts['hashes'].get(what, 'unknown')[:12]}, here {here[:12]}"
        for what, here in hashed.items()
        if facts["hashes"].get(what) != here
    ]
    pairs = zip(facts["greedy"], graph.calls, strict=True) if facts["greedy"] else ()
    greedy = [np.array(ids, np.int64).reshape(call.batch, -1) for ids, call in pairs]
    notes += other_machine(facts["environment"], environment(runtimes[0]))
    if settings.local and any(not isinstance(runtime, GraphRuntime) for runtime in runtimes):
        notes.append("what steps add by themselves is not measured in runtimes of whole models beside a recorded run")
    first = Side(graph, None, recording, greedy, f"recorded {facts['title']}")
    return first, sides, facts["environment"]


def _all_compared(
    first: Side, sides: Sequence[Side], scratch: Path, settings: ComparisonSettings
) -> tuple[list[Beside], dict[str, str]]:
    """Compare every side with the first; a side that fails takes nothing from the rest."""
    besides, failed = [], {}
    for side in sides:
        try:
            besides.append(compare(first, side, scratch, settings))
        except ModelError as error:
            failed[side.title] = str(error)
        for name in ("second", "inner"):
            (scratch / name).unlink(missing_ok=True)
    return besides, failed


def _repeats(
    runtime: Runtime, graph: GraphUnderTest, request: Request, failed: dict[str, str], settings: ComparisonSettings
) -> Iterator[Repeat]:
    try:
        yield from _repeated(runtime, graph, request.checkpoint, settings.progress)
    except ModelError as error:
        failed[f"{runtime.title}, repeated"] = str(error)
    except InterventionError as error:  # a value for these rows only
        settings.notes.append(f"{runtime.title} is not repeated with a row in a batch: {error}")


def _others(
    request: Request, names: Sequence[str], runtimes: Sequence[Runtime], graph: GraphUnderTest, skipped: dict[str, str]
) -> list[Side]:
    """The second model in every runtime that can run it."""
    if request.other is None:
        return []
    sides = [
        Side(GraphUnderTest(request.other, graph.spec, names, graph.calls, "other model"), one) for one in runtimes
    ]
    why = {side.title: runtime.missing(side.graph) for side, runtime in zip(sides, runtimes, strict=True)}
    skipped |= {title: reason for title, reason in why.items() if reason is not None}
    return [side for side in sides if why[side.title] is None]


def _repeated(runtime: Runtime, graph: GraphUnderTest, checkpoint: Path | None, progress: Progress) -> Iterator[Repeat]:
    """Run a graph again in each way that a runtime has.

    A batch is the prompt and the same prompt backwards: rows of one length need no padding, and differ.
    """
    with TemporaryDirectory() as scratch:
        recording = RecordedValues(Path(scratch) / "first")
        stream(Side(graph, runtime), recording.add, progress)
        yield _repeat(runtime.title, TWICE, runtime, graph, graph, recording, progress)
        name, *settings = runtime.title.split(":")
        with_threads = name in WITH_THREADS or name.endswith("ExecutionProvider")
        if with_threads and not any(setting.startswith("threads=") for setting in settings):
            single = runtime_of(f"{runtime.title}:threads=1", checkpoint)
            yield _repeat(runtime.title, ONE_THREAD, single, graph, graph, recording, progress)
        doubled = GraphUnderTest(graph.model, graph.spec, graph.names, [_doubled(call) for call in graph.calls])
        yield _repeat(runtime.title, IN_BATCH, runtime, doubled, graph, recording, progress)


def _doubled(call: TokenBatch) -> TokenBatch:
    """Add the reversed text as a second row; lengths stay as they are."""
    ids = np.concatenate([call.input_ids, call.input_ids[:, ::-1]])
    ends = [None if length is None else np.tile(length, 2) for length in (call.prompt_lengths, call.final_lengths)]
    return TokenBatch(ids, np.ones_like(ids), np.broadcast_to(np.arange(ids.shape[1]), ids.shape).copy(), *ends)


def _repeat(
    title: str,
    what: str,
    runtime: Runtime,
    graph: GraphUnderTest,
    first: GraphUnderTest,
    recording: RecordedValues,
    progress: Progress,
) -> Repeat:
    differences = {name: Difference(unit=graph.model.metadata.dtype) for name in first.names}

    def look(prompt: int, name: str, value: NDArray[Any]) -> None:
        differences[name].add(recording.get(prompt, name), value[: first.calls[prompt].batch])

    stream(Side(graph, runtime), look, progress)
    differing = [name for name in first.names if not differences[name].identical]
    largest = max(one.max_abs for one in differences.values())
    relative = max(one.relative for one in differences.values())
    return Repeat(title, what, not differing, largest, relative, differing[0] if differing else None)
