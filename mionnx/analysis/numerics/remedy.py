"""A remedy for a narrow dtype: which classes of values are rescaled, and what stays in float32."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import ceil, isfinite, log2
from typing import Any

import numpy as np

from mionnx.analysis.numerics.distance import FirstRun
from mionnx.analysis.numerics.dtypes import narrow_of
from mionnx.analysis.numerics.forecast import forecast_of
from mionnx.analysis.numerics.forecast_result import Forecast
from mionnx.analysis.numerics.range import Measured
from mionnx.analysis.numerics.texts_run import TextsRun
from mionnx.errors import InputError, ModelError
from mionnx.graph.output_head import LOGITS
from mionnx.machine.brief import count
from mionnx.rewrite.float_graph import GROUPS, NORM_INSIDES, NORM_OUTPUTS, OF_STREAM, OF_WEIGHTS, FloatGraph
from mionnx.rewrite.largest import PLAIN_VALUE
from mionnx.rewrite.rescale import Classes, Rescaled, rescale

ROOM = 4  # how far below the dtype's limit a rescaled class is at least, for texts that were not seen
AUTOMATIC, NOTHING = "auto", "none"


@dataclass(frozen=True)
class Remedy:
    """What is done so that a narrow dtype holds a model, and what it costs.

    Attributes:
        before, after: forecasts without and with it.
        exponents: value -> the exponent of its class.
        islands: values that stay float32; `groups` are those they were taken from.
    """

    before: Forecast
    after: Forecast
    rescaled: Rescaled
    exponents: Mapping[str, int]
    islands: frozenset[str]
    groups: list[str] = field(default_factory=list)

    def line(self) -> str:
        """The remedy in one line."""
        stream = self.rescaled.graph.stream
        parts = [
            f"{'the residual stream' if value in stream else value} times 2^{one}"
            for value, one in self.exponents.items()
        ]
        parts += [f"{count(len(self.islands), 'value')} of {' and '.join(self.groups)} in float32"] * bool(self.islands)
        return "; ".join(parts) or "none needed"

    def to_entry(self) -> dict[str, Any]:
        """The remedy as the metadata have it."""
        return {
            "exponents": dict(self.exponents),
            "islands": len(self.islands),
            "groups": self.groups,
            "measure": self.after.all.measure,
            "before": _entry(self.before),
            "after": _entry(self.after),
        }


def _entry(forecast: Forecast) -> dict[str, Any]:
    numbers = forecast.all.to_entry()  # no NaN: metadata are JSON
    return {name: value for name, value in numbers.items() if isfinite(value)} | {"norms": forecast.norms}


def exponents_for(graph: FloatGraph, measured: Measured, dtype: str, power: str = AUTOMATIC) -> dict[str, int]:
    """The exponents of the classes that a narrow dtype cannot hold with room: the first value of each -> e.

    Args:
        power: "auto", "none", or a number k: then the residual stream is divided by 2^k.
    """
    if power == NOTHING:
        return {}
    if power != AUTOMATIC:
        stream = next(iter(name for name in graph.hooks if "hook_resid" in name), None)
        if not power.isdecimal() or not 0 < int(power) <= 30 or stream is None:
            raise InputError(f"rescale={power!r}: auto, none, or a power of two from 1 to 30 that the stream is cut by")
        return {stream: -int(power)}
    classes, limit = Classes(graph), narrow_of(dtype).limit
    fixed = {classes.of(name) for name in _fixed(graph)}
    largest: dict[str, tuple[float, str]] = {}
    for number, one in enumerate(measured.observations):
        root, size = classes.of(one.value), float(measured.largest[number])
        if one.what != PLAIN_VALUE or root in fixed or not isfinite(size) or size <= 0:
            continue
        earlier = largest.get(root)
        largest[root] = (size, one.value) if earlier is None else (max(size, earlier[0]), earlier[1])
    needed = {name: ceil(log2(size * ROOM / limit)) for size, name in largest.values()}
    return {name: -power for name, power in needed.items() if power > 0}


def _fixed(graph: FloatGraph) -> Iterator[str]:
    """Values whose classes are not rescaled: masks, insides of norms, inputs and outputs of the model."""
    yield from graph.masked
    yield from (name for norm in graph.decomposed for name in norm.insides)
    yield from (value.name for value in (*graph.proto.graph.input, *graph.proto.graph.output))


def true_sizes(graph: FloatGraph, measured: Measured) -> dict[str, float]:
    """Value -> its largest magnitude, hook points and what they are moved from."""
    sizes = {
        one.value: float(measured.largest[number])
        for number, one in enumerate(measured.observations)
        if one.what == PLAIN_VALUE and one.value not in graph.masked
    }
    moved = {graph.origin(name): size for name, size in sizes.items()}
    hooks = {hook: moved[one] for hook in graph.hooks if (one := graph.origin(hook)) in moved}
    magnitudes = {**hooks, **moved, **sizes}
    for node in graph.flow.nodes:  # numbers that are joined were looked at before
        parts = [magnitudes[name] for name in map(graph.origin, node.input) if name in magnitudes]
        if node.op_type == "Concat" and parts:
            magnitudes.setdefault(node.output[0], max(parts))
    return magnitudes


def check_bits(run: TextsRun, rescaled: FloatGraph, first: FirstRun) -> None:
    """Run one text through a rescaled graph in float32: the logits keep their bits."""
    with run.opened(rescaled.proto) as program:
        logits = run.predictions(program.run([LOGITS], run.feeds(run.calls[0])))
    expected = next(iter(first))
    if not np.array_equal(expected, logits, equal_nan=True):
        apart = float(np.nanmax(np.abs(expected - logits)))
        raise ModelError(
            f"the rescaled graph's logits differ by {apart:.1e}, though every node has a type: a number became "
            "subnormal; give a smaller power with rescale="
        )


def find_remedy(
    run: TextsRun,
    measured: Measured,
    first: FirstRun,
    dtype: str,
    bound: float,
    *,
    power: str = AUTOMATIC,
    islands: str = AUTOMATIC,
    accumulate: str = "float32",
) -> Remedy:
    """Rescale what the range says, and put islands where the forecast says they pay, until a bound of KL holds.

    Raises:
        ModelError: the bound does not hold with any of them; the best forecast is named.
    """
    before = forecast_of(run, run.graph, first, dtype)
    exponents = exponents_for(run.graph, measured, dtype, power)
    rescaled = rescale(run.graph, exponents, true_sizes(run.graph, measured), narrow_of(dtype).limit)
    if rescaled.steps:
        check_bits(run, rescaled.graph, first)
    graph = rescaled.graph
    chosen, groups = _asked(graph, islands)
    after = (
        forecast_of(run, graph, first, dtype, islands=chosen, accumulate=accumulate) if exponents or chosen else before
    )
    waiting = [*_order(run, graph, first, dtype, chosen)] if islands == AUTOMATIC and not _within(after, bound) else []
    for group, values in waiting:
        chosen, groups = chosen | values, [*groups, group]
        after = forecast_of(run, graph, first, dtype, islands=chosen)
        if _within(after, bound):
            break
    if not _within(after, bound):
        where = f"; first not finite: {after.first.value}" if after.first else ""
        raise ModelError(f"bound={bound:g} is not met in {dtype}: {after.all} at best{where}")
    return Remedy(before, after, rescaled, exponents, chosen, groups)


def _within(forecast: Forecast, bound: float) -> bool:
    return forecast.all.sound and forecast.kl <= bound


def _asked(graph: FloatGraph, islands: str) -> tuple[frozenset[str], list[str]]:
    """The values that a group's name or a glob of values means."""
    if islands in (AUTOMATIC, NOTHING):
        return frozenset(), []
    by_group = _groups(graph)
    values = by_group.get(islands) or {
        name for _, name in graph.computed() if fnmatchcase(name, islands) or fnmatchcase(name, f"*{islands}*")
    }
    if not values:
        raise InputError(f"islands={islands!r} means no value: auto, none, a glob of values, or {', '.join(by_group)}")
    return frozenset(values), [islands]


