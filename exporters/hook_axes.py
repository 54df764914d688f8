"""The axes of a hook point, as the metadata of a hooked model have them."""

from collections.abc import Sequence

from mionnx.errors import ExportError
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.layers import Heads, Recurrence
from mionnx.graph.sizes import Sizes, axis_sizes

DYNAMIC = ("batch", "seq", "seq_q", "seq_k")


def axes_of(
    name: str,
    shape: Sequence[int | None],
    sizes: Sizes,
    heads: Heads | None = None,
    recurrence: Recurrence | None = None,
) -> list[str | int]:
    """The axes of a hook point, dynamic ones by name; `heads`, where they differ from `sizes`, are of its layer."""
    point = HookPoint.parse(name)
    names = point.axes or ()
    sizes_of_axes = axis_sizes(point, sizes, heads or (sizes.num_kv_heads, sizes.head_dim, sizes.head_dim), recurrence)
    expected = [sizes_of_axes.get(axis) for axis in names]
    if len(shape) != len(names) or any(
        None not in (dim, size) and dim != size for dim, size in zip(shape, expected, strict=True)
    ):
        raise ExportError(
            f"{name} has the shape {[*shape]}, expected {[sizes_of_axes.get(axis, axis) for axis in names]}"
        )
    # a run had some batch and length: their axes stay names
    return [axis if dim is None or axis in DYNAMIC else dim for axis, dim in zip(names, shape, strict=True)]
