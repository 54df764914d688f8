"""Past keys and values, or RWKV state: graph inputs before a pass, graph outputs after it."""

from collections.abc import Mapping
from typing import Any

from mionnx.errors import InputError
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.io_names import cache_names
from mionnx.inputs.kv_cache import KVCache
from mionnx.inputs.lacking import refuse_without_cache
from mionnx.inputs.layer_cache import Value, fitting_feeds
from mionnx.inputs.rwkv_state import RWKVState
from mionnx.inputs.token_batch import Past, TokenBatch
from mionnx.machine.arrays import zeros


def choose_past(model: HookedModel, cache: Any, initial_state: Any) -> Past | None:
    """Check `cache=` and `initial_state=`, and return the one that is given."""
    if cache is not None and initial_state is not None:
        raise InputError("give either cache or initial_state, not both")
    past = initial_state if cache is None else cache
    kind, where = (RWKVState, "HookCache.state") if model.metadata.recurrent else (KVCache, "HookCache.kv_cache")
    if past is not None and not isinstance(past, kind):
        name = "initial_state" if cache is None else "cache"
        raise InputError(
            f"{name} is a {type(past).__name__}; a {model.metadata.family} model continues from a {kind.__name__}: "
            f"give `{where}` of a call"
        )
    if past is not None:
        refuse_without_cache(model, "a given cache")
    return past


def past_inputs(model: HookedModel, past: Past | None, batch: TokenBatch) -> dict[str, Value]:
    """The inputs that carry the past of a call."""
    sizes, dtype = model.metadata.sizes, model.past_dtype
    if model.metadata.recurrent:
        state = past if isinstance(past, RWKVState) else RWKVState.empty(sizes, batch.batch, dtype)
        return state.feeds(sizes, batch.batch, dtype)
    if not isinstance(past, KVCache):
        # a past of length 0: the graph has one form, with a past
        return {name: zeros(shape, dtype) for name, shape in model.metadata.past_shapes(batch.batch, 0).items()}
    # keys that the mask has before this call's
    shapes = model.metadata.past_shapes(batch.batch, batch.total - batch.seq)
    return fitting_feeds(past, shapes, (dtype, dtype))


def present_to_past(model: HookedModel) -> dict[str, str]:
    """Output of the graph -> the input that takes it in the next pass."""
    refuse_without_cache(model, "generate")
    names, layers = cache_names(model.metadata.recurrent), model.metadata.sizes.num_layers
    return dict(zip(names.outputs(layers), names.inputs(layers), strict=True))


def present_names(model: HookedModel, use_cache: bool) -> list[str]:
    """Names of the outputs to fetch for a next pass; an RWKV's state always is."""
    if use_cache:
        refuse_without_cache(model, "use_cache")
    recurrent, layers = model.metadata.recurrent, model.metadata.sizes.num_layers
    return cache_names(recurrent).outputs(layers) if recurrent or use_cache else []


def take_present(
    model: HookedModel, outputs: Mapping[str, Value], batch: TokenBatch, use_cache: bool
) -> tuple[KVCache | None, RWKVState | None]:
    """The cache or state after a pass, from the outputs of its graph."""
    recurrent = model.metadata.recurrent
    if not (recurrent or use_cache):
        return None, None
    names = cache_names(recurrent)
    parts = [
        tuple(outputs[name] for name in names.layer_outputs(layer)) for layer in range(model.metadata.sizes.num_layers)
    ]
    if recurrent:
        return None, RWKVState.left(parts, batch.attention_mask)
    return KVCache.left(parts, batch.attention_mask), None
