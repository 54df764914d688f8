"""Interventions: what may be done to the value at a hook point, and where on it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mionnx.errors import HookError, InterventionError, nearest
from mionnx.graph.fragment import Fragment
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.onnx_file import ModelProto

Positions = int | str | Sequence[int] | Sequence[Sequence[int]]
# The phases of a text: what was given, and what `generate` made of it (or, in `forward`, what follows prompt_length).
PHASES = ("prompt", "generated")

# kind -> whether it carries a value
KINDS = {
    "replace": True,
    "add": True,
    "knockout": True,
    "scale": True,
    "zero": False,
    "project_out": True,
    "splice": False,
}


@dataclass(frozen=True, eq=False)
class Intervention:
    """One modification of the value at a hook point.

    Made by `Replace`, `Add`, `Knockout`, `Scale`, `Zero`, `ProjectOut` and `Splice`, each with three optional limits:

    * `positions`: token positions, counted from 0 in each row's own text (padding not counted), negative ones from the
      end of its prompt, which is all of it outside a generation; one, a list, or one list a batch row; or a phase,
      "prompt" or "generated". At scores and patterns they select queries.
    * `heads`: heads, counted from 0 (key/value heads at `hook_k`, `hook_rot_k` and `hook_v`).
    * `rows`: batch rows, counted from 0.

    What lies outside the limits keeps its value. A limit that selects nothing, or something that does not exist, is an
    `InterventionError` when the spec is used.

    Attributes:
        kind: one of "replace", "add", "knockout", "scale", "zero", "project_out", "splice".
        value: the tensor, vector, mask, factor or directions; None for "zero" and "splice".
        positions, heads, rows: the limits, None where there is none.
        fragment, reads: of a splice, what is put there, and the hook point that it reads besides.
    """

    kind: str
    value: NDArray[Any] | None = None
    positions: tuple[Any, ...] | str | None = None
    heads: tuple[int, ...] | None = None
    rows: tuple[int, ...] | None = None
    fragment: Fragment | None = None
    reads: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InterventionError(f"no intervention kind {self.kind!r}; the kinds are {', '.join(KINDS)}")
        if KINDS[self.kind] != (self.value is not None):
            raise InterventionError(f"{self.kind} {'needs a' if KINDS[self.kind] else 'takes no'} value")
        if (self.kind == "splice") != (self.fragment is not None):
            raise InterventionError("a splice, and nothing else, has a fragment: Intervention.Splice makes one")

    @classmethod
    def Replace(
        cls,
        tensor: ArrayLike,
        *,
        positions: Positions | None = None,
        heads: int | Iterable[int] | None = None,
        rows: int | Iterable[int] | None = None,
    ) -> "Intervention":
        """Put `tensor` in place of the value.

        Args:
            tensor: of the value's shape. With `positions`, `heads` or `rows` it may instead have the selected part's
                shape, or one that broadcasts to it (a [hidden] vector at chosen positions).
            positions, heads, rows: where; everywhere if none is given.

        Raises:
            InterventionError: NaN in the tensor.
        """
        return cls._of("replace", tensor, positions, heads, rows)

    @classmethod
    def Add(
        cls,
        vector: ArrayLike,
        *,
        positions: Positions | None = None,
        heads: int | Iterable[int] | None = None,
        rows: int | Iterable[int] | None = None,
    ) -> "Intervention":
        """Add `vector`, broadcast to the value's shape and cast to its dtype (steering)."""
        return cls._of("add", vector, positions, heads, rows)

    @classmethod
    def Knockout(
        cls,
        mask: ArrayLike,
        *,
        positions: Positions | None = None,
        heads: int | Iterable[int] | None = None,
        rows: int | Iterable[int] | None = None,
    ) -> "Intervention":
        """Add a mask of 0 (keep) and -inf (knock out) to attention scores, before the softmax.

        Args:
            mask: broadcastable to [batch, n_heads, seq_q, seq_k]; `create_knockout_mask` makes one.
            positions, heads, rows: which queries, heads and rows it applies to.
        """
        return cls._of("knockout", mask, positions, heads, rows)

    @classmethod
    def Scale(
        cls,
        factor: ArrayLike,
        *,
        positions: Positions | None = None,
        heads: int | Iterable[int] | None = None,
        rows: int | Iterable[int] | None = None,
    ) -> "Intervention":
        """Multiply by `factor`: a number, or an array that broadcasts to the value's shape."""
        return cls._of("scale", factor, positions, heads, rows)

    @classmethod
    def Zero(
        cls,
        *,
        positions: Positions | None = None,
        heads: int | Iterable[int] | None = None,
        rows: int | Iterable[int] | None = None,
    ) -> "Intervention":
        """Put zeros in place of the value (ablation)."""
        return cls._of("zero", None, positions, heads, rows)

    @classmethod
    def ProjectOut(
        cls,
        direction: ArrayLike,
        *,
        positions: Positions | None = None,
        heads: int | Iterable[int] | None = None,
        rows: int | Iterable[int] | None = None,
    ) -> "Intervention":
        """Remove a direction: x - (x . d) d with d of unit length, along the value's last axis (direction ablation).

        Args:
            direction: [width], or [k, width] for the subspace that k directions span; normalised here.
            positions, heads, rows: where; everywhere if none is given.

        Raises:
            InterventionError: a zero direction, or directions that depend on each other.
        """
        given = _checked("project_out", _numbers("project_out", direction))
        directions = np.atleast_2d(given).astype(np.float64)
        if directions.ndim != 2 or np.linalg.matrix_rank(directions) < len(directions):
            raise InterventionError(
                f"project_out: directions of shape {list(given.shape)} must be [width] or [k, width], "
                "not zero, and independent of each other"
            )
        basis = np.linalg.qr(directions.T)[0].T  # [k, width], orthonormal
        return cls._of("project_out", basis, positions, heads, rows)

    @classmethod
    def Splice(
        cls,
        fragment: "Fragment | ModelProto | bytes | str | Path",
        *,
        reads: HookPoint | str | None = None,
        positions: Positions | None = None,
        heads: int | Iterable[int] | None = None,
        rows: int | Iterable[int] | None = None,
    ) -> "Intervention":
        """Put a small ONNX model there: the value goes in, and what comes out takes its place.

        See `mionnx.graph.fragment`.

        Values of it whose names begin with `hook_` become hook points, `{hook}.{name}`, which can be captured and
        intervened on in the same spec. Its weights are fed at every call, so that fragments that differ in them share
        one graph.

        Args:
            fragment: a file, the bytes of one, or a model, with one input and one output of the value's shape.
            reads: an earlier hook point; its value is the fragment's second input.
            positions, heads, rows: where its output is put; it is computed everywhere.

        Raises:
            InterventionError: a model that is no fragment.
            ModelError: a file that is missing, corrupt or unsafe.
        """
        if reads is not None and not isinstance(reads, HookPoint | str):
            raise HookError(f"splice: reads={reads!r} is no hook point")
        limits = (_positions(positions), _indices("heads", heads), _indices("rows", rows))
        return cls("splice", None, *limits, Fragment.of(fragment), None if reads is None else str(reads))

    @classmethod
    def _of(cls, kind: str, value: Any, positions: Any, heads: Any, rows: Any) -> "Intervention":
        return cls(
            kind,
            _checked(kind, _numbers(kind, value)) if KINDS.get(kind) else None,
            _positions(positions),
            _indices("heads", heads),
            _indices("rows", rows),
        )

    @property
    def limited(self) -> bool:
        """Whether any of `positions`, `heads`, `rows` is given."""
        return any(limit is not None for limit in (self.positions, self.heads, self.rows))