def _groups(graph: FloatGraph) -> dict[str, set[str]]:
    groups: dict[str, set[str]] = {}
    for node, name in graph.computed():
        if name in graph.carrying:
            groups.setdefault(graph.group(node, name), set()).add(name)
    return {group: groups[group] for group in GROUPS if group in groups}


def _order(
    run: TextsRun, graph: FloatGraph, first: FirstRun, dtype: str, chosen: frozenset[str]
) -> Sequence[tuple[str, frozenset[str]]]:
    """Groups of values by the KL that they cost alone for each node, insides of norms first."""
    rows = forecast_of(run, graph, first, dtype, alone=True, islands=chosen).rows
    cost = {row.name: row.distance for row in rows if row.kind == "group" and row.name != OF_WEIGHTS}
    groups = {name: frozenset(values) for name, values in _groups(graph).items() if name in cost}
    if OF_STREAM in groups:  # norms read it as it is, or it would overflow on the way to them
        groups[OF_STREAM] |= groups.get(NORM_OUTPUTS, frozenset())

    def gain(name: str) -> tuple[bool, bool, float]:
        one = cost[name]
        return name == NORM_INSIDES, not one.sound, one.kl / len(groups[name]) if one.compared else float("inf")

    return [(name, groups[name]) for name in sorted(groups, key=gain, reverse=True)]
