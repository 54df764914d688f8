"""A plan carried out: one rewrite after the other, on a fresh copy of the graph."""

from collections.abc import Sequence

import onnx
import onnx_graphsurgeon as gs

from mionnx.errors import InterventionError
from mionnx.graph import onnx_file
from mionnx.graph.extract import extract
from mionnx.graph.metadata import Metadata
from mionnx.graph.output_head import LOGITS
from mionnx.graph.report import Report
from mionnx.rewrite.capture import capture
from mionnx.rewrite.intervene import intervene
from mionnx.rewrite.plan import Plan
from mionnx.rewrite.prune import prune
from mionnx.rewrite.restrict_outputs import restrict


def rewrite(origin: onnx.ModelProto, plan: Plan, metadata: Metadata) -> tuple[bytes, Report]:
    """Carry out a plan.

    Args:
        origin: the hooked model's graph, without weights; left alone.
        plan: what to insert and what to capture.
        metadata: of the hooked model.

    Returns:
        the rewritten model as bytes, and what was done.

    Raises:
        InterventionError: an intervention that no output depends on.
    """
    graph, report = apply_plan(origin, plan, metadata)
    return onnx_file.serialise(graph, origin), report


def apply_plan(origin: onnx.ModelProto, plan: Plan, metadata: Metadata) -> tuple[gs.Graph, Report]:
    """The same as a graph that can be edited further."""
    graph, report = onnx_file.edit(extract(origin, plan.starts, _ends(plan)) if plan.starts else origin), Report()
    intervene(graph, plan.edits, report)
    if plan.starts:
        graph.outputs = [output for output in graph.outputs if output.name == LOGITS]
    capture(graph, plan.captures, metadata, report)
    restrict(graph, plan, report)
    prune(graph, report)
    _refuse_idle(graph, plan)
    return graph, report


def _ends(plan: Plan) -> list[str]:
    """What a graph that does not begin with the tokens has to compute."""
    return [*(want.hook for want in plan.captures), *([LOGITS] if plan.outputs.logits else [])]


def _refuse_idle(graph: gs.Graph, plan: Plan) -> None:
    """Without logits, an intervention that no capture depends on was dropped with the rest: it would do nothing."""
    if plan.outputs.logits:
        return  # what another intervention replaces altogether may be dropped: the two stand in the order asked for
    left = {node.name for node in graph.nodes}
    for edit in plan.edits:
        if not any(name.startswith(f"{edit.prefix}.") for name in left):
            raise InterventionError(
                f"{edit.kind} at {edit.hook} changes nothing that is asked for: no capture lies behind it, and there "
                "are no logits; ask for logits, or capture a later hook point"
            )


def tail(origin: onnx.ModelProto, hook: str, output: str) -> bytes:
    """The part of a model between a hook point and an output, as a model of its own."""
    return extract(origin, [hook], [output]).SerializeToString()


def parts(origin: onnx.ModelProto, pairs: Sequence[tuple[str, str]]) -> bytes:
    """Several parts of a model side by side, each from one value to another, as a model of its own."""
    return extract(origin, dict.fromkeys(first for first, _ in pairs), [last for _, last in pairs]).SerializeToString()
