"""`bind_pass` and `run_pass`: one forward pass, from a spec to its results."""

from functools import partial
from typing import Any, Protocol

import numpy as np

from mionnx.bind.bound_spec import ALL, Binder, BoundSpec
from mionnx.bind.logit_selection import Logits
from mionnx.bind.metric_inputs import Feeds
from mionnx.engine.options import Options
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.output_head import LOGITS
from mionnx.inputs.token_batch import Past, TokenBatch
from mionnx.rewrite.plan import METRIC_WEIGHTS, Outputs
from mionnx.run.fused_plan import with_fused
from mionnx.run.graph_pool import GraphPool
from mionnx.run.hook_cache import HookCache, collect
from mionnx.run.metric_feeds import metric_feeds
from mionnx.run.nan_logits import checked, refuse_nan
from mionnx.run.other_spelling import has_text, warn_of_spellings
from mionnx.run.pass_memory import refuse_too_large
from mionnx.run.shared_head import with_shared_head
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.metric import MetricSpec


class PassModel(Protocol):
    """A model with open graphs: what is needed of `Runner`."""

    hooked: HookedModel
    options: Options
    binder: Binder
    variants: GraphPool

    def token_id(self, text: str) -> int:
        """The id of a text that is one token."""

    def _known(self, token: int) -> int:
        """Check a token's id."""

    def forward(self, tokens: Any, hooks: HookSpec | None = None, *, logits: bool | Logits = True) -> Any:
        """Run the model once."""


def bind_pass(binder: Binder, spec: HookSpec, logits: bool | Logits, use_cache: bool) -> BoundSpec:
    """Bind the spec of a forward pass, with the outputs that it asks for; see `Runner.forward`."""
    part = logits if isinstance(logits, Logits) else ALL
    carried = use_cache or (bool(logits) and not spec.metric)
    needed = logits or (spec.metric is not None and spec.metric.of is None)
    outputs = part.outputs(carried) if needed else Outputs(logits=False, carried=use_cache)
    return binder.bind(spec, outputs, logits=part, differentiated=True)


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
    plan = with_fused(bound.plan, model.hooked, model.options, batch, names)
    plan, head = with_shared_head(plan, model.hooked, model.options)
    graph = model.variants.get(plan, batch.batch * batch.seq)
    results = graph.run(names, {**inputs, **head})
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
