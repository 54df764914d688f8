"""Metrics of callers' own: pairs that compute the same, and pairs that do not."""

from functools import partial

import numpy as np
from scipy.special import log_softmax, softmax


def of_token(token: int):
    return lambda logits: logits[:, token]


def nested(token: int, other: int = 3):
    def inner(logits):
        return (lambda row: row[:, token] - row[:, other])(logits)

    return inner


ROWS = np.arange(3)
SAME = {
    "closure": lambda: of_token(4),
    "nested code": lambda: nested(4),
    "partial": lambda: partial(np.take, indices=4, axis=-1),
    "array": lambda: lambda logits: logits[:, ROWS].sum(-1),
    "library": lambda: lambda logits: log_softmax(logits, axis=-1)[:, 4],
}
OTHER = {
    "name": (lambda logits: logits.max(-1), lambda logits: logits.min(-1)),
    "closure": (of_token(4), of_token(5)),
    "closure of nested code": (nested(4), nested(4, 5)),
    "nested code": (lambda logits: [row.max() for row in logits], lambda logits: [row.min() for row in logits]),
    "default": (lambda logits, token=4: logits[:, token], lambda logits, token=5: logits[:, token]),
    "partial": (partial(np.take, indices=4, axis=-1), partial(np.take, indices=5, axis=-1)),
    "library": (lambda logits: log_softmax(logits)[:, 4], lambda logits: softmax(logits)[:, 4]),
}
