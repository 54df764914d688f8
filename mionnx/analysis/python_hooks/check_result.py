"""What a hook function gives back is checked before the next segment reads it."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.python_hooks.hook import Hook, HookFunction, spelled
from mionnx.errors import InterventionError
from mionnx.graph.hooked_model import HookedModel
from mionnx.inputs.token_batch import TokenBatch

SCORES = "AttnScores"


def apply(
    model: HookedModel, call: TokenBatch, hook: Hook, functions: list[HookFunction], value: NDArray[Any]
) -> NDArray[Any]:
    """TokenBatch the functions at one hook point in order, each on what the one before left.

    Args:
        model: the hooked model.
        call: the tokens.
        hook: the hook point.
        functions: in the order of registration.
        value: writable, and nobody else's.

    Raises:
        InterventionError: a value that cannot take the old one's place.
    """
    for function in functions:
        returned = function(value, hook=hook)
        if returned is not None and returned is not value:
            value = _of_its_kind(model, hook, function, returned, value)
        _refuse_numbers(model, call, hook, function, value)
    return value


def _called(function: HookFunction) -> str:
    inner = getattr(function, "func", function)  # of a partial
    return getattr(inner, "__name__", None) or type(inner).__name__


def _of_its_kind(
    model: HookedModel, hook: Hook, function: HookFunction, returned: Any, old: NDArray[Any]
) -> NDArray[Any]:
    where = f"{_called(function)} at {hook.name}"
    try:
        found = np.asarray(returned)
    except (TypeError, ValueError) as error:
        raise InterventionError(f"{where} returned no array: {error}") from error
    if found.dtype.kind != "f" and found.dtype.name != "bfloat16":
        raise InterventionError(
            f"{where} returned {found.dtype} of shape {list(found.shape)}; the value is {old.dtype} "
            f"{spelled(model, hook.name, old)}"
        )
    if found.shape != old.shape:
        raise InterventionError(
            f"{where} returned shape {list(found.shape)}; the value is {spelled(model, hook.name, old)}"
        )
    with np.errstate(over="ignore"):
        cast = np.array(found, old.dtype, order="C", copy=found.dtype != old.dtype or not _own(found))
    if not np.array_equal(np.isinf(cast), np.isinf(found)):
        raise InterventionError(f"{where} returned a number beyond the range of the model's {old.dtype}")
    return cast


def _own(found: NDArray[Any]) -> bool:
    """Whether a function after this one may write into it: it lies in one piece, and is no view of another array."""
    return bool(found.flags.c_contiguous and found.flags.writeable and found.flags.owndata)


def _refuse_numbers(
    model: HookedModel, call: TokenBatch, hook: Hook, function: HookFunction, value: NDArray[Any]
) -> None:
    """Refuse what would make NaN of everything after it."""
    scores = hook.point.variant == SCORES
    if not np.isfinite(value).all():
        wrong = np.isnan(value) | (value == np.inf) if scores else ~np.isfinite(value)
        if wrong.any():
            at = np.argwhere(wrong)[0].tolist()
            raise InterventionError(
                f"after {_called(function)} at {hook.name} the value {spelled(model, hook.name, value)} is "
                f"{value[tuple(at)]} at {at}" + ("; scores may be -inf" if scores else "")
            )
    if scores:
        _refuse_blind(call, hook, function, value)


def _refuse_blind(call: TokenBatch, hook: Hook, function: HookFunction, scores: NDArray[Any]) -> None:
    """A query whose every key is masked would attend to all of them alike, those after it included."""
    blind = (scores <= np.finfo(scores.dtype).min).all(axis=-1) & call.real[:, None, :]
    if blind.any():
        row, head, query = np.argwhere(blind)[0].tolist()
        raise InterventionError(
            f"after {_called(function)} at {hook.name} row {row}, head {head} has no key left for query {query}: every "
            "score is the lowest number or -inf"
        )
