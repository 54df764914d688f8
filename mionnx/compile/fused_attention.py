"""Attention of a layer as one node, `com.microsoft.GroupQueryAttention`, where a compiled graph touches nothing inside.

An exported graph has attention in some twenty standard nodes, so that hooks can stand between them. From the rotated
queries to the heads' values side by side, where nothing else reads what is inside, the fused operator computes the
same: it adds the graph's own mask to the scores, so padding and windows are those of the graph. The nodes propose it,
and a trial decides: on random numbers, with padding, a layer must give what its nodes give, or it keeps them.

Where texts need not be padded on the left, the operator also rotates: it reads queries, keys and values side by side,
as their product makes them, and a table of rotations by position. It counts the columns of a prompt from its first
position, padding too (ONNX Runtime 1.32).
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from mionnx.engine.engines import open_to_try
from mionnx.errors import ModelError
from mionnx.graph.dataflow import Dataflow, attributes, extract
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.io_names import KEYS_AND_VALUES
from mionnx.graph.matrices import POSITION_INPUT
from mionnx.graph.operator_table import DOMAIN

PADDING_INPUT = "attention_mask"
ATTENTION_PREFIX = "mionnx.attention"  # begins the names of what is added
TURN = [0, 2, 1, 3]  # of heads
HEAD_AXES = 3  # of heads side by side: batch, seq, heads * width
FUSED_TOLERANCE = 2e-5  # of the largest number of a layer's output
Shape = tuple[int | None, ...]  # behind the batch; None for the tokens
TRIALS = ((2, 5, 0, 2), (2, 1, 6, 3))  # texts, tokens, past, how much of the first text is padding
TABLE_LIMIT = 2**25  # bytes of a table of rotations, which lies in model.onnx


@dataclass(frozen=True)
class Region:
    """The attention of a layer in standard nodes."""

    layer: int
    queries: str  # rotated, [batch, heads, seq, width]
    keys: str
    values: str
    mask: str  # what is added to the scores
    scale: float
    end: str  # [batch, seq, heads * width], or as the last node reshapes that
    shape: str  # of the last node, where that is another one; else empty
    nodes: frozenset[int]

    @property
    def results(self) -> tuple[str, ...]:
        """The values that it makes."""
        return (self.end, *KEYS_AND_VALUES.layer_outputs(self.layer))


def fuse_attention(proto: onnx.ModelProto, model: HookedModel, padding: bool) -> tuple[onnx.ModelProto, int]:
    """A compiled graph with attention fused in the layers where nothing is touched; also count these.

    Args:
        padding: whether texts may be padded on the left.
    """
    flow, metadata = Dataflow(proto), model.metadata
    if PADDING_INPUT not in {value.name for value in proto.graph.input} or metadata.dtype != "float32":
        return proto, 0
    regions = [one for layer in range(metadata.sizes.num_layers) if (one := _region(flow, layer)) is not None]
    # The operator has one width for keys and values.
    regions = [one for one in regions if len({*metadata.heads(one.layer)[1:]}) == 1]
    rotating = _equal(flow, regions, model, True) if regions and not padding else []
    others = [one for one in regions if one not in rotating]
    equal = [*rotating, *(_equal(flow, others, model, False) if others else [])]
    return (_fused(flow, equal, model, rotating)[0], len(equal)) if equal else (proto, 0)


def _region(flow: Dataflow, layer: int) -> Region | None:
    """The attention of a layer; None where its nodes are others, or more is read of it."""
    past, present = KEYS_AND_VALUES.layer_inputs(layer), KEYS_AND_VALUES.layer_outputs(layer)
    makers = [flow.producer(name) for name in present]
    joins = [one for one in makers if one is not None and one.op_type == "Concat" and len(one.input) == 2]
    if tuple(one.input[0] for one in joins) != past:
        return None
    keys, values = joins
    walk = _Walk(flow, {*present})
    read = [walk.repeated(name) for name in present]
    turned = walk.only(read[0])
    product = walk.only(turned.output[0]) if turned is not None and turned.op_type == "Transpose" else None
    if turned is None or product is None or product.op_type != "MatMul" or product.input[1] != turned.output[0]:
        return None
    queries = product.input[0]
    while (before := flow.producer(queries)) is not None and before.op_type == "Reshape":
        if walk.only(queries) is None:
            return None
        walk.taken[-1] = before
        queries = before.input[0]
    scores = walk.through(product.output[0])
    last = walk.only(scores) if scores else None
    if last is None or last.op_type != "MatMul" or last.input[1] != read[1] or not (walk.mask and walk.normed):
        return None
    end = walk.heads_end(last.output[0])
    if end is None or walk.only(read[1]) is None:
        return None
    shape = "" if len(flow.facts.shapes.get(end, ())) == HEAD_AXES else flow.nodes[flow.producers[end]].input[1]
    nodes = {flow.producers[one.output[0]] for one in (*walk.taken, keys, values)}
    return Region(layer, queries, keys.input[1], values.input[1], walk.mask, walk.scale, end, shape, frozenset(nodes))


class _Walk:
    """Follows values that one node alone reads."""

    def __init__(self, flow: Dataflow, presents: set[str]) -> None:
        self.flow, self.presents, self.taken = flow, presents, list[onnx.NodeProto]()
        self.shown = {value.name for value in flow.proto.graph.output} - presents
        self.mask, self.scale, self.normed = "", 1.0, False

    def only(self, name: str) -> onnx.NodeProto | None:
        """The one node that reads a value; None if there are others, or whoever runs the graph."""
        readers = self.flow.consumers.get(name, [])
        if len(readers) != 1 or name in self.shown:
            return None
        self.taken.append(self.flow.nodes[readers[0]])
        return self.taken[-1]

    def repeated(self, name: str) -> str:
        """Keys or values as heads read them: as they are, or repeated for the heads that share them."""
        # the fused operator still makes keys and values, so that their lengths may be read
        readers = [self.flow.nodes[i] for i in self.flow.consumers.get(name, [])]
        readers = [node for node in readers if node.op_type != "Shape"]
        for kind in ("Unsqueeze", "Expand", "Reshape"):
            if len(readers) != 1 or readers[0].op_type != kind:
                return name
            self.taken.append(readers[0])
            name = readers[0].output[0]
            readers = [self.flow.nodes[i] for i in self.flow.consumers.get(name, [])]
        return name

    def through(self, name: str) -> str | None:
        """From the products of queries and keys to the pattern that the values are multiplied by."""
        while (node := self.only(name)) is not None:
            others = [entry for entry in node.input if entry != name]
            number = self._number(others[0]) if len(others) == 1 else None
            if node.op_type == "MatMul":
                self.taken.pop()
                return name
            if node.op_type == "Mul" and number is not None and not self.mask:
                self.scale *= number
            elif node.op_type == "Div" and number and node.input[0] == name and not self.mask:
                self.scale /= number
            elif node.op_type == "Add" and number is None and not self.mask and not self.normed:
                self.mask = others[0]
            elif node.op_type == "Softmax" and attributes(node).get("axis", -1) in (-1, 3):
                self.normed = True
            elif node.op_type != "Reshape":
                return None
            name = node.output[0]
        return None

    def heads_end(self, name: str) -> str | None:
        """From the heads' values to where they stand side by side."""
        turned = False
        while (node := self.only(name)) is not None:
            name = node.output[0]
            if node.op_type == "Transpose" and not turned and [*attributes(node).get("perm", [])] == TURN:
                turned = True
            elif node.op_type != "Reshape":
                return None
            elif turned:
                return name
        return None

    def _number(self, name: str) -> float | None:
        tensor = self.flow.initializers.get(name)
        if tensor is None or tensor.external_data or [*tensor.dims] not in ([], [1]):
            return None
        return float(numpy_helper.to_array(tensor).item())


