"""Next-token losses."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import InputError, nearest
from mionnx.inputs.token_batch import TokenBatch
from mionnx.machine.softmax import logsumexp

NO_LOSS = "a loss needs a text of two tokens or more: it is of each token, given those before it"
RETURN_TYPES = ("logits", "loss", "loss per token", "both")


def loss_per_token(logits: NDArray[Any], batch: TokenBatch) -> NDArray[np.float64]:
    """Cross-entropy of each next token: -log softmax(logits[t])[token t + 1], in nats, float64.

    Args:
        logits: [batch, seq, vocab].
        batch: the tokens.

    Returns:
        [batch, seq - 1]; NaN where either of the two tokens is padding.

    Raises:
        InputError: no row has two tokens.
    """
    predicted = batch.real[:, :-1] & batch.real[:, 1:]
    if not predicted.any():
        raise InputError(NO_LOSS)
    losses = np.full(predicted.shape, np.nan)
    for row, here in enumerate(predicted):  # row by row: the logits of one row in float64, not of all
        at, following = np.flatnonzero(here), batch.input_ids[row, 1:][here]
        losses[row, at] = _losses(logits[row, at], following)
    return losses


def row_losses(logits: NDArray[Any], ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Cross-entropy of each next token of one text, in nats: [seq - 1].

    Args:
        logits: [seq, vocab].
        ids: [seq].
    """
    return _losses(logits[:-1], ids[1:])


def _losses(logits: NDArray[Any], following: NDArray[np.int64]) -> NDArray[np.float64]:
    chosen = logits.astype(np.float64)
    found: NDArray[np.float64] = logsumexp(chosen, axis=-1) - chosen[np.arange(len(following)), following]
    return found


def convert_logits(return_type: str | None, logits: NDArray[Any] | None, batch: TokenBatch) -> Any:
    """Convert logits to a return type: "logits", "loss", "loss per token", "both" or None.

    A loss is the mean over all tokens, in nats; "both" is a pair of logits and loss.
    """
    if return_type is None or logits is None:
        return None
    if return_type == "logits":
        return logits
    losses = loss_per_token(logits, batch)
    if return_type == "loss per token":
        return losses
    mean = np.nanmean(losses)
    return mean if return_type == "loss" else (logits, mean)


def check_return_type(return_type: str | None) -> None:
    """Refuse an unknown return type.

    Raises:
        InputError: with the nearest one.
    """
    if return_type is not None and return_type not in RETURN_TYPES:
        choices = ", ".join(map(repr, RETURN_TYPES))
        raise InputError(
            f"return_type={return_type!r}; one of {choices}, None{nearest(str(return_type), RETURN_TYPES)}"
        )
