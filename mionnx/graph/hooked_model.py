"""A hooked model on disk: a folder with `model.onnx`, its weight files, `config.json` and the tokenizer.

The format, on one page:

1. `model.onnx` is valid ONNX in the standard domain and runs as it is in any runtime; it holds no weights.
2. The value at a hook point is called by the hook's name. `metadata_props` list the hook points with their axes.
3. Weights are external data in files of the same folder, usually the checkpoint's own `.safetensors`. No path leaves
   the folder, so that it can be moved.
4. Inputs: `input_ids`, `attention_mask` [batch, total], `position_ids` [batch, seq], and per layer
   `past_key_values.{i}.key` and `.value` [batch, n_kv_heads, past, head_dim], where past may be 0.
   A graph adopted from a file without a cache may have none of these; generation and sweeps are then refused.
   Layers with a recurrence have `past_state.{i}.conv` [batch, channels, kernel - 1] and `.state` [batch, n_heads,
   key_dim, value_dim], as far as they have these, in place of keys and values or beside them.
   An RWKV model: `input_ids`, per layer `past_state.{i}.att_shift`, `.ffn_shift` [batch, hidden] and `.wkv`
   [batch, n_heads, key_dim, value_dim], and the gates with defaults that `mionnx.bind.state_gates` describes.
   An encoder: `input_ids`, `attention_mask` [batch, seq], and `position_ids` and `token_type_ids` where it reads them.
5. Outputs: `logits` [batch, seq, vocab] (of an encoder those of its head, `embedding` [batch, d], or
   `last_hidden_state` [batch, seq, hidden]) and per layer `present.{i}.key` and `.value`, or `present_state.{i}.*`.
   An RWKV model also names what its recurrence reads after the gates, for values that are derived from it:
   `blocks.{i}.rwkv.written_k`, `.kept_decay`, `.erased_b` (RWKV-7) and `.bonus` (RWKV-6); other recurrences have
   `blocks.{i}.ssm.written_v`, `.write_gate`, `.kept_log_decay`, of the delta rule `.erase_gate`.
6. `metadata_props` keys begin with `mionnx.`; each value is JSON: `format`, `family`, `dtype`, `sizes`, `hooks`,
   `attention`, `exporter`, `weights_sha256`, `weight_files`, `context_length`, `recurrence` where layers have one (but
   of RWKV), and of an adopted file `fused` and `stock`, `hook_dtypes` where hook points have several, `quantised` of a
   model of blocks, and `exponents` and `narrowed` of a rescaled one, whose hook points hold powers of two of their
   values in the file: a model in memory has the values themselves. See `mionnx.graph.metadata`, `weight_record` and
   `exponents`.
7. Refused when opened: another format version, a corrupt or truncated graph, a listed hook point that is no value of
   the graph, a weight outside the folder or beyond the end of its file, weight files that are not those that were
   exported (`mionnx.graph.weight_check`), a fused operator that its nodes cannot stand for, a stock graph that is no
   valid one or has other inputs.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import DTypeLike

from mionnx.errors import HookError, ModelError, boundary
from mionnx.graph import onnx_file, validate, weight_check, weight_record
from mionnx.graph.dataflow import Dataflow
from mionnx.graph.exponents import with_true_values
from mionnx.graph.folder_file import LARGEST_BESIDE, inside, read_json
from mionnx.graph.fused_operators import read_fused
from mionnx.graph.hook_points import HookPoint, layer_of, nearest_hook
from mionnx.graph.influence import Influence
from mionnx.graph.io_names import LOGITS
from mionnx.graph.known_value import Known
from mionnx.graph.metadata import Metadata
from mionnx.graph.operator_table import DOMAIN
from mionnx.graph.sizes import TEXT_SETTINGS, context_length, text_limit
from mionnx.graph.stock_graph import StockGraph, check_stock, unpacked
from mionnx.graph.weight_check import Progress, silent

GRAPH = "model.onnx"
KEY = 16  # hex digits of the key that ends the name of a model's folder in the store
# What is kept beside a graph, where the checkpoint has it: the config, and what tokenizers are made of.
KEPT = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "vocab.txt",
    "rwkv_vocab*.txt",
    "modules.json",
    *TEXT_SETTINGS,
    "config_sentence_transformers.json",
    "*_Pooling/config.json",
    "*_Dense/config.json",
    "*_LayerNorm/config.json",
)
MASK_TOKENS = ("[MASK]", "<mask>")  # where a tokenizer does not say which token hides others
INPUT_NAMES = ("input_ids", "attention_mask")  # of a tokenizer's encoding, that a graph reads
DTYPES: dict[str, DTypeLike] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
ROUNDING_LEVEL = 4  # accuracy_level of a MatMulNBits that rounds what it reads to 8 bits
ROUTER = ("MlpRouterLogits", "MlpExpertIndices", "MlpExpertWeights")
# Operators that find the scale of what they round in all of it.
ROUNDS_BY_CALL = frozenset(("DynamicQuantizeLinear", "DynamicQuantizeMatMul"))
LARGEST_GRAPH = 2**28  # bytes of a graph without its weights
CHECKED_BATCHES = (
    (1, 1, 0),
    (2, 3, 5),
)  # batch, seq, past: token batches for which the sizes of all values are checked


@dataclass(frozen=True)
class HookedModel:
    """A hooked model, opened and checked."""

    folder: Path
    proto: onnx.ModelProto = field(repr=False)
    metadata: Metadata = field(repr=False)

    @classmethod
    def open(cls, folder: Path, *, check: str = "sampled", progress: Progress = silent) -> "HookedModel":
        """Open a hooked model's folder and check it.

        Args:
            check: how its weights are compared with what was exported: "sampled", "full" (every byte) or "none".
            progress: called as (stage, done, total) while every byte is read.
        """
        with boundary(ModelError, f"{folder / GRAPH} is damaged"):
            model = cls._read(folder)
            stock = model.stock
        proto, metadata = model.proto, model.metadata
        files = {*onnx_file.locations(proto), *(onnx_file.locations(stock.proto) if stock else ())}
        if check == "full":
            model.need_weights("checking them")
            metadata = replace(metadata, weight_files=weight_record.complete(folder, metadata, progress))
        weight_check.check(folder, metadata, files, check, progress)
        return model

    @classmethod
    def _read(cls, folder: Path) -> "HookedModel":
        """Read a graph and its metadata, and check them against each other."""
        proto = onnx_file.read(folder / GRAPH, LARGEST_GRAPH)
        validate.check_counts(proto)
        metadata = Metadata.from_props(onnx_file.properties(proto))
        read_fused(Dataflow(proto), metadata.fused)
        facts = validate.check(proto, folder, [validate.input_shapes(proto, *tokens) for tokens in CHECKED_BATCHES])
        values = {output for node in proto.graph.node for output in node.output}
        for name, axes in metadata.hooks.items():
            if name not in values:
                raise ModelError(f"{folder / GRAPH} lists the hook point {name!r}, but no node makes such a value")
            _check_axes(name, axes, facts[name], metadata)
        layers = {layer_of(name) for name in metadata.hooks} - {None}
        # metadata may come from anybody: sizes that do not agree with the graph would make wrong arrays later
        if layers and metadata.sizes.num_layers != len(layers):
            raise ModelError(
                f"{folder / GRAPH} has hook points of {len(layers)} layers, but its metadata say "
                f"{metadata.sizes.num_layers}"
            )
        _check_layers(folder, proto, metadata)
        inputs, outputs = onnx_file.interface(proto)
        if "input_ids" not in inputs or metadata.output not in outputs:
            raise ModelError(
                f"{folder / GRAPH} has the inputs {inputs} and outputs {outputs}; input_ids and {metadata.output} are "
                "missing"
            )
        onnx_file.rename(proto, metadata.output, LOGITS)
        return cls(folder, with_true_values(proto, metadata.exponents), metadata)

    @cached_property
    def stock(self) -> StockGraph | None:
        """The graph of an adopted file as it came, checked; None if there is none."""
        if not self.metadata.stock:
            return None
        stock_graph = unpacked(self.metadata.stock)
        check_stock(stock_graph, self.proto, self.folder)
        return stock_graph

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the graph and its metadata."""
        return hashlib.sha256(self.proto.SerializeToString(deterministic=True)).hexdigest()

    @cached_property
    def fused_kinds(self) -> frozenset[tuple[str, str]]:
        """Domain and name of the operators in the graph of an adopted file as it came."""
        nodes = [] if self.stock is None else list(self.stock.proto.graph.node)
        nodes += [one.node for one in read_fused(Dataflow(self.proto), self.metadata.fused)]
        return frozenset((node.domain, node.op_type) for node in nodes if node.domain == DOMAIN)

    @property
    def name(self) -> str:
        """Name of its folder; in the store that of its source, without the key behind it."""
        return re.sub(rf"(?<=.)-[0-9a-f]{{{KEY}}}$", "", self.folder.resolve().name)

    def hook_points(self) -> list[HookPoint]:
        """All hook points in execution order; derived ones follow their source."""
        return [*self._points.values()]

    @cached_property
    def order(self) -> dict[str, int]:
        """Name of a hook point -> its place in execution order."""
        return {name: place for place, name in enumerate(self._points)}

    @cached_property
    def _points(self) -> dict[str, HookPoint]:
        points: list[HookPoint] = []
        for name in self.metadata.hooks:
            point = HookPoint.parse(name)
            points.append(point)
            points += [one for one in point.derivations() if self._derives(one)]
        return {point.name: point for point in points}

    def _derives(self, point: HookPoint) -> bool:
        """Whether a derived hook point can be computed; shares of heads need one projection."""
        if point.variant != "AttnResult" or point.layer is None:
            return True
        attention = self.metadata.layers[point.layer].attention
        return attention is not None and bool(attention.output_projection)

    @cached_property
    def in_blocks(self) -> bool:
        """Whether products read weights in blocks (MatMulNBits)."""
        return any(node.op_type == "MatMulNBits" for node in self.proto.graph.node)

    @cached_property
    def rounds_by_call(self) -> bool:
        """Whether activations are rounded with one scale for all tokens of a call."""
        # That is dynamic quantisation: rows of a batch and positions then change each other's results.
        return any(node.op_type in ROUNDS_BY_CALL for node in self.proto.graph.node)

    @cached_property
    def rounds_activations(self) -> bool:
        """Whether products round what they read to 8 bits."""
        # Dynamic quantisation does, MatMulNBits of accuracy level 4, and ONNX Runtime where a DequantizeLinear of
        # blocks stands before a product. What is computed from W_U or W_O differs from the graph's products by the
        # rounding.
        return self.rounds_by_call or any(
            (entry.name == "accuracy_level" and entry.i == ROUNDING_LEVEL)
            if node.op_type == "MatMulNBits"
            else (entry.name == "block_size" and entry.i > 0)
            for node in self.proto.graph.node
            if node.op_type in ("MatMulNBits", "DequantizeLinear")
            for entry in node.attribute
        )

    @cached_property
    def has_weights(self) -> bool:
        """Whether it has weights; a graph that was exported from a config alone has none."""
        return not onnx_file.lacks_weights(self.proto)

    def need_weights(self, what: str = "running it") -> None:
        """Refuse what needs weights, if there are none."""
        if not self.has_weights:
            onnx_file.refuse_weightless(self.folder, what)

    @cached_property
    def weights_sha256(self) -> str:
        """Hash of its weights, waited for if need be; see `mionnx.graph.weight_record`."""
        return weight_record.weights_sha256(self.folder, self.metadata)

    @cached_property
    def influence(self) -> Influence:
        """The reach of its hook points."""
        return Influence(self.proto, self.metadata)

    @cached_property
    def has_cache(self) -> bool:
        """Whether the graph takes a past; one adopted from another tool's file may take none."""
        names, ports = {entry.name for entry in self.proto.graph.input}, self.metadata.ports
        return bool(ports) and all(port.past in names for port in ports if port.layer == ports[0].layer)

    @property
    def as_on_disk(self) -> bool:
        """Whether the graph is that of the file: the main output of an embedding model is called "logits" here."""
        return self.metadata.output == LOGITS

    @cached_property
    def mask_token(self) -> int | None:
        """The id of the token that stands for a hidden one, by the tokenizer's files; None without one."""
        try:
            added = read_json(inside(self.folder, "tokenizer.json"), LARGEST_BESIDE)["added_tokens"]
            named = {entry["content"]: entry["id"] for entry in added}
        except (ModelError, KeyError, TypeError):
            return None
        try:
            mask = read_json(inside(self.folder, "tokenizer_config.json")).get("mask_token")
        except (ModelError, AttributeError):
            mask = None
        mask = mask.get("content") if isinstance(mask, dict) else mask
        names = [mask] if isinstance(mask, str) else MASK_TOKENS
        ids = (named[name] for name in names if isinstance(named.get(name), int))
        return next((one for one in ids if 0 <= one < self.metadata.sizes.vocab_size), None)

    @cached_property
    def pad_token(self) -> int:
        """The id of the token that fills rows, by `config.json`; 0 where it names none."""
        return next(iter(self._tokens("pad_token_id")), 0)

    @cached_property
    def longest_text(self) -> int | None:
        """Tokens of the longest text that an encoder is given, special ones included: longer ones are cut."""
        lengths = (text_limit(self.folder), self.metadata.sizes.max_positions)
        return min([size for size in lengths if size], default=self.context_length)

    @cached_property
    def has_token_types(self) -> bool:
        """Whether the graph takes token types: which of two texts a token belongs to."""
        return any(entry.name == "token_type_ids" for entry in self.proto.graph.input)

    def end_tokens(self) -> list[int]:
        """End-of-text tokens of `generation_config.json` or `config.json`; none if neither says."""
        return self._tokens("eos_token_id")

    def start_tokens(self) -> list[int]:
        """Beginning-of-text tokens, of the same files."""
        return self._tokens("bos_token_id")

    def _tokens(self, key: str) -> list[int]:
        for name in ("generation_config.json", "config.json"):
            try:
                tokens = read_json(inside(self.folder, name)).get(key)
            except (ModelError, AttributeError):
                continue
            if tokens is not None:
                tokens = tokens if isinstance(tokens, list) else [tokens]
                return [token for token in tokens if isinstance(token, int) and token < self.metadata.sizes.vocab_size]
        return []

    @property
    def context_length(self) -> int | None:
        """The longest text that the model is made for: learned positions, else as its config says."""
        # Older files do not say it in their metadata; `config.json` beside them is read then.
        length = self.metadata.sizes.max_positions or self.metadata.context_length
        if length is not None:
            return length
        try:
            config = read_json(inside(self.folder, "config.json"))
        except ModelError:
            return None
        return context_length(config) if isinstance(config, dict) else None

    def dtype(self, point: HookPoint) -> DTypeLike:
        """Dtype of a hook point's value: its own, else the model's; float32 in a recurrence."""
        if point.name in self._dtypes_of_routers:
            return self._dtypes_of_routers[point.name]
        # recurrences are computed in float32 in models of any dtype: a state sums over the whole text
        if ".rwkv." in point.name:
            return np.float32
        return DTYPES[self.metadata.hook_dtypes.get(point.source.name, self.metadata.dtype)]

    @cached_property
    def past_dtypes(self) -> dict[str, DTypeLike]:
        """Input of the past -> its dtype; where the graph has no such input, that of the model."""
        inputs = {entry.name: onnx_file.dtype_of(entry) for entry in self.proto.graph.input}
        own = DTYPES[self.metadata.dtype]
        return {one.past: inputs.get(one.past, np.float32 if one.sums else own) for one in self.metadata.ports}

    @cached_property
    def _dtypes_of_routers(self) -> dict[str, DTypeLike]:
        """Dtypes of a router's values: numbers of experts, and often float32."""
        routed = {name for name in self.metadata.hooks if HookPoint.parse(name).variant in ROUTER}
        return {
            value.name: onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
            for value in self.proto.graph.value_info
            if value.name in routed
        }

    def axes(self, point: HookPoint) -> list[str | int]:
        """The axes of a hook point: names of dynamic ones, numbers of fixed ones."""
        if point.derived and point.name in self._points:
            sizes = self.metadata.axis_sizes(point)
            return [sizes.get(axis, axis) for axis in point.axes or ()]
        if point.name not in self.metadata.hooks:
            near = nearest_hook(point.name, self._points)
            raise HookError(f"this {self.metadata.family} model has no hook point {point.name!r}{near}")
        return list(self.metadata.hooks[point.name])


