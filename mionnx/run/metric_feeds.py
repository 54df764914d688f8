"""Inputs of a spec's metric, with its tokens as ids of a model's vocabulary."""

from typing import Any

from numpy.typing import NDArray

from mionnx.bind.bound_spec import BoundSpec
from mionnx.bind.metric_inputs import Vocabulary, metric_inputs, seed_inputs, with_ids
from mionnx.graph.axes import dynamic_sizes, shape_of
from mionnx.graph.hook_points import HookPoint
from mionnx.inputs.token_batch import TokenBatch


def metric_feeds(model: Vocabulary, bound: BoundSpec, batch: TokenBatch) -> dict[str, NDArray[Any]]:
    """Make the inputs of a bound spec's metric; none if it has none.

    Raises:
        GradientError, InterventionError: see `metric_inputs`.
        InputError, TokenizerError: a token outside the vocabulary, or a text that is not one.
    """
    metric = bound.spec.metric
    if metric is None:
        return {}
    if metric.of is not None:
        sizes = dynamic_sizes(batch.batch, batch.seq, batch.total)
        point = HookPoint.parse(metric.of)
        return seed_inputs(metric, shape_of(bound.hooks.dims(point), sizes), bound.hooks.axes(point), batch)
    return metric_inputs(with_ids(metric, model), batch, bound.logits, bound.model.metadata.sizes)
