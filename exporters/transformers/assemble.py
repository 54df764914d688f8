"""A checkpoint folder to a hooked model folder, step by step."""

import tempfile
import warnings
from copy import deepcopy
from dataclasses import replace
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from transformers import AutoTokenizer

from exporters.checkpoint_tensors import StoredTensor, export_dtype, read_tensors
from exporters.packed import quantization_of
from exporters.packed.tensors import unpacked_tensors
from exporters.sidecar_files import find_files, keep_files
from exporters.transformers import trace
from exporters.transformers.by_structure import Checkpoint, export_by_structure
from exporters.transformers.config import CONFIG_FILE, kept_keys, native_config, sizes_of, sliding_window
from exporters.transformers.encoder_families import reads_both_ways
from exporters.transformers.experts import identities_from, is_spare
from exporters.transformers.families import FAMILIES
from exporters.transformers.heads import TaskHead, head_of
from exporters.transformers.hooked_graph import EXPORT_PACKAGES, HookedGraph, Stage, make_graph
from exporters.transformers.refused import refuse
from exporters.transformers.sentence import tensors_of
from exporters.transformers.weights import bind_weights, leave_heads, map_tensors
from exporters.weight_files import locations, place_nowhere
from mionnx.errors import ExportError, boundary
from mionnx.graph import file_digest
from mionnx.graph.blocks import GivenBlocks
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import GRAPH
from mionnx.graph.layers import Attention, Heads
from mionnx.graph.metadata import DTYPE_NAMES, IDENTITIES, NEXT_TOKEN, NORMED_STREAM, Metadata
from mionnx.graph.own_version import own_version
from mionnx.graph.sizes import context_length
from mionnx.graph.weight_record import describe_export, digest_of
from mionnx.machine.progress import Progress

SLOW_TOKENIZERS = ("vocab.json", "tokenizer.model", "vocab.txt")
INDEXER = ".self_attn.indexer."  # in names of weights of a choice of keys, which no graph makes
# Tables of powers of `slope_rate` over a block of lightning attention (MiniMax): a recurrence needs none.
OF_SLOPES = (".self_attn.query_decay", ".self_attn.key_decay", ".self_attn.diagonal_decay")
STAGES = 7  # that a progress bar counts

# What taps see in every decoder, outside of layers and in each.
POINTS_OUTSIDE = (HookPoint.Embed, HookPoint.Logits)
INSIDE = (
    *(
        HookPoint.ResidPre,
        HookPoint.AttnQ,
        HookPoint.AttnK,
        HookPoint.AttnV,
        HookPoint.AttnScores,
        HookPoint.AttnPattern,
    ),
    *(HookPoint.AttnZ, HookPoint.AttnOut, HookPoint.MlpPre, HookPoint.MlpPost, HookPoint.MlpOut, HookPoint.ResidPost),
)


def export_checkpoint(
    folder: Path, target: Path, dtype: str, progress: Progress, leave: bool = False
) -> dict[str, GivenBlocks]:
    """See `exporters.transformers.export`, and with `leave` `export_packed`."""
    stage = _stages(folder, progress)
    stage("reading the checkpoint")
    beside = find_files(folder)
    config = native_config(folder)
    head = head_of(config, folder)
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target, prefix=".mionnx-") as staging:
        tensors = _read(folder, Path(staging), config)
        tensors += tensors_of(head.sentence, Path(staging)) if head.sentence else []
        files = {tensor.file for tensor in tensors}
        file_digest.start(files)  # read while the model is traced
        kind = export_dtype(dtype, tensors)
        source = Checkpoint(folder, config, tensors, kind)
        with boundary(ExportError, f"{folder / CONFIG_FILE} makes no model"):
            layers = sizes_of(config, learned_positions=False).num_layers
            if layers > len(tensors):
                raise ExportError(f"the config says {layers} layers, the checkpoint has {len(tensors)} tensors")
            hooked = _tapped(config, kind, stage, head)
        if isinstance(hooked, str):
            if any(tensor.packed is not None for tensor in tensors):
                raise ExportError(f"{hooked}; a family that is found by structure opens from a checkpoint of floats")
            blocks: dict[str, GivenBlocks] = {}
            export_by_structure(source, hooked, target, stage, progress)
        else:
            blocks = _write_tapped(hooked, source, target, stage, progress, leave)
    keep_files(beside, folder, target)
    _write_fast_tokenizer(folder, target)
    return blocks