def _check_layers(folder: Path, proto: onnx.ModelProto, metadata: Metadata) -> None:
    """Check what the metadata say of layers against hook points and inputs."""
    named = {layer for name in metadata.hooks if ".attn." in name and (layer := layer_of(name)) is not None}
    if metadata.recurrence:
        attending = {i for i, layer in enumerate(metadata.layers) if layer.attention}
        if named != attending:
            raise ModelError(
                f"{folder / GRAPH} has attention in the layers {sorted(named)}, not in {sorted(attending)}"
            )
    elif len(metadata.attention) != (count := metadata.sizes.num_layers if named else 0):
        raise ModelError(f"{folder / GRAPH} describes attention in {len(metadata.attention)} of {count} layers")
    inputs = {entry.name: entry for entry in proto.graph.input}
    for port in metadata.ports:
        if port.past not in inputs or port.positional:
            continue
        dims = [dim.dim_value for dim in inputs[port.past].type.tensor_type.shape.dim[1:]]
        if dims != [*port.dims]:
            raise ModelError(f"{port.past} is [batch, {dims}] in the graph, but the metadata say {list(port.dims)}")


def _check_axes(name: str, axes: Sequence[str | int], fact: Known, metadata: Metadata) -> None:
    """Check what the metadata say of a hook point's axes against the graph and the sizes."""
    shape = fact.shape if fact.shape is not None else (None,) * len(axes)
    fixed = [(axis, dim) for axis, dim in zip(axes, shape, strict=False) if isinstance(axis, int)]
    if len(shape) != len(axes) or any(None is not dim != axis for axis, dim in fixed):
        raise ModelError(f"{name} has the shape {list(shape)} in the graph, but its metadata say {list(axes)}")
    point = HookPoint.parse(name)
    named = metadata.axis_sizes(point)
    for axis, size in zip(point.axes or (), axes, strict=False):
        if isinstance(size, int) and named.get(axis, size) != size:
            raise ModelError(f"the axis {axis} of {name} is {size}, but the metadata's sizes say {named[axis]}")
