"""Fused operators of an adopted file: what each stands for in its graph, read from metadata and checked.

An adopted graph has standard nodes instead of fused operators, so that hooks can stand between them. The metadata keep
the operators, one node each; `restore` puts one back where nothing between is asked for.

Metadata may come from anybody. A node is taken only if its operator has an expansion in `operator_table`, its
attributes are plain numbers, it reads and makes values of the graph, and the nodes between those values are such as
its expansion has, reading nothing else but small constants and what follows from the sizes of the call, its mask and
its positions. What an operator alone reads, lengths or an added mask, follows from the same, however many nodes compute
it.
"""

import base64
import binascii
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import onnx
from google.protobuf.message import DecodeError

from mionnx.errors import ModelError
from mionnx.graph.dataflow import Dataflow
from mionnx.graph.onnx_file import check_texts
from mionnx.graph.operator_table import Expansion, expansion_of

LONGEST_NODE_TEXT = 2**14  # characters of one node's text
MASKED_SCORE = -9999.0  # what is added to a score that no query shall read, or less

# What computes masks and lengths of a call.
CALL = frozenset(
    ("Shape", "Slice", "Squeeze", "Unsqueeze", "Range", "Sub", "Add", "LessOrEqual", "Greater", "And", "Cast", "Gather")
) | {"Identity", "Constant", "ReduceSum", "Reshape"}
SUPPORT = CALL | {"Where"}  # What computes lengths and added masks, which fused operators alone read.

PLAIN = (onnx.AttributeProto.FLOAT, onnx.AttributeProto.INT, onnx.AttributeProto.INTS)


@dataclass(frozen=True)
class FusedOperator:
    """One fused operator, and the nodes of the graph that stand for it."""

    node: onnx.NodeProto
    region: tuple[int, ...]  # indices of the nodes that stand for it
    inner: frozenset[str]  # the values that only these may read for the operator to stand in their place
    support: tuple[int, ...]  # indices of nodes that compute what it alone reads, such as the lengths of the texts
    unpadded: bool  # whether it is right only for texts without padding


def written(node: onnx.NodeProto) -> str:
    """A fused operator as the metadata hold it."""
    return base64.b64encode(node.SerializeToString(deterministic=True)).decode("ascii")


def read_fused(flow: Dataflow, texts: Sequence[str]) -> list[FusedOperator]:
    """Read the fused operators of a graph."""
    reader, operators = _Reader(flow), list[FusedOperator]()
    for text in texts:
        node = _parse(text)
        try:
            operators.append(reader.operator(node))
        except ValueError as error:
            raise ModelError(f"the metadata's fused {node.op_type[:60]} cannot stand in this graph: {error}") from error
    outputs = [name for one in operators for name in one.node.output if name]
    if len({*outputs}) < len(outputs):
        raise ModelError("the metadata have two fused operators that make the same value")
    return operators


def _parse(text: str) -> onnx.NodeProto:
    node = onnx.NodeProto()
    if len(text) > LONGEST_NODE_TEXT:
        raise ModelError(f"a fused operator in the metadata has more than {LONGEST_NODE_TEXT:,} characters: refused")
    try:
        node.ParseFromString(base64.b64decode(text, validate=True))
    except (binascii.Error, DecodeError, ValueError) as error:
        raise ModelError("a fused operator in the metadata is damaged") from error
    check_texts(node, "a fused operator in the metadata")
    return node


