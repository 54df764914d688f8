"""Batches of rows of unequal length: those of like length together, so that little is padded."""

from collections.abc import Iterator, Sequence

from mionnx.errors import InputError

AUTO = "auto"
TOKENS = 2048  # of a batch that is chosen here, padding included


def check_batch_size(given: int | str) -> None:
    """Refuse a batch size that is none.

    Raises:
        InputError: neither "auto" nor a number above 0.
    """
    if given != AUTO and (isinstance(given, str) or given < 1):
        raise InputError(f"batch_size={given!r}: a number of rows, or 'auto'")


def batches_of(lengths: Sequence[int], batch_size: int | str = AUTO, padded: bool = True) -> Iterator[list[int]]:
    """Group rows into batches, the shortest first.

    Args:
        lengths: tokens of each row.
        batch_size: rows of a batch; "auto": so many that a batch has some 2048 tokens.
        padded: whether rows of unequal length may be in one batch.

    Returns:
        the indices of each batch's rows.

    Example:
        [*batches_of([3, 900, 4], 2)]  # [[0, 2], [1]]
    """
    batch: list[int] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        most = max(1, TOKENS // lengths[row]) if isinstance(batch_size, str) else batch_size
        if batch and (len(batch) >= most or (not padded and lengths[row] != lengths[batch[0]])):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
