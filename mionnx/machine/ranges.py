"""Numbers within their range: indices, counts and sizes from outside."""

from collections.abc import Iterable
from itertools import islice
from typing import Any

from mionnx.errors import InputError, MIError

MOST_ENTRIES = 2**20  # entries of a list of indices or prompts; more than any text has positions


def index_within(what: str, index: int, count: int, error: type[MIError] = InputError) -> int:
    """An index from 0; a negative one counts from the end."""
    if not -count <= index < count:
        raise error(f"{what} {index} of {count} (0 to {count - 1}; negative ones count from the end)")
    return index % count


def at_most(what: str, number: float, most: float, error: type[MIError] = InputError) -> None:
    """Refuse a number above its largest value."""
    if not number <= most:
        raise error(f"{what} must be {most:,} or below, got {number}")


def at_least(what: str, number: float, least: float, error: type[MIError] = InputError) -> None:
    """Refuse a number below its least value."""
    if not number >= least:
        raise error(f"{what} must be {least} or above, got {number}")


def listed(what: str, values: Iterable[Any], error: type[MIError] = InputError) -> list[Any]:
    """The entries of an iterable, at most a million, as it may be without end."""
    entries = list(islice(values, MOST_ENTRIES + 1))
    if len(entries) > MOST_ENTRIES:
        raise error(f"{what} has more than {MOST_ENTRIES:,} entries: give fewer")
    return entries
