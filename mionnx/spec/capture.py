"""`Capture`: one request of a spec to read activations, by name, glob or predicate."""

import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from mionnx.errors import HookError, SpecFileError, nearest
from mionnx.graph.hook_points import HookPoint

Predicate = Callable[[str], bool]


@dataclass(frozen=True)
class Capture:
    """One capture request: a hook point, a glob over names or a predicate on them, and limits."""

    what: HookPoint | str | Predicate
    before: bool = False
    positions: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None

    def selects(self, name: str) -> bool:
        """Whether a hook point of this name is requested."""
        if isinstance(self.what, HookPoint):
            return self.what.name == name
        if not isinstance(self.what, str):
            return bool(self.what(name))
        return fnmatchcase(name, self.what) and (_names_one(self.what) or not HookPoint.parse(name).on_request)

    def to_entry(self) -> dict[str, Any]:
        """The capture's entry in a spec file.

        Raises:
            SpecFileError: a predicate.
        """
        if callable(self.what):
            raise SpecFileError("a capture by predicate cannot be saved: name the hook points, or use a glob")
        limits = {"positions": self.positions, "heads": self.heads}
        limited = {name: limit for name, limit in limits.items() if limit is not None}
        return {"hook": str(self.what), "before": self.before, **limited}

    def __copy__(self) -> "Capture":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "Capture":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if callable(self.what):
            try:
                pickle.dumps(self.what)
            except (AttributeError, TypeError, pickle.PicklingError) as error:
                raise SpecFileError(
                    f"a capture by the predicate {self} cannot be pickled: {error}; define the function in a module, "
                    "name the hook points, or use a glob"
                ) from error
        return Capture, (self.what, self.before, self.positions, self.heads)

    def __str__(self) -> str:
        return getattr(self.what, "__name__", None) or str(self.what)


def is_glob(hook: object) -> bool:
    """Whether a hook is a pattern: text with `*`, `?` or `[`."""
    return isinstance(hook, str) and any(character in hook for character in "*?[")


def _names_one(glob: str) -> bool:
    """Whether a pattern has letters after its last dot: `*.hook_eff*` has, `*` has not."""
    return bool(glob.rpartition(".")[2].removeprefix("hook_").strip("*?"))


def resolve(request: Capture, names: Iterable[str]) -> list[str]:
    """The hook points of a model that a capture selects.

    Raises:
        HookError: none; the message names the nearest one.
    """
    names = list(names)
    selected = [name for name in names if request.selects(name)]
    if not selected:
        raise HookError(f"the model has no hook point {str(request)!r}{nearest(str(request), names)}")
    return selected
