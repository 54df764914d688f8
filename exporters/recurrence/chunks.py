"""The recurrence sixteen tokens at a time.

What the tokens of a chunk give each other are matrix products over all chunks at once; only the state goes through a
Scan. In a chunk that begins with S, u = A S + M u + B for a strictly lower triangular M: (1 - M)^-1 gives all its u.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from exporters.op_writer import OpWriter
from exporters.recurrence.forms import BY_HEAD, Outputs, Reads, scan
from exporters.recurrence.pairs import CHUNK_TOKENS, ByHead, ByKey, Decays, diagonal, inverse, matrix, turn

Scanned = dict[str, ir.Value]


def chunks(op: OpWriter, reads: Reads, state: ir.Value, where: str) -> Outputs:
    """Sixteen tokens an iteration; padding of the last chunk leaves the state as it is. Decays by head or key."""
    heads, key, width = reads.sizes
    seq = op.Shape(reads.v, start=1, end=2)
    surplus = op.Mod(op.Neg(seq), [CHUNK_TOKENS])  # tokens that the last chunk lacks
    pads = op.Concat([0, 0, 0, 0, 0], surplus, [0, 0], axis=0)

    def split(value: ir.Value | None, size: int, filling: float = 0.0) -> ir.Value | None:
        """[batch, seq, n_heads, size] as [chunks, batch, n_heads, 16, size]."""
        if value is None:
            return None
        fill = op.constant(filling, np.float32, f"recurrence.fill.{filling:g}")
        padded = op.Reshape(op.Pad(value, pads, fill), [0, -1, CHUNK_TOKENS, heads, size])
        return op.Transpose(padded, perm=[1, 0, 3, 2, 4])

    # padding decays by 1 and writes 0: the state after it is that after the last token
    split_reads = replace(
        reads,
        q=split(reads.q, key),
        k=split(reads.k, key),
        v=split(reads.v, width),
        strength=split(reads.strength, 1),
        a=split(reads.a, key),
        b=split(reads.b, key),
        decay=split(reads.decay, key, 1.0),
        log_decay=split(reads.log_decay, 1 if reads.decays_by == BY_HEAD else key),
    )
    if reads.a is not None:
        step, scanned = _elsewhere(op, split_reads)
    elif (erased := split(reads.erased(op), key)) is not None:
        step, scanned = _delta(op, split_reads, erased)
    else:
        step, scanned = _gated(op, split_reads)
    last, y = scan(op, step, state, scanned, where)
    joined = op.Reshape(op.Transpose(y, perm=[1, 0, 3, 2, 4]), [0, -1, heads, width])
    return op.Slice(joined, [0], seq, [1]), last


def _decays(op: OpWriter, reads: Reads) -> tuple[Decays, ir.Value]:
    """The decays of a chunk, and that of each token."""
    if reads.decays_by == BY_HEAD and reads.log_decay is not None:
        return ByHead(op, reads.log_decay), op.Exp(reads.log_decay)
    decay = reads.decays(op)
    return ByKey(op, decay, reads.sizes[1]), decay


def _with_own(op: OpWriter, weights: ir.Value, reads: Reads) -> ir.Value:
    """Weights of earlier tokens, and that of the token itself."""
    own = op.ReduceSum(op.Mul(reads.q, reads.k), [-1], keepdims=1)
    return op.Add(weights, op.Mul(own, diagonal(op)))


Step = tuple[Callable[..., Outputs], Scanned]


def _gated(op: OpWriter, reads: Reads) -> Step:
    decays, decay = _decays(op, reads)
    later = op.Mul(reads.q, decay) if reads.own else reads.q
    weights = decays.pairs(later, reads.k)
    inside = op.MatMul(_with_own(op, weights, reads) if reads.own else weights, reads.v)
    reading = decays.before(later)  # of the state at the chunk's begin, decayed up to each token
    writing = turn(op, decays.after(reads.k))  # decayed up to the end of the chunk

    def step(op: OpWriter, before: ir.Value, *read: ir.Value) -> Outputs:
        reading, writing, v, inside, decay = read
        after = op.Add(op.Mul(decay, before), op.MatMul(writing, v))
        return after, op.Add(op.MatMul(reading, before), inside)

    return step, {"q": reading, "k": writing, "v": reads.v, "y": inside, "d": turn(op, decays.total)}


def _delta(op: OpWriter, reads: Reads, erased: ir.Value) -> Step:
    """Solve a chunk for u_t = b_t (v_t - e_t k_t exp(g_t) S_(t-1)), which it writes with the same key."""
    decays, decay = _decays(op, reads)
    taken = op.Mul(op.Neg(op.Mul(reads.strength, erased)), decay)
    reading = op.Mul(reads.q, decay)
    weights = decays.pairs(op.Concat(taken, reading, axis=3), reads.k, 2)
    to_taken, to_read = op.Split(weights, axis=3, num_outputs=2, outputs=2)
    to_read = _with_own(op, to_read, reads)
    solve = inverse(op, to_taken)
    from_state = op.MatMul(solve, decays.before(taken))  # of u, per unit of state
    from_values = op.MatMul(solve, op.Mul(reads.strength, reads.v))  # of u, from the chunk's own values
    reading = op.Add(decays.before(reading), op.MatMul(to_read, from_state))
    scanned = {
        "s": op.Concat(from_state, reading, axis=3),
        "i": op.Concat(from_values, op.MatMul(to_read, from_values), axis=3),
        "w": turn(op, decays.after(reads.k)),
        "d": turn(op, decays.total),
    }

    def step(op: OpWriter, before: ir.Value, *read: ir.Value) -> Outputs:
        of_state, inside, writing, decay = read
        u, y = op.Split(op.Add(op.MatMul(of_state, before), inside), axis=2, num_outputs=2, outputs=2)
        return op.Add(op.Mul(decay, before), op.MatMul(writing, u)), y

    return step, scanned


def _elsewhere(op: OpWriter, reads: Reads) -> Step:
    """Solve a chunk of RWKV-7 for u_t = a_t S_(t-1), which it writes with another key than v."""
    # u = A S + M_ab u + M_ak v within a chunk, so u = (1 - M_ab)^-1 (A S + M_ak v)
    decays, decay = _decays(op, reads)
    q, v, a = reads.q, reads.v, reads.a
    earlier = op.Concat(reads.b, reads.k, axis=3)
    reading = op.Mul(q, decay)
    weights = decays.pairs(op.Concat(a, reading, axis=3), earlier, 2, 2)
    own = op.MatMul(q, turn(op, earlier))  # y_t reads the state after its own token
    to_a, to_q = op.Split(weights, axis=3, num_outputs=2, outputs=2)
    twice = matrix(op, "own.1x2", np.tile(np.eye(CHUNK_TOKENS, dtype=np.float32), (1, 2)))
    to_q = op.Add(to_q, op.Mul(own, twice))
    ab, ak = op.Split(to_a, axis=4, num_outputs=2, outputs=2)
    qb, qk = op.Split(to_q, axis=4, num_outputs=2, outputs=2)
    solve = inverse(op, ab)
    from_state = op.MatMul(solve, decays.before(a))  # of u, per unit of state
    from_values = op.MatMul(solve, op.MatMul(ak, v))  # of u, from the chunk's own values
    reading = op.Add(decays.before(reading), op.MatMul(qb, from_state))
    inside = op.Add(op.MatMul(qk, v), op.MatMul(qb, from_values))
    scanned = {
        "s": op.Concat(from_state, reading, axis=3),
        "i": op.Concat(from_values, inside, axis=3),
        "v": v,
        "w": turn(op, decays.after(earlier, 2)),
        "d": turn(op, decays.total),
    }

    def step(op: OpWriter, before: ir.Value, *read: ir.Value) -> Outputs:
        of_state, inside, v, writing, decay = read
        u, y = op.Split(op.Add(op.MatMul(of_state, before), inside), axis=2, num_outputs=2, outputs=2)
        after = op.Add(op.Mul(decay, before), op.MatMul(writing, op.Concat(u, v, axis=2)))
        return after, y

    return step, scanned
