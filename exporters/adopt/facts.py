"""Facts of a recognised decoder for its metadata: sizes, windows, dtypes, what its attention and stream are."""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from exporters.adopt.encoder import FileHead, vocabulary
from exporters.adopt.flow import ROW_LOOKUPS
from exporters.adopt.onnx_files import config_folder
from exporters.adopt.recognise import Recognised
from exporters.adopt.source_file import SourceFile
from exporters.config_sizes import check_sizes
from exporters.hook_axes import axes_of
from exporters.probe import Probe
from exporters.sidecar_files import find_files
from mionnx.errors import ExportError, ModelError
from mionnx.graph.folder_file import files_beside, read_json
from mionnx.graph.hook_points import layer_of
from mionnx.graph.layers import Attention, Recurrence
from mionnx.graph.metadata import ATTENDS_TO_PADDING, DTYPE_NAMES, NORMED_STREAM, Metadata
from mionnx.graph.output_head import LOGITS
from mionnx.graph.own_version import own_version
from mionnx.graph.sizes import Sizes, context_length
from mionnx.graph.weight_check import Hashes

GENAI_CONFIG = "genai_config.json"
SINKS = "attention_sinks"  # key in the metadata's table of the exporter


def add_metadata(
    proto: onnx.ModelProto,
    source: SourceFile,
    decoder: Recognised,
    probed: Probe,
    attends: bool,
    hashes: Hashes,
    head: FileHead,
) -> None:
    """Write the metadata of an adopted graph into it; `attends` says whether it attends to padding."""
    names = [name for name, _ in decoder.points]
    sizes, config = sizes_of(probed.values, decoder), config_of(source.file)
    stated = config or genai_facts(source.file)
    recurrence = {layer: one.recurrence for layer, one in decoder.recurrence.items()}
    hooks = {
        name: axes_of(name, probed.values[name].shape, sizes, recurrence=recurrence.get(layer_of(name) or 0))
        for name in names
    }
    dtypes = {name: str(probed.values[name].dtype) for name in names if probed.values[name].dtype.kind not in "iu"}
    if unknown := {*dtypes.values()} - {*DTYPE_NAMES}:
        raise ExportError(f"{source.file} computes in {', '.join(unknown)}: no such model runs here")
    dtype = max({*dtypes.values()}, key=DTYPE_NAMES.index)  # the coarsest, that of the weights
    annotate(proto, probed, hooks, decoder.main)
    metadata = Metadata(
        family=str(stated.get("model_type", "unknown")),
        dtype=dtype,
        sizes=sizes,
        hooks=hooks,
        attention=attention_of(decoder, decoder.windows or windows_of(config, sizes.num_layers)),
        recurrence=recurrence_of(decoder),
        exporter={
            "mionnx": own_version(),
            "onnx_ir": version("onnx_ir"),
            "adopted": source.file.name,
            **facts_of(decoder, attends),
            "producer": f"{proto.producer_name} {proto.producer_version}".strip()[:100],
        },
        weights_sha256=hashes[0],
        weight_files=hashes[1],
        context_length=context_length(stated),
        hook_dtypes={name: other for name, other in dtypes.items() if other != dtype},
        **head.facts(probed.values, f"blocks.{sizes.num_layers - 1}.hook_resid_post"),
    )
    for key, value in metadata.to_props().items():
        proto.metadata_props.add(key=key, value=value)


def attention_of(decoder: Recognised, windows: Sequence[int | None] | None) -> list[Attention | None]:
    """The output projection and the window of each layer's attention; None of a layer without; empty without any."""
    attention = decoder.attention
    own = {
        layer: Attention(str(one.projection.name), one.rows, windows[layer] if windows else None)
        for layer, one in attention.items()
    }
    return [own.get(layer) for layer in range(len(decoder.layers))] if own else []


def recurrence_of(decoder: Recognised) -> list[Recurrence | None]:
    """What each layer carries beside keys and values; empty where none does."""
    own = {layer: one.recurrence for layer, one in decoder.recurrence.items()}
    return [own.get(layer) for layer in range(len(decoder.layers))] if own else []


def facts_of(decoder: Recognised, attends: bool) -> dict[str, str]:
    """The facts for the metadata's table of the exporter: sinks, padding that is attended to, a normed stream."""
    facts = {SINKS: decoder.sinks and "in the softmax", ATTENDS_TO_PADDING: attends and "yes"}
    facts[NORMED_STREAM] = bool(decoder.sums) and "yes"
    return {key: text for key, text in facts.items() if text}


def config_of(file: Path) -> dict[str, Any]:
    """The table of the config beside a file; empty if there is none."""
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


