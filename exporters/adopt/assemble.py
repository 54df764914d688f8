"""Adoption in stages: read, name inputs, expand, recognise, name, probe, check, write."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from exporters.adopt.encoder import (
    DECODER_HEAD,
    FileHead,
    drop_positions,
    find_head,
    name_head,
    reads_both_ways,
    stream_point,
)
from exporters.adopt.extension import AS_STOCK, LACKING, Plain, complete
from exporters.adopt.facts import SINKS, add_metadata, config_of, counted_places, other_windows, windows_of
from exporters.adopt.flow import rank
from exporters.adopt.interface import heeds_mask, name_inputs, supply_positions
from exporters.adopt.naming import name_caches, name_points
from exporters.adopt.onnx_files import config_folder
from exporters.adopt.operators.expand import expand
from exporters.adopt.operators.fused import Fused
from exporters.adopt.operators.moved_attention import moved
from exporters.adopt.recognise import Recognised, recognise
from exporters.adopt.restorable import Interface, keep_fused, keep_stock
from exporters.adopt.self_check import (
    LawResult,
    check_laws,
    check_padding,
    compare,
    probe_points,
    refuse_broken,
    rounding,
)
from exporters.adopt.source_file import SourceFile, check_source, open_source, tell_types
from exporters.op_writer import OpWriter
from exporters.probe import Probe, check_bounded, open_session, run
from exporters.recurrence.expand import expand as expand_recurrences
from exporters.sidecar_files import find_files, keep_files
from exporters.value_types import infer_types
from mionnx.errors import ExportError, ModelError, boundary
from mionnx.graph.hooked_model import GRAPH, HookedModel
from mionnx.graph.metadata import ATTENDS_TO_PADDING, MAIN_OUTPUTS
from mionnx.graph.onnx_file import rename
from mionnx.graph.output_head import LOGITS
from mionnx.graph.weight_check import Hashes, hashed_beside
from mionnx.machine.files import link_or_copy
from mionnx.machine.progress import Progress

OLDEST, WRITTEN = 13, 18  # from 13 on axes of Squeeze and Unsqueeze are inputs, from 18 on those of all reductions
STAGES = 5


@dataclass(frozen=True)
class Adopted:
    """The outcome of an adoption."""

    file: Path  # the ONNX file that it was made from
    hooks: list[str]
    expanded: Mapping[str, int]  # fused operator -> how many of it were expanded
    laws: list[LawResult]
    notes: list[str]  # what the file has not, and why


def adopt_file(file: Path, target: Path, progress: Progress) -> Adopted:
    """Write a foreign ONNX file as a hooked model into an empty or new folder; its weights stay in their files."""
    progress("reading", 0, STAGES)
    config_of(file)  # what lies beside is refused before anything is read
    with boundary(ExportError, f"{file} cannot be adopted"):
        source = open_source(file)
        target.mkdir(parents=True, exist_ok=True)
        for name, path in source.weight_files.items():
            if not (target / name).exists():
                link_or_copy(path, target / name)
        check_source(source, target)
        with hashed_beside(target, source.weight_files) as hashes:  # nobody waits for gigabytes to be hashed
            return _adopted(source, target, hashes, progress)


def _adopted(source: SourceFile, target: Path, hashes: Callable[[], Hashes], progress: Progress) -> Adopted:
    """See `adopt_file`; the weights are linked into the target, and `hashes` waits for theirs."""
    file, stock_inputs = source.file, {value: str(value.name) for value in source.model.graph.inputs}
    own, stock_outputs = onnx.ModelProto(), [str(value.name) for value in source.model.graph.outputs]
    own.CopyFrom(source.stock)  # before types are told
    progress("recognising", 1, STAGES)
    source.model.graph.sort()  # float16 converters put casts at the end
    _modernise(source.model)
    tell_types(source.stock, infer_types(source.model))
    rows = {value: value.shape[0] for value in source.model.graph.inputs if value.shape}
    tokens = name_inputs(source.model)
    fused: list[Fused] = []
    expanded = expand(source.model, fused)
    # after the expansion, which may put other values in the places of outputs
    ends = dict(zip(stock_outputs, source.model.graph.outputs, strict=True))
    positions = supply_positions(source.model)
    decoder = recognise(source.model.graph)
    stock_logits = str(decoder.flow.logits.name)  # before `name_points` calls it "logits"
    padding = all(heeds_mask(source.model, attention.scores) for attention in decoder.attention.values())
    progress("running once", 2, STAGES)
    windows, config = windows_of(config_of(file), len(decoder.layers)), config_of(file)
    try:
        head = _head_of(source, target, decoder, config, unread=positions is not None)
        cached = name_caches(decoder)
        renamed = {str(value.name): name for value, name in stock_inputs.items()}
        interface, names = Interface.of(renamed, ends, stock_logits), name_points(decoder)
        expand_recurrences(source.model)
        decoder.notes.extend([positions] if positions is not None and not head.both else [])
        lacks = frozenset(lack for lack, has in (("mask", padding), ("cache", cached or head.both)) if not has)
        proto = _clean(source.model)
        check_bounded(proto, target)
        probed = probe_points(proto, target, [*names, *(counted_places(decoder) if head.both else ())])
    except ExportError as error:
        # the probe has two rows: a file exported for one fails for that reason, and is told how to mend it
        if not isinstance(rows.get(tokens), int):
            raise
        batch = f"{stock_inputs[tokens]} has a batch of {rows[tokens]}; export with a dynamic batch"
        raise ExportError(f"{file}: {batch} (an example of two rows): {error}") from error
    # put back, that operator reads an added mask, where other fused attention takes lengths or booleans
    adds = any(one.name == "MultiHeadAttention" for one in fused)
    plain = Plain(source.model, proto, target, decoder, probed, windows, lacks, positions is not None, adds=adds)
    progress("checking", 3, STAGES)

    def checked(proto: onnx.ModelProto, probed: Probe) -> list[LawResult]:
        laws = check_laws(probed, proto, target, len(decoder.layers), decoder.sinks, head.both)
        own = probed.values[LOGITS] if not head.added else probed.values[stream_point(names)]
        return laws + _as_stock(source, target, probed, renamed, stock_logits, own, rounding(proto, probed), decoder)

    proto, probed, laws = _completed(plain, checked) if head.both else complete(plain, _clean, checked)
    refuse_broken(laws, f"{file} was")
    progress("writing", 4, STAGES)
    decoder.notes.extend(other_windows(decoder.windows or [], windows or []))
    same, runs = proto is plain.proto, any(law.law == AS_STOCK for law in laws)  # nothing was added
    add_metadata(proto, source, decoder, probed, same and "mask" in lacks, hashes(), head)
    keep_fused(proto, target, probed, fused if same else map(moved, fused), len(decoder.layers), decoder.notes)
    if not head.added:
        keep_stock(proto, target, replace(source, stock=own), interface, probed, bool(expanded), runs, decoder.notes)
    _write(proto, file, target, MAIN_OUTPUTS[head.kind])
    return Adopted(file, names, expanded, laws, decoder.notes)


def _head_of(
    source: SourceFile, target: Path, decoder: Recognised, config: Mapping[str, Any], unread: bool
) -> FileHead:
    """What a file is for; the points of an encoder's head are put among the others."""
    if decoder.recurrence or not reads_both_ways(decoder, lambda: _clean(source.model), target):
        if rank(decoder.flow.logits) == 2:
            raise ExportError(f"{source.file} is a decoder's with one vector a text: such a head is not adopted")
        return DECODER_HEAD
    if config.get("is_decoder"):
        raise ExportError(f"{source.file} reads tokens on both sides, and config.json says that it is a decoder")
    if unread:
        drop_positions(source.model.graph)
    head = find_head(decoder, config_folder(source.file), config)
    name_head(decoder, source.model, head)
    return head


