"""A metric of a caller's own."""

from collections.abc import Callable

from numpy.typing import NDArray


def of_token(token: int) -> Callable[[NDArray], NDArray]:
    """The logit of one token, [rows]."""
    return lambda logits: logits[:, token]
