"""Contributions of a stack of stream parts: to a norm's output, and to logits; with TransformerLens's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mionnx.analysis.attribution import decompose
from mionnx.analysis.attribution.decompose import PosSlice
from mionnx.analysis.attribution.linear_norm import LinearNorm
from mionnx.analysis.attribution.linear_parts import LinearParts
from mionnx.analysis.attribution.residual_stack import Source, cache_of, norm_before
from mionnx.errors import InputError
from mionnx.inputs.token_rows import read_array
from mionnx.machine.typed import typed
from mionnx.run.prompt import streams_of, token_of
from mionnx.run.runner import Runner

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
    `mionnx.analysis.attribution.linear_norm`.

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
    for token in ids.ravel().tolist():
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
    if isinstance(tokens, np.ndarray) and tokens.dtype.kind in "OUT":
        tokens = tokens.tolist()
    return [_as_ids(model, token) for token in tokens] if isinstance(tokens, list | tuple) else tokens
