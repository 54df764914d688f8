"""An export without a table of modules: hook points are found by structure in the plain trace, and checked.

A family whose modules the taps do not fit is traced as it is, and the recogniser of adopted files names its values. The
export counts as done if the laws of every decoder hold and eager transformers says the same (`check_eagerly`).
"""

import inspect
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx_ir.passes.common import DeduplicateInitializersPass
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from exporters.adopt.attention import ANGLE_LOOKUPS
from exporters.adopt.extension import Plain, complete
from exporters.adopt.facts import annotate, attention_of, facts_of
from exporters.adopt.facts import sizes_of as probed_sizes
from exporters.adopt.interface import INPUT_AXES, supply_positions
from exporters.adopt.masking import LONGEST_PROBE
from exporters.adopt.naming import name_caches, name_points
from exporters.adopt.operators.decoder_writer import POSITIONS
from exporters.adopt.recognise import Recognised, recognise
from exporters.adopt.self_check import LawResult, check_laws, probe_points, refuse_broken
from exporters.checkpoint_tensors import StoredTensor
from exporters.hook_axes import axes_of
from exporters.probe import Probe, feed_of, open_part, run
from exporters.transformers import trace
from exporters.transformers.attention import cache_word, filled
from exporters.transformers.carried import Carries
from exporters.transformers.check_eagerly import check_eagerly
from exporters.transformers.hooked_graph import EXPORT_PACKAGES, LARGEST_CONSTANT, Stage
from exporters.transformers.naming import strip
from exporters.transformers.own_attention import plain_maximum
from exporters.transformers.simplify import simplify_traced, widen
from exporters.transformers.weights import bind_weights, map_tensors
from exporters.value_types import infer_types
from exporters.weight_files import locations
from mionnx.errors import ExportError
from mionnx.graph.dataflow import Dataflow
from mionnx.graph.fused_operators import MASKED_SCORE
from mionnx.graph.hooked_model import GRAPH
from mionnx.graph.metadata import FOUND_BY_STRUCTURE, Metadata
from mionnx.graph.own_version import own_version
from mionnx.graph.sizes import Sizes, context_length
from mionnx.graph.weight_record import describe_export
from mionnx.machine.progress import Progress

OFFSETS = 2  # rows of a table of positions before the first
SHORT = 160  # tokens of a text in which windows show
Past = list[tuple[Tensor, ...]]


@dataclass
class Checkpoint:
    """A checkpoint that is exported; `dtype` is that of the graph."""

    folder: Path
    config: Any
    tensors: list[StoredTensor]
    dtype: torch.dtype

    @property
    def kind(self) -> str:
        """The dtype's name."""
        return str(self.dtype).removeprefix("torch.")


def export_by_structure(source: Checkpoint, why: str, target: Path, stage: Stage, progress: Progress) -> None:
    """Write a checkpoint's `model.onnx`, its hook points found by structure; `why` says what the taps did not find."""
    if source.dtype == torch.bfloat16:
        raise ExportError(f"{why}; what is found by structure is checked by running it, and bfloat16 does not run")
    try:
        stage("tracing the model as it is")
        skeleton = trace.skeleton_of(source.config, source.dtype, plain=True)
        buffers = trace.buffers_of(skeleton)
        model = trace_plainly(skeleton)
        stage("simplifying")
        widen(model)
        parameters = simplify_traced(model, buffers)
        DeduplicateInitializersPass(size_limit=LARGEST_CONSTANT)(model)
        stage("placing weights")
        bind_weights(parameters, map_tensors(source.tensors, skeleton), skeleton, target, progress)
        for value in parameters:
            model.graph.register_initializer(value)
        stage("recognising")
        proto, decoder, metadata = _recognised(model, source, target, {str(value.name) for value in parameters})
        stage("checking beside transformers")
        agreement = _check(proto, decoder, metadata.sizes, source, target)
    except ExportError as error:
        raise ExportError(f"{why}; its hook points were not found by structure either: {error}") from error
    stage("writing")
    files = sorted({tensor.file for tensor in source.tensors})
    digest, of_files = describe_export(target, locations(parameters), files, progress)
    exporter = {
        **{name: version(name) for name in EXPORT_PACKAGES},
        **facts_of(decoder, attends=False),
        FOUND_BY_STRUCTURE: agreement,
    }
    metadata = replace(metadata, exporter=exporter, weights_sha256=digest, weight_files=of_files)
    proto.producer_name, proto.producer_version = "mionnx", own_version()
    for key, text in metadata.to_props().items():
        proto.metadata_props.add(key=key, value=text)
    (target / GRAPH).write_bytes(proto.SerializeToString())


