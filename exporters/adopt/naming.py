"""Hook names onto values; a value with several gets an `Identity` for each after the first, in execution order."""

from collections.abc import Collection

import onnx_ir as ir

from exporters.adopt.flow import KEEPING, SIZE_OPERATORS, Flow, Origin, climb, static
from exporters.adopt.recognise import Recognised, sum_of
from exporters.adopt.rotation import HEADS_FIRST
from mionnx.errors import ExportError

PAST_INPUT = "past_key_values"
LOGITS_OUTPUT = "logits"


def name_points(decoder: Recognised) -> list[str]:
    """Give every recognised value its hook name.

    Returns:
        the names, in execution order.
    """
    graph, current = decoder.flow.graph, {value: _turned(decoder.flow.graph, value) for value in decoder.seq_first}
    current |= {value: _by_rows(decoder.flow.graph, value, *like) for value, like in decoder.flat.items()}
    _free(graph, {name for name, _ in decoder.points})
    taken: set[ir.Value] = set()
    for name, origin in decoder.points:
        value = current.get(origin, origin)
        if name == "hook_logits":
            _name_logits(graph, value)
            continue
        within = decoder.within.get(name, set())
        if within and any(node not in within for node in decoder.flow.readers(value)):
            value = _identity(graph, value, within)
        elif value in taken or value.producer() is None or value.is_graph_output():
            value = current[origin] = _identity(graph, value)
        value.name = name
        taken.add(value)
    for name, value in decoder.sums.items():
        value.name = sum_of(name)
    return [name for name, _ in decoder.points]


def _turned(graph: ir.Graph, value: ir.Value) -> ir.Value:
    """A value as [batch, heads, seq, head_dim], on its way to its readers."""
    readers = [(node, place) for node, place in value.uses() if node.op_type not in SIZE_OPERATORS]
    turn = ir.node("Transpose", [value], attributes={"perm": HEADS_FIRST})
    back = ir.node("Transpose", [turn.outputs[0]], attributes={"perm": HEADS_FIRST})
    for node in (turn, back):
        node.outputs[0].type = value.type
    back.outputs[0].shape = value.shape
    if value.shape is not None:
        turn.outputs[0].shape = ir.Shape([value.shape[axis] for axis in HEADS_FIRST])
    graph.insert_after(value.producer(), [turn, back])
    for node, place in readers:
        node.replace_input_with(place, back.outputs[0])
    return turn.outputs[0]


def _by_rows(graph: ir.Graph, value: ir.Value, like: ir.Value, size: int) -> ir.Value:
    """A value [batch * seq, size] as [batch, seq, size]; `like` begins with both axes."""
    readers = [(node, place) for node, place in value.uses() if node.op_type not in SIZE_OPERATORS]
    last, flat = (ir.node("Constant", [], attributes={"value_ints": ints}) for ints in ([size], [-1, size]))
    axes = ir.node("Shape", [like], attributes={"start": 0, "end": 2})
    sizes = ir.node("Concat", [axes.outputs[0], last.outputs[0]], attributes={"axis": 0})
    rows = ir.node("Reshape", [value, sizes.outputs[0]])
    back = ir.node("Reshape", [rows.outputs[0], flat.outputs[0]])
    for node in (rows, back):
        node.outputs[0].type = value.type
    rows.outputs[0].shape, back.outputs[0].shape = ir.Shape(["batch", "seq", size]), value.shape
    graph.insert_after(value.producer(), [last, flat, axes, sizes, rows, back])
    for node, place in readers:
        node.replace_input_with(place, back.outputs[0])
    return rows.outputs[0]


def _free(graph: ir.Graph, names: set[str]) -> None:
    """Take the names of hook points from values that have them already, as a compiled graph's."""
    for node in graph:
        for value in node.outputs:
            if value.name in names or (value.name == LOGITS_OUTPUT and not value.is_graph_output()):
                value.name = f"stock.{value.name}"


