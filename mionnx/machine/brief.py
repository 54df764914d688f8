"""`Brief`: results as text of few lines; an array is told by its dtype and shape."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

WIDTH = 110  # characters of a line
LINES = 8  # of a printed result
ITEMS = 6  # of a list or tuple that are written out
TEXT_LETTERS = 40  # of a text
DEPTH = 4  # of lists in lists


class Brief:
    """Base of results: `repr` is a line, and `print` shows the most important numbers below.

    A class says its facts in `_facts`, and its numbers in `_lines`; by default the facts are its attributes.
    """

    def _facts(self) -> Iterable[str]:
        shown = {name: value for name, value in vars(self).items() if not name.startswith("_") and value is not None}
        return [f"{name.rstrip('_')}={spelled(value)}" for name, value in shown.items()]

    def _lines(self) -> Iterable[str]:
        """Further lines of the printed result, the most important first."""
        return ()

    def __repr__(self) -> str:
        return cut(f"{type(self).__name__}({', '.join(self._facts())})", WIDTH)

    def __str__(self) -> str:
        return "\n".join([repr(self), *(f"  {cut(line, WIDTH - 2)}" for line in _first(self._lines(), LINES - 1))])


def spelled(value: Any, depth: int = DEPTH) -> str:
    """Spell a value in few letters: arrays by dtype and shape, long lists by their first items."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return shape_of(value)
    if isinstance(value, str):
        return repr(cut(value, TEXT_LETTERS))
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        if not depth:
            return "{…}"
        entries = (f"{key!r}: {spelled(one, depth - 1)}" for key, one in islice(value.items(), ITEMS))
        return "{" + ", ".join(entries) + _more(value, "}")
    if isinstance(value, list | tuple):
        if not depth:
            return "[…]"
        return "[" + ", ".join(spelled(one, depth - 1) for one in value[:ITEMS]) + _more(value, "]")
    return cut(_written(value), WIDTH)


def _written(value: Any) -> str:
    """Python's own text of a value, or its class where values are nested too deeply."""
    try:
        return repr(value)
    except RecursionError:
        return f"{type(value).__name__}(…)"


def shape_of(value: Any) -> str:
    """Dtype and shape of an array, "float32 [4, 5]"; a single number is written out."""
    if len(value.shape) == 0:
        number = value.item() if hasattr(value, "item") else value.dtype
        return f"{number:.4g}" if isinstance(number, int | float) else str(number)
    return f"{value.dtype} {list(value.shape)}"


def count(number: int, noun: str) -> str:
    """A number of things: "1 layer", "4 layers"."""
    return f"{number} {noun}{'s' * (number != 1)}"


def cut(text: str, most: int) -> str:
    """A text in one line of at most so many characters; a longer one ends in "…"."""
    line = text.replace("\n", "⏎")
    return line if len(line) <= most else line[: most - 1] + "…"


def _more(items: Any, end: str) -> str:
    return f", … {len(items)} in all{end}" if len(items) > ITEMS else end


def _first(lines: Iterable[str], most: int) -> Iterator[str]:
    """The first lines; if there are more than fit, the last says how many are left out."""
    entries = list(lines)
    yield from entries if len(entries) <= most else [*entries[: most - 1], f"… and {len(entries) - most + 1} more"]
