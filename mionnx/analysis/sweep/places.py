"""Named positions of a sweep: other token positions in each prompt under one name, so that prompts align."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mionnx.analysis.sweep.grid import Places
from mionnx.errors import InputError, TokenizerError
from mionnx.inputs.tokens import Tokens
from mionnx.run.prompt import Ids
from mionnx.run.runner import Runner
from mionnx.run.tokenizing import Prompt

Place = int | str | Sequence[int]
Positions = Mapping[str, Place | Sequence[Place]]


def find_places(model: Runner, prompts: Prompt, ids: Sequence[Ids], positions: Positions) -> list[Places]:
    """Find the token positions under each name, in each prompt.

    Args:
        model: tokenises.
        prompts: the prompts as they were given; strings are found in their texts.
        ids: their tokens, [seq] each.
        positions: name -> an index, a string that stands for all of its tokens, or a list with one of these for each
            prompt (or a list of several indices).

    Returns:
        for each prompt, for each name, ascending positions from 0.
    """
    if not isinstance(positions, Mapping) or not positions:
        raise InputError(f"positions={positions!r} names none; {{'subject': ['France', 'Spain'], 'last': -1}} does")
    texts = _texts(model, prompts, len(ids))
    columns = [_each(name, place, len(ids)) for name, place in positions.items()]
    return [
        tuple(
            _place_of(f"prompt {number}: position {name!r}", column[number], texts[number], len(row))
            for name, column in zip(positions, columns, strict=True)
        )
        for number, row in enumerate(ids)
    ]


def _texts(model: Runner, prompts: Any, count: int) -> list[Tokens | None]:
    """Prompts as tokenised texts; None for those that came as ids."""
    entries = [prompts] if isinstance(prompts, str | Tokens) else list(prompts)
    if len(entries) != count:
        return [None] * count  # one prompt of ids
    return [
        model.tokenize(one) if isinstance(one, str) else one if isinstance(one, Tokens) else None for one in entries
    ]


def _each(name: str, place: Any, count: int) -> list[Any]:
    """The place of one name in each prompt."""
    if isinstance(place, str) or not isinstance(place, Iterable):
        return [place] * count
    entries: list[Any] = [*place]
    if len(entries) != count:
        raise InputError(f"positions[{name!r}] has {len(entries)} entries for {count} prompts")
    return entries


def _place_of(what: str, place: Any, text: Tokens | None, length: int) -> tuple[int, ...]:
    if isinstance(place, str):
        if text is None:
            raise InputError(f"{what}: {place!r} is found in a text, and this prompt came as ids")
        try:
            return tuple(text.positions_of(place))
        except TokenizerError as error:
            raise InputError(f"{what}: {error}") from error
    indices = [*place] if isinstance(place, Iterable) else [place]
    for index in indices:
        if not isinstance(index, int | np.integer) or not -length <= index < length:
            raise InputError(f"{what}: {index!r} of {length} tokens (0 to {length - 1})")
    if not indices:
        raise InputError(f"{what} is an empty list")
    return tuple(sorted({int(index) % length for index in indices}))
