"""`Capture`: one request of a spec to read activations, by name, glob or predicate."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from mionnx.errors import InterventionError, nearest
from mionnx.graph.metadata import DTYPE_NAMES
from mionnx.machine.ranges import listed
from mionnx.spec.attention_knockout import naturals, whole
from mionnx.spec.hook_choice import HookChoice, Hooks, each


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
    hook: Hooks,
    before: bool,
    positions: int | Iterable[int] | None,
    heads: int | Iterable[int] | None,
    dtype: str | None = None,
) -> list[Capture]:
    """Make the requests of a capture or gradient, one for each hook point, glob or predicate.

    Raises:
        InterventionError: positions or heads that are no integers, or a dtype that no model has.
    """
    if dtype is not None and dtype not in DTYPE_NAMES:
        raise InterventionError(f"dtype={dtype!r}; one of {', '.join(DTYPE_NAMES)}{nearest(str(dtype), DTYPE_NAMES)}")
    limits = _limit("positions", positions), _limit("heads", heads)
    return [Capture(what, before, *limits, dtype) for what in each(hook)]


def add_new(requests: list[Capture], others: Iterable[Capture]) -> None:
    """Append those of the others that are not there yet."""
    for request in others:
        if request not in requests:
            requests.append(request)


def described(request: Capture) -> str:
    """A request as a summary shows it."""
    return f"{request}{' before' * request.before}{f' as {request.dtype}' if request.dtype else ''}"


def _limit(what: str, indices: int | Iterable[int] | None) -> tuple[int, ...] | None:
    """Positions or heads of a capture as a tuple; None stays None.

    Raises:
        InterventionError: none at all, or something else than integers.
    """
    if indices is None:
        return None
    entries = listed(what, indices, InterventionError) if isinstance(indices, Iterable) else [indices]
    limit = tuple(whole(what, entry) for entry in entries) if what == "positions" else tuple(naturals(what, entries))
    if not limit:
        raise InterventionError(f"a capture of no {what} would be empty")
    return limit
