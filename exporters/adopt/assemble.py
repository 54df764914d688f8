"""Adoption in stages: read, name inputs, expand, recognise, name, probe, check, write."""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from exporters.adopt.extension import AS_STOCK, Plain, complete
from exporters.adopt.interface import heeds_mask, name_inputs, supply_positions
from exporters.adopt.naming import name_caches, name_points
from exporters.adopt.operators import expand
from exporters.adopt.operators.fused import Fused
from exporters.adopt.opset import modernise
from exporters.adopt.recognise import Recognised, recognise
from exporters.adopt.restorable import keep_fused
from exporters.adopt.self_check import (
    INT8,
    LawResult,
    Probe,
    check_laws,
    compare,
    open_file,
    probe,
    rounds_activations,
    run,
)
from exporters.adopt.source_file import Source, config_folder, open_source
from exporters.adopt.value_types import infer_types
from mionnx.errors import ExportError, ModelError
from mionnx.graph.folder_file import read_json
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import GRAPH, KEPT, HookedModel
from mionnx.graph.metadata import ATTENDS_TO_PADDING, DTYPE_NAMES, Attention, Metadata, Sizes, context_length
from mionnx.graph.weight_check import fingerprints, sha256
from mionnx.machine.progress import Progress

STAGES = 5
SINKS = "attention_sinks"  # key in the metadata's table of the exporter


@dataclass(frozen=True)
class Adopted:
    """The outcome of an adoption.

    Attributes:
        file: the ONNX file that it was made from.
        hooks: the hook points.
        expanded: fused operator -> how many of it were expanded.
        laws: the self-check.
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
    source = open_source(file)
    stock_inputs = {value: str(value.name) for value in source.model.graph.inputs}
    progress("recognising", 1, STAGES)
    source.model.graph.sort()  # float16 converters put casts at the end
    modernise(source.model)
    infer_types(source.model)
    name_inputs(source.model)
    fused: list[Fused] = []
    expanded = expand(source.model, fused)
    positions = supply_positions(source.model)
    found = recognise(source.model.graph)
    stock_logits = str(found.flow.logits.name)
    padding = all(heeds_mask(source.model, attention.scores) for attention in found.attention)
    cached = name_caches(found)
    renamed = {str(value.name): name for value, name in stock_inputs.items()}
    names = name_points(found)
    found.notes.extend([positions] if positions is not None else [])
    progress("running once", 2, STAGES)
    _link_weights(source, target)
    lacks = {lack for lack, has in (("mask", padding), ("cache", cached)) if not has}
    proto, windows = _clean(source.model), _windows(_config(file), len(found.attention))
    probed = probe(proto, target, names)
    plain = Plain(source.model, proto, target, found, probed, windows, frozenset(lacks), positions is not None)
    progress("checking", 3, STAGES)

    def checked(proto: onnx.ModelProto, probed: Probe) -> list[LawResult]:
        laws = check_laws(probed, proto, target, len(found.attention), any(one.sink for one in found.attention))
        allowed = len(found.attention) * (INT8 if rounds_activations(proto) else probed.rounding)
        return laws + _as_stock(source, probed, renamed, stock_logits, allowed, found.notes)

    proto, probed, laws = complete(plain, _clean, checked)
    broken = [law for law in laws if not law.holds]
    if broken:
        raise ExportError(f"{file} was not understood: {'; '.join(map(str, broken))}")
    progress("writing", 4, STAGES)
    found.notes.extend(_other_windows(found.windows or [], windows or []))
    sinks, attends = any(one.sink for one in found.attention), proto is plain.proto and "mask" in plain.lacks
    said = {**({SINKS: "in the softmax"} if sinks else {}), **({ATTENDS_TO_PADDING: "yes"} if attends else {})}
    _write(proto, source, found, probed, names, said, target, progress)
    keep_fused(proto, target, probed, fused, len(found.attention), found.notes)
    _open(target)
    return Adopted(file, names, expanded, laws, found.notes)


def check_folder(folder: Path) -> list[LawResult]:
    """Run a hooked model once and check it against the laws.

    Raises:
        ExportError: it is recurrent, or does not run.
    """
    hooked = HookedModel.open(folder)
    if hooked.metadata.recurrent:
        raise ExportError(f"{folder} is recurrent: the laws are those of attention")
    probed = probe(hooked.proto, folder, list(hooked.metadata.hooks))
    return check_laws(probed, hooked.proto, folder, hooked.metadata.sizes.num_layers, SINKS in hooked.metadata.exporter)


def _open(target: Path) -> None:
    """Open what was written, as a user will."""
    try:
        HookedModel.open(target, check="none")
    except ModelError as error:
        raise ExportError(f"the adopted graph is refused: {error}") from error


def _link_weights(source: Source, target: Path) -> None:
    """Hard-link the weight files into the folder, or copy them across file systems."""
    target.mkdir(parents=True, exist_ok=True)
    for name, path in source.weight_files.items():
        if (target / name).exists():
            continue
        try:
            os.link(path.resolve(), target / name)
        except OSError:
            shutil.copyfile(path, target / name)


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
    source: Source, found: Probe, renamed: Mapping[str, str], logits: str, allowed: float, notes: list[str]
) -> list[LawResult]:
    """Compare the logits with those of the file as it came, in the same runtime.

    Args:
        source: the file; a merged one runs its other branch.
        found: a run of the adopted graph.
        renamed: name of an input of the adopted graph -> the file's own.
        logits: the file's name of its output.
        allowed: the difference that rounding explains.
        notes: told why nothing was compared.
    """
    try:
        session = open_file(source.file)
        feeds = {} if source.flag is None else {source.flag: np.array([False])}
        feeds |= {renamed[name]: value for name, value in found.feeds.items() if name in renamed}
        feeds = {entry.name: _like(entry, feeds) for entry in session.get_inputs()}
        (expected,) = run(session, [logits], feeds)
    except ExportError as error:
        notes.append(f"the file as it came does not run on the probe, so logits were not compared: {error}")
        return []
    return [compare(AS_STOCK, None, found.values["logits"], expected, allowed)]


def _like(entry: Any, feeds: Mapping[str, np.ndarray]) -> np.ndarray:
    """A feed in the dtype that the file's own input has."""
    if entry.name not in feeds:
        raise ExportError(f"its input {entry.name} is not one of the adopted graph")
    kinds = {"tensor(int32)": np.int32, "tensor(bool)": np.bool_}
    return feeds[entry.name].astype(kinds.get(entry.type, feeds[entry.name].dtype))


