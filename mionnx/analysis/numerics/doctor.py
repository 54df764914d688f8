"""`doctor`: range, forecast, remedy and check of a narrow dtype, in one call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from mionnx.analysis.numerics.diagnosis import Check, Diagnosis
from mionnx.analysis.numerics.distance import Distance, FirstRun, first_run
from mionnx.analysis.numerics.forecast import DECOMPOSED, IN_FLOAT32, check_casts, forecast_of
from mionnx.analysis.numerics.narrow_model import refuse_narrowed, write
from mionnx.analysis.numerics.range import measure, report_of
from mionnx.analysis.numerics.remedy import Remedy, find_remedy
from mionnx.analysis.numerics.texts_run import TextsRun
from mionnx.analysis.quantisation.quantise_model import quantise_model
from mionnx.engine.engines import DEPLOYMENTS, engine_of
from mionnx.errors import InputError, ModelError, nearest
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.output_head import LOGITS
from mionnx.machine.leftovers import new_folder, remove_leftovers
from mionnx.machine.progress import shown
from mionnx.machine.typed import typed
from mionnx.run.runner import Runner

FLOAT16, INT4 = "float16", "int4"
CHOICES = (FLOAT16, INT4, *DEPLOYMENTS)
STEPS = {  # how a step of a rescale begins -> its kind
    "behind": "powers of two behind nodes",
    "constant factor": "constant factors times a power of two",
    "epsilon": "epsilons of norms times a power of four",
    "in front": "powers of two in front of products",
    "one factor": "factors of products of two values times a power of two",
    "taken back": "powers taken back in front of nodes that need the true values",
    "weight": "weights of norms times a power of two",
}


@typed()
def doctor(
    model: Runner,
    texts: str | Sequence[str] | None = None,
    *,
    target: str = FLOAT16,
    folder: str | Path | None = None,
    bound: float = 1e-3,
    progress: bool | None = None,
) -> Diagnosis:
    """Diagnose a model for float16: where it leaves the range, what that costs, an exact cure, and a check of it.

    Args:
        texts: to run on, in windows of 256 tokens; if left out, what the model writes by itself (1,024 tokens).
        target: "float16"; "webgpu", whose products add up in float16, checked in ONNX Runtime's WebGPU plug-in where it
            runs; "cuda", checked there; or "int4": weights in blocks of 4 bits with scales of float16.
        folder: path of a folder that does not exist yet, for the sound model; if left out, none is kept.
        bound: of KL(float32 || narrow) in nats that counts as sound; see `narrow`.
        progress: None for a bar in a terminal or notebook when it takes longer than two seconds, and a line a minute in
            a log; True at once, False for none.

    Returns:
        the diagnosis in one line, the evidence, the cure, and what the sound model does in a runtime.

    Raises:
        InputError: another target.
        ModelError: the model is no float32 model; the folder exists or cannot be written.

    Example:
        print(model.doctor("The capital of France is Paris.").line())
    """
    if target not in CHOICES:
        raise InputError(f"target={target!r}: {', '.join(CHOICES)}{nearest(target, CHOICES)}")
    refuse_narrowed(model.hooked)
    if folder is not None and Path(folder).exists():
        raise ModelError(f"{folder} exists already")
    check_casts(FLOAT16)
    with shown(progress), TemporaryDirectory() as scratch:
        if target == INT4 and not model.hooked.metadata.quantised:
            blocks = quantise_model(model, Path(scratch) / INT4)
            model = type(model)(HookedModel.open(blocks, check="none"), model.options)
        diagnosis = _diagnosed(model, texts, target, None if folder is None else Path(folder), bound, Path(scratch))
    model.give_back(later=True)
    return diagnosis


def _diagnosed(
    model: Runner, texts: str | Sequence[str] | None, target: str, folder: Path | None, bound: float, scratch: Path
) -> Diagnosis:
    with shown() as progress:
        run = TextsRun(model, texts, progress)
        measured = measure(run, run.graph)
        report = report_of(run, measured, FLOAT16)
        accumulate = DEPLOYMENTS[target][1] if target in DEPLOYMENTS else IN_FLOAT32
        with first_run(run.logits(run.graph.proto, IN_FLOAT32)) as first:
            split = forecast_of(run, run.graph, first, FLOAT16, norms=DECOMPOSED)
            fused = forecast_of(run, run.graph, first, FLOAT16, alone=True)
            remedy, why = None, ""
            try:
                remedy = find_remedy(run, measured, first, FLOAT16, bound)
            except ModelError as error:
                why = str(error)
            after = remedy.after if remedy else None
            if remedy and accumulate != IN_FLOAT32:
                graph = remedy.rescaled.graph
                after = forecast_of(run, graph, first, FLOAT16, islands=remedy.islands, accumulate=accumulate)
            checks = []
            if remedy is not None:
                place = folder or scratch / "cured"
                remove_leftovers(place.parent, holding=())
                with new_folder(place, ModelError) as partial:
                    write(model.hooked, partial, FLOAT16, remedy, {"bound": bound, **run.facts}, progress)
                checks = [*_checks(model, place, target, texts, first)]
    cure = [] if remedy is None else [remedy.line(), *_short(remedy)]
    destination = str(folder) if folder is not None and remedy is not None else ""
    return Diagnosis(model.hooked.name, target, bound, report, fused, split, after, cure, checks, why, destination)


def _short(remedy: Remedy) -> list[str]:
    """The steps of a rescale by their kind, how many each."""
    kinds = Counter(
        next(kind for begin, kind in STEPS.items() if one.startswith(begin)) for one in remedy.rescaled.steps
    )
    return [f"{number} {kind}" for kind, number in kinds.items()]


def _checks(
    model: Runner, folder: Path, target: str, texts: str | Sequence[str] | None, first: FirstRun
) -> list[Check]:
    """The sound model in the runtime of the target, beside float32."""
    if target not in DEPLOYMENTS:
        return []
    options, _ = DEPLOYMENTS[target]
    engine = engine_of(options)
    title = engine.title(options)
    if why := engine.missing(options):
        return [Check(title, None, why, {})]
    cured = type(model)(HookedModel.open(folder, check="none"), model.options)
    with shown() as progress:
        run = TextsRun(cured, texts if texts is not None else None, progress)
        try:
            with run.opened(run.graph.proto, options) as program:
                logits = (run.predictions(outputs) for _, outputs in run.run(program, [LOGITS], title))
                distance = Distance.of(first, logits, vectors=run.vectors)
        except ModelError as error:
            return [Check(title, None, str(error), engine.facts(options))]
    return [Check(title, distance, "", engine.facts(options))]
