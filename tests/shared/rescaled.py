"""A model whose residual stream is divided by a power of two, in float32, as a file of its own."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from repository import REPOSITORY

from mionnx import MIModel
from mionnx.graph.onnx_file import external_files, rename
from mionnx.rewrite.float_graph import FloatGraph
from mionnx.rewrite.rescale import rescale

LLAMA = REPOSITORY / "models" / "world-llama"
TEXTS = "The capital of France is Paris ."


def rescaled(model: MIModel, exponent: int, folder: Path, prefix: str = "hook_resid") -> MIModel:
    """The model with the class of the first stream hook point times 2^exponent."""
    hooked = model.hooked
    graph = FloatGraph(hooked.proto, hooked.metadata.hooks)
    first = next(name for name in graph.hooks if prefix in name)
    result = rescale(graph, {first: exponent})
    metadata = replace(hooked.metadata, exponents=dict(result.exponents), fused=[], stock={})
    proto = result.graph.proto
    rename(proto, "logits", metadata.output)
    del proto.metadata_props[:]
    for key, value in metadata.to_props().items():
        proto.metadata_props.add(key=key, value=value)
    folder.mkdir(parents=True)
    for path in [*hooked.folder.glob("*.json"), *(hooked.folder / name for name in external_files(hooked.proto.graph))]:
        shutil.copyfile(path, folder / path.name)
    (folder / "model.onnx").write_bytes(proto.SerializeToString())
    return MIModel.from_pretrained(folder, threads=1, check="none")


def planted(source: Path, folder: Path, weight: str, factor: float) -> MIModel:
    """A copy of a hooked model of float32 with one weight multiplied."""
    shutil.copytree(source, folder)
    proto = onnx.load(folder / "model.onnx", load_external_data=False)
    tensor = next(one for one in proto.graph.initializer if one.name == weight)
    entry = {item.key: item.value for item in tensor.external_data}
    place = int(entry.get("offset", 0))
    array = np.memmap(folder / entry["location"], np.float32, "r+", place, tuple(tensor.dims))
    array *= np.float32(factor)
    array.flush()
    for entry in proto.metadata_props:  # of the weights as they were
        if entry.key in ("mionnx.weight_files", "mionnx.weights_sha256"):
            entry.value = "{}" if entry.key.endswith("files") else '""'
    (folder / "model.onnx").write_bytes(proto.SerializeToString())
    return MIModel.from_pretrained(folder, threads=1, check="none")


def loud_model(folder: Path) -> MIModel:
    """The small trained Llama with a residual stream past float16 from layer 2 on."""
    return planted(LLAMA, folder, "model.layers.2.mlp.down_proj.weight", 2.0**14)
