"""Rewrite: the gradients of a plan's metric become outputs, whole or in part."""

import re

import onnx
import onnx_graphsurgeon as gs

from mionnx.graph.builder import Builder, edit, to_proto, write
from mionnx.graph.report import Report
from mionnx.rewrite.capture import part_of
from mionnx.rewrite.gradient.differentiate import differentiate
from mionnx.rewrite.gradient.rules import RULES, SETS
from mionnx.rewrite.plan import METRIC, GradientNode, Gradients, gradient_name

HOOK_NAME = re.compile(r"([a-z0-9]+\.)*hook_[a-z_]+")  # names of hook points, and of nothing that an intervention adds


def add_gradients(proto: onnx.ModelProto, gradients: Gradients, report: Report) -> onnx.ModelProto:
    """Add the gradients of a graph that computes the metric."""
    if not gradients.by:
        return proto
    names = {name for node in proto.graph.node for name in node.output} | {one.name for one in proto.graph.input}
    sources = {want: want.source if want.source in names else want.hook for want in gradients.by}
    before = {node.name for node in proto.graph.node}
    by, rules = [*dict.fromkeys(sources.values())], SETS[gradients.rules]
    varying = () if rules is RULES else [name for name in names if HOOK_NAME.fullmatch(name)]
    done = differentiate(proto, METRIC, by, rules=rules, varying=varying)
    for node in done.graph.node:
        if node.name not in before:
            report.add(METRIC, node.name)
    return _parts(done, sources, report)


def _parts(proto: onnx.ModelProto, sources: dict[GradientNode, str], report: Report) -> onnx.ModelProto:
    """Cut gradients down to positions and heads, and give each the name that is fetched."""
    report.outputs += [want.fetched for want in sources]
    if all(want.fetched == gradient_name(source) for want, source in sources.items()):
        return proto
    graph = edit(proto)
    tensors = graph.tensors()
    whole = {gradient_name(source) for source in sources.values()}
    graph.outputs = [output for output in graph.outputs if output.name not in whole]
    for want, source in sources.items():
        value = part_of(graph, want, tensors[gradient_name(source)], report)
        if value.name != want.fetched:
            again = gs.Variable(want.fetched, dtype=value.dtype, shape=value.shape)
            value = write(Builder(graph, want.hook, want.fetched, report).Identity(value), again)
        graph.outputs.append(value)
    return to_proto(graph, proto, {})
