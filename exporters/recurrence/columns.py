"""Nodes `mionnx.recurrence::Columns` of a traced graph become standard operators, with a gate for interventions.

Inputs: a value of the layer, to which the node then belongs (it is not read), and the mask of the call's tokens [batch,
seq]. Attributes `layer`, `kernel`. Outputs, int64: for each of the kernel's places the column that a convolution reads
at each token, [batch * seq], the last of them the token's own, and those that it carries on, [batch * (kernel - 1)].
Columns are kernel - 1 of the past and one a token, of all rows one after another.

A convolution passes over padding, and over tokens that the gate, an input, hides from it; at its own place a token is
read in any case. Its default of ones leaves the model as it is:
    conv_seen bool [layers, batch, seq, 1]
"""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from exporters.op_writer import OpWriter

COLUMNS = "Columns"
GATE = "conv_seen"
END = np.iinfo(np.int64).max  # of an axis
GATE_AXES = ("batch", "seq", "one")


@dataclass(frozen=True)
class MarkedColumns:
    """The nodes of a graph's convolutions, one a layer, and what they have in common."""

    layers: list[int]
    kernel: int
    mask: ir.Value

    @classmethod
    def of(cls, nodes: list[ir.Node]) -> "MarkedColumns":
        mask = nodes[0].inputs[1]
        assert mask is not None
        numbers = (node.attributes["layer"].as_int() for node in nodes)
        return cls([*numbers], nodes[0].attributes["kernel"].as_int(), mask)


def read_columns(op: OpWriter, marked: MarkedColumns, layers: int) -> list[list[ir.Value]]:
    """The outputs of each node, all layers worked out at once; adds the gate of a graph of so many layers."""
    seen, past = _seen(op, marked, layers), marked.kernel - 1
    shape = op.Shape(marked.mask)
    batch, seq = (op.Slice(shape, [i], [i + 1], [0]) for i in range(2))
    own = len(marked.layers)
    past_columns = op.Expand(1, op.Concat([own], batch, [past], axis=0))
    real = op.Concat(past_columns, op.Cast(seen, to=ir.DataType.INT64), axis=2)
    before_it = op.CumSum(real, 2, exclusive=1)  # how many columns stand before each one
    width = op.Add(seq, [past])
    at = op.Range(0, op.Squeeze(width), 1)
    # what is hidden is put behind all others, where nobody looks
    place = op.Where(op.Cast(real, to=ir.DataType.BOOL), before_it, width)
    empty = op.Expand(0, op.Concat([own], batch, op.Add(width, [1]), axis=0))
    columns = op.ScatterElements(empty, place, op.Expand(at, op.Shape(real)), axis=2)
    first = op.Mul(op.Range(0, op.Squeeze(batch), 1), width)
    behind = op.Sub(op.Unsqueeze(op.Slice(before_it, [past], [END], [2]), [3]), [*range(past, 0, -1)])
    earlier = op.GatherElements(columns, op.Reshape(behind, op.Concat([own], batch, [-1], axis=0)), axis=2)
    by_place = op.Reshape(earlier, op.Concat([own], batch, seq, [past], axis=0))
    mine = op.Unsqueeze(op.Slice(at, [past], [END], [0]), [1])
    mine = op.Expand(mine, op.Concat([own], batch, seq, [1], axis=0))
    read = op.Add(op.Concat(by_place, mine, axis=3), op.Unsqueeze(first, [1, 2]))
    flat = op.Reshape(op.Transpose(read, perm=[0, 3, 1, 2]), [-1])
    last = op.Add(op.ReduceSum(real, [2], keepdims=1), [*range(-past, 0)])
    carried = op.Add(op.GatherElements(columns, last, axis=2), op.Unsqueeze(first, [1]))
    reads = _split(op, flat, own * marked.kernel)
    keeps = _split(op, op.Reshape(carried, [-1]), own)
    parts = (reads[i * marked.kernel : (i + 1) * marked.kernel] for i in range(own))
    return [[*part, keep] for part, keep in zip(parts, keeps, strict=True)]


def _seen(op: OpWriter, marked: MarkedColumns, layers: int) -> ir.Value:
    """[convolutions, batch, seq] bool: which tokens of the call are columns for later ones."""
    tensor = ir.tensor(np.ones((layers, 1, 1, 1), np.bool_), name=GATE)
    shape = ir.Shape([layers, *(f"{GATE}.{axis}" for axis in GATE_AXES)])
    gate = ir.Value(name=GATE, type=ir.TensorType(tensor.dtype), shape=shape, const_value=tensor)
    op.graph.inputs.append(gate)
    op.graph.register_initializer(gate)
    some = gate if marked.layers == [*range(layers)] else op.Gather(gate, marked.layers, axis=0)
    return op.And(op.Cast(marked.mask, to=ir.DataType.BOOL), op.Squeeze(some, [3]))


def _split(op: OpWriter, flat: ir.Value, count: int) -> list[ir.Value]:
    """Equal parts of a vector."""
    parts = op.Split(flat, axis=0, num_outputs=count, outputs=count)
    return [parts] if isinstance(parts, ir.Value) else list(parts)  # one output comes alone
