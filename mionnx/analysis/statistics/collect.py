"""`statistics`: moments of hook points over a dataset, from a pass over its texts or from harvested activations."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.harvest.activations import Activations
from mionnx.analysis.harvest.settings import capturing
from mionnx.analysis.harvest.texts import Source, Texts
from mionnx.analysis.statistics.statistics import Statistics
from mionnx.errors import HookError, InputError
from mionnx.graph.axes import KEYS, sequence_axis
from mionnx.graph.hook_points import HookPoint
from mionnx.machine.moments import Moments
from mionnx.machine.progress import shown
from mionnx.machine.typed import typed
from mionnx.run.batching import AUTO, BatchSize, check_batch_size
from mionnx.run.forward_batches import ListRequest, map_rows
from mionnx.run.prompt import By, check_by, classes_of, one_prompt
from mionnx.run.runner import Runner
from mionnx.spec.hook_choice import Hooks
from mionnx.spec.hook_spec import HookSpec

AT_ONCE = 256  # texts that are read ahead, to run those of like length together
TOKENS_AT_ONCE = 65_536  # tokens of harvested activations at a time


@typed(leave=["texts", "points", "by"])
def statistics(
    model: Runner,
    texts: Source,
    points: Hooks,
    *,
    hooks: HookSpec | None = None,
    by: By = None,
    covariance: bool = False,
    batch_size: BatchSize = AUTO,
    column: str | None = None,
    progress: bool | None = None,
) -> Statistics:
    """Count, mean, variance and covariance of hook points over a dataset, in one pass.

    No activations are stored. Sums are float64 (Welford's method, by batches). Every token of every text counts, the
    first one too.

    Args:
        texts: a list of texts or ids, an iterator, or a file or folder as `harvest` takes it.
        points: hook points with one value a token.
        hooks: interventions in force, and captures, which count besides.
        by: classes of tokens: "position", "token", or a function: ids [seq] -> integers [seq]; all together if left
            out.
        covariance: of all numbers of a vector [d], as [d, d]; for one class.
        batch_size: rows of a pass; "auto" chooses by their length.
        column: of tables and JSON lines, the one with the texts.
        progress: None for a bar in a terminal or notebook when it takes longer than two seconds, and a line a minute in
            a log; True at once, False for none.

    Raises:
        HookError: no such hook point, or one without one value a token.
        InputError: no texts, or a covariance by classes.

    Example:
        stats = model.statistics(texts, "blocks.*.hook_resid_post", by="position")
        stats.mean("blocks.2.hook_resid_post").shape  # (positions, hidden)
    """
    check_by(by)
    check_batch_size(batch_size)
    if covariance and by is not None:
        raise InputError("covariance= is of all tokens together: leave by= out")
    spec = capturing(points, hooks)
    names = _captured(model, spec)
    source, moments, done = Texts(texts, column), Statistics(by), 0
    waiting = iter(source)
    with shown(progress) as show:
        while entries := [*islice(waiting, AT_ONCE)]:
            rows = [one_prompt(model, text) for text in entries]
            request = ListRequest(rows, spec, batch_size, logits=False)
            caches = map_rows(model, request, lambda _, cache: cache, "statistics", progress=False)
            for ids, cache in zip(rows, caches, strict=True):
                classes = classes_of(by, ids)
                for name in names:
                    moments.add(name, Moments.of(tokens_first(cache[name], name)[0], classes, covariance))
            done += len(rows)
            moments.texts = done
            show("statistics", done, source.count)
    if not done:
        raise InputError("no texts: statistics of nothing")
    return moments


@typed(leave=["by"])
def statistics_of(
    activations: Activations, points: Sequence[str] | None = None, *, by: By = None, covariance: bool = False
) -> Statistics:
    """The statistics of harvested activations; see `statistics`.

    Args:
        activations: of a folder that `harvest` wrote.
        points: the hook points; all if left out.
        by, covariance: see `statistics`; a function gets the ids of the harvested tokens of many texts at a time.

    Raises:
        HookError: a hook point that was not harvested.
        InputError: a covariance by classes.

    Example:
        mionnx.statistics_of(Activations("folder"), covariance=True).covariance("blocks.2.hook_resid_post")
    """
    if not isinstance(activations, Activations):
        raise InputError(f"activations are an Activations, of a harvest's folder, got {type(activations).__name__}")
    check_by(by)
    if covariance and by is not None:
        raise InputError("covariance= is of all tokens together: leave by= out")
    moments = Statistics(by)
    moments.texts = activations.texts
    names = [*activations] if points is None else [*points]
    for batch in activations.batches(TOKENS_AT_ONCE, shuffle=False, points=names):
        classes = classes_of(by, batch["token_ids"], batch["positions"])
        for name in names:
            moments.add(name, Moments.of(batch[name], classes, covariance))
    return moments


def _captured(model: Runner, spec: HookSpec) -> list[str]:
    """The captured hook points, each with one value a token."""
    if any(one.positions is not None or one.heads is not None or one.before for one in spec.captures):
        raise InputError("statistics are of whole values after interventions: capture without positions, heads, before")
    names = [capture.node.hook for capture in model.binder.bind(spec).captures]
    if not names:
        raise HookError("no hook points: statistics of nothing")
    for name in names:
        axes = HookPoint.parse(name).axes or ()
        if "seq" not in axes or KEYS in axes:
            raise HookError(f"{name} is [{', '.join(axes)}]: it has no value of its own for each token")
    return names


def tokens_first(value: NDArray[Any], hook: str) -> NDArray[Any]:
    """A captured value with its tokens behind the batch: [batch, seq, ...]."""
    return np.moveaxis(value, sequence_axis(HookPoint.parse(hook).axes or ()), 1)
