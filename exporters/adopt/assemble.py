"""Adoption in stages: read, name inputs, expand, recognise, name, probe, check, write."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from exporters.adopt.extension import AS_STOCK, Plain, complete
from exporters.adopt.interface import heeds_mask, name_inputs, supply_positions
from exporters.adopt.naming import name_caches, name_points
from exporters.adopt.operators import expand
from exporters.adopt.operators.decoder_writer import TOKEN_INPUT
from exporters.adopt.operators.fused import Fused
from exporters.adopt.operators.moved_attention import moved
from exporters.adopt.recognise import Recognised, recognise
from exporters.adopt.restorable import keep_fused
from exporters.adopt.self_check import INT8, LawResult, check_laws, compare, probe_points, rounds_activations
from exporters.adopt.source_file import SourceFile, check_source, open_source, tell_types
from exporters.adopt.stock_graph import Interface, copied, keep_stock
from exporters.adopt.write_model import config_of, other_windows, windows_of, write_model
from exporters.probe import Probe, check_bounded, open_session, run
from exporters.value_types import infer_types
from mionnx.errors import ExportError, ModelError, boundary
from mionnx.graph.hooked_model import GRAPH, HookedModel
from mionnx.graph.metadata import ATTENDS_TO_PADDING, NORMED_STREAM
from mionnx.graph.weight_check import Hashes, hashed_beside
from mionnx.machine.files import link_or_copy
from mionnx.machine.progress import Progress

OLDEST, WRITTEN = 13, 18  # from 13 on axes of Squeeze and Unsqueeze are inputs, from 18 on those of all reductions

STAGES = 5
SINKS = "attention_sinks"  # key in the metadata's table of the exporter


@dataclass(frozen=True)
class Adopted:
    """The outcome of an adoption.

    Attributes:
        file: the ONNX file that it was made from.
        expanded: fused operator -> how many of it were expanded.
        notes: what the file has not, and why.
    """

    file: Path
    hooks: list[str]
    expanded: Mapping[str, int]
    laws: list[LawResult]
    notes: list[str]


def adopt_file(file: Path, target: Path, progress: Progress) -> Adopted:
    """Write a foreign ONNX file as a hooked model; its weights stay in their files.

    Args:
        file: a decoder-only language model.
        target: an empty or new folder.
        progress: called as (stage, done, total).

    Raises:
        ExportError: it is no such model, or a law does not hold; nothing is named on a guess.
    """
    progress("reading", 0, STAGES)
    config_of(file)  # what lies beside is refused before anything is read
    with boundary(ExportError, f"{file} cannot be adopted"):
        source = open_source(file)
        _link_weights(source, target)
        check_source(source, target)
        with hashed_beside(target, source.weight_files) as hashes:  # nobody waits for gigabytes to be hashed
            return _adopted(source, target, hashes, progress)


def _adopted(source: SourceFile, target: Path, hashes: Callable[[], Hashes], progress: Progress) -> Adopted:
    """See `adopt_file`; the weights are linked into the target, and `hashes` waits for theirs."""
    file, stock_inputs = source.file, {value: str(value.name) for value in source.model.graph.inputs}
    own, stock_outputs = copied(source), [str(value.name) for value in source.model.graph.outputs]
    progress("recognising", 1, STAGES)
    source.model.graph.sort()  # float16 converters put casts at the end
    modernise(source.model)
    tell_types(source.stock, infer_types(source.model))
    rows = {str(value.name): value.shape[0] for value in source.model.graph.inputs if value.shape}
    name_inputs(source.model)
    fused: list[Fused] = []
    expanded = expand(source.model, fused)
    ends = dict(zip(stock_outputs, source.model.graph.outputs, strict=True))
    positions = supply_positions(source.model)
    decoder = recognise(source.model.graph)
    stock_logits = str(decoder.flow.logits.name)
    padding = all(heeds_mask(source.model, attention.scores) for attention in decoder.attention)
    cached = name_caches(decoder)
    renamed = {str(value.name): name for value, name in stock_inputs.items()}
    interface, names = Interface.of(renamed, ends, stock_logits), name_points(decoder)
    decoder.notes.extend([positions] if positions is not None else [])
    progress("running once", 2, STAGES)
    lacks = {lack for lack, has in (("mask", padding), ("cache", cached)) if not has}
    proto, windows = _clean(source.model), windows_of(config_of(file), len(decoder.attention))
    try:
        check_bounded(proto, target)
        probed = probe_points(proto, target, names)
    except ExportError as error:
        tokens = stock_inputs[next(value for value in source.model.graph.inputs if value.name == TOKEN_INPUT)]
        if not isinstance(rows.get(tokens), int):
            raise
        batch = f"{tokens} has a batch of {rows[tokens]}; export with a dynamic batch (an example of two rows)"
        raise ExportError(f"{file}: {batch}: {error}") from error
    adds, counts = any(one.name == "MultiHeadAttention" for one in fused), positions is not None
    plain = Plain(source.model, proto, target, decoder, probed, windows, frozenset(lacks), counts, adds=adds)
    progress("checking", 3, STAGES)

    def checked(proto: onnx.ModelProto, probed: Probe) -> list[LawResult]:
        laws = check_laws(probed, proto, target, len(decoder.attention), any(one.sink for one in decoder.attention))
        allowed = len(decoder.attention) * (INT8 if rounds_activations(proto) else probed.rounding)
        return laws + _as_stock(source, target, probed, renamed, stock_logits, allowed, decoder.notes)

    proto, probed, laws = complete(plain, _clean, checked)
    broken = [law for law in laws if not law.holds]
    if broken:
        raise ExportError(f"{file} was not understood: {'; '.join(map(str, broken))}")
    progress("writing", 4, STAGES)
    decoder.notes.extend(other_windows(decoder.windows or [], windows or []))
    facts = facts_of(decoder, proto is plain.proto and "mask" in plain.lacks)
    write_model(proto, source, decoder, probed, names, facts, target, hashes())
    fused = fused if proto is plain.proto else [one if one.proto() else moved(one) for one in fused]
    keep_fused(proto, target, probed, fused, len(decoder.attention), decoder.notes)
    runs = any(law.law == AS_STOCK for law in laws)
    keep_stock(proto, target, own, interface, probed, bool(expanded), runs, decoder.notes)
    (target / GRAPH).write_bytes(proto.SerializeToString())
    _open(target)
    return Adopted(file, names, expanded, laws, decoder.notes)


def facts_of(decoder: Recognised, attends: bool) -> dict[str, str]:
    """Facts for the metadata: sinks, padding that is attended to, a normed stream."""
    sinks = any(one.sink for one in decoder.attention)
    facts = {SINKS: sinks and "in the softmax", ATTENDS_TO_PADDING: attends and "yes"}
    facts[NORMED_STREAM] = bool(decoder.sums) and "yes"
    return {key: text for key, text in facts.items() if text}


def check_folder(folder: Path) -> list[LawResult]:
    """Run a hooked model once and check it against the laws.

    Raises:
        ExportError: it is recurrent, or does not run.
    """
    hooked = HookedModel.open(folder)
    if hooked.metadata.recurrent:
        raise ExportError(f"{folder} is recurrent: the laws are those of attention")
    probed = probe_points(hooked.proto, folder, list(hooked.metadata.hooks))
    return check_laws(probed, hooked.proto, folder, hooked.metadata.sizes.num_layers, SINKS in hooked.metadata.exporter)


def _open(target: Path) -> None:
    """Open what was written, as a user will."""
    try:
        HookedModel.open(target, check="none")
    except ModelError as error:
        raise ExportError(f"the adopted graph is refused: {error}") from error


def _link_weights(source: SourceFile, target: Path) -> None:
    """Hard-link the weight files into the folder, or copy them across file systems."""
    target.mkdir(parents=True, exist_ok=True)
    for name, path in source.weight_files.items():
        if not (target / name).exists():
            link_or_copy(path.resolve(), target / name)


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
    allowed: float,
    notes: list[str],
) -> list[LawResult]:
    """Compare the logits with those of the file as it came, in the same runtime.

    Args:
        source: the file; a merged one runs its other branch.
        target: the folder with its weights.
        probed: a run of the adopted graph.
        renamed: name of an input of the adopted graph -> the file's own.
        logits: the file's name of its output.
        allowed: the difference that rounding explains.
        notes: told why nothing was compared.
    """
    try:
        feeds = {} if source.flag is None else {source.flag: np.array([False])}
        feeds |= {renamed[name]: value for name, value in probed.feeds.items() if name in renamed}
        check_source(source, target, {name: value.shape for name, value in feeds.items()})
        session = open_session(source.stock, target, [])
        feeds = {entry.name: _like(entry, feeds) for entry in session.get_inputs()}
        (expected,) = run(session, [logits], feeds)
    except ExportError as error:
        notes.append(f"the file as it came does not run on the probe, so logits were not compared: {error}")
        return []
    return [compare(AS_STOCK, None, probed.values["logits"], expected, allowed)]


def _like(entry: Any, feeds: Mapping[str, np.ndarray]) -> np.ndarray:
    """A feed in the dtype that the file's own input has."""
    if entry.name not in feeds:
        raise ExportError(f"its input {entry.name} is not one of the adopted graph")
    kinds = {"tensor(int32)": np.int32, "tensor(bool)": np.bool_}
    return feeds[entry.name].astype(kinds.get(entry.type, feeds[entry.name].dtype))


def modernise(model: ir.Model) -> None:
    """Bring a model to opset 18, if it is older.

    Raises:
        ExportError: it is older than opset 13.
    """
    version = model.opset_imports.get("", 0)
    if version < OLDEST:
        raise ExportError(
            f"the graph is of opset {version}; graphs from opset {OLDEST} on are adopted: convert it with "
            "onnx.version_converter, or export it again"
        )
    if version >= WRITTEN:
        return
    for place, node in enumerate(list(model.graph)):
        if node.domain == "" and node.op_type.startswith("Reduce") and "axes" in node.attributes:
            axes = np.asarray(node.attributes.pop("axes").as_ints(), np.int64)
            name = f"adopted.axes.{place}"
            constant = ir.Value(
                name=name,
                type=ir.TensorType(ir.DataType.INT64),
                shape=ir.Shape(axes.shape),
                const_value=ir.tensor(axes),
            )
            model.graph.register_initializer(constant)
            node.resize_inputs(2)
            node.replace_input_with(1, constant)
        elif node.domain == "" and node.op_type == "Split" and len(node.inputs) == 1:
            node.attributes["num_outputs"] = ir.AttrInt64("num_outputs", len(node.outputs))
    model.opset_imports[""] = WRITTEN
