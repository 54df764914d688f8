"""`Live`: a hook point of a bridge with its hooks: what these do, and whether anything would call them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

from transformer_lens.hook_points import HookPoint as TheirHook

from mionnx.transformer_lens.lens_points import WITHOUT_GRADIENT, LensPoint

# Hooks of TransformerLens that store what they see, and whose cache nobody reads before the pass ends.
STOPPING = "run_with_cache.<locals>.stop_hook"
STORING_FOR_HOOKS = "get_caching_hooks.<locals>.save_hook"  # into a dictionary that other hooks may read
ATTRIBUTION = "cache_activation_and_gradient.<locals>.make_{}_hook.<locals>.hook"
STORING = (
    "run_with_cache.<locals>.make_cache_hook.<locals>.cache_hook", STOPPING, STORING_FOR_HOOKS,
    ATTRIBUTION.format("fwd"),
)  # fmt: skip
STORING_BACK = (
    "run_with_cache.<locals>.make_grad_cache_hook.<locals>.grad_hook", STORING_FOR_HOOKS, ATTRIBUTION.format("bwd"),
)  # fmt: skip


def _called(handle: Any) -> str:
    function = handle.user_hook
    while hasattr(function, "func"):
        function = function.func
    return getattr(function, "__qualname__", "")


@cache
def _storing(called: str) -> str:
    """Which of the storing hooks a function is, by its name; "" for another."""
    return next((end for end in STORING if called.endswith(end)), "")


def _functions(hook: Any, back: bool = False) -> list[Any]:
    """The functions of a point that do more than store, on the way there or back."""
    if back:
        return [one.user_hook for one in getattr(hook, "bwd_hooks", ()) if not _called(one).endswith(STORING_BACK)]
    return [one.user_hook for one in getattr(hook, "fwd_hooks", ()) if not _storing(_called(one))]


def deaf(served: list[Live], others: Iterable[tuple[str, TheirHook]], silent: tuple[str, ...]) -> list[str]:
    """Names at which functions would never be called.

    At some names TransformerLens calls none either: its pass does not reach them, or tokens have no gradient. A
    function that a filter of names put there and elsewhere stays; one that is at these alone could do nothing.
    """
    nowhere = []
    for back in (False, True):
        called = [one for one in served if one.point.goes_back or not back]
        heard = {id(function) for one in called for function in _functions(one.hook, back)}
        places = [(one.point.name, one.hook, one.point.kind in WITHOUT_GRADIENT) for one in served if one not in called]
        places += [(name, hook, name.endswith(silent)) for name, hook in others]
        for name, hook, there_too in places:
            if any(not there_too or id(function) not in heard for function in _functions(hook, back)):
                nowhere.append(name)
    return [*dict.fromkeys(nowhere)]


class Live(NamedTuple):
    """A point with hooks: whether these only store what they see, store it for other hooks, or end the pass."""

    point: LensPoint
    hook: TheirHook
    stores: bool
    keeps: bool
    stops: bool

    @classmethod
    def of(cls, point: LensPoint, hook: TheirHook) -> Live:
        """Look at the hooks of a point, or at the module that stands in its place."""
        if not isinstance(hook, TheirHook):  # an autoencoder
            return cls(point, hook, False, False, False)
        kinds = {_storing(_called(handle)) for handle in hook.fwd_hooks}
        return cls(point, hook, "" not in kinds, STORING_FOR_HOOKS in kinds, STOPPING in kinds)


def has_hooks(hook: Any) -> bool:
    """Whether a point has any hooks, or another module in its place."""
    return not isinstance(hook, TheirHook) or bool(hook.fwd_hooks or hook.bwd_hooks)


def goes_back(hook: Any) -> bool:
    """Whether a point has backward hooks."""
    return bool(getattr(hook, "bwd_hooks", ()))
