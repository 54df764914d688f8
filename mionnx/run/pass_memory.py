"""Memory of passes, from the estimate of captures: batches are made to fit, results that do not are refused."""

from collections import Counter
from collections.abc import Sequence
from math import prod

import numpy as np

from mionnx.bind.bound_spec import BoundSpec
from mionnx.errors import InputError
from mionnx.inputs.token_batch import TokenBatch
from mionnx.machine import memory
from mionnx.run.batching import Fitting

LARGE = 2**26  # bytes of a pass for which nobody needs to ask
SMALL_CAPTURES = 2**20  # bytes of captures for which nobody needs to ask how much memory is left
SHARE = 0.25  # of the free memory that one batch may take
STREAMS, SCORES = 16, 3  # arrays as wide as the stream, and of all heads' scores, that a layer holds at once, about


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
    scores = 0 if bound.model.metadata.recurrent else SCORES * sizes.num_heads * total
    return 4 * seq * (STREAMS * sizes.hidden_size + scores)


def kept_bytes(bound: BoundSpec, length: int, past: int = 0, use_cache: bool = False) -> int:
    """Bytes that one row leaves: captures, gradients, logits, keys and values."""
    model, part = bound.model, bound.logits
    number = np.dtype(model.past_dtype).itemsize
    size = bound.estimate(1, length, past + length).total
    if bound.plan.outputs.logits:
        every = not bound.plan.outputs.last and (part is None or part.positions is None)
        positions = length if every else 1 if part is None else len(part.positions_)
        size += number * positions * model.metadata.sizes.vocab_size
    if use_cache and not model.metadata.recurrent:
        size += number * sum(map(prod, model.metadata.past_shapes(1, past + length).values()))
    return size


def fitting(bound: BoundSpec, past: int = 0, use_cache: bool = False) -> Fitting:
    """The number of rows of a length with room in a quarter of the free memory.

    It counts what the rows leave, and roughly what a layer holds while it is computed.
    """
    room = SHARE * memory.available()

    def rows(length: int) -> int:
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
