"""An export without a table of modules: hook points are found by structure in the plain trace, and checked.

A family whose modules the taps do not fit is traced as it is, and the recogniser of adopted files names its values. The
export counts as done if the laws of every decoder hold and eager transformers says the same (`check_eagerly`).
"""

from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx_ir.passes.common import DeduplicateInitializersPass

from exporters.adopt.assemble import facts_of
from exporters.adopt.extension import Plain, complete
from exporters.adopt.flow import ROW_LOOKUPS
from exporters.adopt.interface import INPUT_AXES, supply_positions
from exporters.adopt.masking import LONGEST_PROBE
from exporters.adopt.naming import name_caches, name_points
from exporters.adopt.recognise import Recognised, recognise
from exporters.adopt.rotation import ANGLE_LOOKUPS
from exporters.adopt.self_check import LawResult, check_laws, probe_points
from exporters.adopt.write_model import annotate, sizes_of
from exporters.checkpoint_tensors import StoredTensor
from exporters.hook_axes import axes_of
from exporters.probe import Probe, feed_of, open_session, run
from exporters.transformers import bfloat16
from exporters.transformers.check_eagerly import check_eagerly
from exporters.transformers.checkpoint import map_tensors
from exporters.transformers.hooked_graph import LARGEST_CONSTANT, Stage
from exporters.transformers.naming import strip
from exporters.transformers.plain_trace import skeleton_of, trace_plainly
from exporters.transformers.simplify import simplify_traced
from exporters.transformers.trace import buffers_of
from exporters.transformers.weights import bind_weights
from exporters.value_types import infer_types
from exporters.weight_files import locations
from mionnx.errors import ExportError
from mionnx.graph.dataflow import Dataflow, extract
from mionnx.graph.fused_operators import MASKED_SCORE
from mionnx.graph.metadata import FOUND_BY_STRUCTURE, Attention, Metadata, Sizes, context_length
from mionnx.graph.weight_record import describe_export
from mionnx.machine.progress import Progress

OFFSETS = 2  # rows of a table of positions before the first
SHORT = 160  # tokens of a text in which windows show


@dataclass
class Checkpoint:
    """A checkpoint that is exported.

    Attributes:
        why: what the taps did not find.
    """

    folder: Path
    config: Any
    tensors: list[StoredTensor]
    dtype: torch.dtype
    why: str

    @property
    def kind(self) -> str:
        """The dtype's name."""
        return str(self.dtype).removeprefix("torch.")


@dataclass
class NamedGraph:
    """A graph whose hook points are named.

    Attributes:
        sizes: as one run shows them.
        said: for the metadata.
    """

    proto: onnx.ModelProto
    recognised: Recognised
    sizes: Sizes
    hooks: dict[str, list[str | int]]
    said: dict[str, str]


def export_by_structure(source: Checkpoint, target: Path, stage: Stage, progress: Progress) -> None:
    """Write `model.onnx` of a checkpoint into a folder, its hook points found by structure.

    Args:
        progress: called as (stage, done, total) while weights are placed and hashed.

    Raises:
        ExportError: it is no decoder that is understood, a law does not hold, or transformers says something else.
    """
    if source.dtype == torch.bfloat16:
        raise ExportError(
            f"{source.why}; what is found by structure is checked by running it, and bfloat16 does not run"
        )
    try:
        stage("tracing the model as it is")
        skeleton = skeleton_of(source.config, source.dtype)
        buffers = buffers_of(skeleton)
        model = trace_plainly(skeleton)
        stage("simplifying")
        bfloat16.widen(model)
        parameters = simplify_traced(model, buffers)
        DeduplicateInitializersPass(size_limit=LARGEST_CONSTANT)(model)
        stage("placing weights")
        bind_weights(parameters, map_tensors(source.tensors, skeleton), skeleton, target, progress)
        for value in parameters:
            model.graph.register_initializer(value)
        stage("recognising")
        named = _recognised(model, source, target, {str(value.name) for value in parameters})
        stage("checking beside transformers")
        _check(named, source, target)
    except ExportError as error:
        raise ExportError(f"{source.why}; its hook points were not found by structure either: {error}") from error
    stage("writing")
    files = sorted({tensor.file for tensor in source.tensors})
    _write(named, source, target, describe_export(target, locations(parameters), files, progress))


