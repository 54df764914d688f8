"""What analysis code reads off a model, under the names that TransformerLens gives it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mionnx.analysis.python_hooks.sizes import ModelSizes, sizes_of
from mionnx.errors import InputError
from mionnx.graph import matrices
from mionnx.graph.hook_points import HookPoint
from mionnx.run.runner import Runner


def cfg(model: Runner) -> ModelSizes:
    """The model's sizes: `model.cfg.n_layers`, `model.cfg.d_head`."""
    return sizes_of(model.hooked)


def hook_dict(model: Runner) -> dict[str, HookPoint]:
    """Name -> hook point, in execution order."""
    return {point.name: point for point in model.hook_points()}


def W_E(model: Runner) -> NDArray[Any]:
    """The embedding [vocab, hidden], read-only; see `mionnx.graph.matrices`."""
    return matrices.embedding(model.hooked)


def W_U(model: Runner) -> NDArray[Any]:
    """The unembedding [hidden, vocab], read-only; see `mionnx.graph.matrices`."""
    return matrices.unembedding(model.hooked)


def b_U(model: Runner) -> NDArray[Any]:
    """The unembedding's bias [vocab]; zeros where the model has none."""
    return matrices.unembedding_bias(model.hooked)


def W_O(model: Runner) -> NDArray[Any]:
    """The heads' output projections [n_layers, n_heads, head_dim, hidden].

    Raises:
        HookError: a recurrent model.
    """
    return matrices.output_projections(model.hooked)


def to_tokens(model: Runner, text: str | Sequence[str]) -> NDArray[np.int64]:
    """A text, or texts of equal length, as ids [batch, seq], with the special tokens that the tokenizer adds.

    Raises:
        InputError: texts of unequal length: padded, they would need a mask; `forward` and `run_with_hooks` take the
            texts themselves.
        TokenizerError: no tokenizer, or a text without tokens.
    """
    rows = [model.tokenize(one).ids for one in ([text] if isinstance(text, str) else text)]
    lengths = {len(row) for row in rows}
    if len(lengths) != 1:
        raise InputError(f"texts of {sorted(lengths)} tokens are no [batch, seq]: give the texts to the model")
    return np.stack(rows)


def to_str_tokens(model: Runner, tokens: str | ArrayLike) -> list[str]:
    """Each token of a text, or of ids [seq] or [1, seq], as text."""
    return [to_string(model, [token]) for token in _row(model, tokens)]


def to_string(model: Runner, tokens: ArrayLike) -> Any:
    """Ids [seq], or one id, as a text; ids [batch, seq] as a list of texts. Special tokens are shown."""
    ids = np.asarray(tokens)
    if ids.ndim == 2:
        return [to_string(model, row) for row in ids]
    return model.tokenizer.decode(_row(model, ids), skip_special_tokens=False)


def to_single_token(model: Runner, text: str) -> int:
    """The id of a text that is one token.

    Raises:
        InputError: it is none, or several.
    """
    return model.token_id(text)


def _row(model: Runner, tokens: str | ArrayLike) -> list[int]:
    """Ids as a list, checked."""
    ids = np.atleast_1d(model.tokenize(tokens).ids if isinstance(tokens, str) else np.asarray(tokens))
    row = ids[0] if ids.ndim == 2 and len(ids) == 1 else ids
    if row.ndim != 1 or row.dtype.kind not in "iu":
        raise InputError(f"tokens must be integers [seq], got {row.dtype} {list(ids.shape)}")
    return [model._known(int(token)) for token in row]