def _completed(
    plain: Plain, checked: Callable[[onnx.ModelProto, Probe], list[LawResult]]
) -> tuple[onnx.ModelProto, Probe, list[LawResult]]:
    """An encoder's graph as it is: it takes no past, and is checked with padding behind its texts."""
    laws, layers = checked(plain.proto, plain.probed), len(plain.structure.layers)
    if "mask" in plain.lacks:
        plain.structure.notes.append(LACKING["mask"])
        return plain.proto, plain.probed, laws
    return plain.proto, plain.probed, laws + check_padding(plain.probed, plain.proto, plain.folder, layers)


def _write(proto: onnx.ModelProto, file: Path, target: Path, output: str) -> None:
    rename(proto, LOGITS, output)
    (target / GRAPH).write_bytes(proto.SerializeToString())
    keep_files(find_files(config_folder(file)), config_folder(file), target)
    try:
        HookedModel.open(target, check="none")  # as a user will
    except ModelError as error:
        raise ExportError(f"the adopted graph is refused: {error}") from error


def check_folder(folder: Path) -> list[LawResult]:
    """Run a hooked model once and check it against the laws; one that mixes tokens with those before is refused."""
    hooked = HookedModel.open(folder)
    if hooked.metadata.shifts_tokens:
        raise ExportError(f"{folder} is an RWKV: the laws are those of attention and of other recurrences")
    probed = probe_points(hooked.proto, folder, list(hooked.metadata.hooks))
    metadata, layers = hooked.metadata, hooked.metadata.sizes.num_layers
    laws = check_laws(probed, hooked.proto, folder, layers, SINKS in metadata.exporter, metadata.bidirectional)
    padded = metadata.bidirectional and ATTENDS_TO_PADDING not in metadata.exporter
    return laws + (check_padding(probed, hooked.proto, folder, layers) if padded else [])


