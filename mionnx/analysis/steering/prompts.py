"""Prompts and the positions that are meant in each of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mionnx.errors import InputError

Texts = str | Sequence[str]


def texts_of(name: str, texts: Texts) -> list[str]:
    """One text or several as a list."""
    rows = [texts] if isinstance(texts, str) else list(texts)
    if not rows or not all(isinstance(text, str) and text for text in rows):
        raise InputError(f"{name} must be one or more texts, got {texts!r}")
    return rows


def one_list_each(positions: Any) -> bool:
    """Whether positions are a list for each prompt, rather than the same for all."""
    plain = isinstance(positions, str | int | np.integer) or positions is None
    return not plain and not all(isinstance(one, int | np.integer) for one in positions)


def positions_of(positions: Any, prompt: int, count: int) -> Any:
    """The positions in one of `count` prompts."""
    if not one_list_each(positions):
        return positions
    if len(positions) != count:
        raise InputError(f"positions for {len(positions)} prompts, and there are {count}")
    return list(positions[prompt])


def whole_numbers(positions: Any) -> list[int] | None:
    """The positions in every text; None for all of them."""
    if positions is None or (isinstance(positions, str) and positions == "prompt"):
        return None
    several = [positions] if isinstance(positions, int | np.integer) else positions
    if not isinstance(several, Sequence | np.ndarray) or not all(isinstance(one, int | np.integer) for one in several):
        raise InputError(f'positions are integers, or "prompt" or None for all tokens, got {positions!r}')
    return [int(one) for one in several]
