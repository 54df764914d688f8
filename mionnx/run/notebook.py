"""A model as a small table in a notebook: its sizes and hook points."""

from typing import TYPE_CHECKING

from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.view import card

if TYPE_CHECKING:
    from mionnx.run.runner import Runner


def model_html(model: "Runner") -> str:
    """The model's folder, dtype and hook points with their axes, as HTML without scripts."""
    hooked = model.hooked
    rows = [("folder", str(hooked.folder), ""), ("weights", hooked.metadata.dtype, "")]
    points = dict.fromkeys(_row(hooked, point) for point in hooked.hook_points())
    return card(repr(model), [*rows, *((name, shape, "") for name, shape in points)])


def _row(hooked: HookedModel, point: HookPoint) -> tuple[str, str]:
    """Name of a hook point with {i} for the layer, and its axes."""
    name = point.name if point.layer is None else point.name.replace(f".{point.layer}.", ".{i}.", 1)
    sizes = zip(point.axes or (), hooked.axes(point), strict=True)
    return name, "[" + ", ".join(str(size) if axis == size else f"{axis}={size}" for axis, size in sizes) + "]"
