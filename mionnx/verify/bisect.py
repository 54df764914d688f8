"""`bisect`: find the smallest part of a graph that two runtimes compute differently, and write it for a bug report."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import numpy as np
import onnx

from mionnx.errors import InputError, ModelError, RuntimeMissingError
from mionnx.graph import onnx_file
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
from mionnx.verify.request import TOLERANCES, check_tolerance, names_of, path_of
from mionnx.verify.runtimes import GraphRuntime, runtime_of
from mionnx.verify.steps import Side, StepPart, local_difference, narrow, unit_of
from mionnx.verify.verify import call_of

COARSE = ("blocks.*.hook_resid_*", "hook_final_norm")
PROGRAM = '''"""Runs both sides on inputs.npz as they were compared, and prints how far each is from what was seen:
expected.npz is {first}, found.npz is {second}."""

from pathlib import Path

import numpy as np
import onnx

here = Path(__file__).parent
inputs = dict(np.load(here / "inputs.npz"))


def feeds_of(path):
    """A model's inputs, in the dtypes that it takes."""
    graph = onnx.load(path, load_external_data=False).graph
    kinds = {{value.name: value.type.tensor_type.elem_type for value in graph.input}}
    dtypes = {{name: onnx.helper.tensor_dtype_to_np_dtype(kind) for name, kind in kinds.items()}}
    return {{name: inputs[name].astype(dtype) for name, dtype in dtypes.items() if name in inputs}}


{functions}

for title, file, run in ({sides}):
    value = np.asarray(run(str(here / file), feeds_of(here / file)))
    for name in ("expected", "found"):
        (seen,) = np.load(here / f"{{name}}.npz").values()
        apart = np.abs(value.astype(np.float64) - seen.astype(np.float64)).max() if seen.size else 0.0
        print(f"{{title}} and {{name}}.npz: largest difference {{apart:.3g}}")
'''


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
        progress: see `patch_sweep`.

    Raises:
        InputError: a runtime that cannot run a part of a graph, or not two sides.
        RuntimeMissingError: a runtime that is not installed.
        ModelError: the folder exists.

    Example:
        print(model.bisect("The capital of France is", ["ort-cpu", "reference"], tolerance=0))
    """
    report, call = path_of(folder), call_of(model, prompt)
    if report is not None and report.exists():
        raise ModelError(f"{report} exists already")
    models = [model.hooked, *([other.hooked] if other else [])]
    check_tolerance(tolerance)
    # Of two models the coarser dtype decides.
    least = max(TOLERANCES[one.metadata.dtype] for one in models) if tolerance is None else tolerance
    first, second = _sides(models, call, runtimes, hooks or HookSpec())
    with shown(progress) as show, TemporaryDirectory() as scratch:
        recording = RecordedValues(Path(scratch) / "first")
        # Of the first side everything is recorded; each step of the second runs on these values.
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
                _write_report(report, str(bisection), part, first, second)
    model.give_back(later=True)
    return bisection


def _sides(models: Sequence[HookedModel], call: TokenBatch, titles: Sequence[str], spec: HookSpec) -> tuple[Side, Side]:
    if len(titles) not in ((1, 2) if len(models) > 1 else (2,)):
        raise InputError(f"bisect compares two runtimes, or two models in one: got {len(titles)} runtimes")
    names = [name for name in names_of(models[0], COARSE, spec) if name in models[-1].order]
    several = ("this model", "other model") if len(models) > 1 else ("",)
    graphs = [GraphUnderTest(one, spec, names, [call], title) for one, title in zip(models, several, strict=True)]
    # One runtime may be given for both models.
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


def _write_report(folder: Path, summary: str, part: StepPart, first: Side, second: Side) -> None:
    """Write a folder that shows the narrowed difference without mionnx."""
    files = {"model.onnx": second} if first.graph is second.graph else {"first.onnx": first, "model.onnx": second}
    try:
        folder.mkdir(parents=True)
        for name, side in files.items():
            (folder / name).write_bytes(_standing(side.graph, part).SerializeToString())
        for name, arrays in (("inputs", part.feeds), ("expected", part.expected), ("found", part.other)):
            np.savez(folder / f"{name}.npz", **arrays)  # type: ignore[arg-type]
        (folder / "reproduce.py").write_text(_program(first, second, files))
        (folder / "README.md").write_text(_text(summary, part, first, second))
    except OSError as error:
        raise ModelError(f"cannot write {folder}: {error}") from error


def _standing(graph: GraphUnderTest, part: StepPart) -> onnx.ModelProto:
    outputs = {name for node in graph.dataflow.nodes for name in node.output}
    # the first model may lack some of the start values
    proto = graph.part([name for name in part.starts if name in outputs], [part.value])
    onnx_file.embed(proto, graph.model.folder)
    return proto


def _program(first: Side, second: Side, files: Mapping[str, Side]) -> str:
    functions, sides = [], []
    for name, side in (("first", first), ("second", second)):
        source = side.runtime.source() if isinstance(side.runtime, GraphRuntime) else None
        if source is None:
            functions.append(f"# {side.title} is not run from Python")
            continue
        file = next(file for file, owner in files.items() if owner.graph is side.graph)
        lines = "".join(f"    {line}\n" if line else "\n" for line in source.splitlines())
        functions.append(f"def {name}(path, feeds):\n{lines}".rstrip())
        sides.append(f'("{side.title}", "{file}", {name})')
    texts = {"functions": "\n\n\n".join(functions), "sides": ", ".join([*sides, ""]).strip()}
    return PROGRAM.format(first=first.title, second=second.title, **texts)


def _text(summary: str, part: StepPart, first: Side, second: Side) -> str:
    inputs = "\n".join(f"- `{name}` {value.dtype} {list(value.shape)}" for name, value in part.feeds.items())
    models = "" if first.graph is second.graph else "`first.onnx` is the same part of the first model. "
    where = {side.title: side.runtime.environment() for side in (first, second) if side.runtime}
    return (
        f"# {first.title} and {second.title} disagree\n\n{summary}\n\n"
        f"`model.onnx` on `inputs.npz` gives `{part.value}`: `expected.npz` in {first.title}, `found.npz` in "
        f"{second.title}. {models}`python reproduce.py` needs numpy, onnx and the two runtimes.\n\n"
        f"Inputs:\n\n{inputs}\n\nMade on:\n\n```json\n{json.dumps(where, indent=1)}\n```\n"
    )
