"""Nodes `mionnx.recurrence::Recurrence` of a traced graph become standard operators, with gates for interventions.

Inputs: q, k [batch, seq, n_heads, key], v [batch, seq, n_heads, value], g, the log decay, [batch, seq, n_heads, 1 or
key] or [batch, seq, n_heads, key, value], the state [batch, n_heads, key, value], of the delta rule b [batch, seq,
n_heads, 1]. Attribute `layer`. Outputs: y [batch, seq, n_heads, value] and the state, whose names stay.

Nodes `Columns` of convolutions are those of `exporters.recurrence.columns`.

The gates are those of RWKV, inputs whose defaults of ones leave the model as it is:
    state_write float32, state_erase float32 (with a delta rule), state_decay bool   [layers, batch, seq, n_heads]
`n_heads` is that of the widest layer; the others read the first of them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import onnx_ir as ir

from exporters.op_writer import OpWriter
from exporters.recurrence.columns import COLUMNS, MarkedColumns, read_columns
from exporters.recurrence.forms import BY_HEAD, BY_KEY, BY_NUMBER, STATE_DTYPE, Outputs, Reads
from exporters.recurrence.open_form import Length, open_form
from mionnx.graph.hook_points import layer_of

RECURRENCE_DOMAIN, RECURRENCE = "mionnx.recurrence", "Recurrence"
FORGETS_ALL = -1e4  # log of a decay that leaves nothing: minus infinity times 0 is no number
GATE_DTYPES = {"write": np.float32, "erase": np.float32, "decay": np.bool_}
TOKENS = "input_ids"  # [batch, seq]
NUMBER_RANK = 5  # of decays [batch, seq, n_heads, key, value]
GATE_AXES = ("batch", "seq", "n_heads")
# Names of what the recurrence reads after the gates, for values that are derived from it: v, g, gates of v and k.
GATED_PREFIX, GATED = "blocks.", "blocks.{layer}.ssm.{name}"


def expand(model: ir.Model) -> None:
    """Replace the nodes of recurrences by their open form, those of convolutions, and add the gates, in place."""
    graph = model.graph
    own = [node for node in graph if node.domain == RECURRENCE_DOMAIN]
    graph.opset_imports.pop(RECURRENCE_DOMAIN, None)
    if convolutions := [node for node in own if node.op_type == COLUMNS]:
        _expand_columns(graph, convolutions)
    if nodes := [node for node in own if node.op_type == RECURRENCE]:
        _expand_recurrences(graph, nodes)


def _expand_columns(graph: ir.Graph, nodes: list[ir.Node]) -> None:
    op = OpWriter(graph)
    op.prefix = "columns.constant"
    outputs = read_columns(op, MarkedColumns.of(nodes), _layers(graph))
    graph.insert_before(nodes[0], _named_apart(op.nodes, "columns"))
    for node, new in zip(nodes, outputs, strict=True):
        for old, value in zip(node.outputs, new, strict=True):
            old.replace_all_uses_with(value)
        graph.remove(node, safe=True)


def _expand_recurrences(graph: ir.Graph, nodes: list[ir.Node]) -> None:
    marked = [Marked.of(node) for node in nodes]
    op = OpWriter(graph)
    op.prefix = "recurrence.constant"
    # counted at an input: what a graph is cut into carries arrays over rows, and no conditions
    tokens = next((value for value in graph.inputs if value.name == TOKENS), marked[0].v)
    length = Length.of(op, op.Shape(tokens, start=1, end=2))
    gates = _gates(op, marked)
    graph.insert_before(nodes[0], _named_apart(op.nodes, "recurrence"))
    for node, one, gate in zip(nodes, marked, gates, strict=True):
        op.nodes = []
        outputs = _open(op, one, gate, length, f"recurrence.{one.layer}")
        graph.insert_before(node, _named_apart(op.nodes, f"recurrence.{one.layer}"))
        for old, new in zip(node.outputs, outputs, strict=True):
            new.type, new.shape = ir.TensorType(STATE_DTYPE), old.shape
            name = old.name
            old.replace_all_uses_with(new, replace_graph_outputs=True)
            old.name, new.name = None, name  # it may be that of a hook point or an output
        graph.remove(node, safe=True)


@dataclass(frozen=True)
class Marked:
    """A node of a recurrence, its inputs by name."""

    layer: int
    q: ir.Value
    k: ir.Value
    v: ir.Value
    g: ir.Value
    state: ir.Value
    b: ir.Value | None

    @classmethod
    def of(cls, node: ir.Node) -> "Marked":
        q, k, v, g, state, b = (*node.inputs, None)[:6]
        return cls(node.attributes["layer"].as_int(), q, k, v, g, state, b)  # type: ignore[arg-type]  # none is left out

    @property
    def sizes(self) -> tuple[int, int, int]:
        """How many heads, and the sizes of a key and of a value."""
        assert self.state.shape is not None
        heads, key, value = (dim for dim in self.state.shape if isinstance(dim, int))
        return heads, key, value

    @property
    def decays_by(self) -> str:
        assert self.g.shape is not None
        if self.g.shape.rank() == NUMBER_RANK:
            return BY_NUMBER
        return BY_HEAD if self.g.shape[3] == 1 else BY_KEY


@dataclass(frozen=True)
class Gates:
    """The gates of one layer, [batch, seq, n_heads, 1]."""

    write: ir.Value
    erase: ir.Value | None
    decay: ir.Value


def _layers(graph: ir.Graph) -> int:
    """How many layers a graph has, by the names of its hook points."""
    return 1 + max(layer_of(str(value.name)) or 0 for node in graph for value in node.outputs)


def _gates(op: OpWriter, marked: Sequence[Marked]) -> list[Gates]:
    """The inputs that gate every recurrence, cut by layer."""
    graph, layers = op.graph, _layers(op.graph)
    widest = max(one.sizes[0] for one in marked)
    own = [one.layer for one in marked]
    parts: dict[str, list[ir.Value]] = {}
    for term, dtype in GATE_DTYPES.items():
        if term == "erase" and all(one.b is None for one in marked):
            continue
        name = f"state_{term}"
        tensor = ir.tensor(np.ones((layers, 1, 1, 1), dtype), name=name)
        shape = ir.Shape([layers, *(f"{name}.{axis}" for axis in GATE_AXES)])
        gate = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=shape, const_value=tensor)
        graph.inputs.append(gate)
        graph.register_initializer(gate)
        some = gate if own == [*range(layers)] else op.Gather(gate, own, axis=0)
        turned = op.Transpose(some, perm=[1, 2, 3, 0])
        split = op.Split(turned, axis=-1, num_outputs=len(own), outputs=len(own))
        parts[term] = [split] if isinstance(split, ir.Value) else list(split)  # one output comes alone

    def of_layer(term: str, place: int) -> ir.Value:
        heads, part = marked[place].sizes[0], parts[term][place]
        part = part if heads == widest else op.Slice(part, [0], [heads], [2])
        if term in ("write", "erase"):
            part.name = GATED.format(layer=marked[place].layer, name=f"{term}_gate")
        return part

    return [
        Gates(of_layer("write", i), None if one.b is None else of_layer("erase", i), of_layer("decay", i))
        for i, one in enumerate(marked)
    ]


def _open(op: OpWriter, one: Marked, gate: Gates, length: Length, where: str) -> Outputs:
    """A gated recurrence in its open form."""
    keep = op.Unsqueeze(gate.decay, [-1]) if one.decays_by == BY_NUMBER else gate.decay
    v = op.Mul(one.v, gate.write)
    log_decay = op.Where(keep, one.g, op.number(0, STATE_DTYPE))
    v.name, log_decay.name = (GATED.format(layer=one.layer, name=name) for name in ("written_v", "kept_log_decay"))
    reads = Reads(one.sizes, one.decays_by, one.q, one.k, v, log_decay=log_decay, strength=one.b, erase=gate.erase)
    return open_form(op, reads, one.state, length, where)


def _named_apart(nodes: list[ir.Node], where: str) -> list[ir.Node]:
    """Name what has no name yet, in bodies too: they share one name space with the outer graph."""
    numbers = count()

    def name(nodes: Iterable[ir.Node]) -> None:
        for node in nodes:
            for attribute in node.attributes.values():
                if attribute.type == ir.AttributeType.GRAPH:
                    name(attribute.as_graph())
            for value in node.outputs:
                if not str(value.name).startswith(
                    (where, GATED_PREFIX)
                ):  # a graph names its values by itself, each from 0
                    value.name = f"{where}.{node.op_type}.{next(numbers)}"
            node.name = f"{node.outputs[0].name}:{node.op_type}"

    name(nodes)
    return nodes