class _Plain(nn.Module):
    """A causal language model as a function of tensors; its cache is a list of (key, value)."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model, self.takes = model, inspect.signature(model.forward).parameters

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, past: Past) -> tuple[Any, Past]:
        arguments: dict[str, Any] = {"position_ids": position_ids} if "position_ids" in self.takes else {}
        cache: Any = DynamicCache()
        if past:
            cache.layers = [filled(key, value) for key, value in past]
            arguments |= {cache_word(self.model): cache, "use_cache": True}
        output = self.model(input_ids=input_ids, attention_mask=attention_mask, **arguments)
        return output.logits, [(layer.keys, layer.values) for layer in cache.layers]


def trace_plainly(skeleton: PreTrainedModel) -> ir.Model:
    """Trace a model to ONNX as it is, without weights and markers; its parameters are fake tensors afterwards."""
    with FakeTensorMode():
        trace.allocate(skeleton)
        try:
            shapes = _cache_shapes(skeleton)
        except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError) as error:
            raise ExportError(f"{skeleton.config.model_type!r} does not run without weights: {error}") from error
        past = [tuple(torch.zeros(shape, dtype=skeleton.dtype) for shape in layer) for layer in shapes]
        ports = [Carries((key[1], key[3], value[3])).ports(i) for i, (key, value) in enumerate(shapes)]
        example = (*trace.example_ids(trace.TRACE_PAST * bool(past)), past)
    causes = list[str]()
    # what comparing sizes in Python fixes for other sizes is seen by `check_eagerly`
    for sizes_compared in (nullcontext(), plain_maximum(skeleton)):
        try:
            with sizes_compared, trace.quiet(), trace.UNCACHED, torch.no_grad():
                return trace.to_onnx(_Plain(skeleton), example, ports)
        except torch.onnx.errors.OnnxExporterError as error:
            causes.append(f"{error.__cause__ or error}")
    raise ExportError(f"torch could not export {skeleton.config.model_type!r} as it is: {causes[0]}")


def _cache_shapes(skeleton: PreTrainedModel) -> list[list[torch.Size]]:
    """The shapes of keys and values after `trace.TRACE_PAST` tokens; none without a cache."""
    word = cache_word(skeleton)
    if not word:
        return []
    ids = torch.ones(trace.TRACE_BATCH, trace.TRACE_PAST, dtype=torch.long)
    with torch.no_grad():
        cache = getattr(skeleton(input_ids=ids, use_cache=True), word, None)
    tensors = [[getattr(layer, part, None) for part in ("keys", "values")] for layer in getattr(cache, "layers", ())]
    shapes = [[one.shape for one in two if isinstance(one, Tensor)] for two in tensors]
    layers, kind = skeleton.config.get_text_config().num_hidden_layers, skeleton.config.model_type
    usual = all(len(two) == 2 and all(len(one) == 4 and one[2] == trace.TRACE_PAST for one in two) for two in shapes)
    if len(shapes) != layers or not usual:
        raise ExportError(f"{kind!r} has a cache of another form than keys and values in each of {layers} layers")
    return shapes


def _recognised(
    model: ir.Model, source: Checkpoint, target: Path, parameters: set[str]
) -> tuple[onnx.ModelProto, Recognised, Metadata]:
    """Name the hook points of a graph, and run it once; the metadata lack what is said of weights and checks."""
    graph = model.graph
    infer_types(model)
    for value in [value for value in graph.inputs if value.name == POSITIONS and not value.uses()]:
        graph.inputs.remove(value)  # a family that makes them itself
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
        return check_laws(probed, proto, target, len(decoder.layers), decoder.sinks)

    laws = checked(proto, probed)
    if not cached:
        proto, probed, laws = complete(plain, ir.to_proto, checked)
    decoder.windows = windows
    refuse_broken(laws, "the graph was")
    sizes = replace(probed_sizes(probed.values, decoder), max_positions=limit)
    hooks = {name: axes_of(name, probed.values[name].shape, sizes) for name in names}
    annotate(proto, probed, hooks)
    metadata = Metadata(
        family=source.config.model_type,
        dtype=source.kind,
        sizes=sizes,
        hooks=hooks,
        attention=attention_of(decoder, windows),
        exporter={},
        context_length=context_length(source.config.to_dict()),
    )
    return proto, decoder, metadata


def _limit(decoder: Recognised, config: Any, parameters: set[str]) -> int | None:
    """The longest text, where a table with a row for each position is looked up or sliced."""
    length = context_length(config.to_dict())
    if length is None:
        return None
    for value in decoder.flow.graph.initializers.values():
        looked_up = any(user.op_type in ANGLE_LOOKUPS for user, _ in value.uses())
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
    names = [f"blocks.{layer}.attn.hook_scores" for layer in range(len(decoder.layers))]
    session = open_part(Dataflow(proto), target, [], names)
    scores = run(session, names, {entry.name: feed_of(entry, 1, seq) for entry in session.get_inputs()})
    counts = [int((one[0, 0, -1].astype(np.float64) > MASKED_SCORE).sum()) for one in scores]
    return [None if count == seq else count for count in counts]


def _check(proto: onnx.ModelProto, decoder: Recognised, sizes: Sizes, source: Checkpoint, target: Path) -> str:
    """Compare a graph with eager transformers; returns what the metadata say of it."""
    projections = [str(one.projection.name) for one in decoder.attention.values()]
    results, layers = check_eagerly(source.folder, source.config, proto, target, sizes, source.kind, projections)
    refuse_broken(results, "the graph was")
    worst = max(results, key=lambda result: result.difference)
    return f"{layers} of {sizes.num_layers} layers beside eager transformers: {worst}"
