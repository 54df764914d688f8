"""The residual stream as a stack of its parts, and what these contribute, with TransformerLens's names and meanings.

`source` is a prompt (a text, ids, several of them) or a cache that `forward` returned with `decomposition_hooks()`.
Positions are those of the arrays, padding included; `pos_slice` is an integer (drops the axis), a slice or a list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mionnx.analysis.attribution import decompose
from mionnx.analysis.attribution.decompose import Labelled, PosSlice
from mionnx.analysis.attribution.linear_parts import LinearNorm, LinearParts, final_norm, input_norm
from mionnx.errors import HookError, InputError
from mionnx.graph.hook_points import HookPoint
from mionnx.inputs.token_rows import read_array
from mionnx.machine.typed import typed
from mionnx.run.hook_cache import HookCache
from mionnx.run.prompt import streams_of, token_of
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
    middles = [str(HookPoint.ResidMid(i)) for i in range(min(end + 1, model.num_layers))]
    middles = [name for name in middles if name in hooked.metadata.hooks]  # parallel blocks have none
    stacked = heads and any(i < end for i in decompose.layers_with_shares(hooked))
    shares = decompose.heads(hooked, end) if stacked else []
    return HookSpec().capture([*dict.fromkeys([*(name for _, name in named), *middles, *shares])])


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
        pos_slice: positions of the stack: an integer (drops the axis), a slice or a list; by default all.
        incl_embeds: whether the embeddings are components.

    Returns:
        [component, batch, pos, hidden] and the labels: "embed", "pos_embed", "0_attn_out", "0_ssm_out" (a mixer beside
        attention), "0_mlp_out", ...

    Raises:
        # Tokens [pos], unless as many as there are prompts: then [batch].
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
        # Each point has its own scale here, so the graph's norm runs on them; a stack of parts would need one scale for
        # all.
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
        _refuse_missing(source, needed)
        return source
    return model.forward(source, HookSpec().capture([*dict.fromkeys(needed)]), logits=False)


def _refuse_missing(cache: HookCache, names: Sequence[str]) -> None:
    missing = [name for name in names if name not in cache]
    if missing:
        raise HookError(
            f"the cache lacks {', '.join(missing[:4])}{', …' if len(missing) > 4 else ''}: run `forward` with "
            "`model.decomposition_hooks()`, which asks for all that is needed, or give the prompt"
        )


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


TokenLike = int | str | Sequence[Any] | NDArray[np.integer[Any]]


@typed()
def apply_ln_to_stack(
    model: Runner,
    stack: ArrayLike,
    source: Source,
    layer: int | None = None,
    *,
    mlp_input: bool = False,
    pos_slice: PosSlice = None,
    weighted: bool = True,
) -> NDArray[np.float32]:
    """Contributions of stream parts to a norm's output, its scale held at the actual stream's.

    The parts of a sum that is the stream add up to the norm's output less its bias; see
    `mionnx.analysis.attribution.linear_parts`.

    Args:
        stack: [component, batch, pos, hidden], sliced already.
        source: prompts or a cache that the stack is from.
        layer: the norm before this layer; None or -1 for the final norm.
        mlp_input: the norm before the layer's MLP rather than before its attention.
        pos_slice: the positions that the stack has.
        weighted: with the norm's weight. TransformerLens leaves it out (it folds weights into what follows, or, for
            a raw model, ignores them): False gives its numbers.

    Returns:
        the shape of the stack, float32.

    Raises:
        InputError: a stack of another shape than the stream.
        ModelError: the model has no LayerNorm or RMSNorm there.

    Example:
        cache = model.forward("The capital of France is", model.decomposition_hooks())
        normed = model.apply_ln_to_stack(model.decompose_resid(cache)[0], cache)
    """
    end = decompose.layer_of(model.hooked, layer)
    norm = norm_before(model, cache_of(model, source, [], end, mlp_input, True), end, mlp_input, pos_slice)
    return norm.apply(_checked(model, stack, norm), weighted).astype(np.float32)


@typed()
def logit_attrs(
    model: Runner,
    stack: ArrayLike,
    source: Source,
    token_ids: TokenLike,
    incorrect_tokens: TokenLike | None = None,
    *,
    pos_slice: PosSlice = None,
    weighted: bool = True,
) -> NDArray[np.float32]:
    """Contributions of stream parts to the logit of tokens, or to its lead over other tokens.

    If the parts add up to the stream, the contributions add up to the logit less the biases of the final norm and the
    head. Where a soft cap follows (Gemma 2), logits are those before the cap.

    Args:
        stack: [component, batch, pos, hidden], sliced already.
        source: prompts or a cache that the stack is from.
        token_ids: one token by id or text, or ids or texts [batch], [pos] where that is another length, or [batch,
            pos].
        incorrect_tokens: the same; contributions are then to the difference.
        pos_slice: the positions that the stack has.
        weighted: with the final norm's weight; without, the numbers of TransformerLens on a raw model.

    Returns:
        [component, batch, pos], float32.

    Raises:
        InputError: a stack of another shape, or tokens that do not fit it.
        ModelError: a final norm or a head that is not linear in a known way.

    Example:
        cache = model.forward("The capital of France is", model.decomposition_hooks())
        stack, labels = model.decompose_resid(cache, pos_slice=-1)
        model.logit_attrs(stack, cache, "Paris", "Berlin", pos_slice=-1)  # [component, batch]
    """
    end = model.num_layers
    norm = norm_before(model, cache_of(model, source, [], end, False, True), end, False, pos_slice)
    parts = _checked(model, stack, norm)
    direction = _directions(model, token_ids, parts.shape[1:-1])
    if incorrect_tokens is not None:
        direction = direction - _directions(model, incorrect_tokens, parts.shape[1:-1])
    return norm.project(parts, direction, weighted).astype(np.float32)


def _checked(model: Runner, stack: ArrayLike, norm: LinearNorm) -> NDArray[Any]:
    parts = streams_of(stack, model.hidden_size, "stack")
    if parts.shape[1:-1] != norm.scale.shape[:-1]:
        raise InputError(
            f"the stack is {list(parts.shape)}; of this stream it must be [component, "
            f"{', '.join(map(str, norm.scale.shape[:-1]))}, hidden={model.hidden_size}]"
        )
    return parts


def _directions(model: Runner, tokens: TokenLike, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """[batch or 1, pos or 1, hidden] of tokens, or fewer axes where the stack has fewer."""
    unembedding = model.opened(LinearParts)
    if isinstance(tokens, int | str | np.integer):
        return unembedding.directions(np.array(token_of(model, tokens)))
    ids = read_array("tokens", _as_ids(model, tokens))
    if ids.dtype.kind not in "iu" or ids.ndim > len(shape) or ids.ndim == 0:
        raise InputError(f"tokens must be one token, or ids or texts [batch] or [batch, pos], got {tokens!r}")
    for token in ids.ravel().tolist():  # refuses ids that are not in the vocabulary
        token_of(model, token)
    if ids.ndim == 1 and len(shape) == 2:
        ids = ids[:, None] if len(ids) == shape[0] else ids[None]
    if any(size not in (1, length) for size, length in zip(ids.shape, shape, strict=True)):
        raise InputError(f"tokens are {list(np.shape(tokens))}, the stack's batch and positions {list(shape)}")
    return unembedding.directions(ids)


def _as_ids(model: Runner, tokens: Any) -> Any:
    """Tokens with the id of each text in its place."""
    if isinstance(tokens, str):
        return token_of(model, tokens)
    if isinstance(tokens, np.ndarray) and tokens.dtype.kind in "OUT":  # arrays of texts; ids stay arrays
        tokens = tokens.tolist()
    return [_as_ids(model, token) for token in tokens] if isinstance(tokens, list | tuple) else tokens
