"""`run_pass`: one forward pass, from a bound spec to its results."""

from functools import partial
from typing import Any

import numpy as np

from mionnx.bind.bound_spec import BoundSpec
from mionnx.bind.metric_inputs import Feeds, metric_inputs, seed_inputs, with_ids
from mionnx.graph.axes import dynamic_sizes, shape_of
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.output_head import LOGITS
from mionnx.inputs.token_batch import Past, TokenBatch
from mionnx.rewrite.plan import METRIC_WEIGHTS
from mionnx.run.call_graph import bind_pass, open_call
from mionnx.run.hook_cache import HookCache, collect
from mionnx.run.nan_logits import checked, refuse_nan
from mionnx.run.open_model import OpenModel
from mionnx.run.other_spelling import has_text, warn_of_spellings
from mionnx.run.pass_memory import refuse_too_large
from mionnx.run.tokenizing import check_token, token_id
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.metric import MetricSpec


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
    """Run a bound spec on one token batch.

    Args:
        effective: whether the interventions are known to have an effect.
    """

    def again(spec: HookSpec) -> HookCache:
        captured = bind_pass(model.binder, spec, logits=False, use_cache=False)
        return run_pass(model, captured, batch, past, use_cache=False, logits=False)

    refuse_too_large(bound, batch, use_cache)
    bound = bound.on(batch)
    feeds = metric_feeds(model, bound, batch)
    inputs = {**bound.inputs(batch, past, use_cache, effective), **feeds}
    names = [name for name in bound.outputs(use_cache) if logits or name != LOGITS]
    results = open_call(model.variants, bound, batch, names).run(names, inputs)
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
    metric = with_ids(metric, partial(token_id, model), partial(check_token, model))
    return metric_inputs(metric, batch, bound.logits, bound.model.metadata.sizes)


def _look_at_spelling(model: OpenModel, metric: MetricSpec | None, feeds: Feeds, logits: Any) -> None:
    """Warn where the model gives more to another spelling of a metric's tokens."""
    if metric is None or METRIC_WEIGHTS not in feeds or not has_text(tokens := (metric.answer, metric.versus)):
        return
    places = feeds[METRIC_WEIGHTS].argmax(axis=1)
    read = np.asarray(logits)[np.arange(len(places)), places]
    warn_of_spellings(model, dict(zip(("answer", "versus"), tokens, strict=True)), read)
