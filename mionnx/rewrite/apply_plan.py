"""Apply a plan: one rewrite after the other, on a copy of the graph."""

import gc
from collections.abc import Collection

import onnx
import onnx_graphsurgeon as gs

from mionnx.errors import InterventionError
from mionnx.graph.dataflow import Dataflow, extract
from mionnx.graph.edited_graph import edit, to_proto
from mionnx.graph.fused_operators import read_fused, restore
from mionnx.graph.metadata import PREFIX, Metadata
from mionnx.graph.output_head import LOGITS
from mionnx.graph.report import Report
from mionnx.rewrite.capture import capture
from mionnx.rewrite.gradient.gradient_outputs import add_gradients, add_metric
from mionnx.rewrite.intervene import intervene
from mionnx.rewrite.lens_head import read_out
from mionnx.rewrite.plan import NONE, PADDED, Plan
from mionnx.rewrite.prune import prune, unscale_idle
from mionnx.rewrite.query_blocks import in_query_blocks
from mionnx.rewrite.restrict_outputs import restrict

STOCK_KEY = f"{PREFIX}stock"  # of the metadata: a graph that no rewritten one needs


def rewrite(origin: onnx.ModelProto, plan: Plan, metadata: Metadata) -> tuple[bytes, Report]:
    """Apply a plan to a model."""
    # Thousands of small objects are made and all are needed to the end: looking for garbage takes a fifth of the time.
    collects = gc.isenabled()
    gc.disable()
    try:
        return _rewritten(origin, plan, metadata)
    finally:
        if collects:
            gc.enable()


def _rewritten(origin: onnx.ModelProto, plan: Plan, metadata: Metadata) -> tuple[bytes, Report]:
    graph, report = apply_plan(origin, plan, metadata)
    proto = to_proto(graph, origin, {})
    if plan.gradients is not None:
        proto = add_gradients(proto, plan.gradients, report)
    if plan.fused != NONE and metadata.fused:
        flow = Dataflow(origin)
        proto, report.restored = restore(proto, flow, read_fused(flow, metadata.fused), padding=plan.fused == PADDED)
    if plan.blocks:
        proto = in_query_blocks(proto, plan.blocks, metadata.sizes.num_layers)
    proto.metadata_props.extend(entry for entry in origin.metadata_props if entry.key != STOCK_KEY)
    return proto.SerializeToString(), report


def apply_plan(
    origin: onnx.ModelProto, plan: Plan, metadata: Metadata, read: Collection[str] = ()
) -> tuple[gs.Graph, Report]:
    """Apply a plan; the graph can be edited further, at the hook points of the plan and those that are `read`."""
    graph = edit(extract(origin, plan.starts, _ends(plan))) if plan.starts else edit(origin, again=True)
    report = Report()
    intervene(graph, plan.edits, report)
    if plan.starts:
        graph.outputs = [output for output in graph.outputs if output.name == LOGITS]
    capture(graph, plan.captures, metadata, report)
    restrict(graph, plan, report)
    if plan.outputs.readout:
        read_out(graph, report)
    if plan.gradients is not None:
        add_metric(graph, plan.gradients, report)
    if metadata.exponents:
        unscale_idle(graph, metadata.exponents, _touched(plan).union(read))
    prune(graph, report)
    _refuse_idle(graph, plan)
    return graph, report


def _ends(plan: Plan) -> list[str]:
    return [*(want.hook for want in plan.captures), *([LOGITS] if plan.outputs.logits else [])]


def _touched(plan: Plan) -> set[str]:
    """Hook points that a graph is cut at, or that gradients are by or of."""
    by = plan.gradients
    return {*plan.starts} | ({*by.seeds, *(node.source for node in by.by)} if by else set())


def _refuse_idle(graph: gs.Graph, plan: Plan) -> None:
    """Refuse interventions that were pruned: without logits, no capture depended on them."""
    if plan.outputs.logits:
        return  # what another intervention replaces altogether may be dropped: the two stand in the order asked for
    left = {node.name for node in graph.nodes}
    for one in plan.edits:
        if not any(name.startswith(f"{one.prefix}.") for name in left):
            raise InterventionError(
                f"{one.kind} at {one.hook} changes nothing that is asked for: no capture lies behind it, and there "
                "are no logits; ask for logits, or capture a later hook point"
            )
