"""Whether two graphs are the same, node by node, but for the names of values and nodes that nobody gave them."""

import re
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import onnx_ir as ir

# Hook points, weights, inputs and outputs; every other value of a traced graph has a running number for a name.
NAMED = re.compile(r"blocks\.\d|hook_|past_key_values\.|present\.|model\.|transformer\.|gpt_neox\.|lm_head|embed_out")
TOKENS = ("input_ids", "attention_mask", "position_ids", "logits")


def described(model: ir.Model, parameters: list[ir.Value]) -> list[Any]:
    """A graph as a list that is equal for equal graphs: its inputs, outputs, nodes, weights and constants.

    Values without a name of their own are called by what makes them, constants by what they hold. Nodes are sorted: the
    order of those that do not depend on each other is the tracer's accident.
    """
    names: dict[int, Any] = {id(value): ("weight", *_facts(value), value.name) for value in parameters}
    return [*map(str, _ends(model.graph, names)), *sorted(str(_facts(value)) for value in parameters)]


def _ends(graph: ir.Graph, names: dict[int, Any]) -> Iterator[Any]:
    for value in graph.inputs:
        names[id(value)] = value.name
        yield "input", *_facts(value)
    yield from sorted(map(str, _nodes(graph, names)))
    for value in graph.outputs:
        yield "output", names[id(value)], *_facts(value)


def _nodes(graph: ir.Graph, names: dict[int, Any]) -> Iterator[Any]:
    for node in graph:
        read = [None if value is None else _name(value, names) for value in node.inputs]
        made_by = sha256(repr((node.domain, node.op_type, node.version, read, _attributes(node))).encode()).hexdigest()
        for number, value in enumerate(node.outputs):
            own = value.name in TOKENS or NAMED.match(str(value.name))
            names[id(value)] = value.name if own else (made_by, number)
        made = [(names[id(value)], str(value.shape), str(value.dtype)) for value in node.outputs]
        yield node.domain, node.op_type, node.version, read, _attributes(node), made


def _name(value: ir.Value, names: dict[int, Any]) -> Any:
    if id(value) not in names:
        assert value.const_value is not None, value
        array = value.const_value.numpy()
        names[id(value)] = "constant", str(value.dtype), array.shape, array.tobytes()
    return names[id(value)]


def _attributes(node: ir.Node) -> list[tuple[str, str]]:
    return sorted((name, repr(_plain(attr.value))) for name, attr in node.attributes.items())


def _plain(value: Any) -> Any:
    return value.numpy().tolist() if isinstance(value, ir.TensorProtocol) else value


def _facts(value: ir.Value) -> tuple[str, str, str]:
    return str(value.name), str(value.shape), str(value.dtype)
