"""Hook names onto values; a value with several gets an `Identity` for each after the first, in execution order."""

from collections.abc import Collection

import onnx_ir as ir

from exporters.adopt.attention import HEADS_FIRST
from exporters.adopt.flow import KEEPING, SIZE_OPERATORS, Flow, Origin, climb, static
from exporters.adopt.recognise import Recognised, sum_of, ungated
from exporters.op_writer import move, node_like
from mionnx.errors import ExportError
from mionnx.graph.io_names import KEYS_AND_VALUES, PASTS, STATE
from mionnx.graph.metadata import MAIN_OUTPUTS
from mionnx.graph.output_head import LOGITS

DROPPED_OUTPUT = "adopted."  # begins names of values that were outputs of the file


def name_points(decoder: Recognised) -> list[str]:
    """Give every recognised value its hook name; returns the names, in execution order."""
    graph, current = decoder.flow.graph, {value: _turned(decoder.flow.graph, value) for value in decoder.seq_first}
    current |= {value: _by_rows(decoder.flow.graph, value, *like) for value, like in decoder.flat.items()}
    current |= {value: _by_heads(graph, value, heads) for value, heads in decoder.merged.items()}
    _free(graph, {name for name, _ in decoder.points} | {*MAIN_OUTPUTS.values()} - {LOGITS})
    taken: set[ir.Value] = set()
    for name, origin in decoder.points:
        value = current.get(origin, origin)
        if name == decoder.main:
            _name_output(graph, value, name, taken)
            continue
        within = decoder.within.get(name, set())
        # of a parallel block: attention reads the same normed value, and is not to be changed by the MLP's hook
        if within and any(node not in within for node in decoder.flow.readers(value)):
            value = _identity(graph, value, within)
        # a hook point is made by a node: an input, an output or a value with a name already gets an Identity
        elif value in taken or value.producer() is None or value.is_graph_output():
            value = current[origin] = _identity(graph, value)
        value.name = name
        taken.add(value)
    for name, value in decoder.sums.items():
        value.name = sum_of(name)
    for name, value in decoder.ungated.items():
        value.name = ungated(name)
    return [name for name, _ in decoder.points]


def _turned(graph: ir.Graph, value: ir.Value) -> ir.Value:
    """A value as [batch, heads, seq, head_dim], on its way to its readers."""
    turn = node_like("Transpose", [value], value, perm=HEADS_FIRST)
    turn.outputs[0].shape = value.shape and ir.Shape([value.shape[axis] for axis in HEADS_FIRST])
    _insert(graph, value, [turn, node_like("Transpose", [turn.outputs[0]], value, perm=HEADS_FIRST)])
    return turn.outputs[0]


def _by_rows(graph: ir.Graph, value: ir.Value, like: ir.Value, size: int) -> ir.Value:
    """A value [batch * seq, size] as [batch, seq, size]; `like` begins with both axes."""
    last, flat = (ir.node("Constant", [], attributes={"value_ints": ints}) for ints in ([size], [-1, size]))
    axes = ir.node("Shape", [like], attributes={"start": 0, "end": 2})
    sizes = ir.node("Concat", [axes.outputs[0], last.outputs[0]], attributes={"axis": 0})
    rows = node_like("Reshape", [value, sizes.outputs[0]], value)
    rows.outputs[0].shape = ir.Shape(["batch", "seq", size])
    back = node_like("Reshape", [rows.outputs[0], flat.outputs[0]], value)
    _insert(graph, value, [last, flat, axes, sizes, rows, back])
    return rows.outputs[0]


def _by_heads(graph: ir.Graph, value: ir.Value, heads: int) -> ir.Value:
    """A value [batch, seq, heads * width] as [batch, seq, heads, width]."""
    apart, together = (
        ir.node("Constant", [], attributes={"value_ints": ints}) for ints in ([0, 0, heads, -1], [0, 0, -1])
    )
    split = node_like("Reshape", [value, apart.outputs[0]], value)
    split.outputs[0].shape = ir.Shape(["batch", "seq", heads, None])
    back = node_like("Reshape", [split.outputs[0], together.outputs[0]], value)
    _insert(graph, value, [apart, together, split, back])
    return split.outputs[0]


def _identity(graph: ir.Graph, value: ir.Value, within: Collection[ir.Node] = ()) -> ir.Value:
    """A value of its own for the readers of another, or some; sizes are still read there."""
    node = node_like("Identity", [value], value)
    _insert(graph, value, [node], within)
    return node.outputs[0]


