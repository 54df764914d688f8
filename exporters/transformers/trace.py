"""From a config to an ONNX graph with markers at the hook points, without reading a weight.

The model is built and traced under `FakeTensorMode`: its parameters have shapes and no storage, so a 70B model traces
in the memory of its graph. Initializers keep the names of the parameters.
"""

import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, PreTrainedModel

from exporters.transformers.attention import ATTENTION, TappedCache
from exporters.transformers.families import Layout, layout_of
from exporters.transformers.sizes import rope_parameters
from exporters.transformers.taps import attached
from mionnx.errors import ExportError
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.io_names import KEYS_AND_VALUES

OPSET = 23
MARKER_DOMAIN = "mionnx"
# Stand-ins for dynamic sizes while tracing: all different, none of them 0 or 1, so that nothing is specialised.
BATCH, SEQ, PAST = 2, 3, 5


@dataclass(frozen=True)
class Traced:
    """Result of a trace: the marked graph, the model without weights, and its layout."""

    model: ir.Model
    skeleton: PreTrainedModel
    layout: Layout


class _Cached(nn.Module):
    """A causal language model as a function of tensors; its cache is a list of (key, value)."""

    def __init__(self, model: PreTrainedModel, layout: Layout, listen: Callable[[str, Tensor, bool], Tensor]) -> None:
        super().__init__()
        self.model, self.layout, self.listen = model, layout, listen

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, past: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        cache = TappedCache(past)
        with attached(self.model, self.layout, self.listen) as taps:
            output = self.model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=cache,
                use_cache=True,
            )
            logits = taps.at(HookPoint.Logits, output.logits)
        return logits, [(layer.keys, layer.values) for layer in cache.layers]


def run_eagerly(
    model: PreTrainedModel,
    listen: Callable[[str, Tensor, bool], Tensor],
    input_ids: Tensor,
    attention_mask: Tensor,
    position_ids: Tensor,
    past: list[tuple[Tensor, Tensor]],
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Run a loaded model once in eager torch, its hook points handed to `listen`."""
    prepare(model.config)
    with torch.no_grad():
        return _Cached(model, layout_of(model.config), listen)(input_ids, attention_mask, position_ids, past)


def prepare(config: Any) -> None:
    """Make a config traceable: our attention, and experts computed for every token."""
    config._attn_implementation = ATTENTION
    config.use_cache = True
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = "batched_mm"
    for rope in rope_parameters(config):
        if rope.get("rope_type") == "dynamic":
            raise ExportError(
                "rope_type 'dynamic' recomputes its frequencies in Python as the text grows; no graph can"
            )


def skeleton_of(config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """A config's model without weights, under the current `FakeTensorMode` or device."""
    prepare(config)
    try:
        skeleton = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False).eval()
    except (KeyError, ValueError) as error:  # no such architecture, or attention code of its own for each backend
        raise ExportError(f"transformers builds no {config.model_type!r} with attention to replace: {error}") from error
    for module in skeleton.modules():
        # The long factors apply beyond `Sizes.max_positions`; the graph holds the short ones only.
        if getattr(module, "rope_type", None) == "longrope":
            module.rope_type = "default"
    return skeleton


def buffers_of(config: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """Buffers that no checkpoint holds (rotation frequencies, embedding scales), with values."""
    with torch.device("meta"):
        model = skeleton_of(config, dtype)
    found = {}
    for path, module in model.named_modules():
        names = sorted(module._non_persistent_buffers_set)
        for name in names:
            module._buffers[name] = torch.empty_like(module._buffers[name], device="cpu")
        if names:
            model._init_weights(module)
        found |= {f"{path}.{name}".lstrip("."): module._buffers[name] for name in names}
    return found


def _mark(name: str, value: Tensor, stream: bool) -> Tensor:
    attributes: dict[str, Any] = {"name": name, "stream": int(stream)}
    return torch.onnx.ops.symbolic(
        f"{MARKER_DOMAIN}::HookPoint", [value], attributes, dtype=value.dtype, shape=value.shape, version=1
    )


def _example(skeleton: PreTrainedModel, kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Any, ...]:
    def ids(width: int) -> Tensor:
        return torch.ones(BATCH, width, dtype=torch.long)

    shape = (BATCH, kv_heads, PAST, head_dim)
    layers = range(skeleton.config.num_hidden_layers)
    past = [(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)) for _ in layers]
    return ids(SEQ), ids(PAST + SEQ), ids(SEQ), past


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's exporter: missing torchvision and deprecations do not concern the caller."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def trace(config: Any, kv_heads: int, head_dim: int, dtype: torch.dtype) -> Traced:
    """Trace a config's model to ONNX with `mionnx::HookPoint` marker nodes, without weights.

    Raises:
        ExportError: the family is laid out in an unknown way, or the torch exporter refused the model.
    """
    dynamic = torch.export.Dim.DYNAMIC
    with FakeTensorMode():
        skeleton = skeleton_of(config, dtype)
        layout = layout_of(skeleton.config)
        example = _example(skeleton, kv_heads, head_dim, dtype)
    two = {0: dynamic, 1: dynamic}
    cached = {0: dynamic, 2: dynamic}
    inputs, outputs = KEYS_AND_VALUES.inputs(len(example[3])), KEYS_AND_VALUES.outputs(len(example[3]))
    try:
        with _quiet(), torch.no_grad():
            program = torch.onnx.export(
                _Cached(skeleton, layout, _mark).eval(),
                example,
                dynamo=True,
                dynamic_shapes=(two, two, two, [(cached, cached) for _ in example[3]]),
                opset_version=OPSET,
                optimize=False,
                verbose=False,
                input_names=["input_ids", "attention_mask", "position_ids", *inputs],
                output_names=["logits", *outputs],
            )
    except torch.onnx.errors.OnnxExporterError as error:
        if isinstance(error.__cause__, ExportError):
            raise error.__cause__ from None
        raise ExportError(f"torch could not export {config.model_type!r}: {error}") from error
    _drop_prefix(program.model.graph)
    return Traced(program.model, skeleton, layout)


def _drop_prefix(graph: ir.Graph) -> None:
    """Call initializers as the model calls its parameters, not as the wrapper around it does."""
    for value in list(graph.initializers.values()):
        del graph.initializers[value.name]
        value.name = value.name.removeprefix("model.")
        graph.register_initializer(value)
