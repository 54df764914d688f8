"""`OpenGraphs`: the graphs of one model that are open, by plan.

A graph is opened when it is first asked for, from the base (`mionnx.run.prepacked`) if there is one that has all that
its plan needs, else from the model's own graph, with weights of its own; `graph_memory` says when it closes.
"""

import hashlib
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from numpy.typing import NDArray

from mionnx.engine.engine import Program
from mionnx.engine.engines import ready_engine
from mionnx.engine.options import Options
from mionnx.errors import ModelError
from mionnx.graph import onnx_file
from mionnx.graph.hooked_model import GRAPH, HookedModel
from mionnx.machine import memory
from mionnx.machine.brief import Brief, count
from mionnx.machine.cache_keys import source_digest
from mionnx.machine.caller import caller_level, caller_verb
from mionnx.machine.disk_cache import DiskCache
from mionnx.machine.once import KeyedLocks, once_property
from mionnx.rewrite import Plan, Report, rewrite
from mionnx.rewrite.plan import NONE, STOCK
from mionnx.run import find_model, prepacked
from mionnx.run.every_layer import EveryLayer, every_layer
from mionnx.run.graph_memory import NODE, SESSION, SHARING, GraphMemory, MappedPages, count_use
from mionnx.run.pieces import PIECES, PiecedGraph, Pieces
from mionnx.run.segment_chain import GraphOpening, SegmentChain, open_segments

UNPACKED = 512  # tokens from which on packing the weights gains little (measured: 1.06 at 8 x 64)
REWRITING = ("mionnx.rewrite", "mionnx.graph", "mionnx.spec.kinds")  # a change there may change a rewritten graph
REMEMBERED = 1024  # plans of which it is known how the graph of every layer serves them
REPORT = "report.json"  # beside a rewritten graph in the store
LAYER = re.compile(r"\bblocks\.\d+\.")
ALIKE = 5  # graphs that differ in the layer only
LAYER_VERBS = {"forward", "call", "run_with_hooks", "run_with_cache"}  # `call` is model(tokens)


class LayerLoopWarning(UserWarning):
    """Calls that differ in the layer only, each with a graph of its own."""