def _clean(model: ir.Model) -> onnx.ModelProto:
    """The graph as a protobuf model, without what its exporter noted on nodes."""
    for number, node in enumerate(model.graph):
        node.metadata_props.clear()
        node.doc_string, node.name = None, node.name or f"adopted.{node.op_type}.{number}"
    model.metadata_props.clear()
    used = {node.domain for node in model.graph} | {""}
    for domain in [domain for domain in model.opset_imports if domain not in used]:
        del model.opset_imports[domain]
    if "com.microsoft" in used:
        model.opset_imports.setdefault("com.microsoft", 1)
    return ir.to_proto(model)


def _as_stock(
    source: SourceFile,
    target: Path,
    probed: Probe,
    renamed: Mapping[str, str],
    logits: str,
    own: np.ndarray,
    rounding: float,
    decoder: Recognised,
) -> list[LawResult]:
    """Compare the logits, or the stream, with the file's own in the same runtime; a merged one by its other branch."""
    try:
        feeds = {} if source.flag is None else {source.flag: np.array([False])}
        feeds |= {renamed[name]: value for name, value in probed.feeds.items() if name in renamed}
        check_source(source, target, {name: value.shape for name, value in feeds.items()})
        session = open_session(source.stock, target)
        (expected,) = run(session, [logits], {one.name: _like(one, feeds) for one in session.get_inputs()})
    except ExportError as error:
        decoder.notes.append(f"the file as it came does not run on the probe, so logits were not compared: {error}")
        return []
    # roundings add up, layer by layer
    return [compare(AS_STOCK, None, own, expected, len(decoder.layers) * rounding)]


def _like(entry: Any, feeds: Mapping[str, np.ndarray]) -> np.ndarray:
    """A feed in the dtype that the file's own input has."""
    if entry.name not in feeds:
        raise ExportError(f"its input {entry.name} is not one of the adopted graph")
    # a file's own ids may be int32, its flag is bool, its states may be float16
    kinds = {"tensor(int32)": np.int32, "tensor(bool)": np.bool_, "tensor(float16)": np.float16}
    feed = feeds[entry.name].astype(kinds.get(entry.type, feeds[entry.name].dtype))
    return feed if feed.ndim >= len(entry.shape) else np.broadcast_to(feed, (entry.shape[0], *feed.shape))


def _modernise(model: ir.Model) -> None:
    """Bring a model to opset 18, if it is older."""
    version = model.opset_imports.get("", 0)
    if version < OLDEST:
        raise ExportError(
            f"the graph is of opset {version}; graphs from opset {OLDEST} on are adopted: convert it with "
            "onnx.version_converter, or export it again"
        )
    if version >= WRITTEN:
        return
    op = OpWriter(model.graph)
    for place, node in enumerate(list(model.graph)):
        if node.domain == "" and node.op_type.startswith("Reduce") and "axes" in node.attributes:
            axes = op.constant(node.attributes.pop("axes").as_ints(), np.int64, f"adopted.axes.{place}")
            node.resize_inputs(2)
            node.replace_input_with(1, axes)
        elif node.domain == "" and node.op_type == "Split" and len(node.inputs) == 1:
            # opset 18 asks for one of the number and the sizes
            node.attributes["num_outputs"] = ir.AttrInt64("num_outputs", len(node.outputs))
    model.opset_imports[""] = WRITTEN
