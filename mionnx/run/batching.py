"""Batches of rows of unequal length: those of like length run together, results come in the order given."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from mionnx.errors import InputError, MIError
from mionnx.machine.progress import shown, silence

AUTO = "auto"
PER_BATCH = 2048  # of a batch that is chosen here, padding included: more run no faster on a CPU
NAMED = 4  # rows of a batch that a message names

BatchSize = int | str | None
Fitting = Callable[[int], int]  # tokens of the longest row of a batch -> rows that it may have
T = TypeVar("T")


def check_batch_size(size: BatchSize) -> None:
    """Refuse a batch size that is none."""
    number = isinstance(size, int) and not isinstance(size, bool) and size > 0
    if not (number or size in (None, AUTO)):
        raise InputError(f"batch_size={size!r}: a number of rows, or {AUTO!r}")


def batches_of(
    lengths: Sequence[int], batch_size: int | str = AUTO, padded: bool = True, *, fitting: Fitting | None = None
) -> Iterator[list[int]]:
    """Group rows into batches, the shortest first.

    A batch ends before a row that would make most of it padding: of 999 short rows and one long one, the long one
    stands alone.

    Args:
        batch_size: most rows of a batch; "auto": so many that a batch has some 2048 tokens.
        padded: whether rows of unequal length may be in one batch.
        fitting: of "auto", tokens of the longest row -> rows of a batch that memory has room for.

    Returns:
        the indices of each batch's rows.

    Example:
        [*batches_of([3, 900, 4], 2)]  # [[0, 2], [1]]
    """
    batch: list[int] = []
    tokens = 0  # of the batch, padding not counted
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        length = lengths[row]
        most = _most(length, fitting) if isinstance(batch_size, str) else batch_size
        sparse = 2 * (tokens + length) < (len(batch) + 1) * length
        if batch and (len(batch) >= most or sparse or (not padded and length != lengths[batch[0]])):
            yield batch
            batch, tokens = [], 0
        batch.append(row)
        tokens += length
    if batch:
        yield batch


def _most(length: int, fitting: Fitting | None) -> int:
    most = PER_BATCH // max(1, length)
    return max(1, most if fitting is None else min(most, fitting(length)))


def in_batches(
    lengths: Sequence[int],
    batch_size: BatchSize,
    run: Callable[[list[int]], Sequence[T]],
    *,
    stage: str,
    padded: bool = True,
    fitting: Fitting | None = None,
    progress: bool | None = None,
) -> list[T]:
    """Run rows in batches of like length.

    Args:
        batch_size: most rows of a batch, or "auto"; None for one batch of all.
        run: runs the rows of these indices, and gives a result for each of them.
        padded, fitting: see `batches_of`.
        progress: see `mionnx.machine.progress.shown`; one batch shows nothing unless it is True.

    Returns:
        the results, in the order of `lengths`.

    Raises:
        MIError: as `run` raises it, with the rows of the batch named.

    Example:
        in_batches([3, 900, 4], "auto", lambda rows: [row * 10 for row in rows], stage="tens")  # [0, 10, 20]
    """
    check_batch_size(batch_size)
    count = len(lengths)
    batches = [[*range(count)]] if batch_size is None else [*batches_of(lengths, batch_size, padded, fitting=fitting)]
    results: dict[int, T] = {}
    with shown(progress) if progress or len(batches) > 1 else silence() as show:
        for rows in batches:
            try:
                results |= zip(rows, run(rows), strict=True)
            except MIError as error:
                if len(batches) == 1:
                    raise
                raise type(error)(f"{rows_text(rows)} of {count}: {error}") from error
            show(stage_text(stage, batches), len(results), count)
    return [results[row] for row in range(count)]


def stage_text(stage: str, batches: Sequence[Sequence[int]]) -> str:
    """A stage's name with the sizes of its batches: "forward (8 batches of up to 341 rows)"."""
    return f"{stage} ({len(batches)} batches of up to {max(map(len, batches), default=0)} rows)"


def rows_text(rows: Sequence[int]) -> str:
    """Rows for messages: "row 3", "rows 3, 5, 8, 9 and 12 more"."""
    named = ", ".join(map(str, rows[:NAMED]))
    more = f" and {len(rows) - NAMED} more" if len(rows) > NAMED else ""
    return f"row{'s' * (len(rows) > 1)} {named}{more}"