def _fused(
    flow: Dataflow, regions: list[Region], model: HookedModel, rotating: Collection[Region]
) -> tuple[onnx.ModelProto, "_Writer"]:
    """The graph with the operator in some layers, and what wrote it; in the `rotating` ones it rotates if it can."""
    result = onnx.ModelProto()
    result.CopyFrom(flow.proto)
    graph, gone = result.graph, {i for one in regions for i in one.nodes}
    last = {max(one.nodes): one for one in regions}
    writer, nodes = _Writer(flow, model, rotating), _lengths()
    for i, node in enumerate(flow.nodes):
        nodes += writer.nodes(last[i]) if i in last else []
        nodes += [] if i in gone else [node]
    del graph.node[:]
    graph.node.extend(nodes)
    constants = {
        f"{ATTENTION_PREFIX}.one": np.array([1], np.int32),
        f"{ATTENTION_PREFIX}.side_by_side": np.array([0, 0, -1]),
    }
    constants |= {name: value for pair in writer.tables.values() if pair is not None for name, value in pair.items()}
    graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
    after = Dataflow(result)
    alive = sorted(after.ancestors([value.name for value in graph.output]))
    needed = after.read_by(alive) | {value.name for value in graph.input}
    # Copies: they live in the lists.
    nodes = [onnx.NodeProto.FromString(after.nodes[i].SerializeToString()) for i in alive]
    weights = [one.SerializeToString() for name, one in after.initializers.items() if name in needed]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(nodes)
    graph.initializer.extend(map(onnx.TensorProto.FromString, weights))
    if all(entry.domain != DOMAIN for entry in result.opset_import):
        result.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return result, writer


