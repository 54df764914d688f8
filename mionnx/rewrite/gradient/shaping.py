"""Rules of operators that move numbers: reshaping, joining, cutting, padding, gathering and scattering."""

from collections.abc import Mapping

import numpy as np
from onnx import NodeProto, TensorProto

from mionnx.errors import GradientError
from mionnx.rewrite.gradient.backward import NARROW_FLOATS, Backward, Rule, Upstream, numbers


def _reshape(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    # a length of 0 is one, not "as the input's"
    return {0: op.Reshape(upstream[0], op.Shape(node.input[0]), allowzero=1)}


def _unsqueeze(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    return {0: op.Squeeze(upstream[0], node.input[1])}


def _squeeze(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    # without axes the run decides which of length 1 go
    return {0: op.Unsqueeze(upstream[0], node.input[1])} if len(node.input) > 1 else _reshape(op, node, upstream)


def _transpose(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    perm = op.attribute(node, "perm", None) or [*range(op.rank(node.input[0]))][::-1]
    return {0: op.Transpose(upstream[0], perm=[int(i) for i in np.argsort(perm)])}  # the inverse permutation


def _expand(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    return {0: op.unbroadcast(str(upstream[0]), node.input[0], op.facts.shapes.get(node.output[0]))}


def _tile(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    """Each axis is split into its repeats and its own length; the repeats are summed."""
    x, rank = node.input[0], op.rank(node.input[0])
    pairs = op.Concat(op.Unsqueeze(node.input[1], [1]), op.Unsqueeze(op.Shape(x), [1]), axis=1)
    split = op.Reshape(upstream[0], op.Reshape(pairs, [-1]), allowzero=1)
    return {0: op.ReduceSum(split, [*range(0, 2 * rank, 2)], keepdims=0)}


def _concat(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    axis, entries = op.attribute(node, "axis", 0), [*node.input]
    if len(entries) == 1:
        return {0: str(upstream[0])}
    active = [i for i, name in enumerate(entries) if op.is_active(name)]
    lengths = [op.length(name, axis) for name in entries]
    # of several a Split, whose other parts nobody reads; of one, as behind a cache, its slice alone
    if len(active) > 1:
        parts = op.Split(upstream[0], op.Concat(*lengths, axis=0), axis=axis, outputs=len(entries))
        return dict(enumerate(parts))
    (at,) = active
    start = op.sum(lengths[:at]) if at else [0]
    return {at: op.Slice(upstream[0], start, op.Add(start, lengths[at]) if at else lengths[at], [axis])}


def _split(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    # zeros for a part that nothing active reads
    parts = [one or op.zeros(name) for one, name in zip(upstream, node.output, strict=True)]
    return {0: op.Concat(*parts, axis=op.attribute(node, "axis", 0))}


def _slice(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    """Numbers go back to where they came from, zeros stand elsewhere."""
    x, starts, _, *rest = node.input
    axes = numbers(op, rest[0]) if rest and rest[0] else np.arange(_count(op, starts))
    steps = numbers(op, rest[1]) if rest[1:] and rest[1] else np.ones(len(axes), int)
    rank = op.rank(x)
    places = [int(axis) % rank for axis in axes]
    if (steps == 1).all():
        return {0: _padded_back(op, x, starts, places, str(upstream[0]))}
    # numbers are added back along one axis at a time
    if len(places) > 1:
        raise GradientError("a slice by steps along several axes")
    indices = op.Range(0, op.Squeeze(op.length(x, places[0])), 1)
    taken = op.Slice(indices, starts, node.input[2], [0], rest[1])
    return {0: scattered(op, x, str(upstream[0]), taken, places[0], 1)}


def _count(op: Backward, index: str) -> int:
    """The length of a list of places."""
    shape = op.facts.shapes.get(index)
    if shape is None or len(shape) != 1 or not isinstance(shape[0], int):
        raise GradientError(f"only the run knows how many axes {index} cuts")
    return shape[0]


def _padded_back(op: Backward, x: str, starts: str, places: list[int], dy: str) -> str:
    """A slice by steps of 1 gets zeros ahead up to its start, and behind up to the length."""
    pads: dict[int, tuple[str, str]] = {}
    for i, axis in enumerate(places):
        length = op.length(x, axis)
        start = op.Gather(starts, [i], axis=0)
        start = op.Where(op.Less(start, 0), op.Add(start, length), start)  # negative starts count from the end
        before = op.Max(op.Min(start, length), [0])  # clamped as Slice does it
        pads[axis] = before, op.Sub(op.Sub(length, before), op.length(dy, axis))
    none = ([0], [0])
    # pads of all axes: ONNX Runtime 1.31 moves a transposition across a `Pad` of some axes wrongly
    every = [pads.get(axis, none) for axis in range(op.rank(x))]
    amounts = op.Concat(*[before for before, _ in every], *[after for _, after in every], axis=0)
    return str(op.Pad(dy, amounts, op.constant(0, x)))


def scattered(op: Backward, x: str, dy: str, index: str, axis: int, index_rank: int, shape: str | None = None) -> str:
    """Add rows of the cotangent `dy` to the places of `x`, or of a `shape`, along an axis that they were taken from."""
    rank, shape = op.rank(x), shape or op.Shape(x)
    axis %= rank
    places = op.Unsqueeze(_from_start(op, index, op.length(x, axis)), [-1])
    # ScatterND adds whole entries of the leading axis: any other axis is brought to the front, and back
    if axis == 0:
        return added_at(op, "ScatterND", shape, places, dy)
    first = [axis, *range(axis), *range(axis + 1, rank)]
    ahead = [*range(axis, axis + index_rank), *range(axis), *range(axis + index_rank, rank - 1 + index_rank)]
    result = added_at(op, "ScatterND", op.Gather(shape, first, axis=0), places, op.Transpose(dy, perm=ahead))
    return str(op.Transpose(result, perm=[int(i) for i in np.argsort(first)]))


def added_at(op: Backward, operator: str, shape: str, places: str, dy: str, **settings: int) -> str:
    """Zeros, and numbers added to them at places."""
    kind = op.facts.type(dy)
    # ONNX Runtime adds no float16 at places on a CPU
    wide = TensorProto.FLOAT if kind in NARROW_FLOATS else kind
    parts = op.Cast(dy, to=wide) if wide != kind else dy
    result = getattr(op, operator)(op.filled_to(0, shape, wide), places, parts, reduction="add", **settings)
    return str(op.Cast(result, to=kind) if wide != kind else result)


def _from_start(op: Backward, index: str, length: str) -> str:
    """Indices with negative ones counted from the start."""
    number = op.facts.number(index)
    if number is not None and (number >= 0).all():
        return index
    wide = op.Cast(index, to=TensorProto.INT64)
    return str(op.Where(op.Less(wide, 0), op.Add(wide, length), wide))


def _gather(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    x, index = node.input
    return {0: scattered(op, x, str(upstream[0]), index, op.attribute(node, "axis", 0), op.rank(index))}


def _gather_elements(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    x, index = node.input
    axis = op.attribute(node, "axis", 0)
    return {0: added_at(op, "ScatterElements", op.Shape(x), index, str(upstream[0]), axis=axis)}


def _top_k(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    """Values of TopK, and of a sorting, go back to their places."""
    x, index = node.input[0], node.output[1]
    axis = op.attribute(node, "axis", -1)
    return {0: added_at(op, "ScatterElements", op.Shape(x), index, str(upstream[0]), axis=axis)}


def _gather_nd(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    """ScatterND has no batch axes: they become a part of the index."""
    x, index = node.input
    rank = op.rank(index)
    # the index's shape without its last axis, the coordinates; each batch axis becomes a coordinate ahead of them
    own = op.Slice(op.Shape(index), [0], [rank - 1], [0])
    for axis in reversed(range(op.attribute(node, "batch_dims", 0))):
        order = op.Range(0, op.Squeeze(op.length(x, axis)), 1)
        column = op.Reshape(order, [-1 if i == axis else 1 for i in range(rank)])
        index = op.Concat(op.Expand(column, op.Concat(own, [1], axis=0)), index, axis=-1)
    return {0: added_at(op, "ScatterND", op.Shape(x), index, str(upstream[0]))}


def _scatter_nd(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    x, index, updates = node.input
    how = _reduction(op, node)
    cotangents = {}
    if op.is_active(x):
        # what was written over has no share in the output: zeros at its places
        cotangents[0] = str(upstream[0]) if how == "add" else op.ScatterND(upstream[0], index, op.zeros(updates))
    if op.is_active(updates):
        cotangents[2] = op.GatherND(upstream[0], index)
    return cotangents


def _scatter_elements(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    x, index, updates = node.input
    how, axis, cotangents = _reduction(op, node), op.attribute(node, "axis", 0), {}
    if op.is_active(x):
        additive = how == "add"
        cotangents[0] = (
            str(upstream[0]) if additive else op.ScatterElements(upstream[0], index, op.zeros(updates), axis=axis)
        )
    if op.is_active(updates):
        cotangents[2] = op.GatherElements(upstream[0], index, axis=axis)
    return cotangents


def _reduction(op: Backward, node: NodeProto) -> str:
    how = str(op.attribute(node, "reduction", "none"))
    if how not in ("none", "add"):
        raise GradientError(f"scattering with the reduction {how!r}")
    return how


def _pad(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    x, pads = node.input[:2]
    if (mode := op.attribute(node, "mode", "constant")) != "constant":
        raise GradientError(f"padding of mode {mode!r}, which repeats numbers")
    some = len(node.input) > 3 and node.input[3]  # axes; all of them where they are left out
    axes = node.input[3] if some else [*range(op.rank(x))]
    lengths = op.Gather(op.Shape(x), axes, axis=0) if some else op.Shape(x)
    start = op.Slice(pads, [0], op.Shape(lengths), [0])
    return {0: op.Slice(upstream[0], start, op.Add(start, lengths), axes)}


def _trilu(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    return {0: op.Trilu(upstream[0], *node.input[1:], upper=op.attribute(node, "upper", 1))}


SHAPING_RULES: dict[str, Rule] = {
    "Concat": _concat,
    "Expand": _expand,
    "Flatten": _reshape,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "Pad": _pad,
    "Reshape": _reshape,
    "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd,
    "Slice": _slice,
    "Split": _split,
    "Squeeze": _squeeze,
    "Tile": _tile,
    "TopK": _top_k,
    "Transpose": _transpose,
    "Trilu": _trilu,
    "Unsqueeze": _unsqueeze,
}
