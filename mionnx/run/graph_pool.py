"""`GraphPool`: open graphs of one model, by plan; a graph is rewritten, or read from disk, when it is first used."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock, RLock
from typing import Any, TypeVar

from mionnx.engine.engine import Program
from mionnx.engine.engines import ready_engine
from mionnx.engine.options import Options
from mionnx.errors import InputError, ModelError, nearest
from mionnx.graph import onnx_file
from mionnx.graph.hooked_model import GRAPH, HookedModel
from mionnx.machine import memory
from mionnx.machine.disk_cache import DiskCache
from mionnx.machine.once import KeyedLocks, once_property
from mionnx.machine.source_digest import source_digest
from mionnx.rewrite import Plan, Report, rewrite
from mionnx.rewrite.plan import NONE, STOCK, Outputs
from mionnx.run import find_model, prepacked
from mionnx.run.graph_uses import count_use
from mionnx.run.layer_loops import LayerLoops
from mionnx.run.segment_chain import SegmentChain, open_segments

UNPACKED = 512  # tokens from which on packing the weights gains little (measured: 1.06 at 8 x 64)
SHARING = 2**23  # approximate bytes of a session on a device that shares its weights with others
SESSION, NODE = 2**19, 2**13  # approximate bytes of a session, and of each of its nodes, besides weights that it shares
REWRITING = ("mionnx.rewrite", "mionnx.graph", "mionnx.spec.kinds")  # a change there may change a rewritten graph
WHEN = ("auto", "always", "ready", "never")


class OpenGraph:
    """One graph of a model, open: the untouched one, or a rewritten one.

    Attributes:
        plan: the structure that was asked for.
        program: the open graph, in whichever engine.
        report: which nodes were added where.
        model: the rewritten model's bytes, weights not included; None for the untouched graph, which is on disk.
        cost: approximate bytes of memory.
        options: settings that it was opened with.
    """

    def __init__(
        self, plan: Plan, session: Program, report: Report, model: bytes | None, cost: int, options: Options
    ) -> None:
        self.plan, self.program, self.report = plan, session, report
        self.model, self.options = model, options
        self.cost = min(cost, SHARING) if session.shares_weights else cost

    @property
    def session(self) -> Any:
        """The engine's own object; for ONNX Runtime an `onnxruntime.InferenceSession`."""
        return self.program.native

    def run(self, outputs: Sequence[str], feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Run it on those of the feeds that it reads; see `Program.compute`."""
        return self.program.compute(outputs, feeds)


Key = Plan | tuple[Plan, tuple[str, ...]]  # of a graph, or of a chain: where the graph is cut
Open = TypeVar("Open", OpenGraph, SegmentChain)


class GraphPool:
    """The open graphs of one model; the least recently used are closed at a limit.

    Threads may share it: one that asks for a graph which another is opening waits for that one, and graphs of different
    plans open side by side. A graph that is closed here ends when the last thread that runs it has its result.
    """

    def __init__(self, model: HookedModel, options: Options) -> None:
        if options.base not in WHEN:
            raise InputError(f"base {options.base!r}; one of {', '.join(WHEN)}{nearest(options.base, WHEN)}")
        self.model, self.options, self.engine = model, options, ready_engine(options)
        if self.engine.prepacks and model.in_blocks:
            self.options = replace(options, prepack=True)  # see `packs`
        self._stock = replace(options, fast=True)  # as ONNX Runtime opens a file by itself
        self.open: dict[Key, OpenGraph | SegmentChain] = {}
        self._lock = RLock()  # of the dictionary and the numbers here; held for no longer than they are read
        self._opening: KeyedLocks[Key] = KeyedLocks()
        self._looking = Lock()
        self.base: prepacked.PrepackedModel | None = None
        self._looked = False
        self._opened = 0
        self._loops = LayerLoops()
        self._plain: set[Key] = set()  # opened without the base
        self._lately: set[Key] = set()  # used since `close_idle`

    @once_property
    def weights(self) -> int:
        """Bytes of the weights."""
        return sum(self.locations.values())

    @once_property
    def locations(self) -> dict[str, int]:
        """The weight files that the model reads, and how many bytes of each."""
        return onnx_file.locations(self.model.proto)

    @once_property
    def _entries(self) -> DiskCache:
        return DiskCache(find_model.cache_folder())

    def get(self, plan: Plan, tokens: int = 0) -> OpenGraph:
        """The open graph of a plan; rewritten and opened on first use.

        Args:
            plan: the structure.
            tokens: of the call that it is for, all rows together; 0 if that is not known, or if more calls will follow.
        """
        return self._recent(plan, lambda: self._make(plan), tokens)

    def chain(self, plan: Plan, hooks: tuple[str, ...], tokens: int = 0) -> SegmentChain:
        """The open segments of a plan cut at hook points; opened on first use.

        Args:
            plan: the structure; it wants all of the hooks.
            hooks: names, in execution order.
            tokens: as for `get`.
        """
        return self._recent((plan, hooks), lambda: self._make_chain(plan, hooks), tokens)

    def _recent(self, key: Key, make: Callable[[], Open], tokens: int) -> Open:
        self.model.need_weights()
        self._need_operators()
        count_use()
        with self._lock:
            if self.options.prepack is None and self.engine.prepacks:
                self.options = replace(self.options, prepack=self.packs(tokens))
        if found := self._used(key):
            return found
        with self._opening.of(key):
            if found := self._used(key):  # another thread has opened it meanwhile
                return found
            if self.model.in_blocks and self.base is None and self.weights >= prepacked.WORTHWHILE:
                self.engine.release()  # packing blocks is when a process holds most
            graph = make()
            with self._lock:
                self.open[key] = graph
                self._lately.add(key)
                self._close_beyond_limits()
        self._loops.opened(*(key if isinstance(key, tuple) else (key,)))
        return graph

    def _need_operators(self) -> None:
        """Refuse a dtype that the engine does not compute in, before a graph is rewritten.

        Raises:
            ModelError: the model's is one.
        """
        dtype = self.model.metadata.dtype
        if dtype in self.engine.lacks(self.options):
            where = f"{self.options.engine} on {self.options.provider}"
            raise ModelError(
                f"{self.model.folder} is in {dtype}, in which {where} does not compute: export its checkpoint in "
                "float32 or float16, or open it with provider='cuda'"
            )

    def settle(self, prepack: bool) -> bool:
        """Settle the packing of weights, unless it is settled; True if it is as asked, or of blocks."""
        with self._lock:
            if self.options.prepack is None and self.engine.prepacks:
                self.options = replace(self.options, prepack=prepack)
            return not self.engine.prepacks or self.model.in_blocks or self.options.prepack == prepack

    def packs(self, tokens: int) -> bool:
        """Whether a graph that a call of so many tokens opens has its weights packed.

        Blocks always are: unpacked, products make floats of all their blocks first, at any accuracy level, and a step
        of decoding takes 40 to 80 times as long.
        """
        chosen = self.options.prepack
        return self.engine.prepacks and (tokens < UNPACKED if chosen is None else chosen)

    def _used(self, key: Key) -> Any:
        """An open graph, or None; it goes last in the dictionary, as the one used most recently."""
        with self._lock:
            graph = self.open.pop(key, None)
            if graph is not None:
                self.open[key] = graph
                self._lately.add(key)
            return graph

    def _close_beyond_limits(self) -> None:
        limit = self.options.max_bytes or memory.total() // 2
        while len(self.open) > 1 and (
            len(self.open) > self.options.max_graphs or sum(one.cost for one in self.open.values()) > limit
        ):
            del self.open[next(iter(self.open))]

    def close_idle(self, allowed: int) -> None:
        """Close graphs not used since the last such call, while all take more than allowed."""
        with self._lock:
            lately, self._lately = self._lately, set()
            for key in [key for key in self.open if key not in lately]:
                if sum(one.cost for one in self.open.values()) <= allowed:
                    break
                del self.open[key]

    def _close_plain(self) -> None:
        """Close graphs with weights of their own, now that there is a base."""
        with self._lock:
            for key in self._plain & self.open.keys():
                if self.base is not None and self.base.serves(key if isinstance(key, Plan) else key[0], self.model):
                    del self.open[key]
            self._plain &= self.open.keys()

    def prepare(self) -> bool:
        """Make the prepacked base now; returns whether there is one."""
        with self._looking:
            return self._prepare() is not None

    def _prepare(self) -> prepacked.PrepackedModel | None:
        if self.base is None:
            self.base = prepacked.make(self.model, self.options, self._entries)
            self._close_plain()
        return self.base

    def _find_base(self) -> prepacked.PrepackedModel | None:
        with self._looking:
            return self._looked_for_base()

    def _looked_for_base(self) -> prepacked.PrepackedModel | None:
        if self.options.base == "never" or self.base is not None:
            return self.base
        if self.options.base == "always" and not self._looked:
            self._prepare()
        elif self.weights >= prepacked.WORTHWHILE:
            if not self._looked:
                self.base = prepacked.find(self.model, self.options, self._entries)
            elif self._opened == 1 and self.options.base == "auto":  # a second structure: more may follow
                self._prepare()
        self._looked = True
        return self.base

    def _count(self, key: Key) -> None:
        """Count a rewritten graph that is opened without a base."""
        with self._lock:
            self._opened += 1
            self._plain.add(key)

    def _make_fused(self, plan: Plan) -> OpenGraph:
        """The graph of a plan with the file's fused operators, which no base has."""
        model, report = rewrite(self.model.proto, plan, self.model.metadata)
        program = self.engine.open(model, self.model.folder, self.options)
        return OpenGraph(plan, program, report, model, self.weights, self.options)

    def _make_stock(self, plan: Plan) -> OpenGraph:
        """The graph of an adopted file as it came, opened as the file itself would be."""
        assert self.model.stock is not None  # as the plan says
        proto, report = self.model.stock.proto, Report()
        model = proto.SerializeToString()
        if plan.outputs != Outputs():
            model, report = rewrite(proto, replace(plan, fused=NONE), self.model.metadata)
        program = self.engine.open(model, self.model.folder, self._stock)
        return OpenGraph(plan, program, report, model, self.weights, self._stock)

    def _make(self, plan: Plan) -> OpenGraph:
        if plan.fused == STOCK:
            return self._make_stock(plan)
        if plan.fused != NONE:
            return self._make_fused(plan)
        base = self._find_base()
        if base is not None and base.serves(plan, self.model):
            model, report = self._rewritten(base, plan)
            program = self.engine.open(model, base.folder, self.options, optimised=True)
            return OpenGraph(plan, program, report, None if plan.empty else model, _cost(model), self.options)
        if plan.empty:
            self._plain.add(plan)
            leveled = None if self.options.accuracy_level is None else self.model.proto.SerializeToString()
            program = self.engine.open(leveled or self.model.folder / GRAPH, self.model.folder, self.options)
            return OpenGraph(plan, program, Report(), leveled, self.weights, self.options)
        self._count(plan)
        model, report = rewrite(self.model.proto, plan, self.model.metadata)
        cost = sum(onnx_file.locations(onnx_file.parse(model)).values()) if plan.starts else self.weights
        program = self.engine.open(model, self.model.folder, self.options)
        return OpenGraph(plan, program, report, model, cost, self.options)

    def _make_chain(self, plan: Plan, hooks: tuple[str, ...]) -> SegmentChain:
        base, metadata = self._find_base(), self.model.metadata
        if base is not None and base.serves(plan, self.model):
            model, report = rewrite(base.proto, plan, metadata)
            folder, optimised, cost = base.folder, True, _cost(model)
        else:
            self._count((plan, hooks))
            model, report = rewrite(self.model.proto, plan, metadata)
            folder, optimised, cost = self.model.folder, False, self.weights
        return open_segments(
            onnx_file.parse(model),
            report,
            plan,
            hooks,
            folder,
            self.options,
            self.engine,
            optimised=optimised,
            cost=cost,
        )

    def _rewritten(self, base: prepacked.PrepackedModel, plan: Plan) -> tuple[bytes, Report]:
        """A base's graph rewritten, from the store if it is there."""
        if plan.empty:
            return base.proto.SerializeToString(), Report()
        rewritten: list[tuple[bytes, Report]] = []

        def build(folder: Path) -> dict[str, Any]:
            rewritten.append(rewrite(base.proto, plan, self.model.metadata))
            (folder / GRAPH).write_bytes(rewritten[0][0])
            (folder / "report.json").write_text(rewritten[0][1].to_json())
            return {"model": self.model.folder.name, "edits": len(plan.edits), "captures": len(plan.captures)}

        entry = self._entries.get("graphs", _key_of(base, plan), build)
        if rewritten or entry is None:
            return rewritten[0] if rewritten else rewrite(base.proto, plan, self.model.metadata)
        try:
            report = Report.from_json((entry.path / "report.json").read_text())
            return (entry.path / GRAPH).read_bytes(), report
        except FileNotFoundError:  # another process cleared the store, or found the entry damaged, a moment ago
            return rewrite(base.proto, plan, self.model.metadata)


def _cost(model: bytes) -> int:
    """Approximate bytes of a session that shares its weights."""
    return SESSION + NODE * len(onnx_file.parse(model).graph.node)


def _key_of(base: prepacked.PrepackedModel, plan: Plan) -> str:
    """Key of a rewritten graph on disk: the base, the plan, and the sources that rewrite."""
    return hashlib.sha256(f"{base.folder.name} {source_digest(*REWRITING)} {plan!r}".encode()).hexdigest()[:32]
