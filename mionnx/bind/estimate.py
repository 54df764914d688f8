"""Memory that captures and gradients need, estimated before anything runs."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from mionnx.bind.plan import BoundCapture
from mionnx.graph.axes import heads_axis, sequence_axis
from mionnx.graph.hook_points import HookPoint
from mionnx.machine.brief import Brief, count
from mionnx.machine.decimals import decimal
from mionnx.machine.memory import format_bytes


@dataclass(frozen=True, repr=False)
class Estimate(Brief):
    """Bytes that a spec's captures and gradients need.

    Attributes:
        captures: name of the capture -> bytes.
        graph: of a spec with gradients, approximate bytes of its open graph.
        passing: approximate bytes of a pass: its longest layer, logits and captures.
        opening: of a spec with gradients, approximate seconds of processor time until its graph is open.
        weights: bytes of the weights in the dtype that the graph computes in: least memory of any pass.
        store: about the most bytes that interventions write to the store, once on a machine: weights as the engine
            packs them; 0 where that is done, or where the store has no room for them (`MIONNX_CACHE_LIMIT`).
    """

    captures: dict[str, int]
    graph: int = field(default=0, kw_only=True)
    passing: int = field(default=0, kw_only=True)
    opening: float = field(default=0.0, kw_only=True)
    weights: int = field(default=0, kw_only=True)
    store: int = field(default=0, kw_only=True)

    @cached_property
    def total(self) -> int:
        """All captures together."""
        return sum(self.captures.values())

    @cached_property
    def peak(self) -> int:
        """The peak while they are computed: a value gathered token by token exists twice."""
        gathered = [size for name, size in self.captures.items() if HookPoint.parse(name).on_request]
        return self.total + max(gathered, default=0)

    def _facts(self) -> Iterator[str]:
        yield from (count(len(self.captures), "capture"), format_bytes(self.total), f"peak {format_bytes(self.peak)}")
        if self.passing:
            yield f"a pass of {format_bytes(self.passing)}"
        if self.graph:
            yield f"a graph of {format_bytes(self.graph)}, opened in {decimal(self.opening, 1)} s"

        if self.weights:
            yield f"weights of {format_bytes(self.weights)}"
        if self.store:
            yield f"{format_bytes(self.store)} more in the store"

    def _lines(self) -> Iterator[str]:
        for name, size in sorted(self.captures.items(), key=lambda one: -one[1]):
            yield f"{format_bytes(size):>10}  {name}"


def estimate_of(captures: Iterable[BoundCapture], sizes: Mapping[str, int]) -> Estimate:
    """The bytes of captures, with these sizes of the dynamic axes (see `axes.dynamic_sizes`)."""
    return Estimate({capture.node.output: _bytes(capture, sizes) for capture in captures})


def _bytes(capture: BoundCapture, sizes: Mapping[str, int]) -> int:
    # an axis inside a splice may have a length that only the run knows: it counts as 1
    shape = [axis if isinstance(axis, int) else sizes.get(axis, 1) for axis in capture.dims]
    request = capture.request
    if request.positions is not None:
        shape[sequence_axis(capture.node.axes)] = len(request.positions)
    if request.heads is not None:
        shape[heads_axis(capture.node.axes) or 0] = len(request.heads)
    return capture.dtype.itemsize * prod(shape)
