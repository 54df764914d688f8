"""Checks on the values that hook functions leave, before the next segment of the graph reads them.

At a dead hook no returned value depends on the hooked one: a function may read it, and not change it.
"""

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.bind.knockout_mask import of_texts
from mionnx.errors import InterventionError
from mionnx.graph.axes import KEYS
from mionnx.graph.dataflow import Dataflow
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.inputs.token_batch import TokenBatch
from mionnx.machine.arrays import to_array
from mionnx.run.hook_functions import Hook, HookFunction, shape_text

SCORES = "AttnScores"


def apply_functions(
    model: HookedModel, batch: TokenBatch, hook: Hook, functions: list[HookFunction], value: NDArray[Any]
) -> NDArray[Any]:
    """Call the functions at one hook point in order, each on the result of the one before.

    Scores and patterns of padding stay as they are, whatever a function leaves there.
    """
    spared = None
    if batch.padded and KEYS in (axes := hook.point.axes or ()):  # a text alone has no keys of padding to read
        spared = ~of_texts(batch, axes), value.copy()
    for function in functions:
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
    """A function's result, in the dtype of the value that it replaces.

    Raises:
        InterventionError: another shape, no fractions, or numbers beyond the dtype.
    """
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
    with np.errstate(over="ignore"):
        cast = np.array(result, old.dtype, order="C", copy=result.dtype != old.dtype or not _own(result))
    if not np.array_equal(np.isinf(cast), np.isinf(result)):
        raise InterventionError(f"{where} returned a number beyond the range of the model's {old.dtype}")
    return cast


def _own(array: NDArray[Any]) -> bool:
    """Whether the next function may write into an array: contiguous, writable and no view."""
    return bool(array.flags.c_contiguous and array.flags.writeable and array.flags.owndata)


def _refuse_numbers(
    model: HookedModel, batch: TokenBatch, hook: Hook, function: HookFunction, value: NDArray[Any]
) -> None:
    """Refuse NaN and infinities, which would spread to everything after them."""
    scores = hook.point.variant == SCORES
    if not np.isfinite(value).all():
        wrong = np.isnan(value) | (value == np.inf) if scores else ~np.isfinite(value)
        if wrong.any():
            at = np.argwhere(wrong)[0].tolist()
            raise InterventionError(
                f"after {_name_of(function)} at {hook.name} the value {shape_text(model, hook.name, value)} is "
                f"{value[tuple(at)]} at {at}" + ("; scores may be -inf" if scores else "")
            )
    if scores:
        _refuse_blind(batch, hook, function, value)


def _refuse_blind(batch: TokenBatch, hook: Hook, function: HookFunction, scores: NDArray[Any]) -> None:
    """Refuse a query without any key: it would attend to all keys alike, later ones included."""
    blind = (scores <= np.finfo(scores.dtype).min).all(axis=-1) & batch.real[:, None, :]
    if blind.any():
        row, head, query = np.argwhere(blind)[0].tolist()
        raise InterventionError(
            f"after {_name_of(function)} at {hook.name} row {row}, head {head} has no key left for query {query}: "
            "every score is the lowest number or -inf"
        )


STATE_VARIANT = "RwkvState"


def dead_hooks(model: HookedModel, hooks: Collection[str], returned: Collection[str]) -> set[str]:
    """Find hooked values that no returned value, and no other function's, is computed from.

    Args:
        hooks: names of the hook points with functions.
        returned: outputs of the graph and captured hook points. If there are none, functions only read, and their
            changes are theirs to know: nothing is refused.
    """
    ends = {_source(name) for name in returned}
    doubtful = [name for name in hooks if "logits" not in ends or HookPoint.parse(name).variant == STATE_VARIANT]
    if not returned or not doubtful or any(_of_a_splice(name) for name in returned):
        return set()
    flow = Dataflow(model.proto)
    return {
        name for name in doubtful if name not in ends and flow.descendants([name]).isdisjoint({*ends, *hooks} - {name})
    }


def _of_a_splice(name: str) -> bool:
    return HookPoint.parse(name).variant == "Custom" and "hook_" in name


def _source(name: str) -> str:
    return str(HookPoint.parse(name).source)


def refuse_change(name: str, before: NDArray[np.floating], after: NDArray[np.floating]) -> NDArray[np.floating]:
    """Return a value on which nothing depends, if it is unchanged."""
    if np.array_equal(before, after):
        return after
    instead = "run_with_cache returns the state" if HookPoint.parse(name).variant == STATE_VARIANT else "ask for more"
    raise InterventionError(f"a function changed {name}, and nothing that is returned depends on it: {instead}")