def _lengths() -> list[onnx.NodeProto]:
    """`total`: the length of the texts, past and padding included; `ends`: [batch], less 1."""
    texts, length, total, one, end, ends = (
        f"{ATTENTION_PREFIX}.{name}" for name in ("texts", "length", "total", "one", "end", "ends")
    )
    return [
        helper.make_node("Shape", [PADDING_INPUT], [texts], texts, start=0, end=1),
        helper.make_node("Shape", [PADDING_INPUT], [length], length, start=1, end=2),
        helper.make_node("Cast", [length], [total], total, to=TensorProto.INT32),
        helper.make_node("Sub", [total, one], [end], end),
        helper.make_node("Expand", [end, texts], [ends], ends),
    ]


class _Writer:
    """Nodes of fused layers.

    Attributes:
        sources: the values that they begin with, by their shapes.
        rotated: the layers in which the operator rotates.
        tables: cosines and sines of the graph -> two tables by position, by their names; None where there are none.
    """

    def __init__(self, flow: Dataflow, model: HookedModel, rotating: Collection[Region]) -> None:
        self.flow, self.model, self.metadata, self.rotating = flow, model, model.metadata, rotating
        self.sources, self.rotated = dict[str, Shape](), set[int]()
        self.tables: dict[tuple[str, ...], dict[str, NDArray[np.float32]] | None] = {}

    def nodes(self, region: Region) -> list[onnx.NodeProto]:
        """A layer's nodes."""
        at, heads = f"{ATTENTION_PREFIX}.{region.layer}", self.metadata.sizes.num_heads
        groups, width, _ = self.metadata.heads(region.layer)
        past, present = KEYS_AND_VALUES.layer_inputs(region.layer), KEYS_AND_VALUES.layer_outputs(region.layer)
        nodes: list[onnx.NodeProto] = []
        parts = (region.queries, heads, "queries"), (region.keys, groups, "keys"), (region.values, groups, "values")
        settings: dict[str, Any] = {"num_heads": heads, "kv_num_heads": groups, "scale": region.scale}
        rotation = self._rotation(region) if region in self.rotating else None
        if rotation is None:
            read = [self._side_by_side(name, count, width, f"{at}.{part}", nodes) for name, count, part in parts]
            tables = ["", "", ""]
        else:
            before, tables, interleaved = rotation
            self.sources |= {name: (None, count * width) for name, (_, count, _) in zip(before, parts, strict=True)}
            self.rotated.add(region.layer)
            nodes.append(helper.make_node("Concat", before, [f"{at}.packed"], f"{at}.packed", axis=-1))
            read = [f"{at}.packed", "", ""]
            settings |= {"do_rotary": 1, "rotary_interleaved": interleaved}
        inputs = [*read, *past, f"{ATTENTION_PREFIX}.ends", f"{ATTENTION_PREFIX}.total", *tables, region.mask]
        outputs = [at if region.shape else region.end, *present]
        nodes.append(helper.make_node("GroupQueryAttention", inputs, outputs, at, domain=DOMAIN, **settings))
        if region.shape:
            nodes.append(helper.make_node("Reshape", [at, region.shape], [region.end], f"{at}.reshaped"))
        return nodes

    def _rotation(self, region: Region) -> tuple[list[str], list[str], int] | None:
        """What stands before heads and rotation, the operator's inputs of rotation, and whether pairs are neighbours.

        None where queries and keys are not rotated alike, or by more than their positions say.
        """
        rotary = [self.flow.producer(name) for name in (region.queries, region.keys)]
        turns = [one for one in rotary if one is not None and (one.domain, one.op_type) == ("", "RotaryEmbedding")]
        ways = {(*one.input[1:], attributes(one).get("interleaved", 0)) for one in turns}
        if len(turns) < len(rotary) or len(ways) > 1:
            return None
        before = [self._before_heads(name) for name in (turns[0].input[0], turns[1].input[0], region.values)]
        *caches, interleaved = ways.pop()
        tables = self._tables(tuple(caches), region.layer) if None not in before else None
        if tables is None:
            return None
        return [name for name in before if name is not None], [*tables, POSITION_INPUT], interleaved

    def _tables(self, caches: tuple[str, ...], layer: int) -> dict[str, NDArray[np.float32]] | None:
        """Cosines and sines by position, up to the longest text that the model is made for, as the graph has them."""
        if caches in self.tables:
            return self.tables[caches]
        self.tables[caches] = None
        length, width = self.model.context_length, self.metadata.heads(layer)[1]
        read = self.flow.read_by(self.flow.ancestors(caches)) & {value.name for value in self.flow.proto.graph.input}
        if len(caches) == 2 and read == {POSITION_INPUT} and length and 4 * length * width <= TABLE_LIMIT:
            program = open_to_try(extract(self.flow, [], caches).SerializeToString(), self.model.folder)
            values = program.run(caches, {POSITION_INPUT: np.arange(length)[None]})
            if all(table.shape == (1, length, table.shape[-1]) for table in values.values()):
                names = (f"{ATTENTION_PREFIX}.{len(self.tables)}.{part}" for part in ("cosines", "sines"))
                self.tables[caches] = {name: values[cache][0] for name, cache in zip(names, caches, strict=True)}
        return self.tables[caches]

    def _side_by_side(self, name: str, heads: int, width: int, to: str, nodes: list[onnx.NodeProto]) -> str:
        """Heads [batch, heads, seq, width] as [batch, seq, heads * width]; nodes that it takes are appended."""
        maker = self.flow.producer(name)
        rotary = maker if maker is not None and (maker.domain, maker.op_type) == ("", "RotaryEmbedding") else None
        before = self._before_heads(name if rotary is None else rotary.input[0])
        if before is None:
            self.sources[name] = (heads, None, width)
            turned = helper.make_node("Transpose", [name], [f"{to}.turned"], f"{to}.turned", perm=TURN)
            nodes += [
                turned,
                helper.make_node("Reshape", [f"{to}.turned", f"{ATTENTION_PREFIX}.side_by_side"], [to], to),
            ]
            return to
        self.sources[before] = (None, heads * width)
        if rotary is None:
            return before
        settings = attributes(rotary) | {"num_heads": heads}
        nodes.append(helper.make_node("RotaryEmbedding", [before, *rotary.input[1:]], [to], to, **settings))
        return to

    def _before_heads(self, name: str) -> str | None:
        """What heads are made of by a `Reshape` and a `Transpose`, [batch, seq, heads * width]."""
        turn = self.flow.producer(name)
        if turn is None or turn.op_type != "Transpose" or [*attributes(turn).get("perm", [])] != TURN:
            return None
        split = self.flow.producer(turn.input[0])
        rank = 0 if split is None else len(self.flow.facts.shapes.get(split.input[0], ()))
        return split.input[0] if split is not None and split.op_type == "Reshape" and rank == HEAD_AXES else None


