"""Batches of rows of unequal length: those of like length run together, as many as fit into memory.

The memory of a pass is estimated from its captures; results that do not fit are refused.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import TypeVar

import numpy as np

from mionnx.bind.bound_spec import BoundSpec
from mionnx.errors import InputError, MIError
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import DTYPES
from mionnx.inputs.token_batch import TokenBatch
from mionnx.machine import memory
from mionnx.machine.progress import shown, silence

AUTO = "auto"
PER_BATCH = 2048  # of a batch that is chosen here, padding included: more run no faster on a CPU
NAMED = 4  # rows of a batch that a message names
LARGE = 2**26  # bytes of a pass for which nobody needs to ask
SMALL_CAPTURES = 2**20  # bytes of captures for which nobody needs to ask how much memory is left
SHARE = 0.25  # of the free memory that one batch may take
STREAMS, SCORES = 16, 3  # arrays as wide as the stream, and of all heads' scores, that a layer holds at once, about
QUERY_BLOCKS = ((4096, 32), (2048, 16), (1024, 8))  # tokens from which on attention has so many blocks of queries
MASKS = 2  # arrays of a mask, whole and in blocks, beside them
READ_SCORES = ("AttnScores", "AttnPattern")

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
    """Indices of the rows of each batch, the shortest first: `batches_of([3, 900, 4], 2)` gives [0, 2], [1]."""
    # `batch_size` is most rows of a batch; "auto": so many that a batch has some 2048 tokens, and `fitting` (tokens of
    # the longest row -> rows that memory has room for) allows. Unless `padded`, rows of a batch have one length.
    batch: list[int] = []
    tokens = 0  # of the batch, padding not counted
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        length = lengths[row]
        if len(lengths) == 1:
            most = 1
        elif isinstance(batch_size, str):
            most = PER_BATCH // max(1, length)
            most = max(1, most if fitting is None else min(most, fitting(length)))
        else:
            most = batch_size
        # Of 999 short rows and one long one, which would make most of their batch padding, the long one stands alone.
        sparse = 2 * (tokens + length) < (len(batch) + 1) * length
        if batch and (len(batch) >= most or sparse or (not padded and length != lengths[batch[0]])):
            yield batch
            batch, tokens = [], 0
        batch.append(row)
        tokens += length
    if batch:
        yield batch


def in_batches(
    lengths: Sequence[int],
    batch_size: BatchSize,  # most rows of a batch, or "auto"; None for one batch of all
    run: Callable[[list[int]], Sequence[T]],  # runs the rows of these indices, and gives a result for each of them
    *,
    stage: str,
    # padded, fitting: see `batches_of`
    padded: bool = True,
    fitting: Fitting | None = None,
    progress: bool | None = None,  # see `mionnx.machine.progress.shown`; one batch shows nothing unless it is True
) -> list[T]:
    """Run rows in batches of like length; an error names the rows of its batch."""
    # Returns the results, in the order of `lengths`.
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
                named = ", ".join(map(str, rows[:NAMED])) + f" and {len(rows) - NAMED} more" * (len(rows) > NAMED)
                raise type(error)(f"row{'s' * (len(rows) > 1)} {named} of {count}: {error}") from error
            largest = max(map(len, batches), default=0)
            show(f"{stage} ({len(batches)} batches of up to {largest} rows)", len(results), count)
    return [results[row] for row in range(count)]


def refuse_too_large(bound: BoundSpec, batch: TokenBatch, use_cache: bool = False) -> None:
    """Refuse a pass that memory does not hold."""
    peak = bound.estimate(batch.batch, batch.seq, batch.total).peak if bound.captures else 0
    if peak > SMALL_CAPTURES and peak > (free := memory.available()):
        raise InputError(
            f"the captures of this spec need {memory.format_bytes(peak)}, and "
            f"{memory.format_bytes(free)} of memory are free: capture fewer layers, or run the text in pieces"
        )
    need = pass_bytes(bound, batch.batch, batch.seq, batch.total, use_cache)
    if need > LARGE and need > (free := memory.available()):
        scores = layer_bytes(bound, batch.seq, batch.total)
        results = kept_bytes(bound, batch.seq, batch.total - batch.seq, use_cache)
        raise InputError(
            f"a pass over {batch.batch} x {batch.seq} tokens needs some {memory.format_bytes(need)} "
            f"({memory.format_bytes(batch.batch * scores)} while its longest layer is computed, "
            f"{memory.format_bytes(batch.batch * results)} of captures, logits, keys and values), and "
            f"{memory.format_bytes(free)} of memory are free: give the text in pieces (use_cache=True, then cache=), "
            "smaller batches (batch_size=), ask for Logits(positions=-1) or logits=False, or capture less"
        )


def pass_bytes(bound: BoundSpec, batch: int, seq: int, total: int, use_cache: bool = False) -> int:
    """Approximate bytes of one pass: the longest layer while it is computed, and what is kept."""
    gathered = bound.estimate(batch, seq, total)
    results = batch * kept_bytes(bound, seq, total - seq, use_cache)
    return batch * layer_bytes(bound, seq, total) + results + gathered.peak - gathered.total


def layer_bytes(bound: BoundSpec, seq: int, total: int) -> int:
    """Bytes of one row's longest layer, about: streams, and the scores of all heads."""
    sizes = bound.model.metadata.sizes
    scores = 0 if not bound.model.metadata.attends else SCORES * sizes.num_heads * total
    if (blocks := query_blocks(seq)) and not _reads_scores(bound):
        scores = scores // blocks + MASKS * total
    return 4 * seq * (STREAMS * sizes.hidden_size + scores)


