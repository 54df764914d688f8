"""`run_pass`: one forward pass, from a bound spec to its results."""

from functools import partial
from typing import Any, Protocol

import numpy as np

from mionnx.bind.bound_spec import Binder, BoundSpec
from mionnx.bind.logit_selection import Logits
from mionnx.bind.metric_inputs import Feeds
from mionnx.engine.options import Options
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.output_head import LOGITS
from mionnx.inputs.token_batch import Past, TokenBatch
from mionnx.rewrite.plan import METRIC_WEIGHTS
from mionnx.run.call_graph import open_call
from mionnx.run.hook_cache import HookCache, collect
from mionnx.run.metric_feeds import metric_feeds
from mionnx.run.nan_logits import checked, refuse_nan
from mionnx.run.open_graphs import OpenGraphs
from mionnx.run.other_spelling import has_text, warn_of_spellings
from mionnx.run.pass_memory import refuse_too_large
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.metric import MetricSpec


class PassModel(Protocol):
    """A model with open graphs: what is needed of `Runner`."""

    hooked: HookedModel
    options: Options
    binder: Binder
    variants: OpenGraphs

    def token_id(self, text: str) -> int:
        """The id of a text that is one token."""

    def _known(self, token: int) -> int:
        """Check a token's id."""

    def forward(self, tokens: Any, hooks: HookSpec | None = None, *, logits: bool | Logits = True) -> Any:
        """Run the model once."""


def run_pass(
    model: PassModel,
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
        model: the model.
        bound: the spec.
        batch: the tokens.
        past: what came before them.
        use_cache: whether keys and values are returned.
        logits: whether logits are.
        effective: whether the interventions are known to have an effect.
    """
    refuse_too_large(bound, batch, use_cache)
    bound = bound.on(batch)
    feeds = metric_feeds(model, bound, batch)
    inputs = {**bound.inputs(batch, past, use_cache, effective), **feeds}
    names = [name for name in bound.outputs(use_cache) if logits or name != LOGITS]
    results = open_call(model.variants, bound, batch, names).run(names, inputs)
    if logits:
        lengths = None if batch.prompt_lengths is None else batch.prompt_lengths.tolist()
        same: dict[str, Any] = {"attention_mask": batch.attention_mask, "cache": past, "prompt_length": lengths}
        again = partial(model.forward, batch.input_ids, logits=False, **same)
        results["logits"] = checked(results["logits"], partial(refuse_nan, spec=bound.spec, again=again))
        _look_at_spelling(model, bound.spec.metric, feeds, results["logits"])
    return collect(bound, batch, results, use_cache)


def _look_at_spelling(model: PassModel, metric: MetricSpec | None, feeds: Feeds, logits: Any) -> None:
    """Warn where the model gives more to another spelling of a metric's tokens."""
    if metric is None or METRIC_WEIGHTS not in feeds or not has_text(given := (metric.answer, metric.versus)):
        return
    places = feeds[METRIC_WEIGHTS].argmax(axis=1)
    read = np.asarray(logits)[np.arange(len(places)), places]
    warn_of_spellings(model, dict(zip(("answer", "versus"), given, strict=True)), read)
