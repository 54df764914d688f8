"""Run a model with Python functions at its hook points: `run_with_hooks`, `run_with_cache`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from numpy.typing import ArrayLike

from mionnx.analysis.python_hooks.hook import HookFunction, Where
from mionnx.analysis.python_hooks.loss import check_return_type, given_as
from mionnx.analysis.python_hooks.run import Text, run
from mionnx.errors import HookError
from mionnx.graph.hook_points import HookPoint
from mionnx.inputs.rwkv_state import RWKVState
from mionnx.inputs.token_batch import Past
from mionnx.run.hook_cache import HookCache
from mionnx.run.runner import Prompt, Runner
from mionnx.spec.hook_spec import HookSpec


def call(
    model: Runner,
    tokens: Prompt,
    return_type: str | None = "logits",
    *,
    hooks: HookSpec | None = None,
    attention_mask: ArrayLike | None = None,
    cache: Past | None = None,
    initial_state: RWKVState | None = None,
) -> Any:
    """Run the model: the same as `run_with_hooks` without functions."""
    return run_with_hooks(
        model,
        tokens,
        return_type=return_type,
        hooks=hooks,
        attention_mask=attention_mask,
        cache=cache,
        initial_state=initial_state,
    )


def run_with_hooks(
    model: Runner,
    tokens: Prompt,
    fwd_hooks: Iterable[tuple[Where, HookFunction]] = (),
    return_type: str | None = "logits",
    *,
    hooks: HookSpec | None = None,
    attention_mask: ArrayLike | None = None,
    cache: Past | None = None,
    initial_state: RWKVState | None = None,
    prompt_length: int | Sequence[int] | None = None,
) -> Any:
    """Run the model once, with Python functions at hook points.

    The graph is cut at the hooked values and runs piece by piece; nothing is computed twice. A function is called
    as `function(activation, hook=hook)`:

    * `activation` is a numpy array, with the axes of the hook point, that the function may write into: **what it
      writes takes effect, whether it returns the array or nothing.** It may keep the array; nobody else writes
      into it but later functions at the same hook point. An array that it returns takes the value's place.
    * `hook.name`, `hook.layer()` and `hook.point` say where it is called, and `hook.ctx` is a dictionary that the
      functions at one hook point share for the time of this call.

    Rows of unequal length are padded on the left, and functions see the padding too.

    Functions written for TransformerLens meet arrays instead of tensors, and hook points with axes and meanings
    of their own: `hook_q`, `hook_k` and `hook_v` are [batch, head, seq, head_dim] here and [batch, seq, head,
    head_dim] there; `mlp.hook_pre` and `mlp.hook_post` are what the MLP reads and gives here, neurons there (here
    `mlp.hook_act`).

    Args:
        tokens: as `forward` takes them.
        fwd_hooks: pairs of a hook and a function. A hook is a name, a `HookPoint`, a glob, or a function of the
            name; the last two mean all hook points that they select, in execution order, derived values
            (`hook_result`, `hook_states`) excluded. Functions at one hook point are called in the order given.
        return_type: "logits", "loss" (of the next token, the mean over all tokens, in nats), "loss per token",
            "both" (logits and loss), or None: the model then runs to the last hooked value only.
        hooks: interventions besides; functions at the same hook point see what these made.
        attention_mask, cache, initial_state, prompt_length: see `forward`.

    Returns:
        logits [batch, seq, vocab]; a loss as one number, or [batch, seq - 1] with NaN where padding is.

    Raises:
        HookError: a hook that the model does not have, with the nearest that it has, or a derived value.
        InterventionError: a function left something that cannot take the value's place: another shape, no floats,
            NaN or an infinity; or scores that leave a query without a key; or it changed a value on which nothing
            returned depends (an RWKV model's last state: `run_with_cache` returns it).
        InputError: tokens that the model cannot run on, an unknown `return_type`, or neither functions nor
            anything to return.
    """
    check_return_type(return_type)
    text = Text(model._ids(tokens), attention_mask, cache, initial_state, prompt_length)
    found = run(model, text, hooks or HookSpec(), fwd_hooks, return_type is not None, state=False)
    return given_as(return_type, found.output() if return_type else None, text.batch(model))


def run_with_cache(
    model: Runner,
    tokens: Prompt,
    names_filter: Where | Sequence[Where] | None = None,
    *,
    fwd_hooks: Iterable[tuple[Where, HookFunction]] = (),
    return_type: str | None = "logits",
    hooks: HookSpec | None = None,
    attention_mask: ArrayLike | None = None,
    cache: Past | None = None,
    initial_state: RWKVState | None = None,
    prompt_length: int | Sequence[int] | None = None,
) -> tuple[Any, HookCache]:
    """Run the model once and keep values at hook points.

    Args:
        tokens: as `forward` takes them.
        names_filter: a name, `HookPoint`, glob or function of the name, or a list of these; all hook points if it
            is left out, derived values excluded.
        fwd_hooks: functions besides, as `run_with_hooks` takes them; the cache has what they made.
        return_type: what is returned first, as `run_with_hooks` does; with None, the model runs to the last of
            these hook points only.
        hooks: interventions, and captures, besides.
        attention_mask, cache, initial_state, prompt_length: see `forward`.

    Returns:
        the logits or the loss, and the cache.

    Raises:
        HookError, InterventionError, InputError: as `run_with_hooks`.
    """
    check_return_type(return_type)
    text = Text(model._ids(tokens), attention_mask, cache, initial_state, prompt_length)
    spec = _capturing(model, names_filter).extend(hooks or HookSpec())
    if not spec.captures:
        raise HookError("names_filter=[] keeps nothing: run_with_hooks returns logits alone")
    found = run(model, text, spec, fwd_hooks, return_type is not None, state=True)
    return given_as(return_type, found.output() if return_type else None, text.batch(model)), found


def _capturing(model: Runner, names_filter: Where | Sequence[Where] | None) -> HookSpec:
    if names_filter is None:
        return _capturing(model, [point for point in model.hook_points() if not point.derived])
    single = isinstance(names_filter, HookPoint | str) or callable(names_filter)
    spec = HookSpec()
    for what in [names_filter] if single else names_filter:  # type: ignore[union-attr, list-item]
        spec.capture(what)  # type: ignore[arg-type]
    return spec
