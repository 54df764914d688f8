"""`HookChoice`: the hook points that a request of a spec means, by name, glob or predicate; `Capture` reads them."""

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any, ClassVar

from mionnx.errors import HookError, InterventionError, SpecFileError, nearest
from mionnx.graph.hook_points import HookPoint, nearest_hook
from mionnx.graph.metadata import DTYPE_NAMES
from mionnx.machine.brief import spelled
from mionnx.machine.ranges import listed
from mionnx.spec.limits import Indices, check_indices

Predicate = Callable[[str], bool]
Hook = HookPoint | str
Hooks = Hook | Predicate | Iterable[Hook | Predicate]


@dataclass(frozen=True)
class HookChoice:
    """A hook point, a glob over names or a predicate on them."""

    what: HookPoint | str | Predicate

    title: ClassVar[str] = "an intervention"

    def selects(self, name: str) -> bool:
        """Whether a hook point of this name is meant."""
        if isinstance(self.what, HookPoint):
            return self.what.name == name
        if not isinstance(self.what, str):
            return bool(self.what(name))
        # Very large hook points are not meant by a glob as wide as `*`.
        return fnmatchcase(name, self.what) and (_names_one(self.what) or not HookPoint.parse(name).on_request)

    @property
    def text(self) -> str:
        """Name or glob, as a spec file has it; a predicate is refused."""
        if callable(self.what):
            raise SpecFileError(f"{self.title} by predicate cannot be saved: name the hook points, or use a glob")
        return str(self.what)

    # Nothing in it changes, and predicates are equal only if they are one object.
    def __copy__(self) -> "HookChoice":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "HookChoice":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if callable(self.what):
            try:
                # Tried now, so that the error names the predicate and what to do.
                pickle.dumps(self.what)
            except (AttributeError, TypeError, pickle.PicklingError) as error:
                raise SpecFileError(
                    f"{self.title} by the predicate {self} cannot be pickled: {error}; define the function in a "
                    "module, name the hook points, or use a glob"
                ) from error
        return type(self), tuple(getattr(self, one.name) for one in fields(self))

    def __str__(self) -> str:
        return getattr(self.what, "__name__", None) or str(self.what)


def is_glob(hook: object) -> bool:
    """Whether a hook is a pattern: text with `*`, `?` or `[`."""
    return isinstance(hook, str) and any(character in hook for character in "*?[")


def _names_one(glob: str) -> bool:
    """Whether a pattern has letters after its last dot: `*.hook_eff*` has, `*` has not."""
    return bool(glob.rpartition(".")[2].removeprefix("hook_").strip("*?"))


def each(hooks: Hooks) -> Iterator[HookPoint | str | Predicate]:
    """Each hook point, glob or predicate of those that `capture` or `intervene` is given."""
    if isinstance(hooks, HookPoint | str) or callable(hooks) or not isinstance(hooks, Iterable):
        several = [hooks]
    elif isinstance(hooks, Mapping) or not (several := listed("hook points", hooks, HookError)):
        raise HookError(
            f"hook points are a name, a glob, a function of the name, or a list of these, not {spelled(hooks)}"
        )
    for hook in several:
        yield hook if callable(hook) or is_glob(hook) else HookPoint.parse(hook)


def resolve(request: HookChoice, names: Iterable[str]) -> list[str]:
    """The hook points of a model that a request means, at least one."""
    names = list(names)
    selected = [name for name in names if request.selects(name)]
    if selected:
        return selected
    if callable(request.what):
        raise HookError(
            f"the predicate {request} selects none of the model's {len(names)} hook points; it is asked for their "
            f"names, such as {names[len(names) // 2]!r}"
        )
    raise HookError(f"the model has no hook point {str(request)!r}{nearest_hook(str(request), names)}")


@dataclass(frozen=True)
class Capture(HookChoice):
    """One capture request: hook point, glob over names or predicate on them; limits; a dtype."""

    before: bool = False
    positions: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    dtype: str | None = None

    title: ClassVar[str] = "a capture"

    def to_entry(self) -> dict[str, Any]:
        """The capture's entry in a spec file."""
        limits = {"positions": self.positions, "heads": self.heads, "dtype": self.dtype}
        limited = {name: limit for name, limit in limits.items() if limit is not None}
        return {"hook": self.text, "before": self.before, **limited}


def requests_of(
    hook: Hooks, before: bool, positions: Indices | None, heads: Indices | None, dtype: str | None = None
) -> list[Capture]:
    """Make the requests of a capture or gradient, one for each hook point, glob or predicate."""
    if dtype is not None and dtype not in DTYPE_NAMES:
        raise InterventionError(f"dtype={dtype!r}; one of {', '.join(DTYPE_NAMES)}{nearest(str(dtype), DTYPE_NAMES)}")
    limits = check_indices("positions", positions), check_indices("heads", heads)
    return [Capture(what, before, *limits, dtype) for what in each(hook)]


def add_new(requests: list[Capture], others: Iterable[Capture]) -> None:
    """Append those of the others that are not there yet."""
    for request in others:
        if request not in requests:
            requests.append(request)


def described(request: Capture) -> str:
    """A request as a summary shows it."""
    return f"{request}{' before' * request.before}{f' as {request.dtype}' if request.dtype else ''}"
