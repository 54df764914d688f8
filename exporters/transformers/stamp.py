"""Layers made from traced ones: the same nodes on their own weights, past and hook names.

A layer's nodes stand between the residual stream before it and after it. They read that stream, the layer's own
weights and past, and values made before, which every layer of the kind reads too (`kinds`). So a layer is made by
copying the nodes of another one of its kind, with names moved:

1. Hook points, weights, past and present of the traced layer become those of the layer that is made. Where a layer of
   transformers holds several with hook points (`Kinds.halves`), it is made whole.
2. The stream before a layer is that after its neighbour, in traced layers too whose neighbour was not traced.
3. Every other value of the layer gets the layer's number behind its name; values from outside are read as they are.
4. Nodes of the traced layer that read nothing of it, but values from outside and each other, are not copied: the first
   layer that needs them makes them for all (a mask, the rotation's angles, lengths).
"""

import re
from collections.abc import MutableSequence
from dataclasses import dataclass, field

import onnx_ir as ir

from exporters.recurrence.expand import RECURRENCE_DOMAIN
from exporters.transformers.kinds import OUTSIDE, Kinds, split
from exporters.transformers.naming import axis_asked
from mionnx.graph.hook_points import HookPoint, layer_of
from mionnx.graph.io_names import KEYS_AND_VALUES, PASTS, PRESENTS, STATE

_CACHE = re.compile(rf"(?:{'|'.join(map(re.escape, (*PASTS, *PRESENTS)))})(\d+)\.")

PARTS = (*KEYS_AND_VALUES.parts, *STATE.parts)  # of what a layer carries, in their order
LAYER_ATTRIBUTE = "layer"  # the attribute of a recurrence that says where it is


def stamp(graph: ir.Graph, parameters: list[ir.Value], hooks: list[str], kinds: Kinds, blocks: str) -> bool:
    """Put every layer into a graph that holds the traced ones, in place; returns whether that could be done."""
    # Where nodes of one layer stand among those of another, or hold graphs of their own, nothing is changed. The made
    # layers' weights are put beside `parameters`, without data, their hook points between `hooks`, which are in
    # execution order; `blocks` is the path of the layers in the names of weights.
    if len(kinds.traced) == len(kinds.of):
        return True
    nodes, names = _segments(graph, kinds), LayerNames(blocks, kinds.halves, kinds.shared)
    if nodes is None or not all(_alone(nodes[layer], layer, names) for layer in kinds.traced):
        return False
    stamper = _Stamper(graph, kinds, names, nodes, {id(value) for value in parameters})
    for layer in range(len(kinds.of)):
        stamper.put(layer)
    stamper.join(nodes[OUTSIDE], len(kinds.of))
    _order_cache(graph.inputs)
    _order_cache(graph.outputs)
    parameters += [value for layer in sorted(stamper.parameters) for value in stamper.parameters[layer]]
    hooks[:] = _hooks(hooks, kinds, names)
    return True


@dataclass(frozen=True)
class LayerNames:
    """Names of values, by which they belong to a layer."""

    blocks: str  # path of the layers in the names of weights
    halves: int  # how many numbers a layer has in the names of hook points, pasts and presents
    shared: frozenset[str] = frozenset()  # weights that are of no one layer

    def layer(self, name: str) -> int:
        """The layer that a value belongs to by its name; `OUTSIDE` if its name says none."""
        hook, cache = layer_of(name), _CACHE.match(name)
        if name in self.shared:
            return OUTSIDE
        if hook is not None:
            return hook // self.halves
        return int(cache[1]) // self.halves if cache else split(name, self.blocks)[0]

    def moved(self, name: str, layer: int, other: int) -> str:
        """Name of a value of a layer, whether its name says the layer or not, as it is in another layer."""
        if self.layer(name) != layer:
            return f"{name}.{other}"
        if split(name, self.blocks)[0] == layer:
            return f"{self.blocks}.{other}.{split(name, self.blocks)[1]}"
        before, number, behind = re.split(r"\.(\d+)(?=\.)", name, maxsplit=1)
        return f"{before}.{int(number) + (other - layer) * self.halves}{behind}"


