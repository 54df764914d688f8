"""Orders of reading tokens: one after the other, or at random in pieces that a disk reads well."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

BLOCK = 1024  # neighbours that stay together on the disk
MIXED = 64  # blocks that are mixed at a time


def blocks(count: int, size: int) -> Iterator[slice]:
    """Pieces of `size` tokens, one after the other."""
    yield from (slice(at, min(at + size, count)) for at in range(0, count, size))


def shuffled(count: int, size: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Pieces of `size` tokens in a random order, each token once.

    Args:
        count: of all tokens.
        size: of a piece; the last one may have fewer.
        seed: of the order.
    """
    random = np.random.default_rng(seed)
    order = random.permutation(-(-count // BLOCK))
    waiting = np.empty(0, np.int64)
    for begin in range(0, len(order), MIXED):
        chosen = order[begin : begin + MIXED, None] * BLOCK + np.arange(BLOCK)
        mixed = random.permutation(chosen[chosen < count])
        waiting = np.concatenate([waiting, mixed])
        full = len(waiting) // size * size
        yield from waiting[:full].reshape(-1, size)
        waiting = waiting[full:]
    if len(waiting):
        yield waiting
