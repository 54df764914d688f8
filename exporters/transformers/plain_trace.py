"""A plain trace: a model as it is, without taps, for families whose hook points are found by structure."""

import inspect
from contextlib import nullcontext
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import DynamicCache

from exporters.transformers import trace
from exporters.transformers.attention import filled
from exporters.transformers.own_attention import plain_maximum
from mionnx.errors import ExportError

EAGER = "eager"
Past = list[tuple[Tensor, ...]]


class _Plain(nn.Module):
    """A causal language model as a function of tensors; its cache is a list of (key, value)."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model, self.takes = model, inspect.signature(model.forward).parameters

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, past: Past
    ) -> tuple[Tensor, Past]:
        arguments: dict[str, Any] = {"position_ids": position_ids} if "position_ids" in self.takes else {}
        cache: Any = DynamicCache()
        if past:
            cache.layers = [filled(key, value) for key, value in past]
            arguments |= {"past_key_values": cache, "use_cache": True}
        output = self.model(input_ids=input_ids, attention_mask=attention_mask, **arguments)
        return output.logits, [(layer.keys, layer.values) for layer in cache.layers]


def skeleton_of(config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """A config's model without weights, on the meta device, with its own eager attention.

    Raises:
        ExportError: transformers does not build it.
    """
    trace.prepare(config)
    config._attn_implementation = EAGER
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = "batched_mm"
    try:
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False).eval()
    except Exception as error:  # transformers' errors share no base class
        raise ExportError(f"transformers builds no {config.model_type!r}: {error}") from error
    for module in skeleton.modules():
        if getattr(module, "rope_type", None) == "longrope":
            module.rope_type = "default"
    return skeleton


def trace_plainly(skeleton: PreTrainedModel) -> ir.Model:
    """Trace a model to ONNX as it is, without weights and without markers.

    Args:
        skeleton: from `skeleton_of`; its parameters are fake tensors afterwards.

    Raises:
        ExportError: it has a cache of another form than keys and values in every layer, or torch does not export it.
    """
    with FakeTensorMode():
        trace.allocate(skeleton)
        try:
            shapes = _cache_shapes(skeleton)
        except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError) as error:
            raise ExportError(f"{skeleton.config.model_type!r} does not run without weights: {error}") from error
        past = [tuple(torch.zeros(shape, dtype=skeleton.dtype) for shape in layer) for layer in shapes]
        example = (_ids(trace.SEQ), _ids(trace.SEQ + trace.TRACE_PAST * bool(past)), _ids(trace.SEQ), past)
    causes = list[str]()
    both = (nullcontext(), plain_maximum(skeleton))  # what that fixes for other sizes is seen by `check_eagerly`
    for sizes_compared in both:
        try:
            with sizes_compared, trace.quiet(), trace.UNCACHED, torch.no_grad():
                return trace.to_onnx(_Plain(skeleton), example, range(len(past)))
        except torch.onnx.errors.OnnxExporterError as error:
            causes.append(f"{error.__cause__ or error}")
    raise ExportError(f"torch could not export {skeleton.config.model_type!r} as it is: {causes[0]}")


def _ids(width: int) -> Tensor:
    return torch.ones(trace.TRACE_BATCH, width, dtype=torch.long)


def _cache_shapes(skeleton: PreTrainedModel) -> list[tuple[list[int], ...]]:
    """The shapes of keys and values after `trace.TRACE_PAST` tokens; none without a cache."""
    if "past_key_values" not in inspect.signature(skeleton.forward).parameters:
        return []
    with torch.no_grad():
        cache = getattr(skeleton(input_ids=_ids(trace.TRACE_PAST), use_cache=True), "past_key_values", None)
    tensors = [[getattr(layer, part, None) for part in ("keys", "values")] for layer in getattr(cache, "layers", ())]
    layers = skeleton.config.get_text_config().num_hidden_layers
    complete = all(
        isinstance(one, Tensor) and one.dim() == 4 and one.shape[2] == trace.TRACE_PAST
        for two in tensors
        for one in two
    )
    if len(tensors) != layers or not complete:
        kind = skeleton.config.model_type
        raise ExportError(f"{kind!r} has a cache of another form than keys and values in each of {layers} layers")
    return [tuple(list(one.shape) for one in two) for two in tensors]