def _stages(folder: Path, progress: Progress) -> Stage:
    numbers = count()
    return lambda name: progress(f"exporting {folder.name}: {name}", next(numbers), STAGES)


def _read(folder: Path, staging: Path, config: Any) -> list[StoredTensor]:
    """The tensors of a checkpoint; those and the config of one of integers as of one of floats."""
    quantization = quantization_of(folder)
    if quantization is None:
        return read_tensors(folder, staging)
    tensors = read_tensors(folder, staging, with_bytes=quantization["quant_method"] == "mxfp4")
    del config.quantization_config
    try:
        return unpacked_tensors(tensors, quantization, config.model_type)
    except ExportError as error:
        raise ExportError(f"{folder}: {error}") from error


def export_config(folder: Path, target: Path, dtype: str, progress: Progress) -> None:
    """See `exporters.transformers.export_graph`."""
    stage = _stages(folder, progress)
    stage("reading the config")
    beside, config = find_files(folder), native_config(folder)
    head = head_of(config, folder)
    refuse(config, head)
    kind = export_dtype(str(config.dtype or torch.float32).removeprefix("torch.") if dtype == "auto" else dtype, [])
    hooked = make_graph(config, kind, stage, head=head)
    stage("writing")
    place_nowhere(hooked.parameters, target)
    target.mkdir(parents=True, exist_ok=True)
    _write_model(hooked, describe(hooked, config, kind), target)
    keep_files(beside, folder, target)
    _write_fast_tokenizer(folder, target)


def _tapped(config: Any, dtype: torch.dtype, stage: Stage, head: TaskHead) -> HookedGraph | str:
    """The graph of a family with taps, or the reason why they do not fit one without a table."""
    refuse(config, head)
    if config.model_type in FAMILIES or head.kind != NEXT_TOKEN:
        return make_graph(config, dtype, stage, head=head)
    lacking = missing_taps(deepcopy(config), dtype)
    if lacking is not None:
        return lacking
    try:
        return make_graph(deepcopy(config), dtype, stage)
    except ExportError as error:
        return str(error)


def missing_taps(config: Any, dtype: torch.dtype) -> str | None:
    """Name what taps by the table's layout do not find in a family, or None; the config, a copy, is changed."""
    seen = set[str]()

    def listen(name: str, value: torch.Tensor, stream: bool) -> torch.Tensor:
        seen.add(name)
        return value

    try:
        skeleton = trace.skeleton_of(config, dtype)
        with torch.device("meta"), trace.quiet(), torch.no_grad():
            ids = torch.ones(1, 2, dtype=torch.long)
            _, cache = trace.wrapped(skeleton, listen)(ids, ids, ids, [])
    except Exception as error:  # whatever a family's code raises where it is laid out otherwise
        return f"{config.model_type!r}: {error}"
    expected = [*POINTS_OUTSIDE, *(point(layer) for layer in range(len(cache)) for point in INSIDE)]
    absent = [str(point) for point in expected if str(point) not in seen]
    return f"{config.model_type!r} shows no {absent[0]} where taps look for it" if absent else None


def _write_tapped(
    hooked: HookedGraph, source: Checkpoint, target: Path, stage: Stage, progress: Progress, leave: bool
) -> dict[str, GivenBlocks]:
    stage("placing weights")
    config, sparse = source.config, bool(kept_keys(source.config))
    read = [one for one in source.tensors if not (sparse and INDEXER in one.name) and not is_spare(one.name, config)]
    read = [one for one in read if not one.name.endswith(OF_SLOPES)]
    mapped = map_tensors(read, hooked.skeleton)
    if hooked.head.kind != NEXT_TOKEN:
        leave_heads(mapped, hooked.parameters, hooked.skeleton)
    blocks = bind_weights(hooked.parameters, mapped, hooked.skeleton, target, progress, leave)
    files = sorted({tensor.file for tensor in source.tensors})
    if blocks:  # holes stand for the numbers that are left out, and nobody keeps these files
        digest, of_files = digest_of(files, progress), dict[str, Any]()
    else:
        digest, of_files = describe_export(target, locations(hooked.parameters), files, progress)
    metadata = replace(describe(hooked, config, source.dtype), weights_sha256=digest, weight_files=of_files)
    stage("writing")
    _write_model(hooked, metadata, target)
    return blocks


