"""What analysis code reads off a model, under the names that TransformerLens gives it."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mionnx.analysis.python_hooks.sizes import ModelSizes, sizes_of
from mionnx.errors import InputError
from mionnx.graph import matrices
from mionnx.graph.hook_points import HookPoint
from mionnx.run.runner import Runner


class Attributes(Runner):
    """Sizes, hook points, matrices and tokens of a model."""

    @cached_property
    def cfg(self) -> ModelSizes:
        """The model's sizes: `model.cfg.n_layers`, `model.cfg.d_head`."""
        return sizes_of(self.hooked)

    @cached_property
    def hook_dict(self) -> dict[str, HookPoint]:
        """Name -> hook point, in execution order."""
        return {point.name: point for point in self.hook_points()}

    @cached_property
    def W_E(self) -> NDArray[Any]:
        """The embedding [vocab, hidden], read-only; see `mionnx.graph.matrices`."""
        return matrices.embedding(self.hooked)

    @cached_property
    def W_U(self) -> NDArray[Any]:
        """The unembedding [hidden, vocab], read-only; see `mionnx.graph.matrices`."""
        return matrices.unembedding(self.hooked)

    @cached_property
    def b_U(self) -> NDArray[Any]:
        """The unembedding's bias [vocab]; zeros where the model has none."""
        return matrices.unembedding_bias(self.hooked)

    @cached_property
    def W_O(self) -> NDArray[Any]:
        """The heads' output projections [n_layers, n_heads, head_dim, hidden].

        Raises:
            HookError: a recurrent model.
        """
        return matrices.output_projections(self.hooked)

    def to_tokens(self, text: str | Sequence[str]) -> NDArray[np.int64]:
        """A text, or texts of equal length, as ids [batch, seq], with the special tokens that the tokenizer adds.

        Raises:
            InputError: texts of unequal length: padded, they would need a mask; `forward` and `run_with_hooks` take the
                texts themselves.
            TokenizerError: no tokenizer, or a text without tokens.
        """
        rows = [self.tokenize(one).ids for one in ([text] if isinstance(text, str) else text)]
        lengths = {len(row) for row in rows}
        if len(lengths) != 1:
            raise InputError(f"texts of {sorted(lengths)} tokens are no [batch, seq]: give the texts to the model")
        return np.stack(rows)

    def to_str_tokens(self, tokens: str | ArrayLike) -> list[str]:
        """Each token of a text, or of ids [seq] or [1, seq], as text."""
        return [self.to_string([token]) for token in self._row(tokens)]

    def to_string(self, tokens: ArrayLike) -> Any:
        """Ids [seq], or one id, as a text; ids [batch, seq] as a list of texts. Special tokens are shown."""
        ids = np.asarray(tokens)
        if ids.ndim == 2:
            return [self.to_string(row) for row in ids]
        return self.tokenizer.decode(self._row(ids), skip_special_tokens=False)

    def to_single_token(self, text: str) -> int:
        """The id of a text that is one token.

        Raises:
            InputError: it is none, or several.
        """
        return self.token_id(text)

    def _row(self, tokens: str | ArrayLike) -> list[int]:
        """Ids as a list, checked."""
        ids = np.atleast_1d(self.tokenize(tokens).ids if isinstance(tokens, str) else np.asarray(tokens))
        row = ids[0] if ids.ndim == 2 and len(ids) == 1 else ids
        if row.ndim != 1 or row.dtype.kind not in "iu":
            raise InputError(f"tokens must be integers [seq], got {row.dtype} {list(ids.shape)}")
        return [self._known(int(token)) for token in row]
