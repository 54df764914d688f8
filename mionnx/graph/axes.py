"""Axes of a value by name: its sequence and heads axis, the sizes of dynamic axes, and a shape in words."""

from collections.abc import Mapping, Sequence

HEAD_AXES = ("n_heads", "n_kv_heads")  # axes that count heads
EXPERTS, CHOSEN = "n_experts", "n_chosen"  # axes of all experts, and of those that a token chose
NEURON_AXES = ("d_mlp", "d_expert")  # axes of neurons, of an MLP and of each chosen expert
SEQUENCE_AXES = ("seq_q", "seq")  # axes with one entry per token of a pass
KEYS = "seq_k"  # an axis with one entry per token of the past and of a pass
TOKEN_AXES = (*SEQUENCE_AXES, "seq_src", KEYS)  # axes whose size a text's length gives


def heads_axis(axes: Sequence[str]) -> int | None:
    """The index of the axis that counts heads; None if there is none."""
    return next((i for i, axis in enumerate(axes) if axis in HEAD_AXES), None)


def neurons_axis(axes: Sequence[str]) -> int | None:
    """The index of the axis that counts neurons; None if there is none."""
    return next((i for i, axis in enumerate(axes) if axis in NEURON_AXES), None)


def has_sequence(axes: Sequence[str]) -> bool:
    """Whether a value has one entry per token of a pass."""
    return not {*SEQUENCE_AXES}.isdisjoint(axes)


def sequence_axis(axes: Sequence[str]) -> int:
    """Index of the axis with one entry per token; the query axis of scores and patterns."""
    return axes.index("seq_q") if "seq_q" in axes else axes.index("seq")


def dynamic_sizes(batch: int, seq: int, total: int) -> dict[str, int]:
    """Axis name -> size of the dynamic axes in one pass; `total` counts past and new tokens."""
    return {"batch": batch, "seq": seq, "seq_q": seq, "seq_k": total, "seq_src": seq}


def shape_of(axes: Sequence[str | int], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of a value, from its axes and the sizes of the dynamic ones."""
    return tuple(axis if isinstance(axis, int) else sizes[axis] for axis in axes)


def format_shape(axes: Sequence[str | int], shape: Sequence[int]) -> str:
    """A shape for messages, with the names of its axes: "[batch=1, seq=8, hidden=64]"."""
    return "[" + ", ".join(f"{axis}={size}" for axis, size in zip(axes, shape, strict=True)) + "]"
