"""The recurrence token by token: `once` for a single token, `steps`, a Scan, for any number.

    S_t = exp(g_t) S_(t-1) + k_t (x) u_t        y_t = q_t S_t        S is [batch, n_heads, key, value]
    u_t = v_t                                                        rule "gated"
    u_t = b_t (v_t - e_t k_t exp(g_t) S_(t-1))                       rule "delta"

RWKV-6 reads the state before its token, y_t = r_t S_(t-1). RWKV-7 takes out at a key of its own, b_t (x) (a_t S_(t-1));
a = -exp(g) k and b = b e k make the delta rule of it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from exporters.op_writer import OpWriter

STATE_DTYPE = ir.DataType.FLOAT  # of the recurrence, whatever the model's: less rounds decays close to 1 to 1
ROW, COLUMN = [-2], [-1]  # axes that make of [..., size] a row vector and a column vector
BY_HEAD, BY_KEY, BY_NUMBER = "head", "key", "number"  # what has a decay of its own
Outputs = Sequence[ir.Value]


@dataclass(frozen=True)
class Reads:
    """What the recurrence reads of each token, [batch, seq, n_heads, key or value], float32.

    Attributes:
        decay: exp(g), [batch, seq, n_heads, 1 or key] or [batch, seq, n_heads, key, value].
        log_decay: g, of the same shape; None where only the decay is known (RWKV).
        strength: b of the delta rule, [batch, seq, n_heads, 1].
        erase: e of the delta rule, [batch, seq, n_heads, 1].
        a, b: of RWKV-7.
        own: whether a token reads the state after itself.
        sizes: how many heads, and the sizes of a key and of a value.
        decays_by: `BY_HEAD`, `BY_KEY` (each place of a key) or `BY_NUMBER` (of the state).
    """

    sizes: tuple[int, int, int]
    decays_by: str
    q: ir.Value
    k: ir.Value
    v: ir.Value
    decay: ir.Value | None = None
    log_decay: ir.Value | None = None
    strength: ir.Value | None = None
    erase: ir.Value | None = None
    a: ir.Value | None = None
    b: ir.Value | None = None
    own: bool = True

    def decays(self, op: OpWriter) -> ir.Value:
        """The decay; its exponential is taken where it is read, in one branch or another."""
        return op.Exp(self.log_decay) if self.decay is None else self.decay

    def erased(self, op: OpWriter) -> ir.Value | None:
        """The key at which the delta rule takes out, e k."""
        return None if self.erase is None else op.Mul(self.k, self.erase)


def unnamed(name: str, rank: int | None = None) -> ir.Value:
    """A value of the recurrence's dtype, of a body or a branch."""
    return ir.Value(name=name, type=ir.TensorType(STATE_DTYPE), shape=None if rank is None else ir.Shape([None] * rank))


def once(op: OpWriter, reads: Reads, state: ir.Value, where: str) -> Outputs:
    """One token: y [batch, 1, n_heads, value] and the state after it."""

    def column(value: ir.Value) -> ir.Value:
        return op.Transpose(value, perm=[0, 2, 3, 1])  # [batch, 1, n_heads, size] as [batch, n_heads, size, 1]

    def row(value: ir.Value) -> ir.Value:
        return op.Transpose(value, perm=[0, 2, 1, 3])

    def grid(value: ir.Value) -> ir.Value:
        return op.Squeeze(value, [1])

    after, y = token(op, _vectors(op, reads, row, column, grid), state, reads.own)
    # constant, so that an engine that knows the whole recurrence finds how many heads there are
    return op.Reshape(y, [0, 1, reads.sizes[0], reads.sizes[2]]), after


def steps(op: OpWriter, reads: Reads, state: ir.Value, where: str) -> Outputs:
    """One token an iteration: y [batch, seq, n_heads, value] and the state after the last."""

    def grid(value: ir.Value) -> ir.Value:
        return value

    scanned = _vectors(op, reads, lambda one: op.Unsqueeze(one, ROW), lambda one: op.Unsqueeze(one, COLUMN), grid)

    def body(op: OpWriter, before: ir.Value, *read: ir.Value) -> Outputs:
        return token(op, dict(zip(scanned, read, strict=True)), before, reads.own)

    axes = {"scan_input_axes": [1] * len(scanned), "scan_output_axes": [1]}
    last, y = scan(op, body, state, scanned, where, **axes)
    return op.Squeeze(y, ROW), last


Turn = Callable[[ir.Value], ir.Value]


def _vectors(op: OpWriter, reads: Reads, row: Turn, column: Turn, grid: Turn) -> dict[str, ir.Value]:
    """What a token reads, as rows and columns beside the state."""
    vectors = {"q": row(reads.q), "k": column(reads.k), "v": row(reads.v)}
    vectors["d"] = (grid if reads.decays_by == BY_NUMBER else column)(reads.decays(op))
    rows = {"s": reads.strength, "e": reads.erased(op), "a": reads.a}
    vectors |= {name: row(value) for name, value in rows.items() if value is not None}
    return vectors | ({} if reads.b is None else {"b": column(reads.b)})


def token(op: OpWriter, at: Mapping[str, ir.Value], before: ir.Value, own: bool) -> Outputs:
    """The state after a token and what the token reads, from the state before."""
    after, u = op.Mul(at["d"], before), at["v"]
    if "s" in at:
        u = op.Mul(at["s"], op.Sub(u, op.MatMul(at["e"], after)))
    after = op.Add(after, op.Mul(at["k"], u))
    if "a" in at:
        after = op.Add(after, op.Mul(at["b"], op.MatMul(at["a"], before)))
    return after, op.MatMul(at["q"], after if own else before)


def scan(
    op: OpWriter,
    body: Callable[..., Outputs],
    state: ir.Value,
    scanned: Mapping[str, ir.Value],
    where: str,
    **axes: list[int],
) -> Outputs:
    """Run a step, from the state and an entry of each value to the state and an output, over the entries."""
    inputs = [unnamed(f"{where}.{name}", 4) for name in ("before", *scanned)]
    outputs = [unnamed(f"{where}.{name}", 4) for name in ("after", "out")]
    graph = op.subgraph(f"{where}.body", inputs, outputs, body)
    return op.Scan(state, *scanned.values(), body=graph, num_scan_inputs=len(scanned), outputs=2, **axes)
