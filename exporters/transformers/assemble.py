"""A checkpoint folder to a hooked model folder, step by step."""

import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import onnx_ir as ir
import torch
from transformers import AutoTokenizer

from exporters.checkpoint_tensors import export_dtype, read_tensors
from exporters.sidecar_files import find_files, keep_files
from exporters.transformers.check_hooked import check_stream, hook_axes
from exporters.transformers.checkpoint import map_tensors
from exporters.transformers.families import layout_of
from exporters.transformers.naming import name_dimensions, name_hooks, strip
from exporters.transformers.native_config import native_config
from exporters.transformers.simplify import simplify
from exporters.transformers.sizes import sizes_of, sliding_window
from exporters.transformers.trace import Traced, buffers_of, trace
from exporters.transformers.weights import bind_weights
from exporters.weight_files import locations
from mionnx.errors import ExportError
from mionnx.graph.metadata import Attention, Metadata, context_length
from mionnx.graph.weight_check import fingerprints, sha256
from mionnx.machine.progress import Progress

SLOW_TOKENIZERS = ("vocab.json", "tokenizer.model", "vocab.txt")
STAGES = ("reading the checkpoint", "tracing", "simplifying", "naming", "placing weights", "writing")


def export_checkpoint(folder: Path, target: Path, dtype: str, progress: Progress) -> None:
    """See `exporters.transformers.export`."""
    stages = iter(range(1, len(STAGES) + 1))

    def stage() -> None:
        done = next(stages)
        progress(f"exporting {folder.name}: {STAGES[done - 1]}", done, len(STAGES))

    stage()
    files = find_files(folder)
    config = native_config(folder)
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target, prefix=".mionnx-") as staging:
        tensors = read_tensors(folder, Path(staging))
        kind = export_dtype(dtype, tensors)
        sizes = sizes_of(config, learned_positions=layout_of(config).positions is not None)
        if sizes.num_layers > len(tensors):
            raise ExportError(f"the config says {sizes.num_layers} layers, the checkpoint has {len(tensors)} tensors")
        stage()
        traced = trace(config, kind)
        sizes = replace(sizes, num_kv_heads=traced.heads[0][0], head_dim=traced.heads[0][1])
        stage()
        buffers = buffers_of(config, kind)
        parameters = _simplified(traced.model, buffers)
        stage()
        hooks = name_hooks(traced.model.graph)
        name_dimensions(traced.model.graph)
        check_stream(traced.model.graph)
        strip(traced.model)
        stage()
        bind_weights(parameters, map_tensors(tensors, traced.skeleton), traced.skeleton, target, progress)
        for value in parameters:
            traced.model.graph.register_initializer(value)
        stage()
        metadata = Metadata(
            family=config.model_type,
            dtype=str(kind).removeprefix("torch."),
            sizes=sizes,
            hooks={},
            attention=[_attention(traced, i) for i in range(sizes.num_layers)],
            exporter={name: version(name) for name in ("mionnx", "torch", "transformers", "onnxscript")},
            weights_sha256=sha256(sorted({tensor.file for tensor in tensors}), progress),
            weight_files=fingerprints(target, locations(parameters), progress),
            context_length=context_length(config.to_dict()),
        )
        metadata = replace(metadata, hooks=hook_axes(traced.model.graph, hooks, metadata))
    traced.model.metadata_props.update(metadata.to_props())
    traced.model.producer_name, traced.model.producer_version = "mionnx", version("mionnx")
    ir.save(traced.model, target / "model.onnx")
    keep_files(files, target)
    _write_fast_tokenizer(folder, target)


def _simplified(model: ir.Model, buffers: Mapping[str, torch.Tensor]) -> list[ir.Value]:
    for name, buffer in buffers.items():
        if name in model.graph.initializers:
            model.graph.initializers[name].const_value = ir.tensor(buffer.numpy(), name=name)
    return simplify(model, _fakes(model.graph))


def _fakes(graph: ir.Graph) -> set[str]:
    """The initializers traced without data, to be bound to checkpoint tensors."""
    return {
        name
        for name, value in graph.initializers.items()
        if isinstance(getattr(value.const_value, "raw", None), torch.Tensor)
        and type(value.const_value.raw) is not torch.Tensor
    }


def _attention(traced: Traced, layer: int) -> Attention:
    layout, model = traced.layout, traced.skeleton
    path = f"{layout.blocks}.{layer}.{layout.output_projection}"
    projection = model.get_submodule(path)
    rows = not isinstance(projection, torch.nn.Linear)  # transformers' Conv1D keeps [in, out], Linear [out, in]
    (count, size, value_size), (usual, usual_size, _) = traced.heads[layer], traced.heads[0]
    return Attention(
        f"{path}.weight",
        rows,
        sliding_window(model.config, layer),
        num_kv_heads=None if count == usual else count,
        head_dim=None if size == usual_size else size,
        value_dim=None if value_size == size else value_size,
    )


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