class _Reader:
    """Checks nodes against one graph."""

    def __init__(self, flow: Dataflow) -> None:
        self.flow, self.initializers = flow, flow.initializers
        self.inputs = {value.name for value in flow.proto.graph.input} - flow.initializers.keys()

    def operator(self, node: onnx.NodeProto) -> FusedOperator:
        expansion = _expansion(node)
        for name in filter(None, node.input):
            _expect(
                name in self.flow.producers or name in self.initializers or name in self.inputs, f"{name!r} is no value"
            )
        ends = [name for name in node.output if name]
        _expect(bool(ends) and all(name in self.flow.producers for name in ends), "no node makes what it makes")
        sources = {*filter(None, node.input)}
        # the operator adds 0 and -inf where its nodes read the booleans that these were made of: both are its sources
        sources |= {*filter(None, map(self._booleans, sources))} if expansion.masked else set()
        above = self.flow.ancestors(ends, sources)
        region = self._region(above, sources)
        names = {self.flow.nodes[i].op_type for i in region}
        other = sorted(names - expansion.nodes)
        _expect(not other, f"{', '.join(other)} stands between what it reads and makes")
        outputs = {name for i in region for name in self.flow.nodes[i].output if name}
        _expect({*ends} <= outputs, "what it makes does not follow from what it reads")
        unpadded = expansion.unpadded is not None
        depends = self._check_others(above - region, region, sources | outputs)
        # an operator right for texts without padding only takes lengths and positions from the call by itself
        _expect(unpadded or not depends, "it depends on the call besides what it reads")
        # a hook point that is another name for an output may be read: the output stays when the operator stands
        inner = outputs - {*ends} - self._aliases(region, ends)
        return FusedOperator(node, tuple(sorted(region)), frozenset(inner), self._support(region, sources), unpadded)

    def _region(self, above: set[int], sources: set[str]) -> set[int]:
        """The nodes among some that follow from sources."""
        values, region = {*sources}, set[int]()
        for i in sorted(above):
            if not values.isdisjoint(self.flow.reads[i]):
                region.add(i)
                values.update(self.flow.nodes[i].output)
        return region

    def _check_others(self, others: set[int], region: set[int], sources: set[str]) -> bool:
        """Check the other reads of a region; returns whether any follows from the call."""
        strange = sorted({self.flow.nodes[i].op_type for i in others} - CALL)
        _expect(not strange, f"its nodes depend on {', '.join(strange)}")
        read = (
            self.flow.read_by(region | others) - sources - {name for i in others for name in self.flow.nodes[i].output}
        )
        weights = self._weights(read)
        _expect(not weights, f"its nodes read the weight {', '.join(weights)}")
        return not self.inputs.isdisjoint(read)

    def _weights(self, names: set[str]) -> list[str]:
        """The weights among some values; constants inside the graph are none."""
        return [name for name in names & self.initializers.keys() if self.initializers[name].external_data]

    def _booleans(self, name: str) -> str | None:
        """The booleans of an added mask, 0 for true; None if it is no such mask."""
        node = self.flow.producer(name)
        if node is None or node.op_type != "Where" or len(node.input) != 3:
            return None
        shown, hidden = (self._number(value) for value in node.input[1:])
        return node.input[0] if shown == 0 and hidden is not None and hidden <= MASKED_SCORE else None

    def _number(self, name: str) -> float | None:
        """A constant number; None if a value is none."""
        tensor = self.initializers.get(name)
        if tensor is None or tensor.external_data or list(tensor.dims) not in ([], [1]):
            return None
        return float(onnx.numpy_helper.to_array(tensor).item())

    def _aliases(self, region: Iterable[int], ends: Iterable[str]) -> set[str]:
        """The outputs of an operator, and hook points that share their values."""
        aliases = {*ends}
        for i in sorted(region):
            node = self.flow.nodes[i]
            if node.op_type == "Identity" and node.input[0] in aliases:
                aliases.update(node.output)
        return aliases

    def _support(self, region: set[int], sources: set[str]) -> tuple[int, ...]:
        """The nodes that compute inputs without a reader in the region."""
        nodes = self.flow.ancestors(sources - self.flow.read_by(region))
        strange = sorted({self.flow.nodes[i].op_type for i in nodes} - SUPPORT)
        _expect(not strange, f"what it reads depends on {', '.join(strange)}")
        weights = [
            name
            for name in self.flow.read_by(nodes) & self.initializers.keys()
            if self.initializers[name].external_data
        ]
        _expect(not weights, f"what it reads depends on the weight {', '.join(weights)}")
        return tuple(sorted(nodes))


def _expansion(node: onnx.NodeProto) -> Expansion:
    expansion = expansion_of((node.domain, node.op_type))
    if expansion is None or not expansion.put_back:
        raise ValueError("it is none of the operators that are put back")
    for attribute in node.attribute:
        _expect(attribute.type in PLAIN, f"its attribute {attribute.name!r} is no number")
        is_known = expansion.unpadded is None or attribute.name in expansion.unpadded
        _expect(is_known, f"its attribute {attribute.name!r} is not known")
    return expansion


def _expect(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(what[:300])


def standing(flow: Dataflow, nodes: Iterable[onnx.NodeProto]) -> list[str]:
    """The texts of those of some operators that can stand in a graph."""
    names: list[str] = []
    for node in nodes:
        try:
            read_fused(flow, [written(node)])
        except ModelError:
            continue
        names.append(written(node))
    return names


def restore(
    proto: onnx.ModelProto, origin: Dataflow, fused: Iterable[FusedOperator], *, padding: bool
) -> tuple[onnx.ModelProto, int]:
    """Put operators back, each if its nodes are unchanged and nothing else reads what is inside; also count them."""
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
    rest = [node for i, node in enumerate(flow.nodes) if i not in removed]
    rest += [origin.nodes[i] for i in sorted(support) if origin.nodes[i].output[0] not in flow.producers]
    return _written(proto, origin, [*rest, *added]), len(added)


def _standing(flow: Dataflow, origin: Dataflow, one: FusedOperator, interface: set[str]) -> set[int] | None:
    """Indices of the nodes in the place of an operator; None if it cannot be put back."""
    if not one.inner.isdisjoint(interface):
        return None
    nodes: set[int] = set()
    for i in one.region:
        node = origin.nodes[i]
        places = {flow.producers.get(name) for name in node.output if name}
        if places == {None} and interface.isdisjoint(node.output):
            continue  # nothing reads it any more
        place = places.pop()
        if places or place is None or not _same(flow.nodes[place], node):
            return None
        nodes.add(place)
    # something else reads a value that would be gone: an intervention, or a capture's node
    if any(reader not in nodes for name in one.inner for reader in flow.consumers.get(name, ())):
        return None
    outputs = {*one.node.output}
    # An Identity that only gives another name to what the operator makes stays.
    stays = one.inner | outputs
    return {i for i in nodes if flow.nodes[i].op_type != "Identity" or not stays.isdisjoint(flow.nodes[i].output)}


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
    result.graph.initializer.extend(tensor for tensor in graph.initializer if tensor.name in read)
    lost = read - {tensor.name for tensor in graph.initializer}
    result.graph.initializer.extend(tensor for tensor in origin.proto.graph.initializer if tensor.name in lost)
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
    # the smallest index first, so that a node stays close to its place in the file
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