def _insert(graph: ir.Graph, value: ir.Value, nodes: list[ir.Node], within: Collection[ir.Node] = ()) -> None:
    """Put nodes between a value and its readers, or some of these; the last one makes what they read then."""
    # readers of the size alone stay with the value itself, which may be there earlier
    reads = [(node, place) for node, place in value.uses() if node.op_type not in SIZE_OPERATORS and node not in nodes]
    if value.producer() is not None:
        graph.insert_after(value.producer(), nodes)
    else:
        graph.insert_before(graph[0], nodes)
    move(((node, place) for node, place in reads if not within or node in within), nodes[-1].outputs[0])


def _free(graph: ir.Graph, names: set[str]) -> None:
    """Take the names of hook points from values that have them already, as a compiled graph's."""
    for node in graph:
        for value in node.outputs:
            if value.name in names or (value.name == LOGITS and not value.is_graph_output()):
                value.name = f"stock.{value.name}"


def _name_output(graph: ir.Graph, value: ir.Value, name: str, taken: Collection[ir.Value]) -> None:
    """Name the value before the main output, in the model's own dtype."""
    # a file may cast its logits to float32 at the end: the hook point stands before that
    place, inner = graph.outputs.index(value), climb(value, KEEPING)
    if inner in taken:  # it has the name of another hook point
        inner = _identity(graph, inner)
    node = node_like("Identity", [inner], inner)
    graph.insert_after(inner.producer(), node)
    value.name = "adopted.logits"
    inner.name, node.outputs[0].name = name, LOGITS
    graph.outputs[place] = node.outputs[0]


def name_caches(decoder: Recognised) -> int:
    """Name the inputs and outputs of keys and values, drop others but the logits; count layers with a cache."""
    flow, cached = decoder.flow, 0
    graph, outputs = flow.graph, {flow.logits, *decoder.other_outputs}
    for layer, attention in decoder.attention.items():
        joined = {"key": attention.keys.joined, "value": attention.values.joined}
        if None in joined.values():
            continue
        cached += 1
        for kind, node in joined.items():
            outputs.add(_name_cache(flow, f"{layer}.{kind}", node))
    if 0 < cached < len(decoder.attention) or (cached == 0 and decoder.attention and decoder.recurrence):
        raise ExportError(f"{cached} of {len(decoder.attention)} layers have a past of keys and values")
    for layer, mixer in decoder.recurrence.items():
        for part, (past, present) in mixer.carried.items():
            past.name = f"{STATE.past}.{layer}.{part}"
            outputs.add(_name_present(graph, present, f"{STATE.present}.{layer}.{part}"))
    for value in [value for value in graph.outputs if value not in outputs]:
        graph.outputs.remove(value)
        decoder.notes.append(f"output {value.name}: dropped, it is no part of a hooked model")
    pasts = [str(value.name) for value in graph.inputs if flow.origin.get(value) == Origin.PAST]
    unknown = [name for name in pasts if not name.startswith(PASTS)]
    if unknown:
        inputs = [value for value in graph.inputs if value.name in unknown]
        readers = sorted({node.op_type for value in inputs for node, _ in value.uses()})
        what = f"{', '.join(unknown)} (of {', '.join(readers)})"
        raise ExportError(f"inputs of fractions that are no past of keys and values, and no states known here: {what}")
    return cached + len(decoder.recurrence)


def _name_cache(flow: Flow, suffix: str, joined: ir.Node) -> ir.Value:
    """Name the past and the present of a node that joins them; the present is an output."""
    graph = flow.graph
    past = next(climb(value) for value in joined.inputs if flow.origin.get(value) == Origin.PAST)
    new = next(value for value in joined.inputs if flow.is_text(value))
    if not past.is_graph_input():
        raise ExportError(f"the past {suffix} is a part of a larger input: such a cache is not taken apart")
    past.name = f"{KEYS_AND_VALUES.past}.{suffix}"
    heads, width = (static(joined.outputs[0], axis) or static(new, axis) or static(past, axis) for axis in (1, 3))
    if heads is None or width is None:
        raise ExportError(f"the past {past.name} has heads of unknown number or width, {past.shape}")
    past.shape = ir.Shape(["batch", heads, "past", width])
    if past.dtype != new.dtype and new.dtype is not None:  # files of float16 may keep an interface of float32
        past.type = ir.TensorType(new.dtype)
    return _name_present(graph, joined.outputs[0], f"{KEYS_AND_VALUES.present}.{suffix}")


def _name_present(graph: ir.Graph, present: ir.Value, name: str) -> ir.Value:
    """An output of what a layer carries on, by its name in hooked models; the file's own for it is no output more."""
    for value in [value for value in graph.outputs if climb(value, KEEPING) is present]:
        graph.outputs.remove(value)
        value.name = f"{DROPPED_OUTPUT}{name}"
    node = node_like("Identity", [present], present)
    graph.insert_after(present.producer(), node)
    graph.outputs.append(node.outputs[0])
    node.outputs[0].name = name
    return node.outputs[0]
