"""An exported graph beside transformers in eager mode: the stream, patterns, z, keys and values, and logits.

The oracle is what transformers itself returns, so that nothing has to be known of the family. A large checkpoint is
loaded with its first layers only: the graph is compared up to there, and its head on the stream behind them.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from exporters.adopt.self_check import LawResult, compare, worst_of
from exporters.probe import ROUNDINGS, open_part, run
from exporters.transformers.attention import CACHE_WORDS
from exporters.transformers.eager import load, silent_transformers
from mionnx.errors import ExportError
from mionnx.graph.dataflow import Dataflow
from mionnx.graph.io_names import KEYS_AND_VALUES
from mionnx.graph.output_head import LOGITS
from mionnx.graph.sizes import Sizes

Array = NDArray[Any]
TOLERANCE = 5e-5  # in float32, relative to numbers of order 1
LOADED = 2**31  # bytes of layers that are loaded for the comparison, and two layers at least
LONGEST = 160  # tokens
FEWEST = 2  # layers: two neighbours may differ


@dataclass(frozen=True)
class _Batch:
    """A token batch, ids and mask [batch, seq]; `past` of its tokens are run first."""

    ids: Array
    mask: Array
    past: int = 0

    def part(self, start: int, end: int) -> dict[str, Array]:
        """The inputs of a graph for some of the tokens."""
        positions = np.maximum(self.mask.cumsum(1) - 1, 0)
        inputs = {"input_ids": self.ids[:, start:end], "position_ids": positions[:, start:end]}
        return {**inputs, "attention_mask": self.mask[:, :end]}


def check_eagerly(
    folder: Path,
    config: Any,
    proto: onnx.ModelProto,
    target: Path,  # folder of the graph's weights
    sizes: Sizes,
    dtype: str,
    projections: Sequence[str],  # name of each layer's output projection, as transformers names its weight: it reads z
) -> tuple[list[LawResult], int]:
    """Compare an exported graph, whose hook points are named, with its checkpoint, run by transformers."""
    # Returns one result a value that was compared, with the layer where it is worst; the number of compared layers.
    size = sum(path.stat().st_size for path in folder.iterdir() if path.suffix in (".safetensors", ".bin"))
    layers = min(sizes.num_layers, max(FEWEST, LOADED * sizes.num_layers // max(size, 1)))
    model = _loaded(folder, config, layers, dtype)
    graph = _Graph(proto, target, layers, sizes)
    results = list[LawResult]()
    allowed = TOLERANCE if dtype == "float32" else ROUNDINGS * layers * float(np.finfo(dtype).eps)
    for batch in _batches(sizes):
        expected = _eager(model, batch, projections[:layers])
        for past in sorted({0, batch.past if graph.cached else 0}):
            pairs = _pairs(graph.run(batch, past), expected, batch, past)
            results += [compare(name, layer, one, other, allowed) for name, layer, one, other in pairs]
    return worst_of(results), layers


def _batches(sizes: Sizes) -> Iterator[_Batch]:
    """Short texts, padded ones with a past, and a long one."""
    rng, longest = np.random.default_rng(0), min(sizes.max_positions or LONGEST, LONGEST)

    def ids(rows: int, seq: int) -> Array:
        return rng.integers(min(3, sizes.vocab_size - 1), sizes.vocab_size, (rows, min(seq, longest)))

    yield _Batch(short := ids(2, 7), np.ones_like(short))
    padded = ids(3, 12)
    mask = np.ones_like(padded)
    mask[0, :3] = mask[1, :1] = 0
    yield _Batch(padded, mask, past=padded.shape[1] // 2)
    yield _Batch(long := ids(1, longest), np.ones_like(long), past=long.shape[1] - 1)


def _loaded(folder: Path, config: Any, layers: int, dtype: str) -> PreTrainedModel:
    """The checkpoint in transformers, with its first layers alone."""
    shortened = deepcopy(config)
    shortened._attn_implementation = "eager"
    shortened.num_hidden_layers = min(layers, shortened.num_hidden_layers)
    try:
        with silent_transformers():
            return load(folder, shortened, dtype)[0]
    except Exception as error:  # transformers' errors share no base class
        raise ExportError(f"transformers does not load {folder}, so nothing is compared: {error}") from error


def _eager(model: PreTrainedModel, batch: _Batch, projections: Sequence[str]) -> dict[str, Array]:
    """The outcome of a batch in transformers, by names of hook points and outputs."""
    inputs = {name: torch.from_numpy(value) for name, value in batch.part(0, batch.ids.shape[1]).items()}
    layers = len(projections)
    try:
        with torch.no_grad(), _read(model, projections) as read:
            output = model(**inputs, output_hidden_states=True, output_attentions=True)
    except Exception as error:  # whatever its modelling code raises
        raise ExportError(f"transformers does not run the checkpoint: {error}") from error
    states, patterns = output.hidden_states or (), output.get("attentions") or ()
    if len(states) < layers:
        raise ExportError(
            f"transformers returns {len(states)} hidden states of {layers} layers: nothing to compare with"
        )
    tensors = {"logits": output.logits, **read}
    tensors |= {f"blocks.{i}.hook_resid_pre": state for i, state in enumerate(states[:layers])}
    tensors |= {f"blocks.{i}.attn.hook_pattern": one for i, one in enumerate(patterns[:layers]) if one is not None}
    cache = next((output[word] for word in CACHE_WORDS if output.get(word) is not None), None)
    for i, layer in enumerate(getattr(cache, "layers", ())):
        tensors |= dict(zip(KEYS_AND_VALUES.layer_outputs(i), (layer.keys, layer.values), strict=True))
    return {name: value.detach().numpy() for name, value in tensors.items()}


@contextmanager
def _read(model: PreTrainedModel, projections: Sequence[str]) -> Iterator[dict[str, torch.Tensor]]:
    """Input of each layer's output projection in a run, [batch, seq, n_heads * head_dim], by the name of z."""
    inputs: dict[str, torch.Tensor] = {}
    modules = dict(model.named_modules())
    with ExitStack() as stack:
        for layer, name in enumerate(projections):
            module = modules.get(name.removesuffix(".weight"))
            if module is None:
                raise ExportError(f"{name}, the output projection of layer {layer}, is no module's weight")

            def keep(_module: torch.nn.Module, args: tuple[torch.Tensor, ...], layer: int = layer) -> None:
                inputs[f"blocks.{layer}.attn.hook_z"] = args[0]

            stack.callback(module.register_forward_pre_hook(keep).remove)
        yield inputs


