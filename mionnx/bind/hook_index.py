"""Hook points of a model and of a spec's splices, by name."""

from collections.abc import Mapping
from dataclasses import dataclass

from numpy.typing import DTypeLike

from mionnx.bind.splice_check import Site, check_fragment
from mionnx.errors import HookError, InterventionError, nearest
from mionnx.graph import onnx_file
from mionnx.graph.fitted_fragment import FittedFragment, InnerHook, inner_names
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.intervention import Intervention

Dims = list[str | int]


@dataclass(frozen=True)
class HookIndex:
    """Hook points by name.

    Attributes:
        model: the model.
        inner: name in the graph -> axes and dtype of a hook point inside a splice.
        fits: index of an intervention that is a splice -> its fragment's structure.
    """

    model: HookedModel
    inner: Mapping[str, InnerHook]
    fits: Mapping[int, FittedFragment]

    @property
    def names(self) -> list[str]:
        """All of them, the model's own first."""
        return [*self.model.order, *self.inner]

    def axes(self, point: HookPoint) -> tuple[str, ...]:
        """The names of a hook point's axes.

        Raises:
            HookError: there is no such hook point.
        """
        self.dims(point)
        return self.inner[point.name].axes if point.name in self.inner else point.axes or ()

    def dims(self, point: HookPoint) -> Dims:
        """The axes of a hook point: a number where the size is fixed, else a name.

        Raises:
            HookError: there is no such hook point.
        """
        if point.name in self.inner:
            return list(self.inner[point.name].dims)
        if self.inner and point.name not in self.model.order:
            raise HookError(f"there is no hook point {point.name!r}{nearest(point.name, self.names)}")
        return self.model.axes(point)

    def dtype(self, point: HookPoint) -> DTypeLike:
        """The dtype of a hook point's value."""
        return self.inner[point.name].dtype if point.name in self.inner else self.model.dtype(point)

    def place(self, name: str) -> tuple[int, int]:
        """The rank of a hook point in execution order."""
        if name not in self.inner:
            return self.model.order[name], 0
        outer = max((own for own in self.model.order if name.startswith(f"{own}.")), key=len)
        return self.model.order[outer], 1 + [*self.inner].index(name)


def index_hooks(spec: HookSpec, model: HookedModel) -> HookIndex:
    """The hook points of a model and of a spec's splices.

    Raises:
        HookError: a splice at, or reading from, a hook point that is not there.
        InterventionError: a fragment that does not fit, or two that bring the same hook point.
    """
    points = HookIndex(model, inner := {}, fits := {})
    for n, (point, intervention) in enumerate(spec.interventions):
        if intervention.fragment is None:
            continue
        fits[n] = found = _fit(points, point, intervention)
        for name, one in zip(inner_names(point.name, found), found.inner, strict=True):
            if name in inner:
                raise InterventionError(f"splice at {point}: another splice there brings the hook point {name!r} too")
            inner[name] = one
    return points


def _fit(points: HookIndex, point: HookPoint, intervention: Intervention) -> FittedFragment:
    if intervention.fragment is None:
        raise InterventionError(f"{intervention.kind} at {point} has no fragment")
    if point.derived:
        raise InterventionError(f"splice at {point}: a derived value can only be captured")
    sites = [Site(point.name, points.axes(point), tuple(points.dims(point)))]
    if intervention.reads is not None:
        source = HookPoint.parse(intervention.reads)
        sites.append(Site(source.name, points.axes(source), tuple(points.dims(source))))
        if source.derived or points.place(source.name) >= points.place(point.name):
            raise InterventionError(f"splice at {point}: it can read what comes before it, and {source} does not")
    return check_fragment(intervention.fragment, onnx_file.opset(points.model.proto), sites)
