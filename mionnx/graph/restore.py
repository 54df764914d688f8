"""`restore`: fused operators put back into a graph, where nothing inside them is asked for or changed."""

from collections.abc import Iterable
from heapq import heapify, heappop, heappush

import onnx

from mionnx.graph.dataflow import Dataflow
from mionnx.graph.fused_operators import FusedOperator


def restore(
    proto: onnx.ModelProto, origin: Dataflow, fused: Iterable[FusedOperator], *, padding: bool
) -> tuple[onnx.ModelProto, int]:
    """Put operators back, each if its nodes are unchanged and nothing else reads what is inside.

    Args:
        proto: a graph that was made from an adopted one; left alone.
        padding: whether texts may be padded; operators that are right without padding only then stay as they are.

    Returns:
        the graph, and how many operators were put back.
    """
    flow = Dataflow(proto)
    interface = {value.name for value in (*proto.graph.output, *proto.graph.input)}
    removed, added, support = set[int](), list[onnx.NodeProto](), set[int]()
    for one in fused:
        nodes = None if padding and one.unpadded else _standing(flow, origin, one, interface)
        if nodes:
            removed.update(nodes)
            added.append(one.node)
            support.update(one.support)
    if not added:
        return proto, 0
    kept = [node for i, node in enumerate(flow.nodes) if i not in removed]
    kept += [origin.nodes[i] for i in sorted(support) if origin.nodes[i].output[0] not in flow.producers]
    return _written(proto, origin, [*kept, *added]), len(added)


def _standing(flow: Dataflow, origin: Dataflow, one: FusedOperator, given: set[str]) -> set[int] | None:
    """Indices of the nodes in the place of an operator; None if it cannot be put back."""
    if not one.inner.isdisjoint(given):
        return None
    nodes: set[int] = set()
    for i in one.region:
        node = origin.nodes[i]
        places = {flow.producers.get(name) for name in node.output if name}
        if places == {None} and given.isdisjoint(node.output):
            continue  # nothing reads it any more
        place = places.pop()
        if places or place is None or not _same(flow.nodes[place], node):
            return None
        nodes.add(place)
    if any(reader not in nodes for name in one.inner for reader in flow.consumers.get(name, ())):
        return None
    outputs = {*one.node.output}
    return {i for i in nodes if not _only_names(flow.nodes[i], one.inner, outputs)}


def _only_names(node: onnx.NodeProto, inner: frozenset[str], made: set[str]) -> bool:
    """Whether a node gives another name to what an operator makes."""
    return node.op_type == "Identity" and made.isdisjoint(node.output) and inner.isdisjoint(node.output)


def _same(node: onnx.NodeProto, origin: onnx.NodeProto) -> bool:
    """Whether a node reads and makes what it did; unread outputs may be nameless."""
    outputs = all(new == old or not new for new, old in zip(node.output, origin.output, strict=False))
    return node.op_type == origin.op_type and list(node.input) == list(origin.input) and outputs


def _written(proto: onnx.ModelProto, origin: Dataflow, nodes: list[onnx.NodeProto]) -> onnx.ModelProto:
    """The graph with other nodes, in an order that can run; dead ones are dropped."""
    result, graph = onnx.ModelProto(), proto.graph
    result.CopyFrom(proto)
    del result.graph.node[:]
    result.graph.node.extend(nodes)
    flow = Dataflow(result)
    alive = sorted(flow.ancestors([value.name for value in graph.output]))
    read = flow.read_by(alive)
    order = _order(flow, alive)
    del result.graph.node[:], result.graph.initializer[:], result.graph.value_info[:]
    result.graph.node.extend(flow.nodes[i] for i in order)
    initializers = {tensor.name for tensor in graph.initializer}
    result.graph.initializer.extend(tensor for tensor in graph.initializer if tensor.name in read)
    lost = (tensor for tensor in origin.proto.graph.initializer if tensor.name in read - initializers)
    result.graph.initializer.extend(lost)
    result.graph.value_info.extend(value for value in graph.value_info if value.name in read)
    domains = {entry.domain for entry in result.opset_import}
    missing = {node.domain for node in result.graph.node} - domains - {"ai.onnx"}
    result.opset_import.extend(onnx.helper.make_opsetid(domain, 1) for domain in sorted(missing))
    return result


def _order(flow: Dataflow, nodes: list[int]) -> list[int]:
    """Some nodes in an order that can run, near their own."""
    chosen, waits, order = {*nodes}, dict[int, int](), list[int]()
    for i in nodes:
        waits[i] = len({flow.producers[name] for name in flow.reads[i] if flow.producers.get(name) in chosen})
    ready = [i for i in nodes if not waits[i]]
    heapify(ready)
    while ready:
        order.append(node := heappop(ready))
        for reader in {reader for name in flow.nodes[node].output for reader in flow.consumers.get(name, ())}:
            if reader in chosen:
                waits[reader] -= 1
                if not waits[reader]:
                    heappush(ready, reader)
    return order