def _write(
    proto: onnx.ModelProto,
    source: Source,
    found: Recognised,
    probed: Probe,
    names: list[str],
    said: Mapping[str, str],
    target: Path,
    progress: Progress,
) -> None:
    sizes, config = _sizes(probed.values, found), _config(source.file)
    windows = found.windows or _windows(config, sizes.num_layers) or [None] * sizes.num_layers
    hooks = {name: _axes(name, probed.values[name].shape, sizes) for name in names}
    dtype = str(probed.values[names[0]].dtype)
    mixed = [name for name in names if str(probed.values[name].dtype) != dtype]
    if dtype not in DTYPE_NAMES or mixed:
        other = f"{mixed[0]} is {probed.values[mixed[0]].dtype}" if mixed else "no such model runs here"
        raise ExportError(f"{source.file} computes in {dtype}, and {other}: hook points of several dtypes")
    _annotate(proto, probed, hooks)
    weight_files = sorted({*source.weight_files})
    metadata = Metadata(
        family=str(config.get("model_type", "unknown")),
        dtype=dtype,
        sizes=sizes,
        hooks=hooks,
        attention=[
            Attention(str(one.projection.name), one.rows, windows[layer]) for layer, one in enumerate(found.attention)
        ],
        exporter={
            "mionnx": version("mionnx"),
            "onnx_ir": version("onnx_ir"),
            "adopted": source.file.name,
            **said,
            "producer": f"{proto.producer_name} {proto.producer_version}".strip()[:100],
        },
        weights_sha256=sha256([target / name for name in weight_files], progress),
        weight_files=fingerprints(target, weight_files, progress),
        context_length=context_length(config),
    )
    for key, value in metadata.to_props().items():
        proto.metadata_props.add(key=key, value=value)
    (target / GRAPH).write_bytes(proto.SerializeToString())
    folder = config_folder(source.file)
    for path in [path for pattern in KEPT for path in folder.glob(pattern) if path.is_file()]:
        shutil.copyfile(path, target / path.name)


