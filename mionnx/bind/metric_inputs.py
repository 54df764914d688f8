"""The inputs of a metric: weights of positions, tokens, the reference, the numbers of a seed."""

import operator
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.bind.knockout_mask import of_texts
from mionnx.bind.logit_selection import Logits
from mionnx.bind.values import columns
from mionnx.errors import GradientError
from mionnx.graph.metadata import Metadata
from mionnx.inputs.token_batch import Place, TokenBatch
from mionnx.machine.softmax import log_softmax
from mionnx.rewrite.plan import METRIC_ANSWER, METRIC_REFERENCE, METRIC_SEED, METRIC_VERSUS, METRIC_WEIGHTS
from mionnx.spec.metric import OF_VECTORS, READS, READS_ALL, Answers, MetricSpec, Token

Feeds = dict[str, NDArray[Any]]


def with_ids(metric: MetricSpec, token_id: Callable[[str], int], check_token: Callable[[int], int]) -> MetricSpec:
    """The same metric with its tokens as ids of a model's vocabulary."""

    def read(token: Token) -> int:
        if isinstance(token, str):
            return token_id(token)
        try:
            return check_token(operator.index(token))
        except TypeError:
            raise GradientError(f"token {token!r}: a token is a text, or an integer") from None

    def each(tokens: Any) -> Any:
        if isinstance(tokens, Sequence | np.ndarray) and not isinstance(tokens, str):
            return [each(token) for token in tokens]
        return None if tokens is None else read(tokens)

    resolved = copy(metric)
    resolved.answer, resolved.versus = each(metric.answer), each(metric.versus)
    return resolved


def metric_inputs(metric: MetricSpec, batch: TokenBatch, logits: Logits | None, metadata: Metadata) -> Feeds:
    """Make the inputs of a metric, its tokens as ids, for one token batch."""
    places = _places(logits)
    if metric.name in READS_ALL:
        return _masked_loss(metric, batch, places) if batch.both else _loss(batch, places)
    weights = _weights(metric, batch, places) if metadata.positional else np.ones((batch.batch, 1), np.float32)
    feeds = {METRIC_WEIGHTS: weights}
    count = feeds[METRIC_WEIGHTS].shape[1]
    for name, tokens in ((METRIC_ANSWER, metric.answer), (METRIC_VERSUS, metric.versus)):
        if tokens is not None:
            ids = np.array(_per_row(name.rsplit(".", 1)[1], tokens, batch.batch), np.int64)
            feeds[name] = np.repeat(ids[:, None], count, axis=1)
    _refuse_same(metric, feeds)
    for name, array in ((METRIC_REFERENCE, metric.reference), (METRIC_SEED, metric.cotangent)):
        if array is not None:
            feeds[name] = _rows(name.rsplit(".", 1)[1], array, (batch.batch, count, metadata.columns))
    if metric.name in OF_VECTORS:
        feeds = feeds | {METRIC_SEED: _vectors(metric.name, feeds.pop(METRIC_REFERENCE))}
    if METRIC_REFERENCE in feeds:
        # in float64: the graph subtracts log-probabilities of its own, in float32, and rounding should be theirs alone
        feeds[METRIC_REFERENCE] = log_softmax(feeds[METRIC_REFERENCE].astype(np.float64), axis=-1).astype(np.float32)
    return feeds


