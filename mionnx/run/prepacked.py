"""A prepared base: a hooked model's graph, optimised once, its weights packed once, from which variants are opened.

Opening a rewritten graph the plain way makes ONNX Runtime optimise it and pack all weights anew, in memory of its own.
From a base it reads them packed, from one file in the store that all sessions of the machine share; the bits are the
same. What a base lacks (a weight under its own name, for `hook_result`) is opened the plain way.
"""

import hashlib
import json
import os
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mionnx.engine.engines import engine_of
from mionnx.engine.options import Options
from mionnx.errors import ModelError
from mionnx.graph import onnx_file
from mionnx.graph.dataflow import Dataflow
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.machine import memory
from mionnx.machine.cache_keys import instruction_sets, processor_name, source_digest
from mionnx.machine.disk_cache import DiskCache
from mionnx.machine.once import Once, once_property
from mionnx.machine.progress import shown
from mionnx.rewrite import Plan

BASE_GRAPH, DATA = "base.onnx", "base.data"
PREPARING = ("mionnx.run.prepacked", "mionnx.engine")  # a change there may change a base
ROOM = 2.3  # of a base, in sizes of the weights
WORTHWHILE = 64 * 2**20  # bytes of weights: below, packing them again is quicker than looking for a base


@dataclass(frozen=True)
class PrepackedModel:
    """A base on disk."""

    folder: Path
    outputs: tuple[str, ...]  # the model's own
    _passed: Once[str, frozenset[str]] = field(default_factory=Once, init=False, repr=False, compare=False)

    @property
    def data(self) -> Path:
        """The file of its weights."""
        return self.folder / DATA

    @once_property
    def proto(self) -> onnx_file.ModelProto:
        """The graph with the model's own outputs, without its weights."""
        # ONNX Runtime leaves out the types of what some of its fusions make; a graph that begins there needs them.
        proto = onnx_file.with_types(onnx_file.read(self.folder / BASE_GRAPH))
        outputs = [output for output in proto.graph.output if output.name in self.outputs]
        del proto.graph.output[:]
        proto.graph.output.extend(outputs)
        return proto

    @once_property
    def _values(self) -> set[str]:
        graph = self.proto.graph
        outputs = {output for node in graph.node for output in node.output}
        return outputs | {entry.name for entry in (*graph.initializer, *graph.input)}

    def serves(self, plan: Plan, model: HookedModel) -> bool:
        """Whether everything that a plan needs is in it under its own name."""
        if plan.differentiated:
            return False  # a base has operators of its engine, for which there are no rules
        begins = {*plan.starts, *(edit.hook for edit in plan.edits)}
        return {*_needed(plan, model)} - plan.inner <= self._values and not begins & self._passed_by(model)

    def _passed_by(self, model: HookedModel) -> frozenset[str]:
        """Hook points whose value not all that follows from it reads: an edit would not reach it."""
        return self._passed.get(model.digest, lambda: passed_by(model.proto, self.proto, {*model.metadata.hooks}))


def passed_by(model: onnx_file.ModelProto, base: onnx_file.ModelProto, hooks: set[str]) -> frozenset[str]:
    """Hook points that an optimised graph leaves beside the way: ONNX Runtime turns keys once more, for example.

    A value follows from the same hook points directly in both graphs, with no other between; where it does not, an edit
    at those of the model's may have no effect.
    """
    ways = [_directly(Dataflow(proto), hooks) for proto in (model, base)]
    return frozenset(point for end, own in ways[0].items() if ways[1].get(end, own) != own for point in own)


def _directly(flow: Dataflow, hooks: set[str]) -> dict[str, frozenset[str]]:
    """Hook point or output -> the hook points that it follows from with none between."""
    above: dict[str, frozenset[str]] = {}
    ends: dict[str, frozenset[str]] = {}
    for node, read in zip(flow.nodes, flow.reads, strict=True):
        own = frozenset[str]().union(*({name} if name in hooks else above.get(name, ()) for name in read))
        above |= dict.fromkeys(node.output, own)
        ends |= {name: own for name in node.output if name in hooks}
    return ends | {entry.name: above.get(entry.name, frozenset()) for entry in flow.proto.graph.output}