def _numbers(kind: str, value: ArrayLike) -> NDArray[Any]:
    try:
        array = np.array(value)  # a copy: what the caller does to their array later is not part of the spec
    except (TypeError, ValueError) as error:  # rows of unequal length, or a tensor that numpy cannot read
        raise InterventionError(f"{kind}: the value is no array of numbers: {error}") from error
    if array.dtype.kind not in "fiub" and array.dtype.name != "bfloat16":
        raise InterventionError(f"{kind}: the value must be numbers, got dtype {array.dtype}")
    return array


def _checked(kind: str, array: NDArray[Any]) -> NDArray[Any]:
    if array.size == 0:
        raise InterventionError(f"{kind}: the value is empty (shape {list(array.shape)})")
    values = array.astype(np.float64)
    if np.isnan(values).any():
        where = np.argwhere(np.isnan(values))[0].tolist()
        raise InterventionError(f"{kind}: the value has NaN at {where}")
    if np.isinf(values).any() and (kind != "knockout" or (values == np.inf).any()):
        where = np.argwhere(np.isinf(values))[0].tolist()
        raise InterventionError(f"{kind}: the value is infinite at {where}; only Knockout takes -inf, at hook_scores")
    if kind == "knockout" and not np.isin(values, (0.0, -np.inf)).all():
        raise InterventionError("knockout: a mask holds 0 (keep) and -inf (knock out) only; Add takes other numbers")
    return array


def _indices(what: str, given: int | Iterable[int] | None) -> tuple[int, ...] | None:
    if given is None:
        return None
    given = _plain(given)
    found = tuple(given) if isinstance(given, Iterable) else (given,)
    if not found or not all(isinstance(i, int | np.integer) and not isinstance(i, bool) for i in found):
        raise InterventionError(f"{what} must be one or more integers, got {given!r}")
    if what != "positions" and min(found) < 0:
        raise InterventionError(f"{what} are counted from 0, got {given!r}")
    return tuple(int(i) for i in found)


def _plain(given: Any) -> Any:
    return given.tolist() if isinstance(given, np.ndarray) else given


def _positions(given: Positions | None) -> tuple[Any, ...] | str | None:
    given = _plain(given)
    if isinstance(given, str):
        if given not in PHASES:
            raise InterventionError(f"no phase {given!r}, only {' and '.join(PHASES)}{nearest(given, PHASES)}")
        return given
    if not isinstance(given, Iterable):
        return _indices("positions", given)
    found: list[Any] = list(given)
    if found and not any(entry is None or isinstance(entry, int | np.integer) for entry in found):
        return tuple(_indices("positions", row) for row in found)
    return _indices("positions", found)
