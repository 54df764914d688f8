"""`forecast`: what a narrow dtype will cost, every number rounded as it would be, on any CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.numerics.distance import Distance, FirstRun, first_run
from mionnx.analysis.numerics.dtypes import narrow_of
from mionnx.analysis.numerics.forecast_result import Forecast, ForecastRow, NotFinite
from mionnx.analysis.numerics.texts_run import TextsRun
from mionnx.engine.engine import Program
from mionnx.engine.engines import engine_of
from mionnx.engine.options import OPTIMISATION_LEVELS, Options
from mionnx.errors import InputError, ModelError, nearest
from mionnx.graph.output_head import LOGITS
from mionnx.machine.progress import shown
from mionnx.machine.typed import typed
from mionnx.rewrite.float_graph import GROUPS, OF_WEIGHTS, FloatGraph
from mionnx.rewrite.rounded import (
    BAD,
    CASTS,
    NARROW_DTYPES,
    SWITCHES,
    ZEROS,
    Cell,
    Rounding,
    accumulated,
    cast_pair,
    decomposed,
    rounded,
    with_flags,
)
from mionnx.run.runner import Runner

AS_WRITTEN, FUSED, DECOMPOSED = NORM_FORMS = ("as written", "fused", "decomposed")
IN_FLOAT32 = "float32"
EVERYTHING = "all"


@typed()
def forecast(
    model: Runner,
    texts: str | Sequence[str] | None = None,
    *,
    dtype: str = "float16",
    accumulate: str = IN_FLOAT32,
    norms: str = AS_WRITTEN,
    alone: bool = True,
    progress: bool | None = None,
) -> Forecast:
    """Forecast what a narrow dtype costs: every number rounded as it would be, inside a graph of float32.

    It says what a runtime will do that stores values in the dtype, before there is such a file or such a runtime;
    ONNX Runtime's CPU provider computes files of float16 in float32 mostly, and shows little of it.

    Args:
        texts: to run on, in windows of 256 tokens; if left out, what the model writes by itself (1,024 tokens).
        dtype: "float16" or "bfloat16".
        accumulate: dtype in which products with weights add up their terms: "float32", as CUDA does and most CPUs, or
            "float16", as WebGPU's shaders do; it takes tens of times as long.
        norms: "as written"; "fused": insides of norms stay in float32; or "decomposed": each is rounded, as in a file
            or a runtime without the operator.
        alone: forecast each group of nodes and each layer by itself too, so that it shows which does the damage.
        progress: None for a bar in a terminal or notebook when it takes longer than two seconds, and a line a minute in
            a log; True at once, False for none.

    Returns:
        KL(float32 || rounded) in nats, the largest difference of logits, the share of equal top tokens (of embeddings
        and other vectors half the squared relative distance in the place of KL); the first value that is not finite,
        infinities that are absorbed, and numbers that become 0.

    Raises:
        InputError: another dtype or choice.
        ModelError: the runtime drops the casts that round.

    Example:
        model.forecast("The capital of France is Paris.", norms="decomposed").kl
    """
    narrow_of(dtype)
    _choose("accumulate", accumulate, (IN_FLOAT32, dtype))
    _choose("norms", norms, NORM_FORMS)
    check_casts(dtype)
    with shown(progress) as show:
        run = TextsRun(model, texts, show)
        with first_run(run.logits(run.graph.proto, IN_FLOAT32)) as first:
            result = forecast_of(run, run.graph, first, dtype, norms=norms, accumulate=accumulate, alone=alone)
    model.give_back(later=True)
    return result


def _choose(name: str, choice: str, choices: Sequence[str]) -> None:
    if choice not in choices:
        raise InputError(f"{name}={choice!r}: {', '.join(choices)}{nearest(choice, choices)}")


def check_casts(dtype: str) -> None:
    """Refuse a runtime that drops a Cast down and up: older ones did, and every forecast would be perfect."""
    for level in OPTIMISATION_LEVELS:
        options = Options(level=level, threads=1)
        engine = engine_of(options)
        with engine.opened_alone(cast_pair(dtype), Path(), options) as program:
            numbers = np.array(CASTS, np.float32)
            after = program.run(["to"], {"from": numbers})["to"]
        exact = np.array_equal(after, _rounded(numbers, dtype))
        if not exact:
            facts = ", ".join(f"{name} {value}" for name, value in engine.facts(options).items())
            raise ModelError(f"this runtime drops casts to {dtype} and back at level {level!r} ({facts}): no forecast")


def _rounded(numbers: NDArray[np.float32], dtype: str) -> NDArray[np.float32]:
    with np.errstate(over="ignore", under="ignore"):
        return numbers.astype(NARROW_DTYPES[dtype]).astype(np.float32)


def graph_as(graph: FloatGraph, norms: str) -> tuple[FloatGraph, frozenset[str]]:
    """A graph with its norms as a runtime has them, and the values that stay float32."""
    graph = decomposed(graph) if norms == DECOMPOSED else graph
    insides = frozenset(name for norm in graph.decomposed for name in norm.insides)
    return graph, insides if norms == FUSED else frozenset()


def forecast_of(
    run: TextsRun,
    graph: FloatGraph,
    first: FirstRun,
    dtype: str,
    *,
    norms: str = AS_WRITTEN,
    accumulate: str = IN_FLOAT32,
    alone: bool = False,
    islands: frozenset[str] = frozenset(),
) -> Forecast:
    """Forecast a graph beside the logits of a first run; see `forecast`.

    Args:
        islands: values that stay float32, and are rounded for nodes outside.
    """
    graph, fused = graph_as(graph, norms)
    rounding = rounded(graph, dtype, weights=True, islands=islands, inside=fused)
    flags = Flags(run, graph, rounding)
    with run.opened(flags.proto) as program:
        rows = [_row(run, program, rounding, first, EVERYTHING, EVERYTHING, lambda cell: True, flags)]
        if alone:
            rows.append(_row(run, program, rounding, first, "group", OF_WEIGHTS, lambda cell: False))
    if alone:
        rows += _alone(run, rounded(graph, dtype, islands=islands, inside=fused), first)
    if accumulate != IN_FLOAT32:
        with run.opened(accumulated(graph, rounding, dtype)) as program:
            name = f"all, sums in {accumulate}"
            rows.insert(0, _row(run, program, rounding, first, EVERYTHING, name, lambda cell: True))
    order = {name: place for place, name in enumerate(GROUPS)}
    rows.sort(key=lambda row: (row.kind != EVERYTHING, row.kind != "group", order.get(row.name, 0)))
    return Forecast(run.hooked.name, dtype, accumulate, norms, rows, flags.not_finite, flags.flushed, *_counts(run))


def _counts(run: TextsRun) -> tuple[int, int]:
    return run.facts["texts"], run.facts["tokens"]


def _row(
    run: TextsRun,
    program: Program,
    rounding: Rounding,
    first: FirstRun,
    kind: str,
    name: str,
    on: Callable[[Cell], bool],
    flags: Flags | None = None,
) -> ForecastRow:
    switches = {SWITCHES: rounding.switches(on)}
    names = [LOGITS, *(flags.names if flags else ())]

    def logits() -> Iterator[NDArray[Any]]:
        for _, outputs in run.run(program, names, f"rounding {name}", **switches):
            if flags:
                flags.add(outputs)
            yield run.predictions(outputs)

    count = sum(on(cell) for cell in rounding.values.values())
    return ForecastRow(kind, name, count, Distance.of(first, logits(), vectors=run.vectors))


def _alone(run: TextsRun, rounding: Rounding, first: FirstRun) -> Iterator[ForecastRow]:
    """Each group and each layer by itself, in one open graph."""
    groups = [name for name in GROUPS if any(name == cell[0] for cell in rounding.cells)]
    layers = sorted({cell[1] for cell in rounding.cells if cell[1] is not None})
    with run.opened(rounding.proto) as program:
        for kind, place, names in (("group", 0, groups), ("layer", 1, layers)):
            for name in names:

                def on(cell: Cell, place: int = place, name: str | int = name) -> bool:
                    return cell[place] == name

                yield _row(run, program, rounding, first, kind, str(name), on)


class Flags:
    """Values that are not finite, and numbers that become 0, while texts run with all rounded.

    Attributes:
        proto: the rounded graph with outputs that say so, `names`.
    """

    def __init__(self, run: TextsRun, graph: FloatGraph, rounding: Rounding) -> None:
        self.graph, self.rounding = graph, rounding
        self.proto, self._bad, self._zeros = with_flags(graph, rounding)
        self.names = [output for output, of in ((BAD, self._bad), (ZEROS, self._zeros)) if of]
        self._texts, self._flushed = np.zeros(len(self._bad), int), np.zeros(len(self._zeros))
        self._moved = {graph.origin(hook): hook for hook in reversed(graph.hooks)}

    def add(self, outputs: Mapping[str, NDArray[Any]]) -> None:
        """Take in one text."""
        self._texts += np.isnan(outputs[BAD]) if BAD in outputs else 0
        self._flushed += outputs.get(ZEROS, np.zeros(0))

    @property
    def not_finite(self) -> list[NotFinite]:
        """Values with infinities in order of execution, by their hook points."""
        counts = [(name, int(self._texts[i])) for i, name in enumerate(self._bad) if self._texts[i]]
        return [
            NotFinite(self._moved.get(name, name), self.rounding.values[name][0], texts, self.graph.absorbed(name))
            for name, texts in counts
        ]

    @property
    def flushed(self) -> dict[str, int]:
        """Value -> how many of its numbers become 0."""
        counts = [(name, int(self._flushed[i])) for i, name in enumerate(self._zeros) if self._flushed[i]]
        return {self._moved.get(name, name): number for name, number in counts}
