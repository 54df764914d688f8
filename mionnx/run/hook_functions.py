"""Python functions at hook points: their argument `Hook`, the points that they name, checks on what they return.

At a dead hook no returned value depends on the hooked one: a function may read it, and not change it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.bind.knockout_mask import of_texts
from mionnx.errors import HookError, InterventionError
from mionnx.graph.axes import KEYS, format_shape
from mionnx.graph.dataflow import Dataflow
from mionnx.graph.hook_points import LAST_STATES, HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.inputs.token_batch import TokenBatch
from mionnx.machine.arrays import to_array
from mionnx.spec.hook_choice import HookChoice, Predicate, resolve

HookFunction = Callable[..., Any]  # (activation, hook=Hook) -> array or None
Where = HookPoint | str | Predicate
HookFunctions = Iterable[tuple[Where, HookFunction]]
SCORES = "AttnScores"


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
    """Names of the hook points that a name, glob, `HookPoint` or predicate selects and a function can change."""
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
        if not isinstance(entry, Sequence) or isinstance(entry, str) or len(entry) != 2 or not callable(entry[1]):
            raise HookError(f"hooks are pairs (hook, function), got {entry!r}")
        for name in select(model, entry[0]):
            functions.setdefault(name, []).append(entry[1])
    return {name: functions[name] for name in sorted(functions, key=model.order.__getitem__)}


def shape_text(model: HookedModel, name: str, value: NDArray[Any]) -> str:
    """A value's shape for messages, with the names of its axes."""
    axes: Sequence[str | int] = HookPoint.parse(name).axes or model.axes(HookPoint.parse(name))
    return format_shape(axes, value.shape)


class StepFunctions:
    """Python functions at hook points, called at every step of a generation."""

    def __init__(self, model: HookedModel, fwd_hooks: Iterable[tuple[Where, HookFunction]]) -> None:
        self.functions = register(model, fwd_hooks)
        self.names = tuple(self.functions)
        self._hooks = {name: Hook(HookPoint.parse(name)) for name in self.names}

    def of_rows(self, rows: Sequence[int]) -> StepFunctions:
        """The same functions for a batch of these rows of a list."""
        functions = copy(self)
        functions._hooks = {name: replace(hook, rows=tuple(rows)) for name, hook in self._hooks.items()}
        return functions

    def call(self, model: HookedModel, batch: TokenBatch, step: int, name: str, value: NDArray[Any]) -> NDArray[Any]:
        """The value at a hook point after its functions, each called on the result of the one before."""
        hook, spared = replace(self._hooks[name], step=step, positions=batch.token_positions), None
        # Scores and patterns of padding stay as they are; a text alone has no keys of padding.
        if batch.padded and KEYS in (axes := hook.point.axes or ()):
            spared = ~of_texts(batch, axes), value.copy()
        for function in self.functions[name]:
            returned = function(value, hook=hook)
            if returned is not None and returned is not value:
                value = replacement(model, hook, function, returned, value)
            if spared is not None:
                value = np.where(spared[0], spared[1], value)
            _refuse_numbers(model, batch, hook, function, value)
        return value


def _name_of(function: HookFunction) -> str:
    inner = getattr(function, "func", function)  # of a partial
    return getattr(inner, "__name__", None) or type(inner).__name__


def replacement(
    model: HookedModel, hook: Hook, function: HookFunction, returned: Any, old: NDArray[Any]
) -> NDArray[Any]:
    """A function's result, in the dtype of the value that it replaces."""
    where = f"{_name_of(function)} at {hook.name}"
    try:
        result = to_array(returned)
    except ValueError as error:
        raise InterventionError(f"{where} returned no array: {error}") from error
    if result.dtype.kind != "f" and result.dtype.name != "bfloat16":
        raise InterventionError(
            f"{where} returned {result.dtype} of shape {list(result.shape)}; the value is {old.dtype} "
            f"{shape_text(model, hook.name, old)}"
        )
    if result.shape != old.shape:
        raise InterventionError(
            f"{where} returned shape {list(result.shape)}; the value is {shape_text(model, hook.name, old)}"
        )
    flags = result.flags
    own = flags.c_contiguous and flags.writeable and flags.owndata  # the next function may write into it
    with np.errstate(over="ignore"):
        cast = np.array(result, old.dtype, order="C", copy=result.dtype != old.dtype or not own)
    if not np.array_equal(np.isinf(cast), np.isinf(result)):
        raise InterventionError(f"{where} returned a number beyond the range of the model's {old.dtype}")
    return cast


def _refuse_numbers(
    model: HookedModel, batch: TokenBatch, hook: Hook, function: HookFunction, value: NDArray[Any]
) -> None:
    """Refuse NaN and infinities, which would spread to everything after them, and scores without any key."""
    scores = hook.point.variant == SCORES
    if not np.isfinite(value).all():
        wrong = np.isnan(value) | (value == np.inf) if scores else ~np.isfinite(value)
        if wrong.any():
            at = np.argwhere(wrong)[0].tolist()
            raise InterventionError(
                f"after {_name_of(function)} at {hook.name} the value {shape_text(model, hook.name, value)} is "
                f"{value[tuple(at)]} at {at}" + ("; scores may be -inf" if scores else "")
            )
    if not scores:
        return
    # A query without any key would attend to all keys alike, later ones included.
    blind = (value <= np.finfo(value.dtype).min).all(axis=-1) & batch.real[:, None, :]
    if blind.any():
        row, head, query = np.argwhere(blind)[0].tolist()
        raise InterventionError(
            f"after {_name_of(function)} at {hook.name} row {row}, head {head} has no key left for query {query}: "
            "every score is the lowest number or -inf"
        )


def dead_hooks(model: HookedModel, hooks: Collection[str], returned: Collection[str]) -> set[str]:
    """Find hooked values that no returned value, and no other function's, is computed from."""
    # If nothing is returned, functions only read, and their changes are theirs to know: none is dead.
    ends = {str(HookPoint.parse(name).source) for name in returned}
    doubtful = [name for name in hooks if "logits" not in ends or HookPoint.parse(name).variant in LAST_STATES]
    spliced = any(HookPoint.parse(name).variant == "Custom" and "hook_" in name for name in returned)
    if not returned or not doubtful or spliced:
        return set()
    flow = Dataflow(model.proto)
    return {
        name for name in doubtful if name not in ends and flow.descendants([name]).isdisjoint({*ends, *hooks} - {name})
    }


def refuse_change(name: str, before: NDArray[np.floating], after: NDArray[np.floating]) -> NDArray[np.floating]:
    """Return a value on which nothing depends, if it is unchanged."""
    if np.array_equal(before, after):
        return after
    instead = "run_with_cache returns the state" if HookPoint.parse(name).variant in LAST_STATES else "ask for more"
    raise InterventionError(f"a function changed {name}, and nothing that is returned depends on it: {instead}")
