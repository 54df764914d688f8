"""An adopted model on disk: the graph with its metadata, config and tokenizer."""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from exporters.adopt.onnx_files import config_folder
from exporters.adopt.recognise import Recognised
from exporters.adopt.source_file import SourceFile
from exporters.config_sizes import check_sizes
from exporters.hook_axes import axes_of
from exporters.probe import Probe
from exporters.sidecar_files import find_files, keep_files
from mionnx.errors import ExportError, ModelError
from mionnx.graph.folder_file import read_json
from mionnx.graph.hooked_model import GRAPH
from mionnx.graph.metadata import DTYPE_NAMES, Attention, Metadata, Sizes, context_length
from mionnx.graph.weight_check import Hashes


def write_model(
    proto: onnx.ModelProto,
    source: SourceFile,
    decoder: Recognised,
    probed: Probe,
    names: list[str],
    facts: Mapping[str, str],
    target: Path,
    hashes: Hashes,
) -> None:
    """Write a graph with its metadata, and the source's config and tokenizer."""
    sizes, config = sizes_of(probed.values, decoder), config_of(source.file)
    windows = decoder.windows or windows_of(config, sizes.num_layers) or [None] * sizes.num_layers
    hooks = {name: axes_of(name, probed.values[name].shape, sizes) for name in names}
    dtypes = {name: str(probed.values[name].dtype) for name in names if probed.values[name].dtype.kind not in "iu"}
    if unknown := {*dtypes.values()} - {*DTYPE_NAMES}:
        raise ExportError(f"{source.file} computes in {', '.join(unknown)}: no such model runs here")
    dtype = max({*dtypes.values()}, key=DTYPE_NAMES.index)  # the coarsest, that of the weights
    annotate(proto, probed, hooks)
    metadata = Metadata(
        family=str(config.get("model_type", "unknown")),
        dtype=dtype,
        sizes=sizes,
        hooks=hooks,
        attention=[
            Attention(str(one.projection.name), one.rows, windows[layer]) for layer, one in enumerate(decoder.attention)
        ],
        exporter={
            "mionnx": version("mionnx"),
            "onnx_ir": version("onnx_ir"),
            "adopted": source.file.name,
            **facts,
            "producer": f"{proto.producer_name} {proto.producer_version}".strip()[:100],
        },
        weights_sha256=hashes[0],
        weight_files=hashes[1],
        context_length=context_length(config),
        hook_dtypes={name: other for name, other in dtypes.items() if other != dtype},
    )
    for key, value in metadata.to_props().items():
        proto.metadata_props.add(key=key, value=value)
    (target / GRAPH).write_bytes(proto.SerializeToString())
    keep_files(find_files(config_folder(source.file)), target)


def config_of(file: Path) -> dict[str, Any]:
    """The table of the config beside a file; empty if there is none.

    Raises:
        ExportError: it is damaged, or lies outside the folder.
    """
    path = config_folder(file) / "config.json"
    if path not in find_files(path.parent):
        return {}
    try:
        config = read_json(path)
    except ModelError as error:
        raise ExportError(str(error)) from error
    if not isinstance(config, dict):
        raise ExportError(f"{path} is damaged: it holds no table")
    check_sizes(config, path)
    return config


def sizes_of(values: Mapping[str, np.ndarray], decoder: Recognised) -> Sizes:
    """The sizes of a decoder, from one run of it."""
    queries, keys = values["blocks.0.attn.hook_q"].shape, values["blocks.0.attn.hook_k"].shape
    learned = next((value for name, value in decoder.points if name == "hook_pos_embed"), None)
    routed = {name.rpartition(".")[2]: value.shape[-1] for name, value in values.items() if value.ndim == 3}
    return Sizes(
        num_layers=len(decoder.attention),
        num_heads=queries[1],
        num_kv_heads=keys[1],
        head_dim=queries[3],
        hidden_size=values["hook_embed"].shape[-1],
        vocab_size=values["hook_logits"].shape[-1],
        max_positions=None if learned is None else _rows(learned),
        n_experts=routed.get("hook_router_logits"),
        n_chosen=routed.get("hook_expert_indices"),
    )


def _rows(learned: ir.Value) -> int | None:
    """Number of learned positions: the rows of the table that they come from."""
    node = learned.producer()
    while node is not None and node.op_type not in ("Gather", "GatherBlockQuantized"):
        node = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
    shape = None if node is None or node.inputs[0] is None else node.inputs[0].shape
    return shape[0] if shape is not None and isinstance(shape[0], int) else None


def other_windows(own: Sequence[int | None], stated: Sequence[int | None]) -> list[str]:
    """A note on layers whose masks have no window, though the config says one."""
    other = [layer for layer, pair in enumerate(zip(own, stated, strict=False)) if pair[0] != pair[1]]
    return [f"layers {other}: the file's own mask has no window, though config.json says one"] if other else []


def windows_of(config: Mapping[str, Any], layers: int) -> list[int | None] | None:
    """The window of each layer; None without a config."""
    return [_window(config, layer) for layer in range(layers)] if config else None


def _window(config: Mapping[str, Any], layer: int) -> int | None:
    """Number of keys that a query of a layer reads, as the config says; None for all."""
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    if not isinstance(window, int) or config.get("use_sliding_window") is False:
        return None
    return window if not isinstance(kinds, list) or kinds[layer] == "sliding_attention" else None


def annotate(proto: onnx.ModelProto, probed: Probe, hooks: Mapping[str, list[str | int]]) -> None:
    """Write down the dtype of every value, and the axes of hook points: rewrites read them."""
    ends = {entry.name: entry for entry in (*proto.graph.input, *proto.graph.output)}
    del proto.graph.value_info[:]
    for name, text in probed.dtypes.items():
        kind = _number(text)
        if name in ends:
            ends[name].type.tensor_type.elem_type = kind
            continue
        proto.graph.value_info.append(onnx.helper.make_tensor_value_info(name, kind, hooks.get(name)))
    for name, axes in (("logits", hooks["hook_logits"]),):
        ends[name].CopyFrom(onnx.helper.make_tensor_value_info(name, ends[name].type.tensor_type.elem_type, axes))


def _number(text: str) -> int:
    """ONNX's number of a dtype in ONNX Runtime's words, `tensor(float)`."""
    name = text.removeprefix("tensor(").removesuffix(")").upper()
    return onnx.TensorProto.DataType.Value(name)
