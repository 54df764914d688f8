"""The open form: once for a single token, chunks for many, steps for the rest, each a branch of an `If`."""

from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir

from exporters.op_writer import OpWriter
from exporters.recurrence.chunks import chunks
from exporters.recurrence.forms import BY_NUMBER, STATE_DTYPE, Outputs, Reads, once, steps
from exporters.recurrence.pairs import CHUNK_TOKENS

Form = Callable[[OpWriter, Reads, ir.Value, str], Outputs]


@dataclass(frozen=True)
class Length:
    """Length of a call: whether it has one token, and whether it has at least a chunk of them. Bool."""

    single: ir.Value
    long: ir.Value

    @classmethod
    def of(cls, op: OpWriter, tokens: ir.Value) -> "Length":
        """From the number of tokens, int64 [1]."""
        long = op.Squeeze(op.GreaterOrEqual(tokens, [CHUNK_TOKENS]))
        return cls(op.Squeeze(op.Equal(tokens, [1])), long)


def open_form(op: OpWriter, reads: Reads, state: ir.Value, length: Length, where: str) -> tuple[ir.Value, ir.Value]:
    """A call's y [batch, seq, n_heads, value], and the state after its last token."""

    def branch(op: OpWriter, name: str, form: Form) -> ir.Graph:
        name = f"{where}.{name}"
        outputs = [ir.Value(name=f"{name}.{which}", type=ir.TensorType(STATE_DTYPE)) for which in ("y", "state")]
        return op.subgraph(name, [], outputs, lambda op: form(op, reads, state, name))

    def several(op: OpWriter, *_: object) -> Outputs:
        many, few = branch(op, "chunks", chunks), branch(op, "steps", steps)
        return op.If(length.long, then_branch=many, else_branch=few, outputs=2)

    one = branch(op, "once", once)
    # a decay for each number of the state leaves nothing for matrix products to share
    more = branch(op, "steps", steps) if reads.decays_by == BY_NUMBER else branch(op, "several", several)
    y, after = op.If(length.single, then_branch=one, else_branch=more, outputs=2)
    y.shape, after.shape = ir.Shape([None, None, reads.sizes[0], reads.sizes[2]]), state.shape
    return y, after