def _segments(graph: ir.Graph, kinds: Kinds) -> dict[int, list[ir.Node]] | None:
    """Group nodes by traced layer, those after all under `OUTSIDE`; None if layers are not one after another."""
    ends = {str(HookPoint.ResidPost((layer + 1) * kinds.halves - 1)): layer for layer in kinds.traced}
    before, waiting = list[ir.Node](), list[ir.Node]()
    segments: dict[int, list[ir.Node]] = {}
    for node in graph:
        waiting.append(node)
        if node.outputs[0].name == str(HookPoint.ResidPre(0)):
            before, waiting = waiting[:-1], waiting[-1:]
        ended = ends.get(str(node.outputs[0].name))
        if ended is not None:
            segments[ended], waiting = waiting, []
    segments[OUTSIDE] = waiting
    return segments if before and [*segments] == [*kinds.traced, OUTSIDE] else None


def _alone(nodes: list[ir.Node], layer: int, names: LayerNames) -> bool:
    """Whether nodes name nothing of another layer but the stream, and hold no graphs."""
    types = {attribute.type for node in nodes for attribute in node.attributes.values()}
    plain = types.isdisjoint((ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS))
    outputs = [value for node in nodes for value in node.outputs]
    read = [value for node in nodes for value in node.inputs if value is not None and value.producer() is None]
    owners = {names.layer(str(value.name)) for value in (*outputs, *read)}
    return plain and owners <= {layer, OUTSIDE}