def _config(file: Path) -> dict[str, Any]:
    """The table of the config beside a file; empty if there is none."""
    try:
        config = read_json(config_folder(file) / "config.json")
    except ModelError:
        return {}
    return config if isinstance(config, dict) else {}


def _sizes(values: Mapping[str, np.ndarray], found: Recognised) -> Sizes:
    queries, keys = values["blocks.0.attn.hook_q"].shape, values["blocks.0.attn.hook_k"].shape
    learned = next((value for name, value in found.points if name == "hook_pos_embed"), None)
    return Sizes(
        num_layers=len(found.attention),
        num_heads=queries[1],
        num_kv_heads=keys[1],
        head_dim=queries[3],
        hidden_size=values["hook_embed"].shape[-1],
        vocab_size=values["hook_logits"].shape[-1],
        max_positions=None if learned is None else _rows(learned),
    )


def _rows(learned: ir.Value) -> int | None:
    """Number of learned positions: the rows of the table that they come from."""
    node = learned.producer()
    while node is not None and node.op_type not in ("Gather", "GatherBlockQuantized"):
        node = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
    shape = None if node is None or node.inputs[0] is None else node.inputs[0].shape
    return shape[0] if shape is not None and isinstance(shape[0], int) else None


def _axes(name: str, shape: tuple[int, ...], sizes: Sizes) -> list[str | int]:
    """The axes of a hook point, dynamic ones by name.

    Raises:
        ExportError: the value has other axes than the hook point.
    """
    names = HookPoint.parse(name).axes or ()
    known = {
        "hidden": sizes.hidden_size,
        "n_heads": sizes.num_heads,
        "n_kv_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "vocab": sizes.vocab_size,
    }
    dynamic = ("batch", "seq", "seq_q", "seq_k")
    if len(shape) != len(names) or any(known.get(axis, size) != size for axis, size in zip(names, shape, strict=True)):
        raise ExportError(f"{name} has the shape {list(shape)}, expected {[known.get(axis, axis) for axis in names]}")
    return [axis if axis in dynamic else size for axis, size in zip(names, shape, strict=True)]


def _other_windows(own: Sequence[int | None], said: Sequence[int | None]) -> list[str]:
    """A note on layers whose masks have no window, though the config says one."""
    other = [layer for layer, pair in enumerate(zip(own, said, strict=False)) if pair[0] != pair[1]]
    return [f"layers {other}: the file's own mask has no window, though config.json says one"] if other else []


def _windows(config: Mapping[str, Any], layers: int) -> list[int | None] | None:
    """The window of each layer; None without a config."""
    return [_window(config, layer) for layer in range(layers)] if config else None


def _window(config: Mapping[str, Any], layer: int) -> int | None:
    """Number of keys that a query of a layer reads, as the config says; None for all."""
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    if not isinstance(window, int) or config.get("use_sliding_window") is False:
        return None
    return window if not isinstance(kinds, list) or kinds[layer] == "sliding_attention" else None


def _annotate(proto: onnx.ModelProto, probed: Probe, hooks: Mapping[str, list[str | int]]) -> None:
    """Write down the dtype of every value, and the axes of hook points: rewrites read them."""
    held = {entry.name: entry for entry in (*proto.graph.input, *proto.graph.output)}
    del proto.graph.value_info[:]
    for name, text in probed.dtypes.items():
        kind = _number(text)
        if name in held:
            held[name].type.tensor_type.elem_type = kind
            continue
        proto.graph.value_info.append(onnx.helper.make_tensor_value_info(name, kind, hooks.get(name)))
    for name, axes in (("logits", hooks["hook_logits"]),):
        held[name].CopyFrom(onnx.helper.make_tensor_value_info(name, held[name].type.tensor_type.elem_type, axes))


def _number(text: str) -> int:
    """ONNX's number of a dtype in ONNX Runtime's words, `tensor(float)`."""
    name = text.removeprefix("tensor(").removesuffix(")").upper()
    return onnx.TensorProto.DataType.Value(name)
