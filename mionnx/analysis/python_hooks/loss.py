"""Next-token losses."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from mionnx.errors import InputError, nearest
from mionnx.inputs.token_batch import TokenBatch

RETURN_TYPES = ("logits", "loss", "loss per token", "both")


def loss_per_token(logits: NDArray[Any], call: TokenBatch) -> NDArray[np.float64]:
    """How badly each token was foreseen: -log softmax(logits[t])[token t + 1], in nats.

    Args:
        logits: [batch, seq, vocab].
        call: the tokens.

    Returns:
        [batch, seq - 1]; NaN where either of the two tokens is padding.

    Raises:
        InputError: no row has two tokens.
    """
    foreseen = call.real[:, :-1] & call.real[:, 1:]
    if not foreseen.any():
        raise InputError("a loss needs a text of two tokens or more: it is of each token, given those before it")
    found = np.full(foreseen.shape, np.nan)
    for row, here in enumerate(foreseen):  # row by row: the logits of one row in float64, not of all
        at, following = np.flatnonzero(here), call.input_ids[row, 1:][here]
        chosen = logits[row, at].astype(np.float64)
        found[row, at] = logsumexp(chosen, axis=-1) - chosen[np.arange(len(at)), following]
    return found


def given_as(return_type: str | None, logits: NDArray[Any] | None, call: TokenBatch) -> Any:
    """What a call returns: "logits", "loss", "loss per token", "both" (logits and loss), or None."""
    if return_type is None or logits is None:
        return None
    if return_type == "logits":
        return logits
    losses = loss_per_token(logits, call)
    if return_type == "loss per token":
        return losses
    mean = np.nanmean(losses)
    return mean if return_type == "loss" else (logits, mean)


def check_return_type(return_type: str | None) -> None:
    """Refuse what `given_as` does not know.

    Raises:
        InputError: naming the nearest.
    """
    if return_type is not None and return_type not in RETURN_TYPES:
        choices = ", ".join(map(repr, RETURN_TYPES))
        raise InputError(
            f"return_type={return_type!r}; one of {choices}, None{nearest(str(return_type), RETURN_TYPES)}"
        )
