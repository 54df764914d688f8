"""Classes of tokens: all alike, by position, by token, or by a function of the ids."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import InputError, nearest

Ids = NDArray[np.int64]
Classify = Callable[[Ids], Any]
By = str | Classify | None
CLASSES = ("position", "token")


def check_by(by: Any) -> None:
    """Refuse what names no classes."""
    if by is not None and not callable(by) and not (isinstance(by, str) and by in CLASSES):
        raise InputError(f"by={by!r}: 'position', 'token', or a function of the ids [seq]{nearest(str(by), CLASSES)}")


def classes_of(by: By, ids: NDArray[Any], positions: NDArray[Any] | None = None) -> Ids:
    """The class of each token of one text, int64 [seq].

    Args:
        by: None, "position", "token", or a function: ids [seq] -> integers [seq].
        ids: [seq].
        positions: [seq], counted from 0 if left out.
    """
    if by is None:
        return np.zeros(len(ids), np.int64)
    if by == "token":
        return np.asarray(ids).astype(np.int64)
    if by == "position":
        return np.arange(len(ids)) if positions is None else np.asarray(positions).astype(np.int64)
    if not callable(by):
        check_by(by)
    classes = np.asarray(by(np.asarray(ids)))  # type: ignore[operator]
    if classes.shape != np.shape(ids) or classes.dtype.kind not in "iub":
        raise InputError(
            f"by= gave {classes.dtype} {list(classes.shape)}; it gives integers [{len(ids)}], a class a token"
        )
    return classes.astype(np.int64)
