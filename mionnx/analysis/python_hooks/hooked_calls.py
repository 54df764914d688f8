"""Run a model with Python functions at its hook points: `run_with_hooks`, `run_with_cache`.

The graph is cut at the hooked values and runs segment by segment, for each batch of a list.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mionnx.errors import GradientError, HookError, InputError, nearest
from mionnx.graph.hook_points import HookPoint
from mionnx.inputs.past import choose_past, present_names
from mionnx.inputs.token_batch import Past, TokenBatch, make_token_batch
from mionnx.machine.softmax import logsumexp
from mionnx.machine.typed import typed
from mionnx.rewrite.plan import Outputs
from mionnx.run.batching import AUTO, BatchSize, check_batch_size
from mionnx.run.call_graph import bind_pass, in_blocks
from mionnx.run.forward_batches import ListRequest, in_one_pass, map_rows
from mionnx.run.hook_cache import HookCache, collect, joined
from mionnx.run.hook_functions import (
    Hook,
    HookFunction,
    StepFunctions,
    Where,
    dead_hooks,
    refuse_change,
    register,
    replacement,
)
from mionnx.run.runner import Runner
from mionnx.run.tokenizing import Prompt, takes_encoding
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.metric import Tokens

RETURN_TYPES = ("logits", "loss", "loss per token", "both")


@takes_encoding
@typed()
def call(
    model: Runner,
    tokens: Prompt,
    return_type: str | None = "logits",
    *,
    hooks: HookSpec | None = None,
    attention_mask: ArrayLike | None = None,
    cache: Past | None = None,
    initial_state: Past | None = None,
    batch_size: BatchSize = AUTO,
) -> Any:
    """Run the model: `run_with_hooks` without functions.

    Example:
        logits = model("The capital of France is")
    """
    return run_with_hooks(
        model,
        tokens,
        return_type=return_type,
        hooks=hooks,
        attention_mask=attention_mask,
        cache=cache,
        initial_state=initial_state,
        batch_size=batch_size,
    )


@takes_encoding
@typed(leave=["fwd_hooks", "bwd_hooks"])
def run_with_hooks(
    model: Runner,
    tokens: Prompt,
    fwd_hooks: Iterable[tuple[Where, HookFunction]] = (),
    return_type: str | None = "logits",
    *,
    hooks: HookSpec | None = None,
    attention_mask: ArrayLike | None = None,
    cache: Past | None = None,
    initial_state: Past | None = None,
    prompt_length: int | Sequence[int] | None = None,
    bwd_hooks: Iterable[tuple[Where, HookFunction]] = (),
    metric: str | None = None,
    answer: Tokens = None,
    versus: Tokens = None,
    batch_size: BatchSize = AUTO,
) -> Any:
    """Run the model once, with Python functions at hook points.

    The graph is cut at the hooked values and runs segment by segment; nothing is computed twice. A function is called
    as `function(activation, hook=hook)`:

    * `activation` is a numpy array with the axes of the hook point. The function may write into it: **changes take
      effect whether it returns the array or nothing.** It may keep the array; only later functions at the same hook
      point write into it. An array that it returns replaces the value.
    * `hook.name`, `hook.layer()` and `hook.point` identify the hook point; `hook.ctx` is a dictionary that the
      functions at one hook point share during this call. `hook.positions` [batch, seq] has each column's position in
      its row's text, -1 for padding; `hook.rows` [batch] the rows' numbers, where a list runs in batches.

    Rows of unequal length are padded on the left, and functions see the padding too. What they leave there in
    scores and patterns is not read: a text alone has no such keys.

    Functions written for TransformerLens get arrays instead of tensors, and some axes and meanings differ: `hook_q`,
    `hook_k` and `hook_v` are [batch, head, seq, head_dim] here and [batch, seq, head, head_dim] there; `mlp.hook_pre`
    and `mlp.hook_post` are input and output of the MLP here, neurons there (here `mlp.hook_act`).

    Args:
        tokens: as `forward` takes them.
        fwd_hooks: pairs of a hook and a function. A hook is a name, a `HookPoint`, a glob, or a function of the
            name; the last two select all matching hook points in execution order, derived values
            (`hook_result`, `hook_states`) excluded. Functions at one hook point are called in the order given.
        return_type: "logits", "loss" (of the next token, the mean over all tokens, in nats), "loss per token",
            "both" (logits and loss), or None: the model then runs to the last hooked value only.
        hooks: interventions besides; they come before the functions at the same hook point.
        attention_mask, cache, initial_state, prompt_length: see `forward`.
        bwd_hooks: pairs of a hook and a function of the gradient by the value there, called as
            `function(gradient, hook=hook)` from the last hook point to the first. What a function writes or returns is
            what earlier hook points' gradients are made of.
        metric, answer, versus: the number whose gradients those are, see `HookSpec.set_metric`: "loss", which is the
            default, "logit", "logit_diff", "log_probability" or "probability".
        batch_size: as for `forward`. Functions are called in each batch; `hook.ctx` is shared by all of them.

    Returns:
        logits [batch, seq, vocab]; a loss as one number, or [batch, seq - 1] with NaN where padding is.

    Raises:
        HookError: a hook that the model does not have, with the nearest that it has, or a derived value.
        InterventionError: a function left a result that cannot replace the value: another shape, no floats, NaN or an
            infinity; or scores that leave a query without a key; or it changed a value on which nothing returned
            depends (an RWKV model's last state: `run_with_cache` returns it).
        InputError: tokens that the model cannot run on, an unknown `return_type`, or neither functions nor
            anything to return.
        GradientError: functions at values and at gradients in one call, a metric without a gradient, or one without
            functions at gradients.

    Example:
        def mute(activation, hook):
            activation[:, 5] = 0  # head 5
        logits = model.run_with_hooks("The capital of France is", [("blocks.2.attn.hook_z", mute)])
    """
    check_return_type(return_type)
    check_batch_size(batch_size)
    spec, functions = hooks or HookSpec(), StepFunctions(model.hooked, fwd_hooks)
    if spec.metric is not None or spec.gradients:
        raise GradientError("hooks= has a metric or gradients, and no logits tell them: `forward` returns them")
    past = choose_past(model.hooked, cache, initial_state)
    logits = return_type is not None
    request = ListRequest(model.ids(tokens), spec, batch_size, attention_mask, past, prompt_length, logits)
    batch = _batch(model, request)
    if backward := register(model.hooked, bwd_hooks):
        if isinstance(batch_size, int):
            raise GradientError("bwd_hooks are called for one batch: `gradients` has batch_size=")
        if functions.names:
            raise GradientError(
                "fwd_hooks and bwd_hooks in one call: no graph can differentiate a Python function; say what the first "
                "do as interventions, in hooks="
            )
        differentiated = {"name": metric or "loss", "answer": answer, "versus": versus}
        result = _run_backwards(model, request, backward, differentiated)
    elif not metric is answer is versus is None:
        raise GradientError("metric=, answer= and versus= are what bwd_hooks= differentiates, and there are none")
    else:
        result = _run(model, request, batch, functions)
    return convert_logits(return_type, result, batch)


@takes_encoding
@typed(leave=["fwd_hooks"])
def run_with_cache(
    model: Runner,
    tokens: Prompt,
    names_filter: Where | Sequence[Where] | None = None,
    *,
    fwd_hooks: Iterable[tuple[Where, HookFunction]] = (),
    return_type: str | None = "logits",
    stop_at_layer: int | None = None,
    hooks: HookSpec | None = None,
    attention_mask: ArrayLike | None = None,
    cache: Past | None = None,
    initial_state: Past | None = None,
    use_cache: bool = False,
    prompt_length: int | Sequence[int] | None = None,
    batch_size: BatchSize = AUTO,
) -> tuple[Any, HookCache]:
    """Run the model once and keep values at hook points.

    Args:
        tokens: as `forward` takes them.
        names_filter: a name, `HookPoint`, glob or function of the name, or a list of these; by default all hook
            points, derived values excluded.
        fwd_hooks: functions besides, as `run_with_hooks` takes them; the cache holds the values after them.
        return_type: of the first result, as for `run_with_hooks`; with None, the model runs to the last of these hook
            points only.
        stop_at_layer: run the layers before this one only, and return the residual stream that it would read,
            [batch, seq, hidden], in place of logits; negative from the end. The cache holds hook points up to there.
        hooks: interventions, and captures, besides.
        attention_mask, cache, initial_state, prompt_length: see `forward`.
        use_cache: return the keys and values that the functions leave, as the cache's `kv_cache`.
        batch_size: as for `forward`.

    Returns:
        the logits or the loss, and the cache.

    Raises:
        HookError, InterventionError, InputError: as `run_with_hooks`; a `stop_at_layer` that the model does not have,
            or nothing to keep before it.

    Example:
        logits, cache = model.run_with_cache("The capital of France is", "blocks.*.hook_resid_post")
        cache["resid_post", 2].shape  # (1, seq, hidden)
    """
    check_return_type(return_type)
    check_batch_size(batch_size)
    spec = _capturing(model, names_filter).extend(hooks or HookSpec())
    if not (spec.captures or use_cache):
        raise HookError("names_filter=[] keeps nothing: run_with_hooks returns logits alone")
    functions, past = StepFunctions(model.hooked, fwd_hooks), choose_past(model.hooked, cache, initial_state)
    logits = return_type is not None
    request = ListRequest(model.ids(tokens), spec, batch_size, attention_mask, past, prompt_length, logits, use_cache)
    batch = _batch(model, request)
    if stop_at_layer is None:
        result = _run(model, request, batch, functions, state=True)
        return convert_logits(return_type, result, batch), result
    if use_cache or return_type != "logits":
        raise InputError("stop_at_layer= returns the residual stream: no logits for a return_type=, no use_cache=True")
    end = _end(model, stop_at_layer)
    spec = _until(model, spec, end, names_filter is None)
    result = _run(model, replace(request, spec=spec, logits=False), batch, functions)
    return result[end], result


def _end(model: Runner, layer: int) -> HookPoint:
    """The residual stream that a layer reads, or after the last one."""
    if not -model.num_layers <= layer <= model.num_layers:
        raise HookError(f"stop_at_layer={layer}: the model has the layers 0 to {model.num_layers - 1}")
    before = layer % model.num_layers if layer < 0 else layer
    return HookPoint.ResidPost(before - 1) if before else HookPoint.ResidPre(0)


def _until(model: Runner, spec: HookSpec, end: HookPoint, everything: bool) -> HookSpec:
    """The captures of a spec up to a hook point, that one besides."""
    points = model.hook_points()
    reached = [point.name for point in points[: points.index(end) + 1]]
    reduced = replace(spec, captures=[])
    for request in spec.captures:
        names = [name for name in reached if request.selects(name)]
        if not (names or everything):
            raise HookError(f"{request} is not computed: the model stops at {end}")
        reduced.captures += [replace(request, what=HookPoint.parse(name)) for name in names]
    return reduced.capture(end)


def _capturing(model: Runner, names_filter: Where | Sequence[Where] | None) -> HookSpec:
    if names_filter is None:
        # Derived values are computed on request, from others that are among these.
        return _capturing(model, [point for point in model.hook_points() if not point.derived])
    single = isinstance(names_filter, HookPoint | str) or callable(names_filter)
    spec = HookSpec()
    for what in [names_filter] if single else names_filter:  # type: ignore[union-attr, list-item]
        spec.capture(what)  # type: ignore[arg-type]
    return spec


def _batch(model: Runner, request: ListRequest) -> TokenBatch:
    return make_token_batch(request.tokens, request.attention_mask, request.past, model.hooked, request.prompt_length)


def _forward(model: Runner, request: ListRequest) -> HookCache:
    return model.forward(
        request.tokens,
        request.spec,
        attention_mask=request.attention_mask,
        cache=request.past,
        prompt_length=request.prompt_length,
        use_cache=request.use_cache,
        logits=request.logits,
        batch_size=request.batch_size,
    )


def _run(
    model: Runner, request: ListRequest, batch: TokenBatch, functions: StepFunctions, state: bool = False
) -> HookCache:
    """Run a list with functions, which act after the interventions at their hook point, and before captures there."""
    if not functions.names:
        return _forward(model, request)
    hooked, logits, size, use_cache = model.hooked, bool(request.logits), request.batch_size, request.use_cache
    outputs = Outputs(logits=logits, carried=use_cache or (logits and hooked.metadata.state_alone))

    def run(spec: HookSpec, part: TokenBatch, past: Past | None, _: bool, rows: Sequence[int]) -> HookCache:
        here = functions.of_rows(rows)
        bound = model.binder.bind(spec, outputs, cuts=here.names).on(part)
        plan = in_blocks(bound.plan, model.variants, part.seq)
        chain = model.variants.chain(plan, here.names, part.batch * part.seq)
        returned = [*(["logits"] if logits else []), *(capture.node.hook for capture in bound.captures)]
        returned += present_names(hooked, use_cache) if state and outputs.carried else []
        dead = dead_hooks(hooked, here.names, returned)

        def between(name: str, value: NDArray[Any]) -> NDArray[Any]:
            if name not in dead:
                return here.call(hooked, part, 0, name, value)
            # A function may write into the array: only a copy tells whether it did.
            before = value.copy()
            return refuse_change(name, before, here.call(hooked, part, 0, name, value))

        results = chain.run({*bound.outputs(use_cache)}, bound.inputs(part, past, use_cache), between)
        model.watch_memory()
        return collect(bound, part, results, use_cache)

    bound = partial(bind_pass, model.binder, request.spec, logits, use_cache)
    if not isinstance(size, int) and (batch.batch == 1 or in_one_pass(bound(), batch, size, use_cache)):
        return run(request.spec, batch, request.past, False, range(batch.batch))
    return joined(map_rows(model, request, lambda _, cache: cache, "run", run=run, keep=True), bound(), batch)


def _run_backwards(
    model: Runner, request: ListRequest, functions: Mapping[str, list[HookFunction]], metric: Mapping[str, Any]
) -> HookCache:
    """Run a model and go back from a metric, with functions at the gradients, by hook point in execution order."""

    def forward(spec: HookSpec, logits: bool = True) -> HookCache:
        # In one pass, since a changed gradient goes back through the same rows again.
        return _forward(model, replace(request, spec=spec, logits=logits, batch_size=None))

    cache = forward(deepcopy(request.spec).set_metric(**metric).gradient([*functions]))
    gradients = {} if cache.grad is None else {name: np.array(value) for name, value in cache.grad.items()}
    for name in reversed([*functions]):
        before = gradients[name].copy()
        gradients[name] = _called(model, name, functions[name], gradients[name])
        change = gradients[name] - before
        # The hook points that this value is computed from; no other gradient changes with its own.
        leading = model.hooked.influence.leading(name)
        earlier = [other for other in functions if other in leading and other != name]
        # A gradient g that became g' reaches earlier hook points as g' - g does: one more pass differentiates the value
        # times (g' - g), and its gradients are added to theirs.
        if earlier and change.any():
            again = deepcopy(request.spec).capture(name).set_metric("cotangent", cotangent=change, of=name)
            for other, value in (forward(again.gradient(earlier), logits=False).grad or {}).items():
                gradients[other] += value
    cache.grad = HookCache(None, gradients, num_layers=model.num_layers)
    return cache


def _called(model: Runner, name: str, functions: list[HookFunction], value: NDArray[Any]) -> NDArray[Any]:
    """The gradient after its functions, each called on the result of the one before."""
    hook = Hook(HookPoint.parse(name))
    for function in functions:
        returned = function(value, hook=hook)
        if returned is not None and returned is not value:
            value = replacement(model.hooked, hook, function, returned, value)
        if not np.isfinite(value).all():
            raise GradientError(f"a function at the gradient of {name} left NaN or an infinity")
    return value


def loss_per_token(logits: NDArray[Any], batch: TokenBatch) -> NDArray[np.float64]:
    """-log softmax(logits[t])[token t + 1] in nats, float64 [batch, seq - 1]; NaN where either token is padding."""
    # A loss is of a real token after a real one.
    predicted = batch.real[:, :-1] & batch.real[:, 1:]
    if not predicted.any():
        raise InputError("a loss needs a text of two tokens or more: it is of each token, given those before it")
    losses = np.full(predicted.shape, np.nan)
    for row, here in enumerate(predicted):  # row by row: the logits of one row in float64, not of all
        at, following = np.flatnonzero(here), batch.input_ids[row, 1:][here]
        chosen = logits[row, at].astype(np.float64)
        losses[row, at] = logsumexp(chosen, axis=-1) - chosen[np.arange(len(following)), following]
    return losses


def convert_logits(return_type: str | None, cache: HookCache, batch: TokenBatch) -> Any:
    """The logits of a call as a return type: "logits", "loss", "loss per token", "both" or None."""
    if batch.both and return_type not in (None, "logits"):
        raise InputError(
            f"return_type={return_type!r} is a loss of the next token, which an encoder reads: take its logits, and "
            "their log-probabilities of the tokens that a mask hides"
        )
    if return_type is None:
        return None
    logits = cache.output()
    if return_type == "logits":
        return logits
    losses = loss_per_token(logits, batch)
    mean = np.nanmean(losses)
    return {"loss per token": losses, "loss": mean, "both": (logits, mean)}[return_type]


def check_return_type(return_type: str | None) -> None:
    """Refuse an unknown return type."""
    if return_type is not None and return_type not in RETURN_TYPES:
        choices = ", ".join(map(repr, RETURN_TYPES))
        raise InputError(
            f"return_type={return_type!r}; one of {choices}, None{nearest(str(return_type), RETURN_TYPES)}"
        )
