"""What one pass leaves for the next: graph inputs before a pass, graph outputs after it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from mionnx.errors import InputError
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.layers import CachePort
from mionnx.graph.metadata import Metadata
from mionnx.inputs.kv_cache import KVCache
from mionnx.inputs.lacking import refuse_without_cache
from mionnx.inputs.layer_cache import LayerCache, Value
from mionnx.inputs.rwkv_state import RWKVState
from mionnx.inputs.token_batch import Past, TokenBatch
from mionnx.machine.arrays import zeros


def kind_of_past(metadata: Metadata) -> type[LayerCache[Any]]:
    """The class of what a model's passes leave: by the parts of its layers."""
    parts = [{port.part for port in metadata.ports if port.layer == i} for i in range(metadata.sizes.num_layers)]
    kinds: tuple[type[LayerCache[Any]], ...] = (KVCache, RWKVState)
    return next((kind for kind in kinds if all(own == {*kind.PARTS} for own in parts)), LayerCache)


def choose_past(model: HookedModel, cache: Any, initial_state: Any) -> Past | None:
    """Check `cache=` and `initial_state=`, and return the one that is given."""
    if cache is not None and initial_state is not None:
        raise InputError("give either cache or initial_state, not both")
    past = initial_state if cache is None else cache
    kind = kind_of_past(model.metadata)
    if past is not None and type(past) is not kind:
        name = "initial_state" if cache is None else "cache"
        where = "HookCache.state" if model.metadata.state_alone else "HookCache.kv_cache"
        raise InputError(
            f"{name} is a {type(past).__name__}; a {model.metadata.family} model continues from a {kind.__name__}: "
            f"give `{where}` of a call"
        )
    if past is not None:
        refuse_without_cache(model, "a given cache")
    return past


def past_inputs(model: HookedModel, past: Past | None, batch: TokenBatch) -> dict[str, Value]:
    """The inputs that carry the past of a call."""
    if model.metadata.reads_whole:
        return {}
    dtypes = model.past_dtypes
    if past is None:
        # a past of length 0, or states of zeros: the graph has one form, with a past
        shapes = model.metadata.past_shapes(batch.batch, 0)
        return {name: zeros(shape, dtypes[name]) for name, shape in shapes.items()}
    # keys that the mask has before this call's
    return _fitting_feeds(past, model.metadata.ports, batch.total - batch.seq, dtypes)


def present_to_past(model: HookedModel) -> dict[str, str]:
    """Output of the graph -> the input that takes it in the next pass."""
    refuse_without_cache(model, "generate")
    return {port.present: port.past for port in model.metadata.ports}


def present_names(model: HookedModel, use_cache: bool) -> list[str]:
    """Names of the outputs to fetch for a next pass; states without keys and values always are."""
    if use_cache:
        refuse_without_cache(model, "use_cache")
    metadata = model.metadata
    return [port.present for port in metadata.ports] if use_cache or metadata.state_alone else []


def take_present(model: HookedModel, outputs: Mapping[str, Value], batch: TokenBatch, use_cache: bool) -> Past | None:
    """What the pass leaves for the next, from the outputs of its graph; None if nobody asked for it."""
    metadata = model.metadata
    if not (use_cache or metadata.state_alone):
        return None
    layers: list[dict[str, Value]] = [{} for _ in range(metadata.sizes.num_layers)]
    for port in metadata.ports:
        layers[port.layer][port.part] = outputs[port.present]
    return kind_of_past(metadata).left(layers, batch.attention_mask)


def _fitting_feeds(
    cache: LayerCache[Any], ports: Sequence[CachePort], past: int, dtypes: Mapping[str, DTypeLike]
) -> dict[str, Value]:
    """A cache as the inputs of a graph; another number of layers, other parts, another shape or dtype are refused.

    Args:
        past: columns of keys and values.
        dtypes: input -> its dtype.
    """
    layers, feeds = cache.device_parts(), dict[str, Value]()
    count = 1 + max((port.layer for port in ports), default=-1)
    if len(layers) < count or (cache.PARTS and len(layers) != count):
        raise InputError(f"the {cache.NOUN} has {cache.num_layers} layers, the model {count}")
    spare = {(i, part) for i, layer in enumerate(layers) for part in layer} - {(one.layer, one.part) for one in ports}
    lacking = [port for port in ports if port.part not in layers[port.layer]]
    if spare or lacking:
        layer = lacking[0].layer if lacking else min(spare)[0]
        parts = [port.part for port in ports if port.layer == layer]
        raise InputError(f"layer {layer} of the {cache.NOUN} holds {[*layers[layer]]}, that of the model {parts}")
    for port in ports:
        part = layers[port.layer][port.part]
        value: Value = part if hasattr(part, "__array__") else np.asarray(part)
        shape, dtype = port.shape(cache.batch, past), np.dtype(dtypes[port.past])
        if value.shape != shape or value.dtype != dtype:
            raise InputError(
                f"the {cache.NOUN}'s {port.part} of layer {port.layer} is {value.dtype} {list(value.shape)}, "
                f"expected {dtype} {list(shape)}"
            )
        # an array on a device is what a call left there: NaN in it is the model's own
        if not port.positional and isinstance(value, np.ndarray) and np.isnan(value).any():
            raise InputError(f"the {cache.NOUN}'s {port.part} of layer {port.layer} has NaN")
        feeds[port.past] = value
    return feeds