def query_blocks(tokens: int) -> int:
    """The blocks of queries in which attention over so many tokens is computed; 0 for one product."""
    return next((blocks for least, blocks in QUERY_BLOCKS if tokens >= least), 0)


def _reads_scores(bound: BoundSpec) -> bool:
    """Whether a layer has all its scores at once, as something reads them."""
    hooks = [*(node.hook for node in bound.plan.captures), *(edit.hook for edit in bound.plan.edits)]
    return bound.plan.differentiated or any(HookPoint.parse(hook).variant in READ_SCORES for hook in hooks)


def kept_bytes(bound: BoundSpec, length: int, past: int = 0, use_cache: bool = False) -> int:
    """Bytes that one row leaves: captures, gradients, logits, keys and values."""
    model, part = bound.model, bound.logits
    number = np.dtype(DTYPES[model.metadata.dtype]).itemsize
    size = bound.estimate(1, length, past + length).total
    if bound.plan.outputs.logits:
        every = not bound.plan.outputs.last and (part is None or part.positions is None)
        positions = length if every else 1 if part is None else len(part.positions_)
        size += number * (positions if model.metadata.positional else 1) * model.metadata.columns
    if use_cache:
        shapes, dtypes = model.metadata.past_shapes(1, past + length), model.past_dtypes
        size += sum(np.dtype(dtypes[name]).itemsize * prod(shape) for name, shape in shapes.items())
    return size


def fitting(bound: BoundSpec, past: int = 0, use_cache: bool = False) -> Fitting:
    """The number of rows of a length with room in a quarter of the free memory."""
    room: float | None = None

    def rows(length: int) -> int:
        nonlocal room
        if room is None:
            room = SHARE * memory.available()
        layer = layer_bytes(bound, length, past + length)
        return int(room // (layer + 2 * kept_bytes(bound, length, past, use_cache)))

    return rows


def refuse_all(bound: BoundSpec, lengths: Sequence[int], past: int = 0, use_cache: bool = False) -> None:
    """Refuse a list of rows whose results memory does not hold together."""
    each = Counter(lengths).items()
    size = sum(count * kept_bytes(bound, length, past, use_cache) for length, count in each)
    if size > SMALL_CAPTURES and size > (free := memory.available()):
        raise InputError(
            f"the results of {len(lengths)} rows need {memory.format_bytes(size)}, and {memory.format_bytes(free)} of "
            "memory are free: capture positions=, ask for Logits(positions=-1) or logits=False, or write activations "
            "to disk with harvest"
        )
