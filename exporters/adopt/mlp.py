"""The MLP of one layer: neurons between two linear maps, gated or not, or a mixture of experts."""

from dataclasses import dataclass, field

import onnx_ir as ir

from exporters.adopt.experts import ROUTING_OPERATORS, Router, find_router
from exporters.adopt.flow import Flow, climb
from exporters.adopt.linear import SHAPE_OPERATORS, input_of, linear_maps, output_of


@dataclass(frozen=True)
class Mlp:
    """The values of one layer's MLP: hook name within the layer and value, in execution order.

    Attributes:
        notes: which hook points it has not, and why.
        flat: those with batch and seq as one axis, of a router; the size of the other axis.
    """

    points: list[tuple[str, ir.Value]]
    notes: list[str] = field(default_factory=list)
    flat: dict[ir.Value, int] = field(default_factory=dict)


def find_mlp(flow: Flow, layer: int, top: ir.Value, out: ir.Value) -> Mlp:
    """Recognise the MLP between a layer's stream and the value that it adds."""
    maps = linear_maps(flow, top, out)
    routed = any(node.op_type in ROUTING_OPERATORS for node in flow.between(top, out))
    if routed or len(maps) < 2:
        why = "a mixture of experts" if routed else f"{len(maps)} linear maps"
        router = find_router(flow, layer, flow.between(top, out)) if routed else Router()
        points = _around(flow, top, out, maps, router.points)
        none = f"layer {layer}: mlp.hook_gate, hook_up, hook_act: {why} has no one value of neurons"
        return Mlp(points, [none, *router.notes], router.flat)
    return _between_two_maps(flow, layer, top, out, maps)


def _around(
    flow: Flow, top: ir.Value, out: ir.Value, maps: list[ir.Node], routing: list[tuple[str, ir.Value]]
) -> list[tuple[str, ir.Value]]:
    """The points of an MLP without neurons: output, router, and input if there is one."""
    pre = input_of(flow, maps[0]) if maps else None
    dominates = pre is not None and pre in flow.chain(out, top)
    return [*([("mlp.hook_pre", pre)] if dominates else []), *routing, ("mlp.hook_post", out), ("hook_mlp_out", out)]


def _between_two_maps(flow: Flow, layer: int, top: ir.Value, out: ir.Value, maps: list[ir.Node]) -> Mlp:
    down = maps[-1]
    pre, act, post = input_of(flow, maps[0]), input_of(flow, down), output_of(flow, down)
    if post not in flow.chain(out, top):
        post = out
    ups = [output_of(flow, node) for node in maps if input_of(flow, node) is pre]
    ups = [part for value in ups for part in (_halves(flow, value) or [value])]
    names, notes = _neurons(layer, ups, act)
    points = [("mlp.hook_pre", pre), *names, ("mlp.hook_act", act), ("mlp.hook_post", post), ("hook_mlp_out", out)]
    return Mlp(points, notes)


def _neurons(layer: int, ups: list[ir.Value], act: ir.Value) -> tuple[list[tuple[str, ir.Value]], list[str]]:
    """Gate and up projection: of two, up is the factor of the neurons that passes no activation."""
    if len(ups) == 1:
        return [("mlp.hook_up", ups[0])], []
    product = act.producer()
    if len(ups) == 2 and product is not None and product.op_type == "Mul":
        factors = [climb(value, SHAPE_OPERATORS) for value in product.inputs if value is not None]
        linear = [value for value in ups if climb(value, SHAPE_OPERATORS) in factors]
        if len(linear) == 1:
            gate = next(value for value in ups if value is not linear[0])
            return [("mlp.hook_gate", gate), ("mlp.hook_up", linear[0])], []
    return [], [f"layer {layer}: mlp.hook_gate, hook_up: {len(ups)} first linear maps, none a plain factor of neurons"]


def _halves(flow: Flow, value: ir.Value) -> list[ir.Value]:
    """Gate and up of a fused projection."""
    users = flow.readers(value)
    if len(users) == 1 and users[0].op_type == "Split":
        return list(users[0].outputs)
    if len(users) == 2 and all(user.op_type == "Slice" for user in users):
        return [user.outputs[0] for user in users]
    return []
