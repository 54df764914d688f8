"""Causal and sliding-window masks, those of padding, and the refusal of knockouts that leave a query without a key."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import InterventionError
from mionnx.graph.axes import KEYS, SEQUENCE_AXES
from mionnx.inputs.token_batch import TokenBatch


def of_texts(batch: TokenBatch, axes: Sequence[str]) -> NDArray[np.bool_]:
    """Entries of a value outside of padding: bool, 1 wide along axes without tokens."""
    tokens = {KEYS: batch.attention_mask.astype(bool), **dict.fromkeys(SEQUENCE_AXES, batch.real)}
    real = np.ones((1,) * len(axes), np.bool_)
    for at, axis in enumerate(axes):
        if axis in tokens:
            shape = [batch.batch, *(-1 if n == at else 1 for n in range(1, len(axes)))]
            real = real & tokens[axis].reshape(shape)
    return real


def visible_keys(batch: TokenBatch, window: int | None) -> NDArray[np.bool_]:
    """[batch, seq, total] bool: keys that a query reads.

    Padding, later positions and positions before the sliding window are not read; the window counts no padding.

    Args:
        window: number of keys that a query reads, its own included; None for all before it.
    """
    key = np.arange(batch.total)
    seen = (key <= key[batch.total - batch.seq :, None]) & batch.attention_mask.astype(bool)[:, None, :]
    if window is not None:
        places = batch.attention_mask.cumsum(axis=1)
        seen &= places[:, batch.total - batch.seq :, None] - places[:, None, :] < window
    return seen


def refuse_rows_without_keys(hook: str, blocked: NDArray[np.bool_], batch: TokenBatch, window: int | None) -> None:
    """Refuse a knockout that leaves a query without a key.

    The softmax of such a row would be NaN, or fall on masked keys.

    Args:
        blocked: True where an edge is knocked out; broadcasts to [batch, n_heads, seq, total].
    """
    left = (visible_keys(batch, window)[:, None] & ~blocked).any(axis=-1)  # [batch, n_heads or 1, seq]
    blind = np.argwhere(~left & batch.real[:, None, :])
    if len(blind):
        row, head, query = blind[0].tolist()
        heads = "every head" if left.shape[1] == 1 else f"head {head}"
        raise InterventionError(
            f"knockout at {hook}: the query at position {batch.token_positions[row, query]} of row {row} is left with "
            f"no key in {heads}; its attention would be NaN. Keep at least one edge (a position may read itself)"
        )
