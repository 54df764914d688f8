"""The axes of a hook point, as the metadata of a hooked model have them."""

from collections.abc import Sequence

from mionnx.errors import ExportError
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.metadata import Sizes

DYNAMIC = ("batch", "seq", "seq_q", "seq_k")


def axes_of(name: str, shape: Sequence[int | None], sizes: Sizes) -> list[str | int]:
    """The axes of a hook point, dynamic ones by name.

    Args:
        name: of the hook point.
        shape: of its value, of a run or as the graph says; None where it is not known.
        sizes: of the model.

    Raises:
        ExportError: the value has other axes than the hook point, or other sizes (queries of which only a part is
            rotated, say, and only that part was seen).
    """
    names = HookPoint.parse(name).axes or ()
    known = {
        "hidden": sizes.hidden_size,
        "n_heads": sizes.num_heads,
        "n_kv_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "vocab": sizes.vocab_size,
    }
    expected = [known.get(axis) for axis in names]
    if len(shape) != len(names) or any(
        None not in (dim, size) and dim != size for dim, size in zip(shape, expected, strict=True)
    ):
        raise ExportError(f"{name} has the shape {[*shape]}, expected {[known.get(axis, axis) for axis in names]}")
    return [axis if dim is None or axis in DYNAMIC else dim for axis, dim in zip(names, shape, strict=True)]
