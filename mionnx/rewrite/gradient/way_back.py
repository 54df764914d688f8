"""Rewrite: a model as two graphs, forwards, and the linear way back from where features read to where they write.

1. The way back has four pieces a layer: from the stream behind the layer to that in its middle and to what the MLP
   wrote (*step*), from where the layer's features read to the same (*enter*), from there to the stream before the layer
   (*attention*), and the product of what arrives at the MLP's output with sources that write there (*rows*). Where
   attention and MLP are side by side, step and enter go to the stream before the layer. Before them comes the final
   norm, behind them the embedding.
2. Patterns, scales of norms and outputs of MLPs are constants (`frozen_norm_pattern`); MLPs' own nodes are left out,
   and where transcoders have a skip connection, its product stands in their place.
3. The rows of a layer are targets: numbers at its features' hook point, each at one position. They join those that come
   from above (Concat), so no row is computed above its layer.
4. What follows from a row is of the graph of the way back. What it reads and follows from the tokens is an output of
   the graph forwards, computed once for one text; rows of any number are broadcast against it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import ArrayLike
from onnx import NodeProto, TensorProto, helper, numpy_helper

from mionnx.errors import GradientError
from mionnx.graph.dataflow import Facts, reads, subgraphs
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.onnx_file import opset
from mionnx.graph.output_head import LOGITS
from mionnx.rewrite.gradient.backward import Backward, FreshNames
from mionnx.rewrite.gradient.rows import IN_ROWS
from mionnx.rewrite.gradient.rules import SETS, SUBGRAPH_RULES
from mionnx.rewrite.gradient.subgraph import activity, prune

FROZEN_PATTERN = "frozen_norm_pattern"
Attention = tuple[int, str, str]  # a layer, and the hook points of its queries and of its keys
EMBED_POINT, FINAL_POINT = str(HookPoint.Embed), str(HookPoint.FinalNorm)
# Names of the way back's inputs, of a layer or, of the logits, one more; and of its outputs.
ROW_VECTORS, ROW_PLACES, SOURCES, SKIPS = (
    f"mionnx.trace.{{}}.{name}".format for name in ("vectors", "places", "sources", "skip")
)
SOURCE_ROWS, SOURCE_INDEX, SOURCE_VALUES = (
    f"mionnx.trace.{{}}.source_{name}".format for name in ("rows", "index", "values")
)
ROW_PRODUCTS = "mionnx.trace.{}.products".format
TOKEN_SOURCES, TOKEN_PRODUCTS = "mionnx.trace.tokens", "mionnx.trace.token_products"
TRACED_LOGITS = "mionnx.trace.logits"  # [batch, vocab], of the graph forwards
QUERY_ROWS, KEY_ROWS = "mionnx.trace.query", "mionnx.trace.key"


@dataclass(frozen=True)
class TwoGraphs:
    """The graph forwards and that of the way back.

    The way back reads `ROW_VECTORS` [n, hidden] and `ROW_PLACES` [n, seq], one-hot, of each layer and of the logits;
    `SOURCES` [seq, hidden, m] of each layer, or gathered `SOURCE_ROWS` [n, hidden], `SOURCE_INDEX` and `SOURCE_VALUES`
    [seq, m]; `SKIPS` [hidden, hidden] where there are skip connections, and `TOKEN_SOURCES` [seq, hidden]. It gives
    `ROW_PRODUCTS` [seq, rows, m] of each layer and `TOKEN_PRODUCTS` [rows, seq], the rows of the logits first, then
    those of the last layer. That of attention reads `QUERY_ROWS` and `KEY_ROWS`, [n, heads, seq, head_dim] each, in the
    place of these rows.

    Attributes:
        constants: outputs of the graph forwards that the way back reads; `captures`: its other outputs.
    """

    forward: bytes
    back: bytes
    constants: tuple[str, ...]
    captures: tuple[str, ...]


def way_back(
    proto: onnx.ModelProto,
    hooks: Collection[str],
    read_at: Sequence[str],  # the hook point that the features of each layer read
    write_at: Sequence[str],  # and the one whose value they stand for
    width: int,
    skips: bool,
    end: str = FINAL_POINT,  # the hook point that targets are linear in, behind the layers of `read_at` alone
    logits: bool = False,  # whether the graph forwards gives the last position's logits too
    gathered: bool = False,  # whether the vectors of sources are gathered from rows in the graph, layer by layer
    rules: str = FROZEN_PATTERN,  # a set of rules of a gradient
    attention: Attention | None = None,  # queries and keys as ends, and not features and logits
) -> TwoGraphs:
    """Write both graphs of a model."""
    builder = _WayBack(proto, hooks, read_at, write_at, width, skips)
    builder.gathered, builder.rules = gathered, {**SETS[rules], **IN_ROWS}
    if attention:
        builder.attention(*attention)
    else:
        builder.pieces(end)
    points = attention[1:] if attention else (*read_at, *write_at, EMBED_POINT)
    return builder.parted([*dict.fromkeys([*points, *([builder.last_logits()] if logits else [])])])


class _WayBack:
    """The nodes of the way back as they are added."""

    def __init__(
        self,
        proto: onnx.ModelProto,
        hooks: Collection[str],
        read_at: Sequence[str],
        write_at: Sequence[str],
        width: int,
        skips: bool,
    ) -> None:
        self.proto, self.read_at, self.write_at, self.width, self.skips = proto, read_at, write_at, width, skips
        self.facts = Facts(onnx.shape_inference.infer_shapes(proto, data_prop=True).graph)
        computed = {name for node in proto.graph.node for name in node.output}
        float32 = TensorProto.FLOAT
        self.hooks = [name for name in hooks if name in computed and self.facts.type(name) == float32]
        self.nodes: list[NodeProto] = []
        self.tensors: dict[str, TensorProto] = {}
        self.inputs: dict[str, tuple[int, Sequence[int | str]]] = {}
        self.gathered, self.rules = False, {**SETS[FROZEN_PATTERN], **IN_ROWS}
        self.outputs: list[str] = []

    def pieces(self, end: str) -> None:
        """Add the whole way, from the targets' vectors down to the embedding."""
        layers = len(self.read_at)
        below, stream = str(HookPoint.ResidPost(layers - 1)), self._seed(layers)
        if end not in (below, str(HookPoint.ResidPre(layers))):  # the same value
            (stream,) = self._piece("final", end, [below], stream)
        for layer in reversed(range(layers)):
            before, middle = str(HookPoint.ResidPre(layer)), str(HookPoint.ResidMid(layer))
            through = self._through(layer, middle)
            joint = middle if through else before
            entered, passed = self._seed(layer), self._passed(layer, stream, joint)
            if self.read_at[layer] != joint:
                (entered,) = self._piece(f"{layer}.enter", self.read_at[layer], [joint], entered)
            stream = self._node("Concat", [passed, entered], f"mionnx.trace.{layer}.stream", axis=0)
            if through:
                (stream,) = self._piece(f"{layer}.attention", middle, [before], stream)
        self._embedded(stream)

    def _through(self, layer: int, middle: str) -> bool:
        """Whether all that a layer's MLP reads and adds to follows from the stream in the middle of the layer."""
        before, ends = str(HookPoint.ResidPre(layer)), {self.read_at[layer], str(HookPoint.ResidPost(layer))}
        if middle not in self.hooks:
            return False
        beside = {before}  # what follows from the stream before the layer without the middle
        for node in self.proto.graph.node:
            if not beside.isdisjoint(reads(node)):
                beside.update(name for name in node.output if name != middle)
        return beside.isdisjoint(ends)

    def attention(self, layer: int, query: str, key: str) -> None:
        """Add the way from the queries and the keys of a layer's heads down to the embedding."""
        before, streams = str(HookPoint.ResidPre(layer)), []
        for name, point in ((QUERY_ROWS, query), (KEY_ROWS, key)):
            _, heads, _, head_dim = self.facts.shapes[point]
            sizes = [one if isinstance(one, int) else f"{name}_{one}" for one in (heads, head_dim)]
            seed = self._input(name, [f"rows_{name}", sizes[0], "positions", sizes[1]])
            streams += self._piece(name.rpartition(".")[2], point, [before], seed)
        stream = self._node("Concat", streams, f"mionnx.trace.{layer}.stream", axis=0)
        for below in reversed(range(layer)):
            stream = self._passed(below, stream, str(HookPoint.ResidPre(below)))
        self._embedded(stream)

    def last_logits(self) -> str:
        """The logits of the last position: those of all are many, and no more than memory."""
        last = self._constant("mionnx.trace.last_position", -1)
        return self._node("Gather", [LOGITS, last], TRACED_LOGITS, axis=1)

    def _passed(self, layer: int, stream: str, joint: str) -> str:
        """The cotangent of the stream before or in the middle of a layer from that behind it; products at its MLP."""
        end = str(HookPoint.ResidPost(layer))
        passed, arrived = self._piece(f"{layer}.step", end, [joint, self.write_at[layer]], stream)
        self.outputs.append(self._products(layer, arrived))
        return passed

    def _embedded(self, stream: str) -> None:
        """The products of tokens with what arrives at the stream before the first layer."""
        first = str(HookPoint.ResidPre(0))
        if first != EMBED_POINT and EMBED_POINT in self.hooks:
            (stream,) = self._piece("embed", first, [EMBED_POINT], stream)
        weighed = self._node("Mul", [stream, self._input(TOKEN_SOURCES, ["positions", self.width])], "mionnx.trace.own")
        last = self._constant("mionnx.trace.last", [-1])
        self.outputs.append(self._node("ReduceSum", [weighed, last], TOKEN_PRODUCTS, keepdims=0))

    def _products(self, layer: int, arrived: str) -> str:
        """[seq, rows, m]: what arrives at each position times the sources that write there."""
        name, dims = f"mionnx.trace.{layer}".__add__, ["positions", f"sources_{layer}"]
        turned = self._node("Transpose", [arrived], name(".turned"), perm=[1, 0, 2])
        if not self.gathered:
            sources = self._input(SOURCES(layer), ["positions", self.width, dims[1]])
            return self._node("MatMul", [turned, sources], ROW_PRODUCTS(layer))
        rows = self._input(SOURCE_ROWS(layer), [f"written_{layer}", self.width])
        index = self._input(SOURCE_INDEX(layer), dims, TensorProto.INT64)
        vectors = self._node("Gather", [rows, index], name(".gathered"), axis=0)
        across = self._node("Transpose", [vectors], name(".across"), perm=[0, 2, 1])
        product = self._node("MatMul", [turned, across], name(".product"))
        second = self._constant("mionnx.trace.axis_1", [1])
        values = self._node("Unsqueeze", [self._input(SOURCE_VALUES(layer), dims), second], name(".values"))
        return self._node("Mul", [product, values], ROW_PRODUCTS(layer))

    def _seed(self, layer: int) -> str:
        """[rows, seq, hidden]: each row's vector at its position."""
        vectors = self._input(ROW_VECTORS(layer), [f"rows_{layer}", self.width])
        places = self._input(ROW_PLACES(layer), [f"rows_{layer}", "positions"])
        name = f"mionnx.trace.{layer}.seed"
        first, second = (self._constant(f"mionnx.trace.axis_{axis}", [axis]) for axis in (1, 2))
        ends = [(vectors, first, f"{name}.vectors"), (places, second, f"{name}.places")]
        wide = [self._node("Unsqueeze", [value, axis], end) for value, axis, end in ends]
        return self._node("Mul", wide, name)

    def _node(self, operator: str, inputs: Sequence[str], name: str, **settings: Any) -> str:
        self.nodes.append(helper.make_node(operator, inputs, [name], name, **settings))
        return name

    def _input(self, name: str, dims: Sequence[int | str], kind: int = TensorProto.FLOAT) -> str:
        self.inputs[name] = kind, dims
        return name

    def _constant(self, name: str, value: ArrayLike) -> str:
        self.tensors[name] = numpy_helper.from_array(np.asarray(value, np.int64), name)
        return name

    def _piece(self, piece: str, of: str, by: list[str], seed: str) -> list[str]:
        """The cotangents of some values from that of another; MLPs are cut, or stand for their skip connection."""
        facts, layer_of = self.facts, {name: layer for layer, name in enumerate(self.write_at)}
        nodes = []
        for node in self.proto.graph.node:
            layers = [layer_of[name] for name in node.output if name in layer_of]
            if layers and self.skips:
                skip = self._input(SKIPS(layers[0]), [self.width, self.width])
                facts.types[skip], facts.shapes[skip] = TensorProto.FLOAT, (self.width, self.width)
                nodes.append(helper.make_node("MatMul", [self.read_at[layers[0]], skip], node.output))
            elif not layers:
                nodes.append(node)
        facts.types[seed], facts.shapes[seed] = TensorProto.FLOAT, facts.shapes[of]
        between = _between(nodes, by, of)
        active = activity(nodes, facts, [*by, *self.hooks], [of])
        op = Backward(
            FreshNames(f"mionnx.trace.{piece}"), facts, active, self.rules, SUBGRAPH_RULES, opset(self.proto), True
        )
        gradients = op.run(between, {of: seed})
        if lacking := [name for name in by if name not in gradients]:
            raise GradientError(
                f"{of} does not depend on {lacking[0]} where patterns and scales of norms are constants"
            )
        self.nodes += op.nodes
        self.tensors |= {tensor.name: tensor for tensor in op.names.tensors.values()}
        return [gradients[name] for name in by]

    def parted(self, captures: list[str]) -> TwoGraphs:
        """Part what depends on rows from what does not."""
        graph = self.proto.graph
        varying = {value.name for value in graph.input} - {tensor.name for tensor in graph.initializer}
        seeded = {name for name in self.inputs if ".skip" not in name}
        fore, back = list[NodeProto](), list[NodeProto]()
        for node in [*graph.node, *_each_once(self.nodes, self.tensors)]:
            own = {*reads(node)}
            (back if own & seeded else fore).append(node)
            if own & seeded:
                seeded |= {*node.output}
            elif own & varying:
                varying |= {*node.output}
        back = prune(back, self.outputs)
        constants = [name for name in dict.fromkeys(name for node in back for name in reads(node)) if name in varying]
        still = prune(
            [node for node in fore if varying.isdisjoint(node.output)], [n for one in back for n in reads(one)]
        )
        facts, value = Facts(graph), helper.make_tensor_value_info
        facts.follow(fore)
        inputs = [value(name, kind, dims) for name, (kind, dims) in self.inputs.items()]
        inputs += [value(name, facts.type(name), None) for name in constants]
        captures = [name for name in captures if name not in constants]
        outputs = [value(name, facts.type(name), None) for name in (*constants, *captures)]
        products = [value(name, TensorProto.FLOAT, None) for name in self.outputs]
        forward = self._graph(prune(fore, [*constants, *captures]), graph.input, outputs)
        return TwoGraphs(forward, self._graph([*still, *back], inputs, products), (*constants,), (*captures,))

    def _graph(
        self,
        nodes: Sequence[NodeProto],
        inputs: Sequence[onnx.ValueInfoProto],
        outputs: Sequence[onnx.ValueInfoProto],
    ) -> bytes:
        read = {name for node in nodes for name in reads(node)}
        tensors = {tensor.name: tensor for tensor in self.proto.graph.initializer} | self.tensors
        model = onnx.ModelProto(ir_version=self.proto.ir_version, opset_import=self.proto.opset_import)
        model.graph.name = "trace"
        model.graph.node.extend(nodes)
        model.graph.initializer.extend(tensor for name, tensor in tensors.items() if name in read)
        model.graph.input.extend(one for one in inputs if one.name in read)
        model.graph.output.extend(outputs)
        return model.SerializeToString()