def _vectors(name: str, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """The vectors that an embedding is compared with; of a cosine with length 1."""
    if name != "cosine":
        return vectors
    lengths = np.sqrt((vectors.astype(np.float64) ** 2).sum(axis=-1, keepdims=True))
    if not lengths.all():
        raise GradientError("the cosine with a reference of zeros does not exist")
    return (vectors / lengths).astype(np.float32)


def seed_inputs(metric: MetricSpec, shape: Sequence[int], axes: Sequence[str], batch: TokenBatch) -> Feeds:
    """Make the inputs of a metric that sums the value at a hook point times numbers; padding counts for nothing."""
    try:
        seed = np.broadcast_to(np.asarray(metric.cotangent, np.float32), shape)
        return {METRIC_SEED: np.where(of_texts(batch, axes), seed, np.float32(0)) if batch.padded else seed}
    except ValueError:
        own = [] if metric.cotangent is None else list(metric.cotangent.shape)
        raise GradientError(f"cotangent is {own}, and the value at {metric.of} is {list(shape)}") from None


def _places(logits: Logits | None) -> list[Place] | None:
    """The positions of which there are logits; None for all."""
    if logits is None:
        return None
    if logits.token_ids is not None or logits.k is not None:
        raise GradientError("a metric reads the logits of all tokens: leave out tokens= and top_k=")
    return None if logits.positions is None else logits.positions_


def _weights(metric: MetricSpec, batch: TokenBatch, places: Sequence[Place] | None) -> NDArray[np.float32]:
    """[batch, n]: 1 at the position that is read, 0 elsewhere."""
    if metric.position is None:
        return batch.real.astype(np.float32) if places is None else np.ones((batch.batch, len(places)), np.float32)
    if places is None:
        weights = np.zeros((batch.batch, batch.seq), np.float32)
        np.put_along_axis(weights, columns("metric", [metric.position], batch), 1, axis=1)
        return weights
    if metric.position not in places:
        raise GradientError(f"the metric reads position {metric.position}, the logits asked for are those of {places}")
    weights = np.zeros((batch.batch, len(places)), np.float32)
    weights[:, places.index(metric.position)] = 1
    return weights


def _masked_loss(metric: MetricSpec, batch: TokenBatch, places: Sequence[Place] | None) -> Feeds:
    """Each row's hidden tokens at its masks, in order; all other positions weigh nothing."""
    if places is not None:
        raise GradientError("the loss reads the logits of every position: leave out positions=")
    targets, weights = np.zeros((batch.batch, batch.seq), np.int64), np.zeros((batch.batch, batch.seq), np.float32)
    for row, answer in enumerate(_per_row("answer", metric.answer, batch.batch)):  # type: ignore[arg-type]
        masks = [batch.column_of[row][at] for at in batch.masks(row)]
        if not masks:
            raise GradientError(f"row {row} has no mask, whose token the loss could be of: put one into the text")
        several = isinstance(answer, Sequence) and not isinstance(answer, str)
        tokens = [*answer] if several else [answer] * len(masks)  # type: ignore[misc]
        if len(tokens) != len(masks):
            raise GradientError(f"row {row} has {len(masks)} masks, and answer {len(tokens)} tokens for it")
        targets[row, masks], weights[row, masks] = tokens, 1 / len(masks)
    return {METRIC_WEIGHTS: weights, METRIC_ANSWER: targets}


def _loss(batch: TokenBatch, places: Sequence[Place] | None) -> Feeds:
    """Each token's own next token; padding, and the last token, predict nothing."""
    if places is not None:
        raise GradientError("the loss reads the logits of every position: leave out positions=")
    targets = np.zeros((batch.batch, batch.seq), np.int64)
    targets[:, :-1] = batch.input_ids[:, 1:]  # the last column keeps 0, with a weight of 0
    weights = np.zeros((batch.batch, batch.seq), np.float32)
    weights[:, :-1] = batch.real[:, :-1] & batch.real[:, 1:]  # padding stands ahead of a text, or behind it
    counts = weights.sum(axis=1, keepdims=True)
    if not counts.all():
        raise GradientError(f"row {int(np.argmin(counts))} has no next token to predict: the loss needs two tokens")
    return {METRIC_WEIGHTS: weights / counts, METRIC_ANSWER: targets}  # the mean over a row's tokens


def _per_row(what: str, tokens: Answers, rows: int) -> list[Any]:
    if not isinstance(tokens, Sequence):
        return [tokens] * rows  # type: ignore[list-item]
    if len(tokens) != rows:
        raise GradientError(f"{what} has {len(tokens)} tokens for {rows} rows")
    return [*tokens]


def _refuse_same(metric: MetricSpec, feeds: Feeds) -> None:
    if "versus" not in READS[metric.name]:
        return
    same = (feeds[METRIC_ANSWER] == feeds[METRIC_VERSUS]).all(axis=1)
    if same.any():
        row = int(same.argmax())
        raise GradientError(f"row {row}: {metric.name} between token {feeds[METRIC_ANSWER][row, 0]} and itself")


def _rows(what: str, array: NDArray[Any], shape: tuple[int, int, int]) -> NDArray[np.float32]:
    """[vocab], [batch, vocab] or [batch, n, vocab] as the latter."""
    rows, _, vocab = shape
    fits = {1: (vocab,), 2: (rows, vocab), 3: shape}[array.ndim]
    if array.shape not in (fits, (1, *shape[1:])):
        raise GradientError(f"{what} is {list(array.shape)}, and must be {list(fits)}")
    wide = array if array.ndim == 3 else np.broadcast_to(array, (rows, vocab))[:, None]
    return np.broadcast_to(wide, shape).astype(np.float32)