def describe(hooked: HookedGraph, config: Any, dtype: torch.dtype) -> Metadata:
    """The metadata of a graph, without those of its weights."""
    normed = {NORMED_STREAM: "yes"} if hooked.layout.stream == "normed" else {}
    identities = {IDENTITIES: str(first)} if (first := identities_from(config)) is not None else {}
    versions = {name: version(name) for name in EXPORT_PACKAGES}
    return Metadata(
        family=config.model_type,
        dtype=str(dtype).removeprefix("torch."),
        sizes=hooked.sizes,
        hooks=hooked.hooks,
        attention=_attentions(hooked),
        recurrence=[own.recurrence for own in hooked.carried] if any(own.recurrence for own in hooked.carried) else [],
        exporter={**versions, **normed, **identities},
        context_length=_longest(hooked, config),
        hook_dtypes=_other_dtypes(hooked, str(dtype).removeprefix("torch.")),
        direction="both" if reads_both_ways(config) else "left",
        head=hooked.head.kind,
        labels=hooked.head.labels(config),
        activation=hooked.head.activation(config),
        pooling=hooked.head.sentence.metadata() if hooked.head.sentence else {},
    )


def _longest(hooked: HookedGraph, config: Any) -> int | None:
    """The length of text that a model is made for; that of a sentence embedding is cut before."""
    sentence = hooked.head.sentence
    own = sentence.max_length if sentence else None
    lengths = (own, hooked.sizes.max_positions if hooked.head.kind != NEXT_TOKEN else None)
    return min([length for length in lengths if length], default=context_length(config.to_dict()))


def _other_dtypes(hooked: HookedGraph, dtype: str) -> dict[str, str]:
    """The dtypes of hook points that a family computes in wider numbers than the model's."""
    values = [value for node in hooked.model.graph for value in node.outputs if value.name in hooked.hooks]
    dtypes = {str(value.name): value.dtype.numpy().name for value in values if value.dtype is not None}
    return {name: kind for name in hooked.hooks if (kind := dtypes.get(name, dtype)) in DTYPE_NAMES and kind != dtype}


def _write_model(hooked: HookedGraph, metadata: Metadata, target: Path) -> None:
    """Write `model.onnx` into a folder; its parameters have their places in files."""
    model = hooked.model
    for value in hooked.parameters:
        model.graph.register_initializer(value)
    model.metadata_props.update(metadata.to_props())
    model.producer_name, model.producer_version = "mionnx", own_version()
    ir.save(model, target / GRAPH)


def _attentions(hooked: HookedGraph) -> list[Attention | None]:
    """Each layer's attention; an empty list where no layer attends."""
    heads = [own.heads for own in hooked.carried]
    usual = next((one for one in heads if one), None)
    if usual is None:
        return []
    return [None if one is None else _attention(hooked, layer, one, usual) for layer, one in enumerate(heads)]


def _attention(hooked: HookedGraph, layer: int, heads: Heads, usual: Heads) -> Attention:
    """A layer's attention; `usual` are the heads of the first one that has any."""
    block, number = divmod(layer, hooked.layout.layers)
    layout, model = hooked.layout.layer(number), hooked.skeleton
    path, rows = f"{layout.blocks}.{block}.{layout.projection}", False
    if layout.projection:  # transformers' Conv1D keeps [in, out], Linear [out, in]
        rows = not isinstance(model.get_submodule(path), torch.nn.Linear)
    (count, size, value_size), (usual_count, usual_size, _) = heads, usual
    return Attention(
        _kept_name(hooked, f"{path}.weight") if layout.projection else "",
        rows,
        sliding_window(model.config, layer),
        num_kv_heads=None if count == usual_count else count,
        head_dim=None if size == usual_size else size,
        value_dim=None if value_size == size else value_size,
    )


def _kept_name(hooked: HookedGraph, name: str) -> str:
    """The name under which a graph reads a parameter that several layers share (ALBERT)."""
    weights = dict(hooked.skeleton.named_parameters(remove_duplicate=False))
    read = {value.name for value in hooked.parameters}
    same = [other for other, weight in weights.items() if weight is weights.get(name)]
    return next((other for other in (name, *same) if other in read), name)


def _write_fast_tokenizer(folder: Path, target: Path) -> None:
    """Write `tokenizer.json` for a checkpoint with older tokenizer files only."""
    slow = any((folder / name).is_file() for name in SLOW_TOKENIZERS)
    if not slow or (target / "tokenizer.json").exists():
        return
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # the libraries' errors share no base class
        warnings.warn(f"{folder}: no tokenizer, give token ids instead of text: {error}", stacklevel=2)
        return
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.save(str(target / "tokenizer.json"))
