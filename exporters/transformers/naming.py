"""From marked values to named ones: the marker nodes go, and the hook name becomes the value's own name."""

from typing import Any

import onnx_ir as ir

from exporters.transformers.trace import MARKER_DOMAIN
from mionnx.graph.io_names import KEYS_AND_VALUES, PASTS

NUMBER_ATTRIBUTES = (ir.AttributeType.INT, ir.AttributeType.INTS)


def name_hooks(graph: ir.Graph) -> list[str]:
    """Replace all markers of a graph by names, in place; returns these in execution order."""
    order = {id(node): position for position, node in enumerate(graph)}
    names: list[str] = []
    taken: set[int] = set()
    for node in [node for node in graph if node.domain == MARKER_DOMAIN]:
        value = _named_value(graph, node, order, taken)
        value.name = node.attributes["name"].as_string()
        taken.add(id(value))
        names.append(value.name)
    graph.opset_imports.pop(MARKER_DOMAIN, None)
    return names


def _named_value(graph: ir.Graph, marker: ir.Node, order: dict[int, int], taken: set[int]) -> ir.Value:
    source, seen = marker.inputs[0], marker.outputs[0]
    stream = bool(marker.attributes["stream"].as_int())
    here = order[id(marker)]
    # The shape of a value is the same before and after, so who reads only that does not count as a reader.
    readers = [(node, i) for node, i in source.uses() if node is not marker and node.op_type != "Shape"]
    # On the residual stream every reader after the marker sees a change; elsewhere only those of the marker's output.
    later = [(node, i) for node, i in readers if stream and order[id(node)] > here]
    # Somebody reads the value under its old meaning, or it has a name: a value of its own for the later readers.
    shared = len(later) < len(readers) or source.is_graph_input() or source.is_initializer() or id(source) in taken
    value = _identity(graph, marker, source) if shared else source
    if not shared:
        later = []
    for node, i in [*later, *seen.uses()]:
        node.replace_input_with(i, value)
    if seen.is_graph_output():  # which keeps its name
        output = _identity(graph, marker, value)
        output.name = seen.name
        graph.outputs[graph.outputs.index(seen)] = output
        order[id(output.producer())] = here
    if value.producer() is not None:
        order.setdefault(id(value.producer()), here)
    graph.remove(marker, safe=True)
    return value


def _identity(graph: ir.Graph, marker: ir.Node, source: ir.Value) -> ir.Value:
    node = ir.node("Identity", [source])
    value = node.outputs[0]
    value.shape, value.type = source.shape, source.type
    graph.insert_after(marker, node)
    return value


def name_dimensions(graph: ir.Graph) -> None:
    """Name the dynamic axes everywhere: batch, seq, past, total (past and seq together)."""
    inputs = {value.name: value for value in graph.inputs}
    seq = str(inputs["input_ids"].shape[1])
    symbols = {str(inputs["input_ids"].shape[0]): "batch", seq: "seq"}
    for name, value in inputs.items():  # where nothing compares them, torch has a symbol of its own for each layer's
        if name.startswith(PASTS):
            symbols[str(value.shape[0])] = "batch"
        if name.startswith(f"{KEYS_AND_VALUES.past}."):
            length = str(value.shape[2])
            symbols[length] = "past"
            symbols |= {f"{length} + {seq}": "total", f"{seq} + {length}": "total"}
    cached = any(name.startswith(PASTS) for name in inputs)
    for name in ("attention_mask", "position_ids", "token_type_ids"):
        if name in inputs:
            inputs[name].shape = ir.Shape(["batch", "total" if name == "attention_mask" and cached else "seq"])
    names = {name: name for name in symbols.values()} | symbols  # torch's other symbols have no meaning here
    for value in _values(graph):
        if value.shape is not None:
            dims = [dim if isinstance(dim, int) else names.get(str(dim.value)) for dim in value.shape]
            value.shape = ir.Shape(dims)


def read_lengths_once(graph: ir.Graph) -> None:
    """Let every node that asks how many rows or tokens there are ask the same input."""
    # All layers' pasts are of one length, and all inputs have the same rows; which of them torch asks is chance.
    inputs = {str(value.name): value for value in graph.inputs}
    pasts = (value for name, value in inputs.items() if name.startswith(f"{KEYS_AND_VALUES.past}."))
    past = next(pasts, inputs["input_ids"])
    sources = {("input", 0): past, ("past", 0): past, ("past", 2): past, ("input", 1): inputs["input_ids"]}
    for node in graph:
        axis = axis_asked(node)
        if axis in sources:
            node.replace_input_with(0, sources[axis])


def axis_asked(node: ir.Node) -> tuple[str, int] | None:
    """The axis whose length a node asks of a past or an input of tokens; None for other nodes."""
    if node.op_type != "Shape" or node.inputs[0] is None or not node.inputs[0].is_graph_input():
        return None
    start, end = (node.attributes.get(name) for name in ("start", "end"))
    if not start or not end or end.as_int() - start.as_int() != 1:
        return None
    name, axis = str(node.inputs[0].name), start.as_int()
    if name == "attention_mask" and axis:  # past tokens and those of the call together
        return None
    return "past" if name.startswith(f"{KEYS_AND_VALUES.past}.") else "input", axis


def merge_lengths(graph: ir.Graph) -> None:
    """Compute lengths once that code of a family asks of each layer's past, in place."""
    # Lengths are what follows from the shapes of inputs alone.
    first: dict[tuple[Any, ...], ir.Value] = {}
    lengths: set[int] = set()
    for node in list(graph):
        read = [value for value in node.inputs if value is not None and value.const_value is None]
        of_input = node.op_type == "Shape" and read[0].is_graph_input()
        plain = len(node.outputs) == 1 and all(attr.type in NUMBER_ATTRIBUTES for attr in node.attributes.values())
        if not plain or not (of_input or (read and all(id(value) in lengths for value in read))):
            continue
        numbers = sorted((name, repr(attr.value)) for name, attr in node.attributes.items())
        same = (node.domain, node.op_type, tuple(map(id, node.inputs)), tuple(numbers))
        value = first.setdefault(same, node.outputs[0])
        lengths.add(id(value))
        if value is not node.outputs[0]:
            node.outputs[0].replace_all_uses_with(value)
            graph.remove(node, safe=True)


def _values(graph: ir.Graph) -> list[ir.Value]:
    return [*graph.inputs, *(value for node in graph for value in node.outputs)]


def strip(model: ir.Model) -> None:
    """Remove what describes the machine and the trace: stack traces, module scopes, doc strings."""
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    model.doc_string = model.graph.doc_string = None
    model.graph.name = "mionnx"
    for value in [*_values(model.graph), *model.graph.initializers.values()]:
        value.metadata_props.clear()
        value.doc_string = None
    for node in model.graph:
        node.metadata_props.clear()
        node.doc_string = None
