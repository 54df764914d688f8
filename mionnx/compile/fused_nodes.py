"""Smaller fusions of a compiled graph: a norm with the sum that it reads, and a product whose parts are joined again.

`com.microsoft.SkipSimplifiedLayerNormalization` adds two streams, gives the sum and its norm: the sum is still there
for whoever reads it. An intervention between the two, or one that is such a sum itself, leaves both as they are.
"""

import onnx
from onnx import helper

from mionnx.graph.dataflow import Dataflow, attributes
from mionnx.graph.operator_table import DOMAIN

STREAM_NORM, FUSED_NORM = "RMSNormalization", "SkipSimplifiedLayerNormalization"
STREAM_AXES = 3  # batch, seq, hidden
NORM_EPSILON = 1e-5  # of the operator, where a node has none


def fuse_norms(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A graph with every norm of a sum of two streams as one node."""
    flow = Dataflow(proto)
    pairs: dict[int, int] = {}  # the place of a sum -> that of its norm
    for place, node in enumerate(flow.nodes):
        if (node.domain, node.op_type) == ("", STREAM_NORM):
            total = _sum_of(flow, node)
            if total is not None:
                pairs.setdefault(total, place)
    gone = {*pairs.values()}
    nodes = [
        _fused(node, flow.nodes[pairs[at]]) if at in pairs else node
        for at, node in enumerate(flow.nodes)
        if at not in gone
    ]
    return _with_nodes(proto, nodes) if pairs else proto


def _sum_of(flow: Dataflow, norm: onnx.NodeProto) -> int | None:
    """The place of the `Add` of two streams that a norm reads; None if it reads another value."""
    name, weight = norm.input[0], norm.input[1]
    while (node := flow.producer(name)) is not None and node.op_type == "Identity":
        name = node.input[0]
    width = flow.facts.shapes.get(weight, ())
    if node is None or node.op_type != "Add" or attributes(norm).get("axis", -1) not in (-1, STREAM_AXES - 1):
        return None
    place = flow.producers[name]
    # The weight may be computed, as Gemma's is, but not behind the sum.
    if len(width) != 1 or flow.producers.get(weight, -1) > place:
        return None
    return place if all(_is_stream(flow, entry, width[0]) for entry in node.input) else None


def _is_stream(flow: Dataflow, name: str, width: int | str) -> bool:
    """Whether a value has a number for every token and coordinate: what is added to all tokens alike has not."""
    shape = flow.facts.shapes.get(name, ())
    lengths = [isinstance(size, str) and not size.startswith("?") for size in shape[:-1]]
    return len(shape) == STREAM_AXES and shape[-1] == width and all(lengths)


def _fused(total: onnx.NodeProto, norm: onnx.NodeProto) -> onnx.NodeProto:
    epsilon = attributes(norm).get("epsilon", NORM_EPSILON)
    outputs = [norm.output[0], "", "", total.output[0]]
    inputs = [*total.input, norm.input[1]]
    return helper.make_node(FUSED_NORM, inputs, outputs, total.name, domain=DOMAIN, epsilon=epsilon)


def join_parts(proto: onnx.ModelProto) -> None:
    """Read a product itself where its parts are split and joined again in their order, in place."""
    flow, shown = Dataflow(proto), {value.name for value in proto.graph.output}
    names, gone = dict[str, str](), set[int]()
    for place, joined in enumerate(flow.nodes):
        split = flow.producer(joined.input[0]) if joined.op_type == "Concat" and joined.input else None
        if split is None or split.op_type != "Split" or [*split.output] != [*joined.input]:
            continue
        alone = all(flow.consumers[name] == [place] for name in split.output) and shown.isdisjoint(split.output)
        if alone and attributes(split).get("axis", 0) == attributes(joined)["axis"] and joined.output[0] not in shown:
            names[joined.output[0]] = split.input[0]
            gone |= {place, flow.producers[split.output[0]]}
    if names:
        nodes = [
            onnx.NodeProto.FromString(node.SerializeToString()) for i, node in enumerate(flow.nodes) if i not in gone
        ]
        for node in nodes:
            node.input[:] = [names.get(name, name) for name in node.input]
        del proto.graph.node[:]
        proto.graph.node.extend(nodes)


def _with_nodes(proto: onnx.ModelProto, nodes: list[onnx.NodeProto]) -> onnx.ModelProto:
    result = onnx.ModelProto()
    result.CopyFrom(proto)
    del result.graph.node[:]
    result.graph.node.extend(nodes)
    if all(entry.domain != DOMAIN for entry in result.opset_import):
        result.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return result