def _equal(flow: Dataflow, regions: list[Region], model: HookedModel, rotate: bool) -> list[Region]:
    """The regions that give the same when they are fused, on random numbers.

    Args:
        rotate: only those in which the operator rotates, and texts are padded on the right.
    """
    proto, writer = _fused(flow, regions, model, regions if rotate else [])
    regions, sources = [one for one in regions if not rotate or one.layer in writer.rotated], writer.sources
    if not regions:
        return []
    ends = [name for one in regions for name in one.results]
    wrong: set[int] = set()
    try:
        programs = [
            open_to_try(extract(each, [*sources], ends).SerializeToString(), model.folder)
            for each in (flow, Dataflow(proto))
        ]
        for trial in TRIALS:
            feeds = _feeds(model, sources, *trial, rotate)
            nodes, fused = (program.run(ends, feeds) for program in programs)
            real = feeds[PADDING_INPUT].astype(bool)  # what a token of padding reads is nobody's concern
            for one in regions:
                for name in one.results:
                    right, other = nodes[name], fused[name]
                    if name == one.end:
                        new = real[:, -trial[1] :]
                        right, other = (value.reshape(*new.shape, -1)[new] for value in (right, other))
                    else:
                        right, other = (value.swapaxes(1, 2)[real] for value in (right, other))
                    if not np.abs(right - other).max() <= FUSED_TOLERANCE * max(1.0, float(np.abs(right).max())):
                        wrong.add(one.layer)
    except ModelError:  # the operator does not take such heads
        return []
    return [one for one in regions if one.layer not in wrong]


def _feeds(
    model: HookedModel, sources: dict[str, Shape], texts: int, tokens: int, past: int, padded: int, right: bool
) -> dict[str, NDArray[Any]]:
    """Random inputs of a call, the prompt of the first text padded on the left, or on the right."""
    random = np.random.default_rng(0)
    mask = np.ones((texts, past + tokens), np.int64)
    end = past or tokens  # of the prompt
    mask[0, slice(end - padded, end) if right else slice(padded)] = 0
    feeds = {
        "input_ids": np.zeros((texts, tokens), np.int64),
        PADDING_INPUT: mask,
        POSITION_INPUT: np.maximum(mask.cumsum(1) - 1, 0)[:, past:],
    }
    shapes: dict[str, tuple[int, ...]] = {**model.metadata.past_shapes(texts, past)}
    for name, shape in sources.items():  # None: as many as there are tokens
        shapes[name] = (texts, *(tokens if size is None else size for size in shape))
    return feeds | {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
