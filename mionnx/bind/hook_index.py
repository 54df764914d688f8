"""Hook points of a model and of a spec's splices, by name; each intervention of the spec at one of them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from numpy.typing import DTypeLike

from mionnx.bind.splice_check import SpliceSite, check_fragment
from mionnx.errors import HookError, InterventionError, MIError
from mionnx.graph import onnx_file
from mionnx.graph.fragment import FittedFragment, Fragment, InnerHook, inner_names
from mionnx.graph.hook_points import HookPoint, nearest_hook
from mionnx.graph.hooked_model import HookedModel
from mionnx.spec.hook_choice import HookChoice, resolve
from mionnx.spec.hook_spec import HookSpec, Where
from mionnx.spec.intervention import Intervention

Dims = list[str | int]


@dataclass(frozen=True)
class HookIndex:
    """Hook points by name."""

    model: HookedModel
    inner: Mapping[str, InnerHook]  # name in the graph -> axes and dtype of a hook point inside a splice
    interventions: Sequence[tuple[HookPoint, Intervention]]  # in registration order, each at one hook point
    fits: Mapping[int, FittedFragment]  # by index of an intervention that is a splice
    chosen: Mapping[int, HookChoice]  # by index of an intervention at a glob or predicate

    @property
    def names(self) -> list[str]:
        """All of them, the model's own first."""
        return [*self.model.order, *self.inner]

    def axes(self, point: HookPoint) -> tuple[str, ...]:
        self.dims(point)
        return self.inner[point.name].axes if point.name in self.inner else point.axes or ()

    def dims(self, point: HookPoint) -> Dims:
        """The axes of a hook point: a number where the size is fixed, else a name."""
        if point.name in self.inner:
            return list(self.inner[point.name].dims)
        if self.inner and point.name not in self.model.order:
            raise HookError(f"there is no hook point {point.name!r}{nearest_hook(point.name, self.names)}")
        return self.model.axes(point)

    def dtype(self, point: HookPoint) -> DTypeLike:
        """The dtype of a hook point's value."""
        return self.inner[point.name].dtype if point.name in self.inner else self.model.dtype(point)

    def place(self, name: str) -> tuple[int, int]:
        """The rank of a hook point in execution order."""
        if name not in self.inner:
            return self.model.order[name], 0
        outer = max((own for own in self.model.order if name.startswith(f"{own}.")), key=len)
        # behind the hook point it is spliced at, in the order of its fragment
        return self.model.order[outer], 1 + [*self.inner].index(name)

    def points(self, where: Where) -> list[HookPoint]:
        """The hook points that an intervention of a spec is at, in execution order."""
        if isinstance(where, HookPoint):
            return [where]
        return [HookPoint.parse(name) for name in sorted(resolve(where, self.names), key=self.place)]


def index_hooks(spec: HookSpec, model: HookedModel) -> HookIndex:
    """Index the hook points of a model and of a spec's splices, and its interventions."""
    inner: dict[str, InnerHook] = {}
    interventions: list[tuple[HookPoint, Intervention]] = []
    hooks = HookIndex(model, inner, interventions, fits := {}, chosen := {})
    spliced: dict[int, dict[HookPoint, FittedFragment]] = {}
    # splices first: a glob or predicate of one means hook points of the model, and of the splices before it
    for n, (where, one) in enumerate(spec.interventions):
        if one.fragment is not None:
            spliced[n] = {}
            for point in hooks.points(where):
                with naming(where):
                    spliced[n][point] = fitted = _fit(hooks, point, one.fragment, one.reads)
                    brought = dict(zip(inner_names(point.name, fitted), fitted.inner, strict=True))
                    for name in brought.keys() & inner.keys():
                        raise InterventionError(
                            f"splice at {point}: another splice there brings the hook point {name!r} too"
                        )
                inner |= brought
    for n, (where, one) in enumerate(spec.interventions):
        for point in spliced.get(n) or hooks.points(where):
            index = len(interventions)
            interventions.append((point, one))
            if n in spliced:
                fits[index] = spliced[n][point]
            if isinstance(where, HookChoice):
                chosen[index] = where
    return hooks


@contextmanager
def naming(where: Where | None) -> Iterator[None]:
    """Name the glob or predicate in errors about one of the hook points that it means."""
    try:
        yield
    except MIError as error:
        if not isinstance(where, HookChoice):
            raise
        raise type(error)(
            f"{error} ({str(where)!r} means that hook point too: narrow it, or choose by a function of the name)"
        ) from error


def _fit(points: HookIndex, point: HookPoint, fragment: Fragment, reads: str | None) -> FittedFragment:
    if point.derived:
        raise InterventionError(f"splice at {point}: a derived value can only be captured")
    sites = [SpliceSite(point.name, points.axes(point), tuple(points.dims(point)))]
    if reads is not None:
        source = HookPoint.parse(reads)
        sites.append(SpliceSite(source.name, points.axes(source), tuple(points.dims(source))))
        if source.derived or points.place(source.name) >= points.place(point.name):
            raise InterventionError(f"splice at {point}: it can read what comes before it, and {source} does not")
    return check_fragment(fragment, onnx_file.opset(points.model.proto), sites)
