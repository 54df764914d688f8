"""`check_range`: the largest and least magnitudes of all values over texts, and what a narrow dtype cannot hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from mionnx.analysis.numerics.dtypes import narrow_of
from mionnx.analysis.numerics.range_report import Massive, RangeReport, RangeRow
from mionnx.analysis.numerics.texts_run import TextsRun
from mionnx.bind.bound_spec import bind
from mionnx.engine.engine import Arrays
from mionnx.machine.progress import shown
from mionnx.machine.typed import typed
from mionnx.rewrite import rewrite
from mionnx.rewrite.float_graph import FloatGraph
from mionnx.rewrite.largest import (
    MASKED,
    PLAIN_VALUE,
    RANGE_OUTPUTS,
    SQUARES,
    WATCHED_OUTPUT,
    Observation,
    largest,
)
from mionnx.rewrite.plan import Outputs
from mionnx.run.runner import Runner
from mionnx.spec.hook_spec import HookSpec

CUBED = "cube"  # in the tanh approximation of GELU
MOST_MASSIVE = 8  # activations that are listed by position and dimension


@typed()
def check_range(
    model: Runner,
    texts: str | Sequence[str] | None = None,
    *,
    dtype: str = "float16",
    products: bool = False,
    progress: bool | None = None,
) -> RangeReport:
    """Measure the largest and least magnitudes of every value, and what a narrow dtype cannot hold.

    Magnitudes are taken inside the graph, so that only numbers leave it, whatever the model's size; a pass takes some
    1.1 times as long as one for logits. One short text finds the range of the residual stream, which its first token
    sets; activations and scores need many.

    Args:
        texts: to run on, in windows of 256 tokens; if left out, what the model writes by itself (1,024 tokens).
        dtype: the narrow dtype that values are held against: "float16" or "bfloat16".
        products: bound the partial sums of products with weights too, by the sum of |a||w|: a second product each.
        progress: None for a bar in a terminal or notebook when it takes longer than two seconds, and a line a minute in
            a log; True at once, False for none.

    Returns:
        rows in order of execution: hook points, values inside, sums of squares in norms, each with the text, position
        and token of the largest.

    Raises:
        InputError: another dtype, or texts without tokens.

    Example:
        report = model.check_range("The capital of France is Paris.")
        report.over("float16")  # rows beyond 65,504, in order of execution
    """
    narrow_of(dtype)
    with shown(progress) as show:
        run = TextsRun(model, texts, show)
        report = report_of(run, measure(run, run.graph, products), dtype)
    model.give_back(later=True)
    return report


def report_of(run: TextsRun, measured: Measured, dtype: str) -> RangeReport:
    """What was measured, held against a narrow dtype."""
    rows = [*_rows(run, run.graph, measured, narrow_of(dtype).limit)]
    return RangeReport(run.hooked.name, dtype, rows, _massive(run, rows), run.facts["texts"], run.facts["tokens"])


class Measured:
    """What was seen of each value: the largest and least, and where.

    Attributes:
        largest, least, text, position: [observations]; the least is NaN where it was not looked at, a position -1.
    """

    def __init__(self, observations: Sequence[Observation]) -> None:
        self.observations = [*observations]
        count = len(self.observations)
        self.largest = np.full(count, -np.inf)
        self.least = np.full(count, np.nan)
        self.text, self.position = np.zeros(count, int), np.full(count, -1)
        self._with = np.array([i for i, one in enumerate(self.observations) if one.place is not None], int)

    def add(self, number: int, outputs: Arrays) -> None:
        """Take in the outputs of one text; NaN counts as infinity."""
        largest, least, position = (outputs.get(name, np.zeros(0)) for name in RANGE_OUTPUTS)
        most = np.nan_to_num(largest.astype(np.float64), nan=np.inf, posinf=np.inf, neginf=-np.inf)
        more = most > self.largest
        self.largest[more], self.text[more] = most[more], number
        self.least[self._with] = np.fmin(self.least[self._with], least)
        here = np.full(len(more), -1)
        here[self._with] = position
        self.position[more] = here[more]

    def of(self, value: str, what: str = PLAIN_VALUE) -> float | None:
        """The largest magnitude of a value."""
        places = (i for i, one in enumerate(self.observations) if (one.value, one.what) == (value, what))
        return next((float(self.largest[i]) for i in places), None)


def measure(run: TextsRun, graph: FloatGraph, products: bool = False) -> Measured:
    """Run every text through a graph whose magnitudes are outputs."""
    proto, observations = largest(graph, products)
    measured = Measured(observations)
    spoiled: list[int] = []  # texts with a NaN
    names = [name for name in RANGE_OUTPUTS if any(name == one.name for one in proto.graph.output)]
    with run.opened(proto, in_order=True) as program:
        for number, outputs in run.run(program, [*names, WATCHED_OUTPUT], "range"):
            measured.add(number, outputs)
            if np.isnan(outputs[WATCHED_OUTPUT]).any():
                spoiled.append(number)
    if spoiled:  # once more, to see where
        with run.opened(largest(graph, products, nan=True)[0], in_order=True) as program:
            for number in spoiled:
                measured.add(number, program.run(names, run.feeds(run.calls[number])))
    return measured


def _rows(run: TextsRun, graph: FloatGraph, measured: Measured, limit: float) -> Iterator[RangeRow]:
    moved: dict[str, list[str]] = {}
    for hook in graph.hooks:
        moved.setdefault(graph.origin(hook), []).append(hook)
    for i, one in enumerate(measured.observations):
        most = float(measured.largest[i])
        if most == -np.inf:
            continue  # no numbers at all, as of an empty past
        if most >= -MASKED and one.what == PLAIN_VALUE and one.value in graph.masked:
            continue  # minus infinity of a mask, or nothing but masked
        text, position = int(measured.text[i]), int(measured.position[i])
        place = _place(run, one, text, position)
        absorbed = most > limit and _absorbed(graph, one)
        names = [one.value]
        if one.what == PLAIN_VALUE and one.value in graph.hooks:
            names = moved.get(graph.origin(one.value), names)
        for name in names:
            yield RangeRow(name, one.what, one.operator, name in graph.hooks and one.what == PLAIN_VALUE, most,
                           float(measured.least[i]), text, *place, absorbed)  # fmt: skip
        node = graph.flow.producer(one.value)
        for reader in graph.flow.readers(one.value) if node is not None and one.what == PLAIN_VALUE else ():
            tanh = any(entry.name == "approximate" and entry.s == b"tanh" for entry in reader.attribute)
            if reader.op_type in ("FastGelu",) or (reader.op_type == "Gelu" and tanh):
                yield RangeRow(reader.output[0], CUBED, reader.op_type, False, most**3, float("nan"), text, *place,
                               True)  # fmt: skip


def _place(run: TextsRun, one: Observation, text: int, position: int) -> tuple[int | None, str]:
    """The position and token of a value's largest number, where both are known."""
    tokens = run.tokens[text]
    if one.place is None or not 0 <= position < len(tokens):
        return None, ""
    if one.what != PLAIN_VALUE and position >= len(tokens):
        return None, ""
    return position, tokens[position]


