"""`run_pass`: one forward pass; `forward_batches`: that over a list of prompts, in batches of like length."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from mionnx.bind.bound_spec import BoundSpec
from mionnx.bind.logit_selection import Logits
from mionnx.bind.metric_inputs import Feeds, metric_inputs, seed_inputs, with_ids
from mionnx.bind.spec_rows import SpecRows, differs_by_row, reaches_by_row
from mionnx.graph.axes import dynamic_sizes, shape_of
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.metadata import ATTENDS_TO_PADDING
from mionnx.graph.output_head import LOGITS
from mionnx.inputs.prompt_list import read_prompts
from mionnx.inputs.token_batch import Past, TokenBatch, make_token_batch
from mionnx.rewrite.plan import METRIC_WEIGHTS
from mionnx.run.batching import AUTO, PER_BATCH, BatchSize, fitting, in_batches, refuse_all, refuse_too_large
from mionnx.run.call_graph import bind_pass, open_pass
from mionnx.run.hook_cache import HookCache, collect, joined, rows_of
from mionnx.run.nan_logits import checked, refuse_nan
from mionnx.run.open_model import OpenModel
from mionnx.run.tokenizing import answer_id, check_answer, has_text, warn_of_spellings
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.metric import READS_ALL, MetricSpec

T = TypeVar("T")
HALF = 0.5  # of a list that is padding: where steps or functions follow, which are quicker, or fewer, for all rows
WORTH_PARTING = 0.2  # of a list that is padding, which a pass is quicker without


def run_pass(
    model: OpenModel,
    bound: BoundSpec,
    batch: TokenBatch,
    past: Past | None,
    *,
    use_cache: bool,
    logits: bool,
    effective: bool = False,
) -> HookCache:
    """Run a bound spec on one token batch; `effective` where its interventions are known to have an effect."""

    def again(spec: HookSpec) -> HookCache:
        captured = bind_pass(model.binder, spec, logits=False, use_cache=False)
        return run_pass(model, captured, batch, past, use_cache=False, logits=False)

    refuse_too_large(bound, batch, use_cache)
    bound = bound.on(batch)
    feeds = metric_feeds(model, bound, batch)
    inputs = {**bound.inputs(batch, past, use_cache, effective), **feeds}
    names = [name for name in bound.outputs(use_cache) if logits or name != LOGITS]
    results = open_pass(model.variants, bound, batch, names).run(names, inputs)
    model.watch_memory()
    if logits:
        results["logits"] = checked(results["logits"], partial(refuse_nan, spec=bound.spec, again=again))
        _look_at_spelling(model, bound.spec.metric, feeds, results["logits"])
    return collect(bound, batch, results, use_cache)


def metric_feeds(model: OpenModel, bound: BoundSpec, batch: TokenBatch) -> Feeds:
    """Make the inputs of a bound spec's metric; none if it has none."""
    metric = bound.spec.metric
    if metric is None:
        return {}
    if metric.of is not None:
        sizes = dynamic_sizes(batch.batch, batch.seq, batch.total)
        point = HookPoint.parse(metric.of)
        return seed_inputs(metric, shape_of(bound.hooks.dims(point), sizes), bound.hooks.axes(point), batch)
    metric = with_ids(metric, partial(answer_id, model), partial(check_answer, model))
    return metric_inputs(metric, batch, bound.logits, bound.model.metadata)


def _look_at_spelling(model: OpenModel, metric: MetricSpec | None, feeds: Feeds, logits: Any) -> None:
    """Warn where the model gives more to another spelling of a metric's tokens."""
    if metric is None or METRIC_WEIGHTS not in feeds or not has_text(tokens := (metric.answer, metric.versus)):
        return
    if model.hooked.metadata.labels or metric.name in READS_ALL:
        return
    places = feeds[METRIC_WEIGHTS].argmax(axis=1)
    read = np.asarray(logits)[np.arange(len(places)), places]
    warn_of_spellings(model, dict(zip(("answer", "versus"), tokens, strict=True)), read)


def takes_padding(model: HookedModel) -> bool:
    """Whether rows of unequal length may run as one batch."""
    return ATTENDS_TO_PADDING not in model.metadata.exporter


