"""`bisect`: find the smallest part of a graph that two runtimes compute differently, and write it for a bug report."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from mionnx.errors import InputError, ModelError, RuntimeMissingError
from mionnx.graph.hooked_model import HookedModel
from mionnx.inputs.token_batch import TokenBatch
from mionnx.machine.progress import Progress
from mionnx.machine.stored import Stored
from mionnx.spec.hook_spec import HookSpec
from mionnx.verify.compare import ComparisonSettings, Side, record, unit_of
from mionnx.verify.graph_under_test import GraphUnderTest
from mionnx.verify.narrow_fault import Narrowed, narrow
from mionnx.verify.recorded_values import RecordedValues
from mionnx.verify.report import write_report
from mionnx.verify.runtime import GraphRuntime
from mionnx.verify.runtime_names import runtime_of
from mionnx.verify.step_error import local_difference
from mionnx.verify.verify import TOLERANCES, names_of

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


def bisect(
    model: HookedModel,
    call: TokenBatch,
    titles: list[str],
    folder: Path | None,
    spec: HookSpec | None,
    other: HookedModel | None,
    tolerance: float | None,
    progress: Progress,
) -> Bisection:
    """See `MIModel.bisect`."""
    if folder is not None and folder.exists():
        raise ModelError(f"{folder} exists already")
    first, second = _sides(model, call, titles, spec or HookSpec(), other)
    least = _tolerance(tolerance, model, other)
    with tempfile.TemporaryDirectory() as scratch:
        record(
            first,
            recording := RecordedValues(Path(scratch) / "first"),
            ComparisonSettings(least, False, 0, None, progress),
        )
        hook, largest = _coarse(first, second, recording, least, progress)
        if hook is None:
            return Bisection(first.title, second.title, None, [], [], None, 0.0, 0.0, largest, least)
        part = _fine(first, second, recording, hook, least)
    bisection = Bisection(first.title, second.title, hook, part.starts, part.nodes, part.value, part.difference.max_abs,
                     part.difference.relative, largest, least, folder)  # fmt: skip
    if folder is not None:
        write_report(folder, str(bisection), part, first, second)
    return bisection


def _tolerance(tolerance: float | None, model: HookedModel, other: HookedModel | None) -> float:
    if tolerance is None:
        return max(TOLERANCES[one.metadata.dtype] for one in (model, other) if one)
    if not (np.isfinite(tolerance) and tolerance >= 0):
        raise InputError(f"tolerance must be a number of 0 or above, got {tolerance!r}")
    return tolerance


def _sides(
    model: HookedModel, call: TokenBatch, titles: list[str], spec: HookSpec, other: HookedModel | None
) -> tuple[Side, Side]:
    counts = (1, 2) if other else (2,)
    if len(titles) not in counts:
        raise InputError(f"bisect compares two runtimes, or two models in one: got {len(titles)} runtimes")
    names = names_of(model, COARSE, spec)
    if other is not None:
        names = [name for name in names if name in other.order]
    graph = GraphUnderTest(model, spec, names, [call], "this model" if other else "")
    beside = GraphUnderTest(other, spec, names, [call], "other model") if other else graph
    sides = [Side(one, _runtime(title, one)) for title, one in zip((titles * 2)[:2], (graph, beside), strict=True)]
    return sides[0], sides[1]


def _runtime(title: str, graph: GraphUnderTest) -> GraphRuntime:
    runtime = runtime_of(title)
    if not isinstance(runtime, GraphRuntime):
        raise InputError(f"{title} runs models as a whole: bisect needs runtimes that run parts of a graph")
    why = runtime.missing(graph)
    if why:
        raise RuntimeMissingError(f"{title}: {why}")
    return runtime


def _coarse(
    first: Side, second: Side, recording: RecordedValues, tolerance: float, progress: Progress
) -> tuple[str | None, tuple[float, str]]:
    """Find the first step that differs by itself, and the largest difference of a step so far."""
    runtime, names = second.graph_runtime, second.graph.names
    assert runtime is not None
    largest = (0.0, names[0])
    for place, name in enumerate(names):
        progress("steps", place, len(names))
        share = local_difference(runtime, second.graph, recording, names[:place], name, unit_of(first, second)).relative
        largest = max(largest, (share, name))
        if share > tolerance:
            return name, largest
    return None, largest


def _fine(first: Side, second: Side, recording: RecordedValues, name: str, tolerance: float) -> Narrowed:
    """Find the nodes of a step that differ; all of them, if no value inside does by itself."""
    one, other, graph = first.graph_runtime, second.graph_runtime, second.graph
    assert one is not None
    assert other is not None
    inputs = {start: np.asarray(recording.get(0, start)) for start in graph.names[: graph.names.index(name)]}
    return narrow((one, first.graph), (other, graph), inputs, name, 0, tolerance)
