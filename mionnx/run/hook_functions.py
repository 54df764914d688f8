"""`Hook`, the argument of a hook function, and the selection of hook points by name, glob or predicate."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import HookError
from mionnx.graph.axes import format_shape
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.spec.hook_choice import HookChoice, Predicate, resolve

HookFunction = Callable[..., Any]  # (activation, hook=Hook) -> array or None
Where = HookPoint | str | Predicate
HookFunctions = Iterable[tuple[Where, HookFunction]]


@dataclass(frozen=True)
class Hook:
    """The hook point at which a function is called.

    Attributes:
        ctx: a dictionary that the functions at this hook point share during one call.
        step: of a generation: 0 while the prompts are read, n when the n-th new token is.
        positions: [batch, seq], the position of each column in its row's text, past included; -1 for padding.
        rows: [batch], the numbers of the rows in the list that was given, where it runs in batches; else 0, 1, ...
    """

    point: HookPoint
    ctx: dict[str, Any] = field(default_factory=dict)
    step: int = 0
    positions: NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 0), np.int64), compare=False)
    rows: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The hook point's name: "blocks.5.attn.hook_pattern"."""
        return self.point.name

    def layer(self) -> int:
        """The 0-based layer."""
        if self.point.layer is None:
            raise HookError(f"{self.name} belongs to no layer")
        return self.point.layer


def select(model: HookedModel, what: Where) -> list[str]:
    """Names of the hook points that an expression selects and a function can change.

    Args:
        what: a name, glob, `HookPoint`, or predicate of the name.

    Raises:
        HookError: no hook point, with the nearest name; or only values that are derived from others.
    """
    if not (isinstance(what, HookPoint | str) or callable(what)):
        raise HookError(f"a hook is named by a name, a glob, a HookPoint or a function of the name, not by {what!r}")
    names = resolve(HookChoice(what), [str(point) for point in model.hook_points()])
    acting = [name for name in names if not HookPoint.parse(name).derived]
    if not acting:
        raise HookError(f"{names[0]} is computed for captures alone, and nothing reads it: no function can act there")
    return acting


def register(model: HookedModel, fwd_hooks: Iterable[tuple[Where, HookFunction]]) -> dict[str, list[HookFunction]]:
    """Group functions by hook point: names in execution order, functions as given."""
    functions: dict[str, list[HookFunction]] = {}
    if not isinstance(fwd_hooks, Iterable):
        raise HookError(f"hooks are pairs (hook, function), got {fwd_hooks!r}")
    for entry in fwd_hooks:
        what, function = _pair(entry)
        for name in select(model, what):
            functions.setdefault(name, []).append(function)
    return {name: functions[name] for name in sorted(functions, key=model.order.__getitem__)}


def _pair(entry: Any) -> tuple[Where, HookFunction]:
    if not isinstance(entry, Sequence) or isinstance(entry, str) or len(entry) != 2 or not callable(entry[1]):
        raise HookError(f"hooks are pairs (hook, function), got {entry!r}")
    return entry[0], entry[1]


def shape_text(model: HookedModel, name: str, value: NDArray[Any]) -> str:
    """A value's shape for messages, with the names of its axes."""
    axes: Sequence[str | int] = HookPoint.parse(name).axes or model.axes(HookPoint.parse(name))
    return format_shape(axes, value.shape)
