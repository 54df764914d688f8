"""Limits of an intervention, checked: token positions, heads, batch rows, experts, neurons."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

import numpy as np

from mionnx.errors import InterventionError, nearest
from mionnx.machine.arrays import is_tensor, to_array
from mionnx.machine.ranges import listed
from mionnx.machine.typed import shown

Positions = int | str | Sequence[int] | Sequence[Sequence[int]]
Indices = int | Iterable[int]
LATER = ("experts", "neurons")  # limits that an entry of a spec file leaves out where they are not given


class RowLimits(TypedDict, total=False):
    """Limits of a kind that adds a mask to attention scores."""

    positions: Positions | None
    heads: Indices | None
    rows: Indices | None


class ExpertLimits(RowLimits, total=False):
    """Limits of a kind that works along the last axis."""

    experts: Indices | None


class Limits(ExpertLimits, total=False):
    """Limits of an intervention; see `mionnx.spec.intervention.Intervention`."""

    neurons: Indices | None


LIMITS = tuple(Limits.__annotations__)
# Phases of a text: the prompt, and what `generate` added to it (or, in `forward`, what follows prompt_length).
PHASES = ("prompt", "generated")


def checked(limits: Mapping[str, Any]) -> dict[str, Any]:
    """Limits by name, each as a tuple or a phase; None where there is none."""
    # Positions are checked apart: they may be a phase, or a list for each row.
    indices = {name: check_indices(name, limits.get(name)) for name in LIMITS[1:]}
    return {"positions": check_positions(limits.get("positions")), **indices}


def check_indices(what: str, indices: Indices | None) -> tuple[int, ...] | None:
    """Indices as a tuple; None stays None."""
    return None if indices is None else indices_of(what, indices)


def indices_of(what: str, indices: Indices) -> tuple[int, ...]:
    """One or more integers as a tuple; of "positions" alone they may be negative."""
    if isinstance(indices, Mapping):
        raise InterventionError(f"{what} must be one or more integers, got the dictionary {indices!r:.60}")
    indices = _plain(indices)
    entries = tuple(listed(what, indices, InterventionError)) if isinstance(indices, Iterable) else (indices,)
    try:
        # True is an integer to Python, and no index.
        numbers = tuple(operator.index(entry) for entry in entries if not isinstance(entry, bool))
    except TypeError:
        numbers = ()
    if not entries or len(numbers) < len(entries):
        raise InterventionError(f"{what} must be one or more integers, got {shown(entries)}")
    if what != "positions" and min(numbers) < 0:
        raise InterventionError(f"{what} are counted from 0, got {shown(entries)}")
    return numbers


def check_positions(limit: Positions | None) -> tuple[Any, ...] | str | None:
    """Positions as a tuple, as a tuple of one tuple a batch row, or a phase by name."""
    positions: Any = _plain(limit)
    if isinstance(positions, str):
        if positions not in PHASES:
            raise InterventionError(f"no phase {positions!r}, only {' and '.join(PHASES)}{nearest(positions, PHASES)}")
        return positions
    if not isinstance(positions, Iterable) or isinstance(positions, Mapping):
        return check_indices("positions", positions)
    entries = listed("positions", positions, InterventionError)
    # Rows of lists; a list of integers and None is a wrong list of positions, and refused as such.
    if entries and not any(entry is None or isinstance(entry, int | np.integer) for entry in entries):
        return tuple(check_indices("positions", row) for row in entries)
    return check_indices("positions", entries)


def _plain(limit: Any) -> Any:
    if not (isinstance(limit, np.ndarray) or is_tensor(limit)):
        return limit
    try:
        return to_array(limit).tolist()
    except ValueError as error:
        raise InterventionError(f"a limit must be one or more integers, got {shown(limit)}: {error}") from error
