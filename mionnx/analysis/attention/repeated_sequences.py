"""Random repeated sequences, and the attention of heads to the targets of each kind of head.

In the second half, token i has occurred at i - period. The kinds, as induction heads were described (Olsson et al.
2022, "In-context Learning and Induction Heads") and as TransformerLens' head detector has them:

* previous_token: attends to i - 1;
* duplicate_token: attends to i - period, where the same token stood;
* induction: attends to i - period + 1, to what followed it there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import InputError, nearest
from mionnx.machine import memory

HEAD_KINDS = ("previous_token", "duplicate_token", "induction")


@dataclass(frozen=True)
class RepeatedSequences:
    """Random sequences, each repeated once, behind a prefix.

    Attributes:
        ids: [batch, prefix + 2 period].
        period: tokens of one sequence; within one, all are different.
        prefix: tokens before the first.
    """

    ids: NDArray[np.int64]
    period: int
    prefix: int

    @property
    def queries(self) -> range:
        """The positions of the second half."""
        return range(self.prefix + self.period, self.prefix + 2 * self.period)

    @property
    def chance(self) -> float:
        """Score of uniform attention to all positions."""
        return float(np.mean([1 / (position + 1) for position in self.queries]))

    def chunks(self, rows: int) -> Iterator[NDArray[np.int64]]:
        """Split the sequences into batches of some rows."""
        for first in range(0, len(self.ids), rows):
            yield self.ids[first : first + rows]


def repeat_sequences(
    candidates: NDArray[np.int64], prefix: Sequence[int], batch: int, period: int, seed: int
) -> RepeatedSequences:
    """Draw random sequences and repeat each of them once.

    Args:
        prefix: ids before each row.

    Raises:
        InputError: fewer candidates than tokens in a sequence, or a batch, period or seed out of range.
    """
    for name, value in (("batch", batch), ("period", period), ("seed", seed)):
        if not isinstance(value, int | np.integer) or value < 0:
            raise InputError(f"{name}={value!r}: an integer of 0 or above is expected")
    if batch < 1 or period < 2:
        raise InputError(f"batch={batch}, period={period}: at least 1 row of sequences of 2 tokens")
    if period > len(candidates):
        raise InputError(f"period={period}, and there are {len(candidates)} tokens to draw from, each once a sequence")
    if (size := batch * (len(prefix) + 2 * period) * 16) > memory.available():
        raise InputError(f"batch={batch}: the sequences alone need {memory.format_bytes(size)}, more than is free")
    random = np.random.default_rng(seed)
    once = np.stack([random.permutation(candidates)[:period] for _ in range(batch)])
    start = np.tile(np.array(prefix, np.int64), (batch, 1))
    return RepeatedSequences(np.concatenate([start, once, once], axis=1), period, len(prefix))


def check_kinds(kinds: Sequence[str]) -> tuple[str, ...]:
    """Check names of kinds."""
    names = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    for kind in names:
        if kind not in HEAD_KINDS:
            raise InputError(
                f"no kind of head {kind!r}; the kinds are {', '.join(HEAD_KINDS)}{nearest(kind, HEAD_KINDS)}"
            )
    if not names or len({*names}) != len(names):
        raise InputError(f"kinds of heads must be different ones of {', '.join(HEAD_KINDS)}, got {list(names)}")
    return names


def attention_to(kind: str, pattern: NDArray[np.floating], sequences: RepeatedSequences) -> NDArray[np.float64]:
    """Mean attention of each head to the targets of a kind, summed over rows: [n_heads].

    Args:
        pattern: [batch, n_heads, period, seq]: attention of the queries of the second half.
    """
    back = {"previous_token": 1, "duplicate_token": sequences.period, "induction": sequences.period - 1}[kind]
    at = np.arange(sequences.period)
    seen = pattern[:, :, at, np.array(sequences.queries) - back]  # [batch, n_heads, period]
    return seen.mean(axis=-1, dtype=np.float64).sum(axis=0)