def genai_facts(file: Path) -> dict[str, Any]:
    """Family and context length by the config that onnxruntime-genai's builder writes; empty without one."""
    path = file.parent / GENAI_CONFIG
    try:
        model = read_json(path).get("model") if files_beside(path.parent, (GENAI_CONFIG,)) else None
    except (ModelError, AttributeError) as error:
        raise ExportError(f"{path} is damaged: {error}") from error
    own = model if isinstance(model, dict) else {}
    return {"model_type": own["type"]} | own if isinstance(own.get("type"), str) else {}


def sizes_of(values: Mapping[str, np.ndarray], decoder: Recognised) -> Sizes:
    """The sizes of a decoder, from one run of it."""
    heads = _heads_of(values, decoder)
    learned = next((value for name, value in decoder.points if name == "hook_pos_embed"), None)
    width, hidden = (values[name].shape[-1] for name in ("hook_embed", "blocks.0.hook_resid_pre"))
    rows = vocabulary(decoder.flow)
    routed = {name.rpartition(".")[2]: value.shape[-1] for name, value in values.items() if value.ndim == 3}
    return Sizes(
        num_layers=len(decoder.layers),
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        hidden_size=hidden,
        vocab_size=values["hook_logits"].shape[-1] if "hook_logits" in values else rows or 1,
        max_positions=None if learned is None else _rows(learned, values),
        embedding_size=None if width == hidden else width,
        n_experts=routed.get("hook_router_logits"),
        n_chosen=routed.get("hook_expert_indices"),
    )


def _heads_of(values: Mapping[str, np.ndarray], decoder: Recognised) -> tuple[int, int, int]:
    """Heads of queries and of keys, and their size, in the first layer that attends; without any, those of states."""
    first = next(iter(decoder.attention), None)
    if first is not None:
        queries, keys = (values[f"blocks.{first}.attn.hook_{part}"].shape for part in "qk")
        return queries[1], keys[1], queries[3]
    own = next(iter(decoder.recurrence.values())).recurrence
    return own.n_heads, own.n_heads, own.value_dim


def _rows(learned: ir.Value, values: Mapping[str, np.ndarray]) -> int | None:
    """Number of learned positions: the rows of the table that they come from, those before the first one left out."""
    node = _look_up(learned)
    shape = None if node is None or node.inputs[0] is None else node.inputs[0].shape
    if shape is None or not isinstance(shape[0], int):
        return None
    places = values.get(str(node.inputs[1].name))
    return shape[0] - (0 if places is None else int(places.reshape(-1)[0]))


def _look_up(learned: ir.Value) -> ir.Node | None:
    """The node that picks rows of the table of learned positions."""
    node = learned.producer()
    while node is not None and node.op_type not in ROW_LOOKUPS:
        node = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
    return node


def counted_places(decoder: Recognised) -> list[str]:
    """The value of the rows that are picked from a table of learned positions, where the graph counts them itself."""
    learned = next((value for name, value in decoder.points if name == "hook_pos_embed"), None)
    node = None if learned is None else _look_up(learned)
    picked = None if node is None else node.inputs[1]
    return [str(picked.name)] if picked is not None and picked.producer() is not None else []


def other_windows(own: Sequence[int | None], stated: Sequence[int | None]) -> list[str]:
    """A note on layers whose masks have no window, though the config says one."""
    other = [layer for layer, pair in enumerate(zip(own, stated, strict=False)) if pair[0] != pair[1]]
    return [f"layers {other}: the file's own mask has no window, though config.json says one"] if other else []


def windows_of(config: Mapping[str, Any], layers: int) -> list[int | None] | None:
    """How many keys a query of each layer reads, as the config says; None in it for all, and without a config."""
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    if not isinstance(window, int) or config.get("use_sliding_window") is False:
        return [None] * layers if config else None
    # without a list all layers slide, as in mistral
    sliding = [not isinstance(kinds, list) or kinds[layer] == "sliding_attention" for layer in range(layers)]
    return [window if slides else None for slides in sliding]


def annotate(
    proto: onnx.ModelProto, probed: Probe, hooks: Mapping[str, list[str | int]], main: str | None = "hook_logits"
) -> None:
    """Write down the dtype of every value, and the axes of hook points: rewrites read them."""
    ends = {entry.name: entry for entry in (*proto.graph.input, *proto.graph.output)}
    del proto.graph.value_info[:]
    for name, text in probed.dtypes.items():
        # ONNX's number of a dtype in ONNX Runtime's words, `tensor(float)`
        kind = onnx.TensorProto.DataType.Value(text.removeprefix("tensor(").removesuffix(")").upper())
        if name in ends:
            ends[name].type.tensor_type.elem_type = kind
            continue
        proto.graph.value_info.append(onnx.helper.make_tensor_value_info(name, kind, hooks.get(name)))
    logits = ends[LOGITS]
    axes = hooks[main or "blocks.0.hook_resid_pre"]
    logits.CopyFrom(onnx.helper.make_tensor_value_info(LOGITS, logits.type.tensor_type.elem_type, axes))