def _recognised(model: ir.Model, source: Checkpoint, target: Path, parameters: set[str]) -> NamedGraph:
    """Name the hook points of a graph, and run it once."""
    graph = model.graph
    infer_types(model)
    _drop_unread_positions(graph)
    positions = supply_positions(model)
    decoder = recognise(graph)
    cached = name_caches(decoder)
    names = name_points(decoder)
    decoder.notes.extend([] if positions is None else [positions])
    strip(model)
    for value in graph.inputs:
        value.shape = ir.Shape(INPUT_AXES[value.name]) if value.name in INPUT_AXES else value.shape
    model.opset_imports.pop("pkg.onnxscript.torch_lib.common", None)
    limit = _limit(decoder, source.config, parameters)
    proto = ir.to_proto(model)
    probed = probe_points(proto, target, names)
    windows = _windows(proto, target, decoder, limit, source.config)
    lacks = frozenset[str]() if cached else frozenset(("cache",))
    plain = Plain(model, proto, target, decoder, probed, windows, lacks, positions is not None, limit or LONGEST_PROBE)

    def checked(proto: onnx.ModelProto, probed: Probe) -> list[LawResult]:
        return check_laws(probed, proto, target, len(decoder.attention), any(one.sink for one in decoder.attention))

    laws = checked(proto, probed)
    if not cached:
        proto, probed, laws = complete(plain, ir.to_proto, checked)
    decoder.windows = windows
    _refuse([law for law in laws if not law.holds])
    sizes = replace(sizes_of(probed.values, decoder), max_positions=limit)
    hooks = {name: axes_of(name, probed.values[name].shape, sizes) for name in names}
    annotate(proto, probed, hooks)
    return NamedGraph(proto, decoder, sizes, hooks, facts_of(decoder, attends=False))


def _refuse(broken: list[LawResult]) -> None:
    if broken:
        raise ExportError(f"the graph was not understood: {'; '.join(map(str, broken))}")


def _drop_unread_positions(graph: ir.Graph) -> None:
    """Take away an input of positions that a family makes itself."""
    for value in [value for value in graph.inputs if value.name == "position_ids" and not value.uses()]:
        graph.inputs.remove(value)


def _limit(decoder: Recognised, config: Any, parameters: set[str]) -> int | None:
    """The longest text, where a table with a row for each position is looked up or sliced."""
    length = context_length(config.to_dict())
    if length is None:
        return None
    for value in decoder.flow.graph.initializers.values():
        looked_up = any(user.op_type in ROW_LOOKUPS | ANGLE_LOOKUPS for user, _ in value.uses())
        sizes = [size for size in value.shape or () if isinstance(size, int)]
        places = sizes[:1] if str(value.name) in parameters else sizes
        if (looked_up or str(value.name) not in parameters) and any(0 <= size - length <= OFFSETS for size in places):
            return length
    return None


def _windows(
    proto: onnx.ModelProto, target: Path, decoder: Recognised, limit: int | None, config: Any
) -> list[int | None]:
    """The window of each layer: how many keys the last query of a long text reads."""
    named = [value for key, value in config.to_dict().items() if "window" in key and type(value) is int]
    seq = min(max([SHORT, *(2 * window + 3 for window in named)]), limit or LONGEST_PROBE, LONGEST_PROBE)
    names = [f"blocks.{layer}.attn.hook_scores" for layer in range(len(decoder.attention))]
    session = open_session(extract(Dataflow(proto), [], names), target, [])
    scores = run(session, names, {entry.name: feed_of(entry, 1, seq) for entry in session.get_inputs()})
    counts = [int((one[0, 0, -1].astype(np.float64) > MASKED_SCORE).sum()) for one in scores]
    return [None if count == seq else count for count in counts]


def _check(named: NamedGraph, source: Checkpoint, target: Path) -> None:
    projections = [str(one.projection.name) for one in named.recognised.attention]
    checked = check_eagerly(source.folder, source.config, named.proto, target, named.sizes, source.kind, projections)
    _refuse([result for result in checked.results if not result.holds])
    worst = max(checked.results, key=lambda result: result.difference)
    named.said[FOUND_BY_STRUCTURE] = (
        f"{checked.layers} of {named.sizes.num_layers} layers beside eager transformers: {worst}"
    )


def _write(named: NamedGraph, source: Checkpoint, target: Path, weights: tuple[str, dict[str, dict[str, Any]]]) -> None:
    recognised = named.recognised
    windows = recognised.windows or [None] * named.sizes.num_layers
    metadata = Metadata(
        family=source.config.model_type,
        dtype=source.kind,
        sizes=named.sizes,
        hooks=named.hooks,
        attention=[
            Attention(str(one.projection.name), one.rows, windows[layer])
            for layer, one in enumerate(recognised.attention)
        ],
        exporter={**{name: version(name) for name in ("mionnx", "torch", "transformers", "onnxscript")}, **named.said},
        context_length=context_length(source.config.to_dict()),
        weights_sha256=weights[0],
        weight_files=weights[1],
    )
    named.proto.producer_name, named.proto.producer_version = "mionnx", version("mionnx")
    for key, value in metadata.to_props().items():
        named.proto.metadata_props.add(key=key, value=value)
    (target / "model.onnx").write_bytes(named.proto.SerializeToString())
