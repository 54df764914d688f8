"""The residual stream as a stack of its parts, with TransformerLens's names and meanings.

`source` is a prompt (a text, ids, several of them) or a cache that `forward` returned with `decomposition_hooks()`.
Positions are those of the arrays, padding included; `pos_slice` is an integer (drops the axis), a slice or a list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.attribution import decompose
from mionnx.analysis.attribution.decompose import Labelled, PosSlice
from mionnx.analysis.attribution.linear_norm import LinearNorm
from mionnx.analysis.attribution.linear_parts import LinearParts, final_norm, input_norm
from mionnx.machine.typed import typed
from mionnx.run.hook_cache import HookCache
from mionnx.run.runner import Runner
from mionnx.run.tokenizing import Prompt
from mionnx.spec.hook_spec import HookSpec

Source = HookCache | Prompt


@typed()
def decomposition_hooks(model: Runner, layer: int | None = None, heads: bool = True) -> HookSpec:
    """A spec with every capture that the verbs on residual stacks read, for a single `forward`.

    Args:
        layer: up to the inputs of this layer's attention and MLP; the whole stream if left out.
        heads: each head's share too, [batch, seq, n_heads, hidden] a layer, where heads have shares.

    Raises:
        InputError: no such layer.

    Example:
        cache = model.forward("The capital of France is", model.decomposition_hooks())
        stack, labels = model.decompose_resid(cache)
    """
    hooked = model.hooked
    end = decompose.layer_of(hooked, layer)
    named = decompose.additions(hooked, end, "all", end < model.num_layers, True)
    named += decompose.accumulations(hooked, end, False, False)
    middles = decompose.middles(hooked, end)
    shares = decompose.heads(hooked, end) if heads and end and decompose.heads_have_shares(hooked) else []
    spec = HookSpec()
    for name in dict.fromkeys([*(name for _, name in named), *middles, *shares]):
        spec.capture(name)
    return spec


@typed()
def decompose_resid(
    model: Runner,
    source: Source,
    layer: int | None = None,
    *,
    mlp_input: bool = False,
    mode: str = "all",
    apply_ln: bool = False,
    pos_slice: PosSlice = None,
    incl_embeds: bool = True,
) -> Labelled:
    """Everything added to the stream before a layer; with mode "all" it sums to its input.

    Args:
        source: prompts or a cache, see `mionnx.analysis.attribution.residual_stack`.
        layer: whose input; None or -1 for the final norm's.
        mlp_input: the input of the layer's MLP rather than of its attention.
        mode: "all", "mlp" or "attn": which outputs.
        apply_ln: through the norm before the layer, see `apply_ln_to_stack`.
        pos_slice: at these positions.
        incl_embeds: with the embeddings.

    Returns:
        [component, batch, pos, hidden] and the labels: "embed", "pos_embed", "0_attn_out", "0_mlp_out", ...

    Raises:
        InputError: no such layer, mode or position.
        HookError: a cache that lacks captures.

    Example:
        stack, labels = model.decompose_resid("The capital of France is", pos_slice=-1)
    """
    end = decompose.layer_of(model.hooked, layer)
    named = decompose.additions(model.hooked, end, mode, mlp_input, incl_embeds)
    cache = cache_of(model, source, [name for _, name in named], end, mlp_input, apply_ln)
    stack, labels = decompose.stacked(cache, named, pos_slice)
    return _normed(model, stack, cache, end, mlp_input, pos_slice, apply_ln), labels


@typed()
def accumulated_resid(
    model: Runner,
    source: Source,
    layer: int | None = None,
    *,
    incl_mid: bool = False,
    apply_ln: bool = False,
    pos_slice: PosSlice = None,
    mlp_input: bool = False,
) -> Labelled:
    """The residual stream at each point on its way to the input of a layer.

    Args:
        source, layer, mlp_input, pos_slice: as `decompose_resid` takes them.
        incl_mid: the stream between attention and MLP of each layer before it, too.
        apply_ln: at the end of the stream, each through the final norm with a scale of its own (the logit lens);
            before, with the layer's actual scale, as `apply_ln_to_stack`.

    Returns:
        [point, batch, pos, hidden] and the labels: "0_pre", "0_mid", ..., "final_post".

    Raises:
        InputError, HookError: as `decompose_resid`; `incl_mid` where blocks are parallel and have no such point.

    Example:
        streams, labels = model.accumulated_resid("The capital of France is", incl_mid=True, pos_slice=-1)
    """
    end = decompose.layer_of(model.hooked, layer)
    named = decompose.accumulations(model.hooked, end, incl_mid, mlp_input)
    cache = cache_of(model, source, [name for _, name in named], end, mlp_input, apply_ln)
    stack, labels = decompose.stacked(cache, named, pos_slice)
    if apply_ln and end == model.num_layers:
        rows = np.ascontiguousarray(stack.reshape(-1, model.hidden_size))
        return model.opened(LinearParts).norm(final_norm(model.hooked), rows).reshape(stack.shape), labels
    return _normed(model, stack, cache, end, mlp_input, pos_slice, apply_ln), labels


@typed()
def stack_head_results(
    model: Runner,
    source: Source,
    layer: int | None = None,
    *,
    incl_remainder: bool = False,
    pos_slice: PosSlice = None,
    apply_ln: bool = False,
) -> Labelled:
    """Each head's share of the stream, z W_O, of the layers before one.

    Families that norm an attention's output (Gemma 2) do so after the shares are added up: `attribute` takes them
    through that norm, this does not.

    Args:
        source, layer, pos_slice, apply_ln: as `decompose_resid` takes them.
        incl_remainder: with a last component, all the rest of the stream.

    Returns:
        [layer x head, batch, pos, hidden] and the labels "L0H0", "L0H1", ..., "remainder".

    Raises:
        InputError, HookError: as `decompose_resid`; a recurrent model has no such shares.

    Example:
        shares, labels = model.stack_head_results("The capital of France is", pos_slice=-1)
    """
    end = decompose.layer_of(model.hooked, layer)
    names = decompose.heads(model.hooked, end)
    rest = decompose.input_of(model.hooked, end, False)
    cache = cache_of(model, source, [*names, *([rest] if incl_remainder else [])], end, False, apply_ln)
    stack, labels = decompose.head_stack(cache, names, pos_slice)
    if incl_remainder:
        remainder = decompose.sliced(cache.require(rest), pos_slice) - stack.sum(axis=0)
        stack, labels = np.concatenate([stack, remainder[None]]), [*labels, "remainder"]
    return _normed(model, stack, cache, end, False, pos_slice, apply_ln), labels


def cache_of(
    model: Runner, source: Source, names: Sequence[str], layer: int, mlp_input: bool, with_norm_input: bool
) -> HookCache:
    """Captures by name, and the input of the norm before a layer; runs the model for a prompt."""
    needed = [*names, *([decompose.input_of(model.hooked, layer, mlp_input)] if with_norm_input else [])]
    if isinstance(source, HookCache):
        decompose.refuse_missing(source, needed)
        return source
    spec = HookSpec()
    for name in dict.fromkeys(needed):
        spec.capture(name)
    return model.forward(source, spec, logits=False)


def norm_before(model: Runner, cache: HookCache, layer: int, mlp_input: bool, pos_slice: PosSlice) -> LinearNorm:
    """The norm before a layer, or the final one, as a linear map at the stream of a cache."""
    hooked = model.hooked
    stream = decompose.sliced(cache.require(decompose.input_of(hooked, layer, mlp_input)), pos_slice)
    part = final_norm(hooked) if layer == model.num_layers else input_norm(hooked, layer, mlp_input)
    return model.opened(LinearParts).linear(part, stream)


def _normed(
    model: Runner,
    stack: NDArray[Any],
    cache: HookCache,
    layer: int,
    mlp_input: bool,
    pos_slice: PosSlice,
    apply_ln: bool,
) -> NDArray[Any]:
    if not apply_ln:
        return stack
    return norm_before(model, cache, layer, mlp_input, pos_slice).apply(stack).astype(np.float32)
