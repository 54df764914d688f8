"""`Pieces`: a base's graph in eight pieces, so that a new structure packs the weights of one.

ONNX Runtime packs all weights that a graph reads when it opens it, a base's too: nine tenths of the time that opening
takes. A graph in pieces opens those that a plan touches; the others serve all plans. The nodes and bits are those of
the whole graph. A call of few tokens is up to a fifth slower, as threads start anew for each piece: a structure that is
called again and again gets a graph of its own (`benchmarks/new_structures.py`).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from mionnx.graph.dataflow import Dataflow
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.io_names import PRESENTS
from mionnx.graph.metadata import Metadata
from mionnx.graph.onnx_file import ModelProto
from mionnx.graph.output_head import LOGITS
from mionnx.rewrite.plan import NONE, CaptureNode, Edit, Outputs, Plan

PIECES = 8
TOUCHED = 4  # pieces, at most: with more, most of them would be opened
REMEMBERED = 1024  # structures of which calls are counted
CALLS = 32  # of one structure in pieces, by which a graph of its own has paid for itself
INNER = Outputs(logits=False)


class Opener(Protocol):
    """What opens the graph of a plan."""

    def get(self, plan: Plan) -> Any:
        """The open graph."""


@dataclass(frozen=True)
class Piece:
    """Some layers of a model."""

    starts: tuple[str, ...]
    crossing: tuple[str, ...]  # what later pieces read of it
    carried: tuple[str, ...]  # keys, values and states that it gives for a call that goes on
    values: frozenset[str]  # that it makes, of those that depend on the tokens

    @property
    def ends(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.crossing, *self.carried)))


@dataclass(frozen=True)
class PiecedGraph:
    """The open graphs of a plan's pieces."""

    graphs: Opener
    plans: tuple[Plan, ...]
    crossing: frozenset[str]

    def run(self, outputs: Sequence[str], feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Run them one after the other on those of the feeds that they read."""
        values, needed = dict(feeds), {*outputs} | self.crossing
        computed: dict[str, Any] = {}
        for plan in self.plans:
            names = [node.fetched for node in plan.captures if node.fetched in needed]
            if plan.outputs.logits:
                names += [name for name in outputs if name not in computed and name not in names]
            results = self.graphs.get(plan).program.compute(names, values)
            computed |= results
            values |= {name: results[name] for name in results.keys() & self.crossing}
        return {name: computed[name] for name in outputs}


class Pieces:
    """The pieces of one model's base."""

    def __init__(self, proto: ModelProto, metadata: Metadata) -> None:
        self.calls: Counter[Plan] = Counter()  # of each structure, in pieces
        self._pieces = tuple(_pieces(proto, metadata))
        self._crossing = frozenset(name for piece in self._pieces for name in piece.crossing)

    def of(self, plan: Plan, graphs: Opener) -> PiecedGraph | None:
        """The pieces that serve a plan; None where only one graph does, or one is worth its time."""
        if self.calls[plan] >= CALLS or not self._pieces or not _fits(plan):
            return None
        placed = self._placed(plan)
        if placed is None or len({*placed.values()}) > TOUCHED:
            return None
        if len(self.calls) >= REMEMBERED and plan not in self.calls:
            self.calls.clear()  # those that are called again are counted again
        self.calls[plan] += 1
        last = len(self._pieces) - 1
        plans = []
        for i, piece in enumerate(self._pieces):
            own = [node for node, place in placed.items() if place == i]
            edits = tuple(node for node in own if isinstance(node, Edit))
            wants = tuple(node for node in own if isinstance(node, CaptureNode))
            fetched = {want.fetched for want in wants}
            ends = tuple(CaptureNode(name) for name in piece.ends if name not in fetched)
            outputs = INNER if i < last else replace(plan.outputs, carried=True)
            plans.append(Plan(edits, (*wants, *ends), outputs, piece.starts))
        return PiecedGraph(graphs, tuple(plans), self._crossing)

    def _placed(self, plan: Plan) -> dict[Edit | CaptureNode, int] | None:
        """The number of the piece that makes what each part of a plan is at."""
        placed: dict[Edit | CaptureNode, int] = {}
        nodes: tuple[Edit | CaptureNode, ...] = (*plan.edits, *plan.captures)
        for node in nodes:
            place = next((i for i, piece in enumerate(self._pieces) if node.hook in piece.values), None)
            if place is None:
                return None
            placed[node] = place
        return placed


def _fits(plan: Plan) -> bool:
    if plan.fused != NONE or plan.starts or plan.gradients or plan.blocks or not plan.outputs.logits:
        return False
    # what is at one place alone, under the name of a value of the graph
    edits = all(edit.fit is None and edit.reads is None and edit.at_experts is None for edit in plan.edits)
    return edits and not any(HookPoint.parse(node.hook).derived for node in plan.captures)


def _pieces(proto: ModelProto, metadata: Metadata) -> Iterable[Piece]:
    flow, layers = Dataflow(proto), metadata.sizes.num_layers
    outputs = [value.name for value in proto.graph.output]
    cuts = [str(HookPoint.ResidPre(layers * n // PIECES)) for n in range(1, PIECES)]
    if layers < PIECES or not {*cuts} <= flow.varying or outputs[0] != LOGITS or metadata.exponents:
        return
    weights = {tensor.name for tensor in proto.graph.initializer}
    inputs = [entry.name for entry in proto.graph.input if entry.name not in weights]
    crossings = flow.crossings([[cut] for cut in cuts], outputs, inputs)
    before: Sequence[str] = ()
    for after in (*crossings, outputs):
        ends = [name for name in after if name not in before]
        # the first begins with the tokens: else all nodes would be looked at for its few
        starts = tuple(flow.needed(before, ends)) or tuple(inputs[:1])
        nodes = flow.ancestors(ends, {*starts})
        values = {name for i in nodes for name in flow.nodes[i].output} & flow.varying
        carried = tuple(name for name in ends if name.startswith(PRESENTS))
        crossing = tuple(name for name in ends if name not in outputs)
        yield Piece(starts, crossing, carried, frozenset(values))
        before = after
