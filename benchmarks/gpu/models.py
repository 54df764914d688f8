"""The measured models where they are measured: random weights, opened in mionnx, in transformers, and in both alike."""

import gc
import json
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from shapes import shapes
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from mionnx import MIModel

WEIGHTS = "model.safetensors"
TIED = {
    "lm_head.weight": ("transformer.wte.weight", "model.embed_tokens.weight"),
    "transformer.wte.weight": ("lm_head.weight",),
    "model.embed_tokens.weight": ("lm_head.weight",),
}


@dataclass(frozen=True)
class Place:
    """Where things are.

    Attributes:
        provider: "cuda" or "cpu".
        tiny: whether the tiny shapes stand for the large ones.
        graphs: the exported graphs, a folder `NAME-DTYPE` each.
        work: a folder for weights.
    """

    provider: str
    tiny: bool
    graphs: Path
    work: Path

    @property
    def device(self) -> str:
        """Torch's name of the device."""
        return self.provider

    def dtypes(self, wanted: tuple[str, ...]) -> list[str]:
        """Those dtypes in which the provider computes."""
        return [dtype for dtype in wanted if self.provider == "cuda" or dtype != "bfloat16"]

    def folder(self, name: str, dtype: str) -> Path:
        """A hooked model with random weights, made on first use."""
        made = self.work / f"{name}-{dtype}"
        if not (made / "ready").exists():
            shutil.rmtree(made, ignore_errors=True)
            shutil.copytree(self.graphs / f"{name}-{dtype}", made)
            _write_weights(name, dtype, made, self)
            _bind(made)
            (made / "ready").touch()
        return made


def _write_weights(name: str, dtype: str, folder: Path, place: Place) -> None:
    """Random weights in transformers' own form; norms and biases keep what transformers begins with."""
    family, config = shapes(place.tiny)[name]
    torch.manual_seed(0)
    with torch.device(place.device):
        built = AutoConfig.for_model(family, **config)
        model = AutoModelForCausalLM.from_config(built, dtype=getattr(torch, dtype))
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder, max_shard_size="200GB")
    del model
    free(place.device)


def _bind(folder: Path) -> None:
    """Let the graph's weights, which lie nowhere, be the tensors of the same names in the file."""
    with (folder / WEIGHTS).open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        tensors = json.loads(file.read(size))
    proto = onnx.load(folder / "model.onnx", load_external_data=False)
    for tensor in proto.graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        names = [name for name in (tensor.name, *TIED.get(tensor.name, ())) if name in tensors]
        if not names or tensors[names[0]]["shape"] != list(tensor.dims):
            raise SystemExit(f"{tensor.name} {list(tensor.dims)} of the graph is not among transformers' weights")
        begin, end = tensors[names[0]]["data_offsets"]
        del tensor.external_data[:]
        for key, value in (("location", WEIGHTS), ("offset", 8 + size + begin), ("length", end - begin)):
            tensor.external_data.add(key=key, value=str(value))
    (folder / "model.onnx").write_bytes(proto.SerializeToString())


def ours(folder: Path, place: Place, **options: Any) -> MIModel:
    """A model in mionnx."""
    return MIModel.from_pretrained(folder, provider=place.provider, check="none", **options)


@contextmanager
def theirs(folder: Path, place: Place, attention: str, dtype: str) -> Iterator[PreTrainedModel]:
    """The same weights in transformers."""
    free(place.device)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation=attention)
    model = model.to(place.device).eval()
    model.generation_config.eos_token_id = None
    try:
        with torch.no_grad():
            yield model
    finally:
        del model
        free(place.device)


def blocks(model: PreTrainedModel) -> Any:
    """The layers of a model in transformers."""
    return model.get_submodule("transformer.h" if hasattr(model, "transformer") else "model.layers")


def free(device: str) -> None:
    """Return what torch holds on the device."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def finished(device: str) -> None:
    """Wait for what torch has begun."""
    if device == "cuda":
        torch.cuda.synchronize()


def timed(work: Callable[[], Any], device: str, repeats: int, most: float = 20.0) -> tuple[float, Any]:
    """The median of seconds after a warm-up, and the last result; fewer repeats where `most` seconds have passed."""
    seconds: list[float] = []
    begin = time.perf_counter()
    result = work()
    while len(seconds) < repeats and (not seconds or time.perf_counter() - begin < most):
        result = None  # results of two runs need not fit beside each other
        finished(device)
        start = time.perf_counter()
        result = work()
        finished(device)
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds)), result


def ids_of(vocab: int, batch: int, length: int) -> np.ndarray:
    """Random tokens, [batch, length]."""
    return np.random.default_rng(length).integers(3, vocab, (batch, length))
