"""Attention knockout: edges by query and key position, as a mask of 0 and -inf."""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mionnx.errors import InterventionError
from mionnx.machine.arrays import read_dtype, zeros
from mionnx.machine.brief import Brief
from mionnx.machine.stored import Storable
from mionnx.machine.typed import shown, typed
from mionnx.spec.limits import indices_of

MOST_INDICES = 2**16  # layers, or heads, of any model


@typed(InterventionError)
@dataclass(repr=False)
class LayerTargets(Brief, Storable):
    """Layers, chained: `.layer(0).layer_range(2, 5)`; all layers by default."""

    layers_: list[int] | None = None

    def __post_init__(self) -> None:
        if self.layers_ is not None:
            self.layers_ = [*indices_of("layers", self.layers_)]

    def layer(self, layer: int) -> Self:
        """Add one layer."""
        return self.layers([layer])

    def layers(self, layers: Iterable[int]) -> Self:
        """Add layers."""
        self.layers_ = [*(self.layers_ or []), *indices_of("layers", layers)]
        return self

    def layer_range(self, start: int, end: int) -> Self:
        """Add the layers from `start` to `end`, both included."""
        if end < start:
            raise InterventionError(
                f"layer_range({start}, {end}) is empty: the end is included and must not lie before"
            )
        # Counted before the list is made: a range may have a length of any size.
        return self.layers(range(start, start + at_most("layers", end + 1 - start)))

    def target_layers(self, num_layers: int) -> list[int]:
        """The selected layers of a model with `num_layers` layers; others are refused."""
        if self.layers_ is None:
            return list(range(at_most("layers", num_layers)))
        if max(self.layers_) >= num_layers:
            raise InterventionError(
                f"{self.title}: layer {max(self.layers_)} of a model with {num_layers} layers (0 to {num_layers - 1})"
            )
        return sorted(set(self.layers_))

    @property
    def title(self) -> str:
        """Name in messages."""
        return "knockout"


@typed(InterventionError)
class HeadTargets:
    """Heads, chained: `.head(0).heads([2, 5])`; all heads by default."""

    heads_: list[int] | None

    def head(self, head: int) -> Self:
        """Add one head."""
        return self.heads([head])

    def heads(self, heads: Iterable[int]) -> Self:
        """Add heads."""
        self.heads_ = [*(self.heads_ or []), *indices_of("heads", heads)]
        return self


