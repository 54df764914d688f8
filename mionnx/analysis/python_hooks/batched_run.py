"""`run_batches`: a list of prompts in batches, with Python functions called in each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.python_hooks.loss import NO_LOSS, row_losses
from mionnx.analysis.python_hooks.segmented_run import RunInputs, run_segments
from mionnx.errors import InputError
from mionnx.inputs.past import choose_past
from mionnx.inputs.prompt_list import read_prompts
from mionnx.inputs.token_batch import Past, TokenBatch
from mionnx.run.forward_batches import ListRequest, map_rows
from mionnx.run.hook_cache import HookCache
from mionnx.run.hook_caches import HookCaches
from mionnx.run.hook_functions import Hook, HookFunction, Where
from mionnx.run.runner import Runner
from mionnx.spec.hook_spec import HookSpec

Losses = NDArray[np.float64]


@dataclass(frozen=True)
class _RowResult:
    """The results of one prompt; losses [seq - 1] if they were asked for."""

    cache: HookCache
    losses: Losses | None


def run_batches(
    model: Runner,
    inputs: RunInputs,
    spec: HookSpec,
    fwd_hooks: Iterable[tuple[Where, HookFunction]],
    return_type: str | None,
    batch_size: int | str,
    state: bool,
) -> tuple[Any, HookCaches]:
    """Run a list of prompts with functions at hook points.

    Args:
        model, inputs, spec, fwd_hooks, state: see `run_segments`; the functions see each batch.
        return_type: of the first result.
        batch_size: most rows of a batch, or "auto".

    Returns:
        a list of logits [1, seq, vocab], the losses of all texts, or None; and the results of each prompt.

    Raises:
        HookError, InterventionError, InputError: see `run_with_hooks`.
    """
    past, functions = choose_past(model.hooked, inputs.cache, inputs.initial_state), [*fwd_hooks]
    asked = inputs.tokens, spec, batch_size, inputs.attention_mask, past, inputs.prompt_length
    texts = read_prompts(inputs.tokens, inputs.attention_mask, past, model.hooked.metadata.sizes).ids
    hooks: dict[str, Hook] = {}

    def run(spec: HookSpec, batch: TokenBatch, past: Past | None, _: bool, rows: list[int]) -> HookCache:
        lengths = None if batch.prompt_lengths is None else batch.prompt_lengths.tolist()
        part = RunInputs(batch.input_ids, batch.attention_mask, past, None, lengths)
        return run_segments(model, part, spec, functions, return_type is not None, state, hooks, rows)

    def read(row: int, cache: HookCache) -> _RowResult:
        losses = None
        if return_type not in (None, "logits"):
            losses = row_losses(cache.output()[0], texts[row])
        if return_type not in ("logits", "both") and not cache and cache.has_logits:
            cache.into_output()  # nobody asked for them
        return _RowResult(cache, losses)

    request = ListRequest(*asked, logits=return_type is not None)
    rows = map_rows(model, request, read, "run", run=run, kept=return_type in ("logits", "both"))
    caches = HookCaches([row.cache for row in rows])
    return _returned(return_type, caches, [row.losses for row in rows if row.losses is not None]), caches


def _returned(return_type: str | None, caches: HookCaches, losses: list[Losses]) -> Any:
    """Results of a list, as `convert_logits` gives those of a batch."""
    if return_type is None:
        return None
    if losses and not any(map(len, losses)):
        raise InputError(NO_LOSS)
    if return_type == "loss per token":
        width = max(map(len, losses))
        return np.stack([np.pad(row, (width - len(row), 0), constant_values=np.nan) for row in losses])
    logits = [] if return_type == "loss" else [cache.output() for cache in caches]
    if return_type == "logits":
        return logits
    mean = np.concatenate(losses).mean()
    return mean if return_type == "loss" else (logits, mean)