@dataclass
class _Stamper:
    """A graph under work, and what has been made so far."""

    graph: ir.Graph
    kinds: Kinds
    names: LayerNames
    nodes: dict[int, list[ir.Node]]  # the nodes of each layer, and under `OUTSIDE` those after all layers
    weights: set[int]  # ids of the values that a checkpoint feeds
    parameters: dict[int, list[ir.Value]] = field(default_factory=dict)  # layer -> such values made for it

    def put(self, layer: int) -> None:
        """Make a layer, or join a traced one to the layer before it."""
        if layer in self.kinds.traced:
            self.join(self.nodes[layer], layer)
            return
        self.nodes[layer] = self._copies(self.kinds.template(layer), layer)
        self.graph.insert_after(self.nodes[layer - 1][-1], self.nodes[layer])

    def join(self, nodes: list[ir.Node], layer: int) -> None:
        """Let traced nodes read the stream of the layer before, not of the traced one before."""
        earlier = max((other for other in self.kinds.traced if other < layer), default=layer - 1)
        if earlier == layer - 1:
            return
        old, new = self._stream(earlier), self._stream(layer - 1)
        for node in nodes:
            for place, value in enumerate(node.inputs):
                if value is old:
                    node.replace_input_with(place, new)

    def _stream(self, layer: int) -> ir.Value:
        return self.nodes[layer][-1].outputs[0]

    def _own(self, layer: int) -> list[ir.Node]:
        """The nodes of a traced layer with something of its own: its stream, weights or past."""
        moving = set() if layer == 0 else {id(self._stream(layer - 1))}
        own = []
        for node in self.nodes[layer]:
            named = any(self.names.layer(str(value.name)) == layer for value in node.outputs)
            read = [value for value in node.inputs if value is not None]
            reads = any(id(value) in moving or self._is_source(value, layer) for value in read)
            if named or (reads and axis_asked(node) is None):
                own.append(node)
                moving |= {id(value) for value in node.outputs}
        return own

    def _is_source(self, value: ir.Value, layer: int) -> bool:
        """Whether a value is a past, a weight or a buffer of a layer."""
        return value.producer() is None and self.names.layer(str(value.name)) == layer

    def _copies(self, template: int, layer: int) -> list[ir.Node]:
        before = self._stream(layer - 1)
        copied = {} if template == 0 else {id(self._stream(template - 1)): before}
        begin = str(HookPoint.ResidPre(0)) if template == 0 else None  # stream of embeddings, in whatever way
        copies = []
        for node in self._own(template):
            if node.outputs[0].name == begin:
                stream = self._like(node.outputs[0], template, layer)
                copied[id(node.outputs[0])] = stream
                copies.append(ir.Node("", "Identity", [before], name=f"{node.name}.{layer}", outputs=[stream]))
                continue
            inputs = [value and self._read(value, copied, template, layer) for value in node.inputs]
            outputs = [self._like(value, template, layer) for value in node.outputs]
            copied |= {id(old): new for old, new in zip(node.outputs, outputs, strict=True)}
            copy = ir.Node(
                node.domain,
                node.op_type,
                inputs,
                self._attributes(node, layer - template),
                version=node.version,
                name=f"{node.name}.{layer}",
                outputs=outputs,
            )
            copies.append(copy)
        return copies

    def _attributes(self, node: ir.Node, further: int) -> list[ir.Attr]:
        """Attributes of a copy so many layers further; a recurrence says its layer in one of them."""
        own = {**node.attributes}
        if LAYER_ATTRIBUTE in own and node.domain == RECURRENCE_DOMAIN:
            own[LAYER_ATTRIBUTE] = ir.AttrInt64(
                LAYER_ATTRIBUTE, own[LAYER_ATTRIBUTE].as_int() + further * self.names.halves
            )
        return [*own.values()]

    def _read(self, value: ir.Value, copied: dict[int, ir.Value], template: int, layer: int) -> ir.Value:
        """Value that a copy reads in the place of another one."""
        if not self._is_source(value, template):
            return copied.get(id(value), value)
        if id(value) not in copied:
            copied[id(value)] = self._source(value, template, layer)
        return copied[id(value)]

    def _source(self, value: ir.Value, template: int, layer: int) -> ir.Value:
        """A past, a weight, or a buffer of the layer."""
        value_of_layer = self._like(value, template, layer)
        if value.is_graph_input():
            self.graph.inputs.append(value_of_layer)
        elif id(value) in self.weights:
            self.parameters.setdefault(layer, []).append(value_of_layer)
        else:
            value_of_layer.const_value = value.const_value
            self.graph.register_initializer(value_of_layer)
        return value_of_layer

    def _like(self, value: ir.Value, template: int, layer: int) -> ir.Value:
        name = self.names.moved(str(value.name), template, layer)
        copy = ir.Value(name=name, shape=value.shape and value.shape.copy(), type=value.type)
        if value.is_graph_output():
            self.graph.outputs.append(copy)
        return copy


def _order_cache(values: MutableSequence[ir.Value]) -> None:
    """Put the past and present of layers into the order of layers and their parts, behind all others."""

    def place(value: ir.Value) -> tuple[int, int]:
        layer = _CACHE.match(str(value.name))
        # a layer may read its state before its keys (Falcon-H1)
        return (int(layer[1]), PARTS.index(str(value.name)[layer.end() :])) if layer else (OUTSIDE, 0)

    ordered = sorted(values, key=place)
    values.clear()
    values.extend(ordered)


def _hooks(hooks: list[str], kinds: Kinds, names: LayerNames) -> list[str]:
    """Hook points of all layers, in execution order."""
    of: dict[int, list[str]] = {}
    for name in hooks:
        of.setdefault(names.layer(name), []).append(name)
    layered = [place for place, name in enumerate(hooks) if layer_of(name) is not None]
    ordered = hooks[: layered[0]]
    for layer in range(len(kinds.of)):
        traced = layer if layer in kinds.traced else kinds.template(layer)
        ordered += [names.moved(name, traced, layer) for name in of[traced]]
    return ordered + hooks[layered[-1] + 1 :]