def _absorbed(graph: FloatGraph, one: Observation) -> bool:
    """Whether what overflows leaves finite numbers behind: silent."""
    return one.what == SQUARES or (one.what == PLAIN_VALUE and graph.absorbed(one.value))


def _massive(run: TextsRun, rows: Sequence[RangeRow]) -> list[Massive]:
    """Positions and dimensions of the largest numbers of the stream, in the text that has the largest."""
    stream = [row for row in rows if row.hook and "hook_resid" in row.value]
    if not stream:
        return []
    top = max(stream, key=lambda row: row.largest)
    spec = HookSpec().capture(top.value)
    bound = bind(spec, run.hooked, Outputs(logits=False, carried=False))
    written, _ = rewrite(run.hooked.proto, bound.plan, run.hooked.metadata)
    with run.opened(written) as program:
        feeds = {name: np.asarray(value) for name, value in bound.inputs(run.calls[top.text]).items()}
        value = program.run([top.value], feeds)[top.value][0].astype(np.float32)
    sizes = np.abs(value)
    order = np.argsort(-sizes, axis=None, kind="stable")[:MOST_MASSIVE]
    median = float(np.median(sizes))
    tokens = run.tokens[top.text]
    return [
        Massive(top.value, top.text, int(position), tokens[position], int(dimension),
                float(value[position, dimension]), median)
        for position, dimension in zip(*np.unravel_index(order, sizes.shape), strict=True)
    ]  # fmt: skip