def _between(nodes: Sequence[NodeProto], sources: Sequence[str], end: str) -> list[NodeProto]:
    """The nodes on a way from some values to another."""
    after, passed = {*sources}, []
    for node in nodes:
        if not after.isdisjoint(reads(node)):
            after |= {*node.output}
            passed.append(node)
    return prune(passed, [end])


def _each_once(nodes: Sequence[NodeProto], tensors: Mapping[str, TensorProto]) -> Sequence[NodeProto]:
    """The nodes without those that compute what an earlier one does: both pieces of a layer turn its patterns."""
    if any(map(subgraphs, nodes)):
        return nodes
    first: dict[Any, list[str]] = {}
    renamed, values, different = dict[str, str](), dict[bytes, str](), list[NodeProto]()
    for name, tensor in tensors.items():
        value = TensorProto()
        value.CopyFrom(tensor)
        value.name = ""
        renamed[name] = values.setdefault(value.SerializeToString(deterministic=True), name)
    for node in nodes:
        own = NodeProto()
        own.CopyFrom(node)
        own.ClearField("input")
        own.input.extend(renamed.get(name, name) for name in node.input)
        settings = sorted(one.SerializeToString(deterministic=True) for one in own.attribute)
        outputs = first.setdefault((own.domain, own.op_type, *own.input, *settings), [*own.output])
        if outputs == [*own.output]:
            different.append(own)
        renamed |= dict(zip(own.output, outputs, strict=True))
    return different