@typed(InterventionError)
@dataclass(repr=False)
class KnockoutSpec(LayerTargets, HeadTargets):
    """Attention edges to knock out: `KnockoutSpec().layer(3).head(0).edge(query, key)`.

    Without `head` or `heads` every head is meant, without any layer every layer. `edge` names single edges;
    `from_position` all edges out of a query position, `to_position` all edges into a key position. Positions count from
    0 in a row's own text; negative ones from the end of the text that the mask is made for. In an encoder a query reads
    later keys too: `create_knockout_mask(..., both=True)`.
    """

    heads_: list[int] | None = None
    edges: list[tuple[int | None, int | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads_ is not None:
            self.heads_ = [*indices_of("heads", self.heads_)]

    def edge(self, query: int, key: int) -> Self:
        """Cut one edge: the query at one position cannot read the key at another."""
        self.edges.append((integer("position", query), integer("position", key)))
        return self

    def from_position(self, query: int) -> Self:
        """Cut the query at a position off from every other position; it still reads itself."""
        self.edges.append((integer("position", query), None))
        return self

    def to_position(self, key: int) -> Self:
        """Cut the other queries off from the key at a position; the position still reads itself."""
        self.edges.append((None, integer("position", key)))
        return self

    def length_of_any_text(self, both: bool = False) -> int:
        """Number of positions of the mask for texts of any length; `both` for an encoder."""
        for query, key in self.edges:
            # From the end, or from every query on, an edge depends on the text's length.
            if query is None or (both and key is None) or min(query, key or 0) < 0:
                raise InterventionError(
                    f"edge {'*' if query is None else query}>{'*' if key is None else key} is another one in each "
                    "text, and here are texts of any length: write edges between positions from 0, as 4>2"
                )
        return 1 + max(max(query, key or 0) for query, key in self.edges if query is not None)


def integer(what: str, value: int) -> int:
    """Check that `value` is an integer."""
    try:
        return operator.index(value)
    except TypeError:
        raise InterventionError(f"a {what} is an integer, got {shown(value)}") from None


def at_most(what: str, number: int) -> int:
    """Check that a model can have so many layers or heads, before a list of them is made."""
    if not 0 <= number <= MOST_INDICES:
        raise InterventionError(f"{number} {what}: a model has 0 to {MOST_INDICES}")
    return number


def parse_edges(text: str) -> KnockoutSpec:
    """Parse edges of a command line: QUERY>KEY, comma separated, `*` for all of one side."""
    spec = KnockoutSpec()
    for edge in text.split(","):
        query, arrow, key = edge.partition(">")
        if not arrow or query == key == "*":
            raise InterventionError(f"{edge!r} is no edge: write QUERY>KEY, with * for all of one side")
        spec.edges.append((_parsed(query, text), _parsed(key, text)))
    return spec


def _parsed(number: str, text: str) -> int | None:
    try:
        return None if number == "*" else int(number)
    except ValueError:
        raise InterventionError(f"{text!r}: {number!r} is no integer") from None


@typed(InterventionError)
def create_knockout_mask(
    spec: KnockoutSpec,
    n_heads: int,
    seq_len: int | Sequence[int],
    dtype: DTypeLike = np.float32,
    *,
    both: bool = False,
) -> NDArray:
    """Build the mask of a knockout, to be added to attention scores.

    Its rows and columns are positions of a text, padding not counted, whatever batch the text stands in.

    Args:
        spec: edges and heads. Its layers do not shape the mask; they say at which layers to use it.
        n_heads: query heads of the model.
        seq_len: length of the text, past included; or one length for each row of a batch, from whose end that row's
            negative positions then count.
        dtype: a floating dtype.
        both: whether queries read later keys too, as in an encoder (`model.bidirectional`): edges to later positions
            exist then, and `from_position` and `to_position` cut on both sides.

    Returns:
        [1 or rows, n_heads, seq_len, seq_len] (query, key): 0 to keep, -inf to knock out; of several lengths the
            longest.

    Raises:
        InterventionError: no edge, an edge or head that does not exist, an edge to a later position, or a dtype that
            has no infinity.

    Example:
        mask = create_knockout_mask(KnockoutSpec().edge(-1, 3), model.num_heads, len(tokens))
    """
    kind = _floating(dtype)
    if not spec.edges:
        raise InterventionError("a KnockoutSpec without edge, from_position or to_position knocks nothing out")
    if n_heads < 1:
        raise InterventionError(f"n_heads must be 1 or more, got {n_heads}")
    lengths = _lengths(seq_len)
    heads = slice(None) if spec.heads_ is None else spec.heads_
    if spec.heads_ is not None and max(spec.heads_) >= n_heads:
        raise InterventionError(f"head {max(spec.heads_)} of {n_heads} heads (0 to {n_heads - 1})")
    # Refuses what memory has no room for.
    mask = zeros((len(lengths), n_heads, max(lengths), max(lengths)), kind, InterventionError)
    for row, length in zip(mask, lengths, strict=True):
        # Behind its own length a row's mask stays 0: a shorter row takes its part.
        row[heads, :length, :length] = np.where(_blocked(spec, length, both), -np.inf, 0)
    return mask


def _floating(dtype: DTypeLike) -> "np.dtype[Any]":
    kind = read_dtype(dtype, InterventionError)
    if kind.kind != "f" and kind.name != "bfloat16":
        raise InterventionError(f"a knockout mask holds -inf, which {kind} does not have")
    return kind


def _lengths(seq_len: int | Sequence[int]) -> list[int]:
    entries = [seq_len] if isinstance(seq_len, int | np.integer) else seq_len
    if not isinstance(entries, Iterable) or isinstance(entries, str):
        raise InterventionError(f"a length is an integer, or one for each row, got {seq_len!r}")
    lengths = [integer("length", entry) for entry in entries]
    if not lengths or min(lengths) < 1:
        raise InterventionError(f"a text has a length of at least 1, got {seq_len!r}")
    return lengths


def _blocked(spec: KnockoutSpec, length: int, both: bool) -> NDArray[np.bool_]:
    """[length, length]: the edges of a text that are cut."""
    blocked, places = np.zeros((length, length), bool), np.arange(length)
    for edge in spec.edges:
        query, key = (_index(position, length) for position in edge)
        if query is not None and key is not None:
            if key > query and not both:
                raise InterventionError(
                    f"edge({query}, {key}): a query never reads a later key, so there is nothing to knock out; in an "
                    "encoder it does: both=True"
                )
            blocked[query, key] = True
        elif query is not None:
            if query == 0 and not both:
                raise InterventionError("from_position(0): the first position reads only itself")
            blocked[query] |= places != query if both else places < query
        elif key is not None:
            if key == length - 1 and not both:
                raise InterventionError(f"to_position({key}): no later position reads the last one")
            blocked[:, key] |= places != key if both else places > key
    if not blocked.any():
        raise InterventionError("a text of one token has no edge but that to itself: nothing would be knocked out")
    return blocked


def _index(position: int | None, seq_len: int) -> int | None:
    if position is None:
        return None
    if not -seq_len <= position < seq_len:
        raise InterventionError(f"position {position} of a sequence of {seq_len} (0 to {seq_len - 1})")
    return position % seq_len
