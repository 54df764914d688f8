"""Columns of a harvest: a hook point's value for each token, its size, dtype, and place in a captured array."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.harvest.rows import HarvestRow
from mionnx.bind.plan import BoundCapture
from mionnx.errors import HookError, InputError
from mionnx.graph.axes import has_sequence, sequence_axis
from mionnx.run.hook_cache import HookCache
from mionnx.run.nan_logits import INFINITY

TOKEN_COLUMNS: Mapping[str, "np.dtype[Any]"] = {
    "token_ids": np.dtype(np.int32),
    "text_index": np.dtype(np.int64),
    "positions": np.dtype(np.int32),
}


@dataclass(frozen=True)
class Column:
    """One hook point's values, an entry a token.

    Attributes:
        axis: of the captured array, with one entry a token.
        shape: of one token's value.
        dtype: as it is written.
        own: dtype of the model's value.
    """

    name: str
    axis: int
    shape: tuple[int, ...]
    dtype: "np.dtype[Any]"
    own: "np.dtype[Any]"

    @property
    def bytes_a_token(self) -> int:
        """Size of one token's value."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def rows(self, value: NDArray[Any], rows: Sequence[HarvestRow]) -> list[NDArray[Any]]:
        """Cut the chosen tokens of each row out of a captured array, padded on the left."""
        by_token = np.moveaxis(value, self.axis, 1)
        width = by_token.shape[1]
        cut = (by_token[n, width - len(row) :][row.keep] for n, row in enumerate(rows))
        return [self._cast(one) for one in cut]

    def lost(self, values: Sequence[NDArray[Any]]) -> bool:
        """Whether values, cast to fewer bits by the graph, hold infinity or NaN."""
        if self.dtype.itemsize >= self.own.itemsize or self.dtype not in INFINITY:
            return False
        infinity = INFINITY[self.dtype]
        return any(bool(((one.view(np.uint16) & infinity) == infinity).any()) for one in values)

    def _cast(self, values: NDArray[Any]) -> NDArray[Any]:
        """Values in the dtype that is written."""
        if values.dtype == self.dtype:
            return values
        with np.errstate(over="ignore"):
            cast = values.astype(self.dtype)
        if self.dtype.itemsize < values.dtype.itemsize and not np.isfinite(cast).all() and np.isfinite(values).all():
            raise InputError(f"{self.name} has {np.abs(values).max():.4g}, too large for {self.dtype}: use bfloat16")
        return cast


def columns_of(captures: Sequence[BoundCapture], cache: HookCache, dtype: "np.dtype[Any] | None") -> list[Column]:
    """The columns of captures, from one pass.

    Args:
        dtype: of fractions, as they are written; their own if None.

    Raises:
        HookError: a hook point without one value of fixed size a token.
    """
    columns = []
    for node, own in ((capture.node, capture.dtype) for capture in captures):
        if not has_sequence(node.axes) or {"seq_k", "seq_src"} & {*node.axes}:
            raise HookError(
                f"{node.output} {list(node.axes)} has no value of one size for each token, and cannot be harvested"
            )
        axis, value = sequence_axis(node.axes), cache[node.output]
        shape = tuple(size for at, size in enumerate(value.shape) if at not in (0, axis))
        written = np.dtype(np.int32) if own == np.int64 else own
        columns.append(Column(node.output, axis, shape, written if own.kind in "iub" or dtype is None else dtype, own))
    return columns


def token_columns(row: HarvestRow) -> dict[str, NDArray[Any]]:
    """Ids, texts and positions of the wanted tokens of a row."""
    parts = (row.ids, row.text, row.position)
    return {name: part[row.keep].astype(kind) for (name, kind), part in zip(TOKEN_COLUMNS.items(), parts, strict=True)}
