"""`bisect`: find the smallest part of a graph that two runtimes compute differently, and write it for a bug report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import numpy as np

from mionnx.errors import InputError, ModelError, RuntimeMissingError
from mionnx.graph.hooked_model import HookedModel
from mionnx.inputs.token_batch import TokenBatch
from mionnx.machine.progress import Progress, shown
from mionnx.machine.stored import Stored
from mionnx.machine.typed import typed
from mionnx.run.runner import Runner
from mionnx.run.tokenizing import Prompt
from mionnx.spec.hook_spec import HookSpec
from mionnx.verify.compare import ComparisonSettings, record
from mionnx.verify.graph_under_test import GraphUnderTest
from mionnx.verify.recorded_values import RecordedValues
from mionnx.verify.report import write_report
from mionnx.verify.request import TOLERANCES, check_tolerance, names_of
from mionnx.verify.runtimes import GraphRuntime, runtime_of
from mionnx.verify.steps import Side, local_difference, narrow, unit_of
from mionnx.verify.verify import call_of

COARSE = ("blocks.*.hook_resid_*", "hook_final_norm")


@dataclass(frozen=True)
class Bisection(Stored):
    """The part of a graph in which two sides differ; `save` writes .safetensors.

    Attributes:
        first, second: their titles.
        hook: the hook point at the end of the first step that differs by itself; None if none does.
        after: the values that the part starts from, besides the tokens.
        nodes: of the part, `name (operator)`; empty if there is none.
        max_abs, relative: the difference there, and as a share of the largest value there.
        largest: without a part, the largest difference that a step adds by itself, and where.
    """

    first: str
    second: str
    hook: str | None
    after: list[str]
    nodes: list[str]
    value: str | None
    max_abs: float
    relative: float
    largest: tuple[float, str]
    tolerance: float
    folder: Path | None = None

    def __str__(self) -> str:
        if self.hook is None:
            return (
                f"{self.first} and {self.second}: no step differs by itself by more than {self.tolerance:g}; the "
                f"largest is {self.largest[0]:.2e}, at {self.largest[1]}"
            )
        written = f"; written to {self.folder}" if self.folder else ""
        return (
            f"{self.first} and {self.second} part at {self.value}, before {self.hook}: {', '.join(self.nodes)} on the "
            f"same inputs ({', '.join(self.after) or 'the tokens'}) differ by {self.max_abs:.3g}, {self.relative:.2e} "
            f"of the largest value{written}"
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {**vars(self), "folder": str(self.folder) if self.folder else None}

    _contents = to_dict

    @classmethod
    def _of_contents(cls, contents: dict[str, Any]) -> Self:
        folder = contents.pop("folder")
        return cls(**contents, folder=None if folder is None else Path(folder))


@typed()
def bisect(
    model: Runner,
    prompt: Prompt,
    runtimes: Sequence[str] = ("ort-cpu", "ort-cpu:none"),
    *,
    folder: str | Path | None = None,
    hooks: HookSpec | None = None,
    other: Runner | None = None,
    tolerance: float | None = None,
    progress: bool | None = None,
) -> Bisection:
    """Find the smallest part of the graph that two runtimes compute differently.

    Its inputs are the same in both, and its output is not.

    Args:
        prompt: a text, or ids.
        runtimes: two that run graphs (not "torch"), or one if `other` is given.
        folder: made new, if there is such a part: it as `model.onnx`, its inputs, both outputs, and a program that
            shows the difference; for a bug report.
        hooks: interventions, in force in both.
        other: a second model instead of a second runtime.
        tolerance: see `verify`; 0 finds the first node that does not give the same bits.
        progress: None for a bar in a terminal or notebook when it takes longer than two seconds, and a line a minute in
            a log; True at once, False for none.

    Raises:
        InputError: a runtime that cannot run a part of a graph, or not two sides.
        RuntimeMissingError: a runtime that is not installed.
        ModelError: the folder exists.

    Example:
        print(model.bisect("The capital of France is", ["ort-cpu", "reference"], tolerance=0))
    """
    report, call = Path(folder) if folder else None, call_of(model, prompt)
    if report is not None and report.exists():
        raise ModelError(f"{report} exists already")
    models = [model.hooked, *([other.hooked] if other else [])]
    check_tolerance(tolerance)
    least = max(TOLERANCES[one.metadata.dtype] for one in models) if tolerance is None else tolerance
    first, second = _sides(models, call, runtimes, hooks or HookSpec())
    with shown(progress) as show, TemporaryDirectory() as scratch:
        recording = RecordedValues(Path(scratch) / "first")
        record(first, recording, ComparisonSettings(least, progress=show))
        hook, largest = _coarse(first, second, recording, least, show)
        if hook is None:
            bisection = Bisection(first.title, second.title, None, [], [], None, 0.0, 0.0, largest, least)
        else:
            names = second.graph.names
            inputs = {start: np.asarray(recording.get(0, start)) for start in names[: names.index(hook)]}
            part = narrow(first, second, inputs, hook, 0, least)
            apart = part.difference
            bisection = Bisection(first.title, second.title, hook, part.starts, part.nodes, part.value, apart.max_abs,
                                  apart.relative, largest, least, report)  # fmt: skip
            if report is not None:
                write_report(report, str(bisection), part, first, second)
    model.give_back(later=True)
    return bisection


def _sides(models: Sequence[HookedModel], call: TokenBatch, titles: Sequence[str], spec: HookSpec) -> tuple[Side, Side]:
    """Two runtimes, or two models in one or two runtimes."""
    if len(titles) not in ((1, 2) if len(models) > 1 else (2,)):
        raise InputError(f"bisect compares two runtimes, or two models in one: got {len(titles)} runtimes")
    names = [name for name in names_of(models[0], COARSE, spec) if name in models[-1].order]
    several = ("this model", "other model") if len(models) > 1 else ("",)
    graphs = [GraphUnderTest(one, spec, names, [call], title) for one, title in zip(models, several, strict=True)]
    first, second = (_side(graphs[at], titles[at % len(titles)]) for at in (0, -1))
    return first, second


def _side(graph: GraphUnderTest, title: str) -> Side:
    runtime = runtime_of(title)
    if not isinstance(runtime, GraphRuntime):
        raise InputError(f"{title} runs models as a whole: bisect needs runtimes that run parts of a graph")
    if why := runtime.missing(graph):
        raise RuntimeMissingError(f"{title}: {why}")
    return Side(graph, runtime)


def _coarse(
    first: Side, second: Side, recording: RecordedValues, tolerance: float, progress: Progress
) -> tuple[str | None, tuple[float, str]]:
    """Find the first step that differs by itself, and the largest difference of a step so far."""
    names = second.graph.names
    largest = (0.0, names[0])
    for place, name in enumerate(names):
        progress("steps", place, len(names))
        share = local_difference(second, recording, names[:place], name, unit_of(first, second)).relative
        largest = max(largest, (share, name))
        if share > tolerance:
            return name, largest
    return None, largest
