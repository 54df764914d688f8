"""From a spec and a call to the open graph that runs it: `bind_pass`, `open_call`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.bind.bound_spec import ALL_LOGITS, Binder, BoundSpec
from mionnx.bind.logit_selection import Logits
from mionnx.bind.state_gates import states_of
from mionnx.engine.engines import ENGINES
from mionnx.engine.options import Options
from mionnx.graph import stock_graph
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.io_names import KEYS_AND_VALUES
from mionnx.inputs.token_batch import TokenBatch
from mionnx.rewrite.plan import ALL, LOGIT_BEGIN, NONE, PADDED, STOCK, Outputs, Plan
from mionnx.run import stock_calls
from mionnx.run.batching import query_blocks
from mionnx.run.every_layer import ALL_LAYERS
from mionnx.run.open_graphs import OpenGraph, OpenGraphs
from mionnx.run.pieces import PiecedGraph
from mionnx.spec.hook_spec import HookSpec

SHARED = (Outputs(), Outputs(last=True))


def bind_pass(binder: Binder, spec: HookSpec, logits: bool | Logits, use_cache: bool) -> BoundSpec:
    """Bind the spec of a forward pass, with the outputs that it asks for; see `Runner.forward`."""
    part = logits if isinstance(logits, Logits) else ALL_LOGITS
    carried = use_cache or (bool(logits) and not spec.metric)
    needed = logits or (spec.metric is not None and spec.metric.of is None)
    outputs = part.outputs(carried) if needed else Outputs(logits=False, carried=use_cache)
    return binder.bind(spec, outputs, logits=part, differentiated=True)


def open_call(
    graphs: OpenGraphs,
    bound: BoundSpec,
    batch: TokenBatch | None = None,
    outputs: Sequence[str] = (),
    *,
    continues: bool = False,
) -> OpenGraph:
    """The open graph of a bound spec in a call; of one text of several tokens without a batch."""
    plan, feeds = _plan_of(graphs, bound, batch, outputs, continues)
    graph = _of_every_layer(graphs, bound, batch, plan)
    if graph is None:
        graph = graphs.get(plan, 0 if batch is None or continues else batch.batch * batch.seq)
    return _fed(graph, feeds)


def _fed(graph: OpenGraph, feeds: dict[str, NDArray[Any]]) -> OpenGraph:
    return replace(graph, feeds={**graph.feeds, **feeds}) if feeds else graph


def open_pass(
    graphs: OpenGraphs, bound: BoundSpec, batch: TokenBatch, outputs: Sequence[str]
) -> OpenGraph | PiecedGraph:
    """The open graph of a bound spec in one pass, or those of its pieces, which open sooner."""
    plan, feeds = _plan_of(graphs, bound, batch, outputs, False)
    if (graph := _of_every_layer(graphs, bound, batch, plan)) is not None:
        return _fed(graph, feeds)
    pieces = None if feeds else graphs.pieces(plan, batch.batch * batch.seq)
    return open_call(graphs, bound, batch, outputs) if pieces is None else pieces


def _plan_of(
    graphs: OpenGraphs, bound: BoundSpec, batch: TokenBatch | None, outputs: Sequence[str], continues: bool
) -> tuple[Plan, dict[str, NDArray[Any]]]:
    """The plan of a call, and inputs that its graph needs where calls of several kinds share it."""
    model = bound.model
    gated = bool(states_of(bound.spec))
    plan = with_fused(bound.plan, model, graphs.options, batch, outputs, continues=continues, gated=gated)
    feeds: dict[str, NDArray[Any]] = {}
    if model.in_blocks and _shares(plan) and graphs.engine.packs(graphs.options):
        # The engine packs all blocks for each graph: passes and generations share one. An input says from which column
        # on there are logits; what comes before the head is not touched, so the bits are the same.
        feeds[LOGIT_BEGIN] = np.array([-1 if plan.outputs.last else 0])
        plan = replace(plan, outputs=replace(plan.outputs, last=False, begins=True))
    if batch is not None and not continues:
        plan = in_blocks(plan, graphs, batch.seq)
    return plan, feeds


def _of_every_layer(graphs: OpenGraphs, bound: BoundSpec, batch: TokenBatch | None, plan: Plan) -> OpenGraph | None:
    """The open graph of every layer, if it serves a plan."""
    layers = None if batch is None else graphs.every_layer(plan)
    if layers is None or batch is None:
        return None
    if bound.estimate(batch.batch, batch.seq, batch.total).total * layers.copies > ALL_LAYERS:
        return None
    graph = graphs.get(layers.plan, batch.batch * batch.seq)
    return replace(graph, feeds=dict(layers.switches), lent=layers.lent)


def in_blocks(plan: Plan, graphs: OpenGraphs, tokens: int) -> Plan:
    """The plan with attention in blocks of queries, for rows of many tokens on the CPU."""
    one_product = plan.fused != NONE or not graphs.engine.packs(graphs.options)
    return plan if one_product else replace(plan, blocks=query_blocks(tokens))


def _shares(plan: Plan) -> bool:
    """Whether a plan asks for all logits or the last ones, of tokens, and touches none."""
    touched = {*(edit.hook for edit in plan.edits), *(capture.hook for capture in plan.captures)}
    plain = plan.fused == NONE and not plan.starts and plan.gradients is None
    return plain and plan.outputs in SHARED and HookPoint.Logits.name not in touched


def with_fused(
    plan: Plan,
    model: HookedModel,
    options: Options,
    batch: TokenBatch | None = None,
    outputs: Sequence[str] = (),
    *,
    continues: bool = False,
    gated: bool = False,
) -> Plan:
    """The plan with those operators of its file that are right for a call, if the engine computes them.

    `gated` says that states are intervened on, by gates and a mask with holes: those that are right for padding are
    right for that.
    """
    metadata = model.metadata
    if not (options.fused and (metadata.fused or metadata.stock)) or plan.starts or plan.gradients:
        return plan
    if not ENGINES[options.engine].computes(model.fused_kinds, metadata.dtype, options):
        return plan
    stock = model.stock
    # The file's own graph runs, for the kinds of calls in which it gives what the hooked graph gives, where that has
    # standard nodes instead of the file's operators, or with `fast`.
    if not gated and not plan.touches and stock is not None and (options.fast or stock.expanded):
        present = [name for name in outputs if name.startswith(KEYS_AND_VALUES.present)]
        kind = stock_graph.SEVERAL_BIT if batch is None else kind_of(batch)
        kinds = [] if kind is None else [kind]
        if kind is not None and continues:
            kinds.append(kind & ~stock_graph.SEVERAL_BIT | stock_graph.PAST_BIT)
        if kinds and stock.gives(present) and all(stock_calls.serves(model, one) for one in kinds):
            return replace(plan, fused=STOCK)
    if not metadata.fused:
        return plan
    return replace(plan, fused=ALL if not gated and (batch is None or _attends(batch)) else PADDED)


def kind_of(batch: TokenBatch) -> int | None:
    """The kind of a call, by the flags of `stock_graph`; None if it is of none that are tried."""
    kind = stock_graph.ROWS_BIT * (batch.batch > 1) | stock_graph.PAST_BIT * (batch.total > batch.seq)
    kind |= stock_graph.SEVERAL_BIT * (batch.seq > 1)
    mask = batch.attention_mask
    if mask.all():
        return kind
    # None: padding behind a text, or so much before it that a call holds nothing else
    return kind | stock_graph.PADDED_BIT if (mask[:, 1:] >= mask[:, :-1]).all() else None


def _attends(batch: TokenBatch) -> bool:
    """Whether fused attention is right for a call; standard nodes are for all."""
    # It takes lengths from the number of ones in the mask: padding is not where it looks for it, and with a past it
    # takes one row or one token at a time.
    past = batch.total - batch.seq
    return not batch.padded and (past == 0 or batch.seq == 1 or batch.batch == 1)