def _needed(plan: Plan, model: HookedModel) -> list[str]:
    names = [hook for edit in plan.edits for hook in (edit.hook, edit.reads) if hook is not None]
    names += plan.starts
    for want in plan.captures:
        point = HookPoint.parse(want.hook)
        if not point.derived:
            names.append(want.hook)
        elif point.variant == "AttnResult":
            layer = point.layer or 0
            attention = model.metadata.layers[layer].attention
            names += [str(HookPoint.AttnZ(layer)), attention.output_projection if attention else ""]
        else:
            names.append("of a recurrence")  # which no base has: its parts have no hook names
    return names


def key_of(model: HookedModel, options: Options) -> str:
    """The hash of everything that a base depends on."""
    files = sorted({str(model.folder / location) for location in onnx_file.locations(model.proto)})
    stats = [(Path(file).stat().st_size, Path(file).stat().st_mtime_ns) for file in files]
    facts = {
        "sources": source_digest(*PREPARING),
        "graph": hashlib.sha256(model.proto.SerializeToString(deterministic=True)).hexdigest(),
        "weights": [model.metadata.weights_sha256, stats],
        "engine": _engine_facts(options),
        "fast": options.fast,
        "processor": [processor_name(), *instruction_sets()],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _engine_facts(options: Options) -> dict[str, str]:
    """The engine's version and settings; any number of threads can use a base."""
    return engine_of(options).facts(replace(options, threads=0))


def possible(options: Options) -> bool:
    """Whether bases are of use: the engine packs weights, and a base is fully optimised."""
    return engine_of(options).packs(options) and options.level == "all"


def find(model: HookedModel, options: Options, entries: DiskCache) -> PrepackedModel | None:
    """The base, if there is one already."""
    entry = entries.find("bases", key_of(model, options)) if possible(options) else None
    return PrepackedModel(entry.path, _outputs(model)) if entry else None


def make(model: HookedModel, options: Options, entries: DiskCache) -> PrepackedModel | None:
    """The base, made if there is none; None where the store cannot hold it."""
    model.need_weights()
    if not possible(options):
        return None

    def build(folder: Path) -> dict[str, Any]:
        refuse_without_room(model, entries)
        # Every hook point is an output, so that nothing that can be hooked is fused away.
        names = [name for name in model.metadata.hooks if name not in _outputs(model)]
        proto = onnx_file.with_outputs(model.proto, {name: model.dtype(HookPoint.parse(name)) for name in names})
        room = memory.format_bytes(bytes_of(model))
        stage = f"packing the weights of {model.folder.name}, once on this machine ({room} in the store)"
        try:
            with shown() as show:
                show(stage, 0, 1)
                engine_of(options).write_optimised(proto, model.folder, folder / BASE_GRAPH, DATA, options, packed=True)
                show(stage, 1, 1)
        except ModelError as error:  # a disk that fills up comes as one too; the plain way is still open
            raise OSError(str(error)) from error
        return {"model": model.folder.name, "family": model.metadata.family, **_engine_facts(options)}

    entry = entries.get("bases", key_of(model, options), build)
    return PrepackedModel(entry.path, _outputs(model)) if entry else None


def refuse_without_room(model: HookedModel, entries: DiskCache) -> None:
    """Refuse a base that the store cannot hold.

    Raises:
        OSError: with the bytes that it needs, and those that are free.
    """
    folder = next(folder for folder in (entries.root, *entries.root.absolute().parents) if folder.is_dir())
    needed, free = bytes_of(model), min(shutil.disk_usage(folder).free, entries.limit)
    if not os.access(folder, os.W_OK):
        raise OSError(f"{folder} cannot be written to")
    if needed > free:
        room = f"needs {memory.format_bytes(needed)}, and there is room for {memory.format_bytes(free)}"
        raise OSError(f"a base of {model.folder.name} {room}")


def bytes_of(model: HookedModel) -> int:
    """Approximate bytes of a base."""
    return int(ROOM * sum(onnx_file.locations(model.proto).values()))


def _outputs(model: HookedModel) -> tuple[str, ...]:
    return tuple(onnx_file.interface(model.proto)[1])