def _name_logits(graph: ir.Graph, value: ir.Value) -> None:
    """Name the value before the output of logits, in the model's own dtype."""
    place, inner = graph.outputs.index(value), climb(value, KEEPING)
    node = ir.node("Identity", [inner])
    graph.insert_after(inner.producer(), node)
    value.name = "adopted.logits"
    inner.name, node.outputs[0].name = "hook_logits", LOGITS_OUTPUT
    node.outputs[0].type, node.outputs[0].shape = inner.type, inner.shape
    graph.outputs[place] = node.outputs[0]


def _identity(graph: ir.Graph, value: ir.Value, within: Collection[ir.Node] = ()) -> ir.Value:
    """A value of its own for the readers of another, or some; sizes are still read there."""
    readers = [(node, place) for node, place in value.uses() if node.op_type not in SIZE_OPERATORS]
    readers = [(node, place) for node, place in readers if not within or node in within]
    node = ir.node("Identity", [value])
    copy = node.outputs[0]
    copy.type, copy.shape = value.type, value.shape
    if value.producer() is not None:
        graph.insert_after(value.producer(), node)
    else:
        graph.insert_before(graph[0], node)
    for reader, place in readers:
        reader.replace_input_with(place, copy)
    return copy


def name_caches(decoder: Recognised) -> int:
    """Name the inputs and outputs of keys and values, and drop all other outputs but the logits.

    Returns:
        the number of layers with a cache.

    Raises:
        ExportError: some layers have a cache and some have none, or an input of fractions is no past.
    """
    flow, cached = decoder.flow, 0
    graph, outputs = flow.graph, {flow.logits}
    for layer, attention in enumerate(decoder.attention):
        joined = {"key": attention.keys.joined, "value": attention.values.joined}
        if None in joined.values():
            continue
        cached += 1
        for kind, node in joined.items():
            outputs.add(_name_cache(flow, f"{layer}.{kind}", node))
    if 0 < cached < len(decoder.attention):
        raise ExportError(f"{cached} of {len(decoder.attention)} layers have a past of keys and values")
    for value in [value for value in graph.outputs if value not in outputs]:
        graph.outputs.remove(value)
        decoder.notes.append(f"output {value.name}: dropped, it is no part of a hooked model")
    unknown = [value.name for value in graph.inputs if flow.origin.get(value) == Origin.PAST and not _named(value)]
    if unknown:
        raise ExportError(f"inputs of fractions that are no past of keys and values: {', '.join(map(str, unknown))}")
    return cached


def _named(value: ir.Value) -> bool:
    return str(value.name).startswith(f"{PAST_INPUT}.")


def _name_cache(flow: Flow, suffix: str, joined: ir.Node) -> ir.Value:
    """Name the past and the present of a node that joins them; the present is an output."""
    graph = flow.graph
    past = next(climb(value) for value in joined.inputs if flow.origin.get(value) == Origin.PAST)
    new = next(value for value in joined.inputs if flow.is_text(value))
    if not past.is_graph_input():
        raise ExportError(f"the past {suffix} is a part of a larger input: such a cache is not taken apart")
    past.name = f"{PAST_INPUT}.{suffix}"
    heads, width = (static(joined.outputs[0], axis) or static(new, axis) or static(past, axis) for axis in (1, 3))
    if heads is None or width is None:
        raise ExportError(f"the past {past.name} has heads of unknown number or width, {past.shape}")
    past.shape = ir.Shape(["batch", heads, "past", width])
    if past.dtype != new.dtype and new.dtype is not None:  # files of float16 may keep an interface of float32
        past.type = ir.TensorType(new.dtype)
    present = joined.outputs[0]
    for value in [value for value in graph.outputs if climb(value, KEEPING) is present]:
        graph.outputs.remove(value)
        value.name = f"adopted.{suffix}"
    output = _identity_of_output(graph, present)
    output.name = f"present.{suffix}"
    return output


def _identity_of_output(graph: ir.Graph, value: ir.Value) -> ir.Value:
    node = ir.node("Identity", [value])
    node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
    graph.insert_after(value.producer(), node)
    graph.outputs.append(node.outputs[0])
    return node.outputs[0]
