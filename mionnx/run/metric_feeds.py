"""Inputs of a spec's metric, with its tokens as ids of a model's vocabulary."""

import operator
from typing import Any, Protocol

from numpy.typing import NDArray

from mionnx.bind.bound_spec import BoundSpec
from mionnx.bind.metric_inputs import metric_inputs, seed_inputs
from mionnx.errors import GradientError
from mionnx.graph.axes import dynamic_sizes, shape_of
from mionnx.graph.hook_points import HookPoint
from mionnx.inputs.token_batch import TokenBatch
from mionnx.spec.metric import Token


class Vocabulary(Protocol):
    """A model with a tokenizer: what is needed here of `Runner`."""

    def token_id(self, text: str) -> int:
        """The id of a text that is one token."""

    def _known(self, token: int) -> int:
        """Check a token's id."""


def metric_feeds(model: Vocabulary, bound: BoundSpec, batch: TokenBatch) -> dict[str, NDArray[Any]]:
    """Make the inputs of a bound spec's metric; none if it has none.

    Raises:
        GradientError, InterventionError: see `metric_inputs`.
        InputError, TokenizerError: a token outside the vocabulary, or a text that is not one.
    """
    metric = bound.spec.metric
    if metric is None:
        return {}
    if metric.at is not None:
        sizes = dynamic_sizes(batch.batch, batch.seq, batch.total)
        return seed_inputs(metric, shape_of(bound.hooks.dims(HookPoint.parse(metric.at)), sizes))

    def token_id(token: Token) -> int:
        if isinstance(token, str):
            return model.token_id(token)
        try:
            return model._known(operator.index(token))
        except TypeError:
            raise GradientError(f"token {token!r}: a token is a text, or an integer") from None

    return metric_inputs(metric, batch, bound.logits, bound.model.metadata.sizes, token_id)
