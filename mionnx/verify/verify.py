"""`verify`: one model in several runtimes, or two models, compared hook point by hook point."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.quantisation.candidates import losses
from mionnx.analysis.quantisation.windows import windows
from mionnx.errors import InputError, InterventionError, ModelError
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.inputs.token_batch import TokenBatch, make_token_batch
from mionnx.inputs.token_rows import is_one_prompt
from mionnx.machine.brief import count
from mionnx.machine.memory import format_bytes
from mionnx.machine.progress import Progress, shown
from mionnx.machine.ranges import listed
from mionnx.machine.typed import typed
from mionnx.run.runner import Runner
from mionnx.run.sampling import refuse_too_long
from mionnx.run.tokenizing import Prompt
from mionnx.spec.hook_spec import HookSpec
from mionnx.verify.compare import ComparisonSettings, compare, stream
from mionnx.verify.compare import record as record_side
from mionnx.verify.difference import IN_BATCH, ONE_THREAD, TWICE, Difference, Repeat
from mionnx.verify.graph_under_test import GraphUnderTest
from mionnx.verify.recorded_values import RecordedValues
from mionnx.verify.request import Request, as_recorded, names_of, path_of
from mionnx.verify.result import Beside, Verification
from mionnx.verify.runtimes import PROVIDER, WITH_THREADS, Runtime, runtime_of
from mionnx.verify.steps import Side

RUNTIMES = ("ort-cpu", "ort-cpu:none", "reference")
CONTINUED = 8  # tokens


@typed()
def verify(
    model: Runner,
    prompts: Sequence[Prompt] | Prompt = (),
    runtimes: Sequence[str] = RUNTIMES,
    *,
    points: str | HookPoint | Sequence[str | HookPoint] | None = None,
    hooks: HookSpec | None = None,
    other: Runner | None = None,
    record: str | Path | None = None,
    against: str | Path | None = None,
    tolerance: float | None = None,
    local: bool = True,
    greedy: int | None = None,
    positions: Sequence[int] | None = None,
    repeat: bool = False,
    checkpoint: str | Path | None = None,
    progress: bool | None = None,
    texts: str | Sequence[str] = (),
    matrices: bool | None = None,
    experts: bool = False,
) -> Verification:
    """Run this model in several runtimes and compare them hook point by hook point.

    Memory stays below twice what one runtime takes, however many hook points are compared: values lie on disk. Only
    narrowing a fault down to its nodes holds the values of its one step.

    Args:
        prompts: texts, or ids [seq] or [batch, seq] each; each runs by itself, without padding. A pair of texts of an
            encoder is `model.tokenize(a, b)`; KL is then of its labels, tags, tokens, or of a span's start and end.
        runtimes: "torch" (transformers, eager), "ort-cpu", "ort-cuda", "openvino", "onnxruntime-web", "reference"
            (onnx's own evaluator) or an ONNX Runtime provider's full name; "ort-cpu:none", ":basic", ":extended",
            ":all" set the optimisation level, ":threads=1" the threads. All are compared with the first. If left
            out, the default, or with `other` "ort-cpu" alone: it is the models that are compared then, and onnx's own
            evaluator takes minutes for a real one.
        points: globs of hook points (those that derive from others by their full names only); `hook_logits` is
            always compared. If left out, the residual streams, or what was recorded.
        hooks: interventions, in force in every runtime (torch is left out where one is a splice); its captures are
            compared too.
        other: a second model, run in each of the runtimes as well: another dtype of the same checkpoint, or the
            checkpoint of a quantised file. Its part of the result says which layer adds most to the distance of the
            two, and KL(other || this) in nats; hook points that one of the two lacks are left out, and named.
        record: write the first runtime's values to this safetensors file, for another machine.
        against: compare with such a file instead of the first runtime; prompts may be left out.
        tolerance: largest difference, as a share of the hook point's largest value, that is agreement; by default
            5e-5 in float32, 5e-3 in float16, 4e-2 in bfloat16.
        local: measure what each step between hook points adds by itself, and find the first that adds too much.
        greedy: tokens to choose greedily after each prompt, and compare: 8 if left out, none of an encoder or with
            `texts`, whose windows are cut anywhere.
        positions: compare (and record) these positions of each prompt only.
        repeat: say which runtimes are bit-identical when this model is run again, on one thread, and with a row in
            a batch, at all positions.
        checkpoint: where "torch" finds the weights, if the hooked model's folder has not all of them; not with
            `other`.
        progress: see `patch_sweep`.
        texts: run besides, cut into windows of 256 tokens; nothing is then continued.
        matrices: measure each matrix of a quantised model by itself, put into its floats, over at most 256 tokens:
            `Verification.matrices`. If left out, where one of the two models is what `quantise` made of floats. All
            matrices of a stack of experts are put in together.
        experts: measure each expert's matrix by itself too: as many runs as there are, less those of experts that no
            token chose.

    Raises:
        InputError: an unknown runtime, no prompts, a tolerance that is none.
        HookError: a hook point that the model does not have.
        RuntimeMissingError: fewer runtimes can run here than a comparison needs.
        SpecFileError: a recorded run that cannot be written, or is damaged.

    Example:
        result = model.verify("The capital of France is", ["ort-cpu", "reference"], greedy=0)
        assert result.agrees, result.summary()
    """
    if other is not None and runtimes is RUNTIMES:  # models are compared then: onnx's evaluator takes minutes
        runtimes = RUNTIMES[:1]
    prompts = [*_listed(prompts), *(windows(model, texts) if texts else ())]
    greedy = _continued(model, greedy, bool(texts))
    calls = [call_of(model, prompt) for prompt in prompts]
    for call in calls:
        refuse_too_long("greedy", greedy, call, model.hooked.metadata)
    request = Request(
        runtimes, points, hooks or HookSpec(), other.hooked if other else None, path_of(against), path_of(record),
        tolerance, local, greedy, positions, repeat, path_of(checkpoint), matrices, experts,
    )  # fmt: skip
    request.check()
    if not calls and against is None:
        raise InputError("there is no prompt to run on")
    texts_of_prompts = [_shown(prompt, call) for prompt, call in zip(prompts, calls, strict=True)]
    with shown(progress) as show:
        verification = _verified(model.hooked, calls, texts_of_prompts, request, show)
    model.give_back(later=True)
    return verification


def _listed(prompts: Any) -> list[Any]:
    if is_one_prompt(prompts):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise InputError(f"prompts must be texts or ids, got {type(prompts).__name__}")
    return listed("prompts", prompts)


def call_of(model: Runner, prompt: Prompt) -> TokenBatch:
    """A prompt as the inputs of a forward pass, without padding."""
    call = make_token_batch(model.ids(prompt), None, None, model.hooked)
    if not call.real.all():
        raise InputError("texts of unequal length in one prompt: give each as a prompt of its own")
    return call


def _shown(prompt: Prompt, call: TokenBatch) -> str:
    text = prompt if isinstance(prompt, str) else getattr(prompt, "text", "")
    return text or f"ids {list(call.input_ids.shape)}"


def _verified(
    model: HookedModel, calls: list[TokenBatch], prompts: list[str], request: Request, progress: Progress
) -> Verification:
    """Compare each side with the first, then matrices, then repeated runs."""
    notes: list[str] = []
    names, spec = request.names(model, notes), request.spec
    recording = RecordedValues.open(request.against) if request.against else None
    tolerance = request.tolerance_of(model, recording)
    settings = ComparisonSettings(tolerance, request.local, request.greedy, request.positions, progress, notes)
    if recording is not None:
        recorded = recording.facts["names"]
        if not request.points:  # all that was recorded, and the spec's captures, which are refused if they were not
            names = [*recorded, *(name for name in names_of(model, (), spec) if name not in recorded)]
        calls, names, settings = as_recorded(recording, calls, names, model, settings)
        prompts = [*recording.facts["texts"]]
    if settings.positions is not None:
        notes.append(f"positions {list(settings.positions)} only: what steps add by themselves is not measured")
    calls = [_with_horizon(call, settings.greedy) for call in calls]
    graph = GraphUnderTest(model, spec, names, calls, "this model" if request.other else "")
    runtimes, skipped = request.split_runtimes(graph)
    # those of weights are read from the disk: only where another machine asks for them
    hashes = graph.hashes() if request.record or recording else {"graph": graph.graph_hash()}
    sides = [Side(graph, runtime) for runtime in runtimes]
    with TemporaryDirectory() as scratch:
        if recording is None:
            # The first runtime is the reference: it is recorded before the others run.
            first, environment = sides.pop(0), runtimes[0].environment()
            record_side(first, RecordedValues(Path(scratch) / "first"), settings)
        else:
            environment = recording.facts["environment"]
            first = _recorded_side(graph, runtimes, recording, hashes, settings)
        besides, failed = _all_compared(
            first, sides + _others(request, graph, runtimes, skipped), Path(scratch), settings
        )
        if request.record:
            notes.append(_keep(first, request.record, prompts, hashes, environment, settings))
    matrices = losses(model, request.other, calls, spec, request.matrices, progress, notes, request.experts)
    repeats = [
        one for runtime in runtimes * request.repeat for one in _repeats(runtime, graph, request, failed, settings)
    ]
    return Verification(_title(model, request.other, graph), first.title, besides, skipped, failed, tolerance, notes,
                        prompts, hashes, environment, repeats, matrices)  # fmt: skip


def _continued(model: Runner, greedy: int | None, windowed: bool) -> int:
    """The tokens to choose after each prompt; those that would have no effect are refused."""
    if not (model.bidirectional or windowed):
        return CONTINUED if greedy is None else greedy
    if greedy:
        why = f"{model.hooked.name} is an encoder" if model.bidirectional else "windows of texts are cut anywhere"
        raise InputError(f"greedy={greedy}: {why}, and nothing follows: leave it out")
    return 0


def _with_horizon(call: TokenBatch, greedy: int) -> TokenBatch:
    """Mark a batch as the first step of a generation: interventions may reach later tokens."""
    # With one token no later step follows.
    return replace(call, prompt_lengths=call.lengths, final_lengths=call.lengths + greedy - 1) if greedy > 1 else call


def _title(model: HookedModel, other: HookedModel | None, graph: GraphUnderTest) -> str:
    changes = graph.spec.num_interventions()
    steered = f", {count(changes, 'intervention')}" if changes else ""
    names = model.name if other is None else f"{model.name} and {other.name}"
    prompts = count(len(graph.calls), "prompt")
    return f"{names}: {len(graph.names)} hook points, {prompts}, {model.metadata.dtype}{steered}"


def _recorded_side(
    graph: GraphUnderTest,
    runtimes: Sequence[Runtime],
    recording: RecordedValues,
    hashes: dict[str, str],
    settings: ComparisonSettings,
) -> Side:
    """The side of a recorded run; notes on what is another here."""
    facts, notes = recording.facts, settings.notes
    notes += [
        f"the recorded run has another {what}: {facts['hashes'].get(what, 'unknown')[:12]}, here {here[:12]}"
        for what, here in hashes.items()
        if facts["hashes"].get(what) != here
    ]
    notes += _other_machine(facts["environment"], runtimes[0].environment())
    sides = [Side(graph, runtime) for runtime in runtimes]
    if settings.local and not all(side.by_parts for side in sides):
        notes.append("what steps add by themselves is not measured in runtimes of whole models beside a recorded run")
    pairs = zip(facts["greedy"], graph.calls, strict=True) if facts["greedy"] else ()
    greedy = [np.array(ids, np.int64).reshape(call.batch, -1) for ids, call in pairs]
    return Side(graph, None, recording, greedy, f"recorded {facts['title']}")


def _other_machine(there: dict[str, Any], here: dict[str, Any]) -> Iterator[str]:
    """The differences of two environments, a note each."""
    for what in sorted({*there, *here} - {"versions", "options", "runtime", "features"}):
        if there.get(what) != here.get(what):
            yield f"recorded with another {what}: {there.get(what)}, here {here.get(what)}"
    for name in sorted({*there["versions"], *here["versions"]}):
        versions = [one["versions"].get(name, "none") for one in (there, here)]
        if versions[0] != versions[1]:
            yield f"recorded with {name} {versions[0]}, here {versions[1]}"
    missing = [sorted({*one["features"]} - {*other["features"]}) for one, other in ((there, here), (here, there))]
    if any(missing):
        yield f"processor features only there: {' '.join(missing[0])}; only here: {' '.join(missing[1])}"


def _others(
    request: Request, graph: GraphUnderTest, runtimes: Sequence[Runtime], skipped: dict[str, str]
) -> list[Side]:
    """The second model in every runtime that can run it."""
    if request.other is None:
        return []
    other = [GraphUnderTest(request.other, graph.spec, graph.names, graph.calls, "other model") for _ in runtimes]
    sides = [Side(*one) for one in zip(other, runtimes, strict=True)]
    why = {side.title: runtime.missing(side.graph) for side, runtime in zip(sides, runtimes, strict=True)}
    skipped |= {title: reason for title, reason in why.items() if reason is not None}
    return [side for side in sides if why[side.title] is None]


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
        for name in ("second", "inner"):  # the next side records its own
            (scratch / name).unlink(missing_ok=True)
    return besides, failed


def _keep(
    side: Side,
    path: Path,
    prompts: list[str],
    hashes: dict[str, str],
    environment: dict[str, Any],
    settings: ComparisonSettings,
) -> str:
    """Write a side's values, with all facts that a comparison needs; a line on what was written."""
    assert side.recording is not None
    names, calls = side.graph.names, side.graph.calls
    facts = {
        "title": side.title,
        "texts": prompts,
        "prompts": [call.input_ids.tolist() for call in calls],
        "names": names,
        "positions": None if settings.positions is None else list(settings.positions),
        "count": settings.greedy,
        "dtype": side.dtype,
        "greedy": [ids.tolist() for ids in side.greedy],
        "hashes": hashes,
        "environment": environment,
    }
    types = [None if call.token_type_ids is None else call.token_type_ids.tolist() for call in calls]
    side.recording.keep(path, facts | ({"types": types} if any(types) else {}))
    points = names[0] if len(names) == 1 else f"{len(names)} hook points from {names[0]} to {names[-1]}"
    where = "" if settings.positions is None else f", positions {', '.join(map(str, settings.positions))} only"
    chosen = f", {count(settings.greedy, 'greedy token')} after each" if settings.greedy else ""
    size = format_bytes(path.stat().st_size)
    return f"wrote {path}, {size}: {side.title} at {points}, {count(len(calls), 'prompt')}{where}{chosen}"


def _repeats(
    runtime: Runtime, graph: GraphUnderTest, request: Request, failed: dict[str, str], settings: ComparisonSettings
) -> Iterator[Repeat]:
    try:
        yield from _repeated(runtime, graph, request.checkpoint, settings.progress)
    except ModelError as error:
        failed[f"{runtime.title}, repeated"] = str(error)
    except InterventionError as error:  # a value for these rows only
        settings.notes.append(f"{runtime.title} is not repeated with a row in a batch: {error}")


def _repeated(runtime: Runtime, graph: GraphUnderTest, checkpoint: Path | None, progress: Progress) -> Iterator[Repeat]:
    """Run a graph again in each way that a runtime has."""
    with TemporaryDirectory() as scratch:
        recording = RecordedValues(Path(scratch) / "first")
        stream(Side(graph, runtime), recording.add, progress)

        def repeat(what: str, again: Runtime, rerun: GraphUnderTest) -> Repeat:
            differences = {name: Difference(unit=graph.model.metadata.dtype) for name in graph.names}

            def look(prompt: int, name: str, value: NDArray[Any]) -> None:
                # The first rows of a batch are the text itself.
                differences[name].add(recording.get(prompt, name), value[: graph.calls[prompt].batch])

            stream(Side(rerun, again), look, progress)
            differing = next((name for name in graph.names if not differences[name].identical), None)
            largest = max(one.max_abs for one in differences.values())
            relative = max(one.relative for one in differences.values())
            return Repeat(runtime.title, what, differing is None, largest, relative, differing)

        yield repeat(TWICE, runtime, graph)
        name, *settings = runtime.title.split(":")
        with_threads = name in WITH_THREADS or name.endswith(PROVIDER)
        if with_threads and not any(setting.startswith("threads=") for setting in settings):
            yield repeat(ONE_THREAD, runtime_of(f"{runtime.title}:threads=1", checkpoint), graph)
        doubled = GraphUnderTest(graph.model, graph.spec, graph.names, [_doubled(call) for call in graph.calls])
        yield repeat(IN_BATCH, runtime, doubled)


def _doubled(call: TokenBatch) -> TokenBatch:
    """Add the reversed text as a second row: of one length, it needs no padding, and it differs."""
    ids = np.concatenate([call.input_ids, call.input_ids[:, ::-1]])
    ends = [None if length is None else np.tile(length, 2) for length in (call.prompt_lengths, call.final_lengths)]
    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape).copy()
    return replace(
        call,
        input_ids=ids,
        attention_mask=np.ones_like(ids),
        position_ids=positions,
        prompt_lengths=ends[0],
        final_lengths=ends[1],
        token_type_ids=None if call.token_type_ids is None else np.tile(call.token_type_ids, (2, 1)),
    )