@dataclass(frozen=True, eq=False, repr=False)
class OpenGraph(Brief):
    """One graph of a model, open: the untouched one, or a rewritten one."""

    plan: Plan
    program: Program
    report: Report
    # The bytes that were opened, weights not included; None for the untouched graph, which is on disk.
    model: bytes | None
    cost: int  # approximate bytes of memory
    options: Options
    # Inputs that say what it is used for, where calls of several kinds share it.
    feeds: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    # Input -> another whose array it is fed, where it has no effect in this call.
    lent: Mapping[str, str] = field(default_factory=dict)

    def _facts(self) -> Iterator[str]:
        yield count(len(self.plan.captures), "capture")
        yield count(len(self.plan.edits), "intervention")
        yield memory.format_bytes(self.cost)
        yield self.options.engine or ""

    @property
    def session(self) -> Any:
        """The engine's own object, as its documentation describes it."""
        return self.program.native

    def run(self, outputs: Sequence[str], feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Run it on those of the feeds that it reads; see `Program.compute`."""
        lent = {name: feeds[source] for name, source in self.lent.items()}
        return self.program.compute(outputs, {**self.feeds, **lent, **feeds})


Cut = tuple[Plan, tuple[str, ...]]  # a plan, and the hook points at which its graph is cut
Open = TypeVar("Open", OpenGraph, SegmentChain)


class OpenGraphs(GraphMemory[Plan | Cut, OpenGraph | SegmentChain]):
    """The open graphs of one model.

    Threads may share it: one that asks for a graph which another is opening waits for that one, and graphs of different
    plans open side by side.
    """

    def __init__(self, model: HookedModel, options: Options) -> None:
        super().__init__(options)
        self.model, self.options, self.engine = model, options, ready_engine(options)
        if model.in_blocks and self.engine.packs(options):
            self.options = replace(options, prepack=True)  # unpacked, products make floats of all blocks first
        self._asked = options.prepack
        self._stock = replace(options, fast=True)  # as the engine opens a file by itself
        self.base: prepacked.PrepackedModel | None = None
        self._pages = MappedPages()
        self._opening: KeyedLocks[Plan | Cut | str] = KeyedLocks()
        self._unbased = 0  # rewritten graphs that were opened without a base
        self._loops: dict[str, set[str]] | None = defaultdict(set)  # plan without the layer -> with it; None once said
        self._pieces: Pieces | None = None
        self._layers: dict[Plan, EveryLayer | None] = {}
        self._structures: dict[Plan | Cut, Plan] = {}  # that of every layer -> the first plan that was asked for

    @property
    def mappings(self) -> int:
        return len(self.open) * len(self._parts) if self.open else 0

    @once_property
    def weights(self) -> int:
        return sum(onnx_file.locations(self.model.proto).values())

    @property
    def packs_gradients(self) -> bool:
        """Whether a graph with gradients has weights of its own: packed as they are, and once more turned."""
        return bool(self._asked) or self.model.in_blocks or self.weights < prepacked.WORTHWHILE

    @property
    def base_to_come(self) -> int:
        """Bytes of the base that is made before the second rewritten graph; 0 where one is there, or has no room."""
        makes = self.options.base and self.options.prepack is not False and prepacked.possible(self.options)
        if not makes or self.base is not None or self.weights < prepacked.WORTHWHILE:
            return 0
        if self.model.has_weights and prepacked.find(self.model, self.options, self._entries) is not None:
            return 0
        try:
            prepacked.refuse_without_room(self.model, self._entries)
        except OSError:  # then none is made
            return 0
        return prepacked.bytes_of(self.model)

    @once_property
    def _entries(self) -> DiskCache:
        return DiskCache(find_model.cache_folder())

    def get(self, plan: Plan, tokens: int = 0) -> OpenGraph:
        """The open graph of a plan, opened on first use; `tokens` of a single call, 0 if more will follow."""
        return self._of(plan, lambda: self._open_graph(plan), tokens)

    def every_layer(self, plan: Plan, cuts: tuple[str, ...] = ()) -> EveryLayer | None:
        """How the graph of every layer serves a plan; None where its own does: open, or the first of its structure."""
        if _keyed(plan, cuts) in self.open:
            return None
        try:
            layers = self._layers[plan]
        except KeyError:
            if len(self._layers) >= REMEMBERED:
                self._layers.clear()
                self._structures.clear()
            layers = self._layers[plan] = every_layer(plan, self.model)
        if layers is None:
            return None
        wide = _keyed(layers.plan, layers.cuts(cuts))
        first = self._structures.setdefault(wide, plan) == plan
        return None if first and wide not in self.open else layers

    def pieces(self, plan: Plan, tokens: int) -> PiecedGraph | None:
        """Pieces of the base that serve a plan; None where a graph of its own does, as for the first structure."""
        base = self.base
        if base is None or plan.empty or plan in self.open or tokens >= UNPACKED or self._limits[0] < 4 * PIECES:
            return None
        if not base.serves(plan, self.model):
            return None
        with self._opening.of("pieces"):
            if self._pieces is None:
                self._pieces = Pieces(base.proto, self.model.metadata)
        return self._pieces.of(plan, self) if self.packs(tokens) else None

    def chain(self, plan: Plan, cuts: tuple[str, ...], tokens: int = 0) -> SegmentChain:
        """The open segments of a plan cut at hook points; opened on first use."""
        layers = self.every_layer(plan, cuts)
        if layers is None:
            return self._chain(plan, cuts, tokens)
        chain = self._chain(layers.plan, layers.cuts(cuts), tokens)
        return replace(chain, acting=frozenset(cuts), feeds=layers.switches, lent=layers.lent)

    def _chain(self, plan: Plan, cuts: tuple[str, ...], tokens: int) -> SegmentChain:
        return self._of((plan, cuts), lambda: open_segments(self._opening_of(plan), plan, cuts, self.engine), tokens)

    def _of(self, key: Plan | Cut, make: Callable[[], Open], tokens: int) -> Open:
        self.model.need_weights()
        self._refuse_dtype()
        count_use()
        if self.options.prepack is None:  # the last bits differ between the two: one of them for all graphs of a model
            self.settle(self.packs(tokens))
        graph: Any = self.used(key)
        if graph is not None:
            return graph
        with self._opening.of(key):
            graph = self.used(key)
            if graph is not None:  # another thread has opened it meanwhile
                return graph
            if self.model.in_blocks and self.base is None and self.weights >= prepacked.WORTHWHILE:
                self.engine.release()  # packing blocks is when a process holds most
            self._pages.limit(self.weights // 2, lambda: self._parts, self._base_files)  # opening maps them once more
            graph = make()
            self.keep(key, graph)
            self.limit_pages()
        self._warn_of_layer_loop(*(key if isinstance(key, tuple) else (key, ())))
        return graph

    def limit_pages(self) -> None:
        """Let pages of the weights' files go where more graphs than one hold them."""
        self._pages.limit(self.weights, lambda: self._parts, self._base_files)

    def watch_pages(self) -> None:
        """The same behind a pass, now and then."""
        self._pages.watch(self.weights, lambda: self._parts, self._base_files)

    @property
    def _base_files(self) -> list[Path]:
        return [] if self.base is None else [self.base.data]

    @once_property
    def _parts(self) -> set[memory.Part]:
        return onnx_file.external_parts(self.model.proto, self.model.folder)

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
        if not self.engine.packs(self.options) or self.options.prepack is not None:
            return self.engine.packs(self.options) and bool(self.options.prepack)
        return tokens < UNPACKED and self._has_room

    @once_property
    def _has_room(self) -> bool:
        """Whether packed weights can lie in the store; else each graph would hold a copy of its own."""
        if not self.options.base or self.weights < prepacked.WORTHWHILE or not prepacked.possible(self.options):
            return True
        try:
            if prepacked.find(self.model, self.options, self._entries) is None:
                prepacked.refuse_without_room(self.model, self._entries)
        except OSError as error:
            self._entries.say_unusable(error, "reading its weights as they are, which is slower on few tokens")
            return False
        return True

    def prepare(self) -> bool:
        """Make the base now, and close graphs with weights of their own; tell whether there is one."""
        with self._opening.of("base"):
            if self.base is None:
                self.base = base = prepacked.make(self.model, self.options, self._entries)
                with self._lock:
                    plans = {key: graph.plan for key, graph in self.open.items() if graph.plan.fused == NONE}
                    self.close([key for key, plan in plans.items() if base and base.serves(plan, self.model)])
            return self.base is not None

    def _base_for(self, plan: Plan) -> prepacked.PrepackedModel | None:
        """The base, if it serves a plan."""
        if plan.fused != NONE:  # no base has operators of the file
            return None
        with self._opening.of("base"):
            if self.options.base and self.base is None and self.weights >= prepacked.WORTHWHILE:
                # Looked for before the first rewritten graph, and made before the second: more may follow.
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
        proto, options, folder = self.model.proto, self.options, self.model.folder
        if plan.fused == STOCK:
            assert self.model.stock is not None  # as the plan says
            proto, options, plan = self.model.stock.proto, self._stock, replace(plan, fused=NONE)
        if plan.empty:
            own = self.model.as_on_disk and proto is self.model.proto and options.accuracy_level is None
            untouched = folder / GRAPH if own else proto.SerializeToString()
            return GraphOpening(untouched, folder, options, Report(), self.weights)
        model, report = rewrite(proto, plan, self.model.metadata)
        cost = sum(onnx_file.locations(onnx_file.parse(model)).values()) if plan.starts else self.weights
        if plan.differentiated and not self.packs_gradients:
            options = replace(options, prepack=False)
        if options.prepack is False and self.engine.packs(options):  # weights are pages of their file
            cost = SESSION + NODE * len(onnx_file.parse(model).graph.node)
        return GraphOpening(model, folder, options, report, cost)

    def _open_graph(self, plan: Plan) -> OpenGraph:
        one = self._opening_of(plan)
        program = self.engine.open(one.model, one.folder, one.options, optimised=one.optimised)
        model = one.model if isinstance(one.model, bytes) else None
        cost = min(one.cost, SHARING) if program.shares_weights else one.cost
        return OpenGraph(plan, program, one.report, model, cost, one.options)

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

    def _warn_of_layer_loop(self, plan: Plan, cuts: tuple[str, ...]) -> None:
        """Warn of the fifth graph, opened by a user's own calls, that differs from others in the layer only."""
        structures = self._loops
        if structures is None or not (plan.edits or plan.captures) or plan.starts or caller_verb() not in LAYER_VERBS:
            return
        structure = f"{plan} {cuts}"
        alike = structures[LAYER.sub("blocks.*.", structure)]
        alike.add(structure)
        if len(alike) < ALIKE:
            return
        self._loops = None
        warnings.warn(
            f"{ALIKE} calls differ in the layer only, and each opened a graph of its own; {_one_call(plan, cuts)}",
            LayerLoopWarning,
            stacklevel=caller_level(),
        )


def _keyed(plan: Plan, cuts: tuple[str, ...]) -> Plan | Cut:
    return (plan, cuts) if cuts else plan


def _one_call(plan: Plan, cuts: tuple[str, ...]) -> str:
    """End of a warning: the verb that does all layers in one call."""
    changed = [*cuts, *(edit.hook for edit in plan.edits)]
    if changed:
        hook = next(filter(LAYER.match, changed), changed[0]).rpartition("hook_")[2]
        return (
            f'one call does all layers: model.patch_sweep(clean, corrupted, "{hook}", "layer", answer=...) puts values '
            f'of another prompt in, model.ablation_sweep(prompt, "{hook}", "layer") zeros or means'
        )
    captured = [node.hook for node in plan.captures]
    hook = LAYER.sub("blocks.*.", next(filter(LAYER.match, captured), captured[0]))
    return f'one call captures all layers: HookSpec().capture("{hook}")'


def _key_of(base: prepacked.PrepackedModel, plan: Plan) -> str:
    return hashlib.sha256(f"{base.folder.name} {source_digest(*REWRITING)} {plan!r}".encode()).hexdigest()[:32]
