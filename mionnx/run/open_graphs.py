"""`OpenGraphs`: the graphs of one model that are open, by plan.

1. A graph is opened when it is first asked for, and closed when it is the one used longest ago and a limit is reached.
   A thread that runs it meanwhile keeps it until it has its result.
2. It is opened from the base (`mionnx.run.prepacked`) if there is one that has all that its plan needs, else from the
   model's own graph, with weights of its own. A base is looked for before the first rewritten graph of a large model,
   and made before the second: more may follow.
3. Whether weights are packed is settled by the options, or else by the first call, for all graphs of a model: the last
   bits differ between the two.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mionnx.engine.engine import Program
from mionnx.engine.engines import ready_engine
from mionnx.engine.options import Options
from mionnx.errors import ModelError
from mionnx.graph import onnx_file
from mionnx.graph.hooked_model import GRAPH, HookedModel
from mionnx.machine import memory
from mionnx.machine.cache_keys import source_digest
from mionnx.machine.disk_cache import DiskCache
from mionnx.machine.once import KeyedLocks, once_property
from mionnx.rewrite import Plan, Report, rewrite
from mionnx.rewrite.plan import NONE, STOCK
from mionnx.run import find_model, prepacked
from mionnx.run.layer_loops import LayerLoops
from mionnx.run.segment_chain import SegmentChain, open_segments

UNPACKED = 512  # tokens from which on packing the weights gains little (measured: 1.06 at 8 x 64)
SHARING = 2**23  # approximate bytes of a session on a device that shares its weights with others
SESSION, NODE = 2**19, 2**13  # approximate bytes of a session, and of each of its nodes, besides weights that it shares
REWRITING = ("mionnx.rewrite", "mionnx.graph", "mionnx.spec.kinds")  # a change there may change a rewritten graph
REPORT = "report.json"  # beside a rewritten graph in the store

_uses = [0]  # how often any model's graph was asked for


def uses() -> int:
    """Count of graphs asked for, of all models."""
    return _uses[0]


@dataclass(frozen=True)
class GraphOpening:
    """Model, folder and options with which an engine opens a plan.

    Attributes:
        model: its bytes, weights not included; the file of the untouched graph.
        cost: approximate bytes of memory.
        optimised: whether the engine has optimised it already, as a base.
    """

    model: bytes | Path
    folder: Path
    options: Options
    report: Report
    cost: int
    optimised: bool = False


@dataclass(frozen=True, eq=False)
class OpenGraph:
    """One graph of a model, open: the untouched one, or a rewritten one.

    Attributes:
        model: the bytes that were opened, weights not included; None for the untouched graph, which is on disk.
        cost: approximate bytes of memory.
        feeds: inputs that tell what it is used for, where calls of several kinds share it.
    """

    plan: Plan
    program: Program
    report: Report
    model: bytes | None
    cost: int
    options: Options
    feeds: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)

    @property
    def session(self) -> Any:
        """The engine's own object, as its documentation describes it."""
        return self.program.native

    def run(self, outputs: Sequence[str], feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Run it on those of the feeds that it reads; see `Program.compute`."""
        return self.program.compute(outputs, {**self.feeds, **feeds})


Key = Plan | tuple[Plan, tuple[str, ...]]  # of a graph, or of a chain: where the graph is cut
Open = TypeVar("Open", OpenGraph, SegmentChain)


class OpenGraphs:
    """The open graphs of one model.

    Threads may share it: one that asks for a graph which another is opening waits for that one, and graphs of different
    plans open side by side.

    Attributes:
        options: how graphs are opened; `prepack` is settled by the first call.
        open: plan, or plan and cuts -> open graph, the one used longest ago first.
    """

    def __init__(self, model: HookedModel, options: Options) -> None:
        self.model, self.options, self.engine = model, options, ready_engine(options)
        if model.in_blocks and self.engine.packs(options):
            self.options = replace(options, prepack=True)  # unpacked, products make floats of all blocks first
        self._stock = replace(options, fast=True)  # as the engine opens a file by itself
        self.open: dict[Key, OpenGraph | SegmentChain] = {}
        self.base: prepacked.PrepackedModel | None = None
        self._lock = RLock()  # of `open`, `options` and `_recent`; held for no longer than they are read
        self._opening: KeyedLocks[Key | str] = KeyedLocks()
        self._recent: set[Key] = set()  # used since `close_idle`
        self._unbased = 0  # rewritten graphs that were opened without a base
        self._loops = LayerLoops()

    @once_property
    def weights(self) -> int:
        """Bytes of the weights."""
        return sum(onnx_file.locations(self.model.proto).values())

    @once_property
    def _entries(self) -> DiskCache:
        return DiskCache(find_model.cache_folder())

    def get(self, plan: Plan, tokens: int = 0) -> OpenGraph:
        """The open graph of a plan; rewritten and opened on first use.

        Args:
            tokens: of the call that it is for, all rows together; 0 if that is not known, or if more calls will follow.
        """
        return self._of(plan, lambda: self._open_graph(plan), tokens)

    def chain(self, plan: Plan, hooks: tuple[str, ...], tokens: int = 0) -> SegmentChain:
        """The open segments of a plan cut at hook points; opened on first use."""
        return self._of((plan, hooks), lambda: self._open_chain(plan, hooks), tokens)

    def _of(self, key: Key, make: Callable[[], Open], tokens: int) -> Open:
        self.model.need_weights()
        self._refuse_dtype()
        _uses[0] += 1
        if self.options.prepack is None:
            self.settle(self.packs(tokens))
        if graph := self._used(key):
            return graph
        with self._opening.of(key):
            if graph := self._used(key):  # another thread has opened it meanwhile
                return graph
            if self.model.in_blocks and self.base is None and self.weights >= prepacked.WORTHWHILE:
                self.engine.release()  # packing blocks is when a process holds most
            graph = make()
            with self._lock:
                self.open[key] = graph
                self._recent.add(key)
                limit = self.options.max_bytes or memory.total() // 2
                self._close([*self.open][:-1], lambda: len(self.open) <= self.options.max_graphs and self.cost <= limit)
        self._loops.opened(*(key if isinstance(key, tuple) else (key,)))
        return graph

    def _refuse_dtype(self) -> None:
        """Refuse a dtype that the engine does not compute in, before a graph is rewritten."""
        dtype = self.model.metadata.dtype
        if dtype in self.engine.lacks(self.options):
            raise ModelError(
                f"{self.model.folder} is in {dtype}, in which {self.engine.title(self.options)} does not compute: "
                "export its checkpoint in float32 or float16, or open it with provider='cuda'"
            )

    def settle(self, prepack: bool) -> bool:
        """Settle the packing of weights, unless it is settled; True if it is as asked, or of blocks."""
        packs = self.engine.packs(self.options)
        with self._lock:
            if self.options.prepack is None and packs:
                self.options = replace(self.options, prepack=prepack)
            return not packs or self.model.in_blocks or self.options.prepack == prepack

    def packs(self, tokens: int) -> bool:
        """Whether a graph that a call of so many tokens opens has its weights packed."""
        chosen = self.options.prepack
        return self.engine.packs(self.options) and (tokens < UNPACKED if chosen is None else chosen)

    def _used(self, key: Key) -> Any:
        """An open graph, or None; it goes last in the dictionary, as the one used most recently."""
        with self._lock:
            graph = self.open.pop(key, None)
            if graph is not None:
                self.open[key] = graph
                self._recent.add(key)
            return graph

    @property
    def cost(self) -> int:
        """Approximate bytes of all open graphs."""
        return sum(graph.cost for graph in self.open.values())

    def _close(self, keys: Iterable[Key], enough: Callable[[], bool]) -> None:
        """Close graphs, in this order, until there is enough room."""
        for key in keys:
            if enough():
                return
            del self.open[key]

    def close_idle(self, allowed: int) -> None:
        """Close graphs not used since the last such call, while all take more than allowed."""
        with self._lock:
            recent, self._recent = self._recent, set()
            self._close([key for key in self.open if key not in recent], lambda: self.cost <= allowed)

    def prepare(self) -> bool:
        """Make the base now, and close graphs with weights of their own; tell whether there is one."""
        with self._opening.of("base"):
            if self.base is None:
                self.base = base = prepacked.make(self.model, self.options, self._entries)
                with self._lock:
                    plans = {key: graph.plan for key, graph in self.open.items() if graph.plan.fused == NONE}
                    served = [key for key, plan in plans.items() if base and base.serves(plan, self.model)]
                    self._close(served, lambda: False)
            return self.base is not None

    def _base_for(self, plan: Plan) -> prepacked.PrepackedModel | None:
        """The base, if it serves a plan."""
        if plan.fused != NONE:  # no base has operators of the file
            return None
        with self._opening.of("base"):
            if self.options.base and self.base is None and self.weights >= prepacked.WORTHWHILE:
                if self._unbased == 0:
                    self.base = prepacked.find(self.model, self.options, self._entries)
                elif self._unbased == 1 and self.options.prepack is not False:
                    self.prepare()
            if self.base is not None and self.base.serves(plan, self.model):
                return self.base
            self._unbased += not plan.empty
            return None

    def _opening_of(self, plan: Plan) -> GraphOpening:
        """Model, folder and options with which the engine opens a plan."""
        base = self._base_for(plan)
        if base is not None:
            model, report = self._rewritten(base, plan)
            cost = SESSION + NODE * len(onnx_file.parse(model).graph.node)
            return GraphOpening(model, base.folder, self.options, report, cost, optimised=True)
        proto, options = self.model.proto, self.options
        if plan.fused == STOCK:
            assert self.model.stock is not None  # as the plan says
            proto, options, plan = self.model.stock.proto, self._stock, replace(plan, fused=NONE)
        if plan.empty:
            own = proto is self.model.proto and options.accuracy_level is None
            untouched = self.model.folder / GRAPH if own else proto.SerializeToString()
            return GraphOpening(untouched, self.model.folder, options, Report(), self.weights)
        model, report = rewrite(proto, plan, self.model.metadata)
        cost = sum(onnx_file.locations(onnx_file.parse(model)).values()) if plan.starts else self.weights
        return GraphOpening(model, self.model.folder, options, report, cost)

    def _open_graph(self, plan: Plan) -> OpenGraph:
        one = self._opening_of(plan)
        program = self.engine.open(one.model, one.folder, one.options, optimised=one.optimised)
        model = one.model if isinstance(one.model, bytes) else None
        cost = min(one.cost, SHARING) if program.shares_weights else one.cost
        return OpenGraph(plan, program, one.report, model, cost, one.options)

    def _open_chain(self, plan: Plan, hooks: tuple[str, ...]) -> SegmentChain:
        one = self._opening_of(plan)
        assert isinstance(one.model, bytes)  # it captures where it is cut
        proto, cost, optimised = onnx_file.parse(one.model), one.cost, one.optimised
        return open_segments(
            proto, one.report, plan, hooks, one.folder, one.options, self.engine, optimised=optimised, cost=cost
        )

    def _rewritten(self, base: prepacked.PrepackedModel, plan: Plan) -> tuple[bytes, Report]:
        """A base's graph rewritten, from the store if it is there."""
        if plan.empty:
            return base.proto.SerializeToString(), Report()
        rewritten: list[tuple[bytes, Report]] = []

        def build(folder: Path) -> dict[str, Any]:
            rewritten.append(rewrite(base.proto, plan, self.model.metadata))
            (folder / GRAPH).write_bytes(rewritten[0][0])
            (folder / REPORT).write_text(rewritten[0][1].to_json())
            return {"model": self.model.folder.name, "edits": len(plan.edits), "captures": len(plan.captures)}

        entry = self._entries.get("graphs", _key_of(base, plan), build)
        if rewritten or entry is None:
            return rewritten[0] if rewritten else rewrite(base.proto, plan, self.model.metadata)
        try:
            return (entry.path / GRAPH).read_bytes(), Report.from_json((entry.path / REPORT).read_text())
        except FileNotFoundError:  # another process cleared the store, or found the entry damaged, a moment ago
            return rewrite(base.proto, plan, self.model.metadata)


def _key_of(base: prepacked.PrepackedModel, plan: Plan) -> str:
    return hashlib.sha256(f"{base.folder.name} {source_digest(*REWRITING)} {plan!r}".encode()).hexdigest()[:32]
