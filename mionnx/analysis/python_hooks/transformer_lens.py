"""Words of TransformerLens: sizes, hook points, matrices and tokens of a model.

their word                    ours
run_with_cache                forward(tokens, HookSpec().capture(...))
run_with_hooks, model(tokens) forward(tokens, HookSpec().intervene(...)); of Python functions only this one
cfg                           num_layers, num_heads, num_kv_heads, hidden_size, head_dim, vocab_size
hook_dict                     hook_points()
device                        options.provider
W_E, W_U, b_U                 embedding, unembedding, unembedding_bias of mionnx.graph.matrices
to_tokens                     tokenize(text).ids
to_str_tokens, to_string      tokenizer.decode(ids)
to_single_token               token_id(text)

This file, `hooked_calls.py`, the residual stacks (`mionnx.analysis.attribution`), the weights by name
(`mionnx.analysis.weights`) and nothing else speak that dialect; words that are written in another way here stand in
`mionnx/machine/DIALECTS.md`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mionnx.errors import InputError
from mionnx.graph import matrices
from mionnx.graph.hook_points import HookPoint
from mionnx.inputs.token_rows import IDS, is_one_prompt, read_array, read_rows
from mionnx.inputs.tokens import decode, encode
from mionnx.machine.typed import typed
from mionnx.run.prompt import token_of
from mionnx.run.runner import Runner
from mionnx.run.tokenizing import One, Prompt
from mionnx.view import card


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model under the names of TransformerLens: `model.cfg`.

    Attributes:
        d_model: width of the residual stream.
        d_mlp: neurons a layer; None where the model has no hook points at them.
        d_vocab: tokens in the vocabulary.
        n_ctx: the longest text that the model is made for: its learned positions, which nothing passes, or else the
            context length of its config, which is no limit here. None where no config says (RWKV).
        dtype: of weights and activations, as numpy names it.
    """

    model_name: str
    n_layers: int
    n_heads: int
    n_key_value_heads: int
    d_model: int
    d_head: int
    d_mlp: int | None
    d_vocab: int
    n_ctx: int | None
    dtype: str

    def _repr_html_(self) -> str:
        return card(type(self).__name__, [(name, str(value), "") for name, value in vars(self).items()])


def cfg(model: Runner) -> ModelSizes:
    """The model's sizes: `model.cfg.n_layers`, `model.cfg.d_head`."""
    metadata = model.hooked.metadata
    sizes = metadata.sizes
    neurons = metadata.hooks.get(str(HookPoint.MlpAct(0)), [None])[-1]
    return ModelSizes(
        model_name=model.hooked.name,
        n_layers=sizes.num_layers,
        n_heads=sizes.num_heads,
        n_key_value_heads=sizes.num_kv_heads,
        d_model=sizes.hidden_size,
        d_head=sizes.head_dim,
        d_mlp=neurons if isinstance(neurons, int) else None,
        d_vocab=sizes.vocab_size,
        n_ctx=model.hooked.context_length,
        dtype=metadata.dtype,
    )


def device(model: Runner) -> str:
    """The execution provider that the model was opened on: "cpu", "cuda"."""
    return model.options.provider


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


@typed()
def to_tokens(model: Runner, text: str | Sequence[str], prepend_bos: bool | None = None) -> NDArray[np.int64]:
    """Tokenise a text, or texts of equal length: ids [batch, seq].

    The special tokens that the tokenizer adds are among them.

    Args:
        text: a text, or several.
        prepend_bos: begin with the beginning-of-text token, whether or not the tokenizer adds it; False: never; if left
            out, as the tokenizer does.

    Raises:
        InputError: texts of unequal length: padded, they would need a mask; `forward` and `run_with_hooks` take the
            texts themselves. No beginning-of-text token in the model's config.

    Example:
        model.to_tokens("The capital of France is")  # int64 [1, 5]
    """
    if is_one_prompt(text) and not isinstance(text, str):
        raise InputError(f"to_tokens takes texts, got a {type(text).__name__}, which has ids already")
    rows = [_tokenised(model, one, prepend_bos) for one in ([text] if isinstance(text, str) else text)]
    lengths = {len(row) for row in rows}
    if len(lengths) != 1:
        raise InputError(f"texts of {sorted(lengths)} tokens are no [batch, seq]: give the texts to the model")
    return np.stack(rows)


def _tokenised(model: Runner, text: str, prepend_bos: bool | None) -> NDArray[np.int64]:
    ids = model.tokenize(text).ids
    if prepend_bos is None:
        return ids
    bos = model.hooked.start_tokens()[:1]
    if not bos:
        if prepend_bos:
            raise InputError(f"prepend_bos=True: the config of {model.hooked.name} names no beginning-of-text token")
        return ids
    # A text may begin with the token's own spelling: only the ids without special tokens tell what was added.
    plain = encode(model.tokenizer, text, add_special_tokens=False).ids
    added = ids[:1].tolist() == bos and ids[1 : 1 + len(plain)].tolist() == plain
    if added == prepend_bos:
        return ids
    return np.array([*bos, *ids]) if prepend_bos else ids[1:]


@typed()
def to_str_tokens(model: Runner, tokens: Prompt) -> list[str]:
    """Each token of a text, of ids [seq] or [1, seq], or of a tokenizer's encoding, as text.

    Example:
        model.to_str_tokens("The capital of France is")
    """
    return [to_string(model, [token]) for token in _row(model, _ids(tokens))]


@typed()
def to_string(model: Runner, tokens: ArrayLike | One) -> Any:
    """Decode ids [seq], or one id, to a text; ids [batch, seq] to a list of texts.

    A tokenizer's dictionary has ids [batch, seq] or [seq], as it says. Special tokens are shown.

    Example:
        model.to_string(model.to_tokens("The capital of France is")[0])
    """
    ids = read_array("tokens", _ids(tokens))
    if ids.ndim == 2:
        return [to_string(model, row) for row in ids]
    return decode(model.tokenizer, _row(model, ids), skip_special_tokens=False)


@typed()
def to_single_token(model: Runner, text: str) -> int:
    """The id of a text that is one token.

    Example:
        model.to_single_token(" Paris")
    """
    return model.token_id(text)


def _ids(tokens: Any) -> Any:
    """The ids of an encoding or a dictionary; anything else as it is."""
    if isinstance(tokens, Mapping) and IDS in tokens:
        return read_array("tokens", tokens[IDS])
    return read_rows(tokens).ids[0] if is_one_prompt(tokens) and not isinstance(tokens, str) else tokens


def _row(model: Runner, tokens: str | ArrayLike) -> list[int]:
    rows = read_rows(model.tokenize(tokens) if isinstance(tokens, str) else np.atleast_1d(read_array("tokens", tokens)))
    if len(rows.ids) != 1:
        raise InputError(f"tokens must be integers [seq], got {list(rows.ids.shape)}")
    return [token_of(model, int(token)) for token in rows.ids[0]]