@dataclass(frozen=True)
class ListRequest:
    """A pass over a list of prompts, with the arguments of `Runner.forward`."""

    tokens: Any
    spec: HookSpec
    batch_size: BatchSize
    attention_mask: ArrayLike | None = None
    past: Past | None = None
    prompt_length: int | Sequence[int] | None = None
    logits: bool | Logits = True
    use_cache: bool = False

    def bound(self, model: OpenModel) -> BoundSpec:
        """Bind the spec."""
        return bind_pass(model.binder, self.spec, self.logits, self.use_cache)

    def batch(self, model: OpenModel) -> TokenBatch:
        """All prompts as one token batch."""
        return make_token_batch(self.tokens, self.attention_mask, self.past, model.hooked, self.prompt_length)


# of the spec, tokens and past of some rows, whether its effects are known, and the rows' numbers
Run = Callable[[HookSpec, TokenBatch, Past | None, bool, list[int]], HookCache]


def in_one_pass(
    bound: BoundSpec, batch: TokenBatch, batch_size: BatchSize, use_cache: bool = False, most: float = HALF
) -> bool:
    """Whether all rows run at once: they fit into memory, and at most such a share is padding."""
    if batch_size != AUTO or batch.batch == 1:
        return batch_size is None or batch.batch == 1
    sparse = batch.real.sum() < (1 - most) * batch.real.size and batch.real.size > PER_BATCH
    return not sparse and batch.batch <= fitting(bound, batch.total - batch.seq, use_cache)(batch.seq)


def forward_batches(model: OpenModel, request: ListRequest, bound: BoundSpec) -> HookCache:
    """Run a list of prompts in batches; the results are those of one batch."""
    rows = map_rows(model, request, lambda _, cache: cache, "forward", keep=True, bound=bound)
    return joined(rows, bound, request.batch(model))


def map_rows(
    model: OpenModel,
    request: ListRequest,
    read: Callable[[int, HookCache], T],
    stage: str,
    *,
    run: Run | None = None,
    keep: bool = False,
    progress: bool | None = None,
    bound: BoundSpec | None = None,
) -> list[T]:
    """Run a list of prompts in batches, and make something of the results of each.

    Args:
        read: makes something of a prompt's number and its results, [1, seq, ...] without padding.
        run: runs one batch; a forward pass if left out.
        keep: whether all results are kept, padded, so that memory must hold them together.
        bound: the request's spec, where it is bound already.

    Returns:
        what `read` made, in the order given.
    """
    bound, hooked = bound or request.bound(model), model.hooked
    prompts, full = read_prompts(request.tokens, request.attention_mask, request.past, hooked), None
    by_row = differs_by_row(bound) or request.prompt_length is not None
    if checked_once := by_row or reaches_by_row(bound):
        full = request.batch(model)
        bound.check(full, request.use_cache)  # on all rows at once: a part may lack what an intervention is for
        metric_feeds(model, bound, full)
        full = full if by_row else None
    if keep:
        refuse_all(bound, [max(prompts.lengths)] * len(prompts), prompts.seen, request.use_cache)

    def run_rows(rows: list[int]) -> list[T]:
        ids, mask, past = prompts.part(rows)
        lengths = None if full is None or full.prompt_lengths is None else full.prompt_lengths[rows].tolist()
        batch = make_token_batch(ids, mask, past, hooked, lengths)
        spec = bound.spec if full is None else SpecRows(bound, full).of(rows, batch.seq)
        if run is not None:
            cache = run(spec, batch, past, checked_once, rows)
        else:
            cache = run_pass(
                model,
                bound if full is None else replace(request, spec=spec).bound(model),
                batch,
                past,
                use_cache=request.use_cache,
                logits=bool(request.logits),
                effective=checked_once,
            )
        return [read(row, one) for row, one in zip(rows, rows_of(cache, bound, batch), strict=True)]

    return in_batches(
        prompts.lengths,
        request.batch_size,
        run_rows,
        stage=stage,
        padded=takes_padding(model.hooked),
        fitting=fitting(bound, prompts.seen, request.use_cache),
        progress=progress,
    )