class _Graph:
    """The first layers of a graph, and its head."""

    def __init__(self, proto: onnx.ModelProto, target: Path, layers: int, sizes: Sizes) -> None:
        flow, outputs = Dataflow(proto), {output for node in proto.graph.node for output in node.output}
        self.cached = any(entry.name == KEYS_AND_VALUES.outputs(1)[0] for entry in proto.graph.output)
        self.presents = KEYS_AND_VALUES.outputs(layers) if self.cached else []
        self.pasts = KEYS_AND_VALUES.inputs(layers) if self.cached else []
        self.last = f"blocks.{layers - 1}.hook_resid_post"
        self.sizes, self.end = sizes, f"blocks.{sizes.num_layers - 1}.hook_resid_post"
        named = ("hook_resid_pre", "attn.hook_pattern", "attn.hook_z")
        points = [f"blocks.{i}.{name}" for i in range(layers) for name in named]
        self.names = [*(name for name in points if name in outputs), self.last, *self.presents]
        self.body = open_part(flow, target, [], self.names)
        self.head = open_part(flow, target, [self.end], [LOGITS])

    def run(self, batch: _Batch, past: int) -> dict[str, Array]:
        """Values of the tokens after a past, by name."""
        cache = dict[str, Array]()
        if past:
            cache = self._part(batch, 0, past, self._empty(len(batch.ids)))
            cache = {name: cache[present] for name, present in zip(self.pasts, self.presents, strict=True)}
        return self._part(batch, past, batch.ids.shape[1], cache or self._empty(len(batch.ids)))

    def _part(self, batch: _Batch, start: int, end: int, past: Mapping[str, Array]) -> dict[str, Array]:
        inputs = {**batch.part(start, end), **past}
        values = dict(zip(self.names, run(self.body, self.names, inputs), strict=True))
        (values[LOGITS],) = run(self.head, [LOGITS], {**inputs, self.end: values[self.last]})
        return values

    def _empty(self, batch: int) -> dict[str, Array]:
        shapes = {entry.name: entry.shape for entry in self.body.get_inputs() if entry.name in self.pasts}
        kind = np.float16 if "float16" in self.body.get_outputs()[0].type else np.float32
        return {name: np.zeros((batch, shape[1], 0, shape[3]), kind) for name, shape in shapes.items()}


def _pairs(
    values: Mapping[str, Array], expected: Mapping[str, Array], batch: _Batch, past: int
) -> Iterator[tuple[str, int | None, Array, Array]]:
    """The compared values in words, with layer and both sides, at tokens without padding."""
    real, tokens = batch.mask[:, past:].astype(bool), batch.mask.astype(bool)
    for name, value in expected.items():
        if name not in values:
            continue
        own, layer, words = values[name], *_words(name)
        if name.startswith(KEYS_AND_VALUES.present):
            length = value.shape[2]  # of a sliding window, the last ones
            one, other = (np.moveaxis(array[:, :, -length:], 2, 1) for array in (own, value))
            yield words, layer, one[tokens[:, -length:]], other[tokens[:, -length:]]
        elif name.endswith("hook_z"):
            yield words, layer, own[real].reshape(int(real.sum()), -1), value[:, past:][real]
        elif name.endswith("pattern"):
            yield words, layer, np.moveaxis(own, 2, 1)[real], np.moveaxis(value[:, :, past:], 2, 1)[real]
        else:
            yield words, layer, own[real], value[:, past:][real]


def _words(name: str) -> tuple[int | None, str]:
    """The layer of a value, and what it is."""
    parts = name.split(".")
    layer = int(parts[1]) if len(parts) > 1 else None
    kinds = {"hook_resid_pre": "stream", "hook_pattern": "pattern", "hook_z": "z", "key": "keys", "value": "values"}
    what = kinds.get(parts[-1], parts[-1])
    return layer, f"{what} = eager transformers'"
