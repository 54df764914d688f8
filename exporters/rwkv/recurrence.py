"""The WKV recurrence as an ONNX Scan, in forms that give the same numbers.

RWKV-6:  y_t = r_t S_{t-1} (and, outside, (sum r u k) v_t);  S_t = diag(d_t) S_{t-1} + k_t (x) v_t
RWKV-7:  S_t = diag(d_t) S_{t-1} + b_t (x) (a_t S_{t-1}) + k_t (x) v_t;  y_t = r_t S_t

(Peng et al. 2024, "Eagle and Finch"; Peng et al. 2025, "RWKV-7 Goose".) S is [key, value].

The step form takes one token an iteration; for a single token it needs no Scan. The chunked form takes 16: what the
tokens of a chunk give each other are matrix products over all chunks at once, and only the state goes through the Scan.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from exporters.op_writer import OpWriter
from exporters.rwkv.build import STATE_DTYPE, Build

CHUNK_TOKENS = 16
Form = Callable[[OpWriter, Build, "Reads", ir.Value, str], Sequence[ir.Value]]
BLOCK_SIZES = (1, 2, 4, 8)  # doubled up to half a chunk: then all pairs in it are joined


@dataclass(frozen=True)
class Reads:
    """Inputs of the recurrence [batch, seq, n_heads, head_dim], float32; a and b in RWKV-7 only."""

    r: ir.Value
    k: ir.Value
    v: ir.Value
    decay: ir.Value
    a: ir.Value | None = None
    b: ir.Value | None = None


@dataclass(frozen=True)
class Length:
    """Length of a pass: whether it has at least a chunk of tokens, and whether it has one. Bool."""

    long: ir.Value
    single: ir.Value


def recurrence(build: Build, reads: Reads, state: ir.Value, length: Length, where: str) -> tuple[ir.Value, ir.Value]:
    """Run the recurrence over a call's tokens; returns y [batch, seq, n_heads, value] and the state after the last."""

    def branch(op: OpWriter, name: str, form: Form) -> ir.Graph:
        outputs = [_float(f"{where}.{name}.y"), _float(f"{where}.{name}.state")]
        return op.subgraph(f"{where}.{name}", [], outputs, lambda op: form(op, build, reads, state, f"{where}.{name}"))

    def short(op: OpWriter, *_: object) -> Sequence[ir.Value]:
        once, steps = branch(op, "once", _once), branch(op, "steps", _steps)
        return op.If(length.single, then_branch=once, else_branch=steps, outputs=2)

    chunks, rest = branch(build.op, "chunks", _chunks), branch(build.op, "short", short)
    y, after = build.op.If(length.long, then_branch=chunks, else_branch=rest, outputs=2)
    y.shape, after.shape = ir.Shape([None, None, build.shape.num_heads, build.shape.head_dim]), state.shape
    return y, after


def _float(name: str, rank: int | None = None) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(STATE_DTYPE), shape=None if rank is None else ir.Shape([None] * rank))


def _once(op: OpWriter, build: Build, reads: Reads, state: ir.Value, where: str) -> Sequence[ir.Value]:
    """One token."""

    def column(value: ir.Value) -> ir.Value:
        return op.Transpose(value, perm=[0, 2, 3, 1])  # [batch, 1, n_heads, head_dim] as [batch, n_heads, head_dim, 1]

    def row(value: ir.Value) -> ir.Value:
        return op.Transpose(value, perm=[0, 2, 1, 3])

    after = op.Add(op.Mul(column(reads.decay), state), op.Mul(column(reads.k), row(reads.v)))
    if reads.a is not None:
        after = op.Add(after, op.Mul(column(reads.b), op.MatMul(row(reads.a), state)))
    y = op.MatMul(row(reads.r), state if reads.a is None else after)  # RWKV-6 reads the state before its token
    return row(y), after


def _steps(op: OpWriter, build: Build, reads: Reads, state: ir.Value, where: str) -> Sequence[ir.Value]:
    """One token an iteration."""
    column, row = [-1], [-2]  # [..., head_dim] as a column vector and as a row vector
    scanned = {
        "r": op.Unsqueeze(reads.r, row),
        "k": op.Unsqueeze(reads.k, column),
        "v": op.Unsqueeze(reads.v, row),
        "d": op.Unsqueeze(reads.decay, column),
    }
    if reads.a is not None:
        scanned |= {"a": op.Unsqueeze(reads.a, row), "b": op.Unsqueeze(reads.b, column)}

    def body(op: OpWriter, before: ir.Value, *read: ir.Value) -> Sequence[ir.Value]:
        at = dict(zip(scanned, read, strict=True))
        after = op.Add(op.Mul(at["d"], before), op.Mul(at["k"], at["v"]))
        if "a" in at:
            after = op.Add(after, op.Mul(at["b"], op.MatMul(at["a"], before)))
            return after, op.MatMul(at["r"], after)
        return after, op.MatMul(at["r"], before)

    axes = {"scan_input_axes": [1] * len(scanned), "scan_output_axes": [1]}
    last, y = _scan(op, body, state, scanned, where, **axes)
    return op.Squeeze(y, row), last


def _chunks(op: OpWriter, build: Build, reads: Reads, state: ir.Value, where: str) -> Sequence[ir.Value]:
    """Run sixteen tokens an iteration; padding of the last chunk leaves the state as it is."""
    heads, width = build.shape.num_heads, build.shape.head_dim
    seq = op.Shape(reads.r, start=1, end=2)
    surplus = op.Mod(op.Neg(seq), [CHUNK_TOKENS])  # tokens that the last chunk lacks
    pads = op.Concat([0, 0, 0, 0, 0], surplus, [0, 0], axis=0)

    def split(value: ir.Value, filling: float = 0.0) -> ir.Value:
        """[batch, seq, n_heads, head_dim] as [chunks, batch, n_heads, 16, head_dim]."""
        padded = op.Pad(value, pads, build.constant(f"fill.{filling:g}", np.float32(filling)))
        return op.Transpose(op.Reshape(padded, [0, -1, CHUNK_TOKENS, heads, width]), perm=[1, 0, 3, 2, 4])

    # padding decays by 1 and writes 0: the state after it is that after the last token
    chunks = Reads(split(reads.r), split(reads.k), split(reads.v), split(reads.decay, 1.0))
    if reads.a is None:
        last, y = _chunks6(op, build, chunks, state, where)
    else:
        last, y = _chunks7(op, build, replace(chunks, a=split(reads.a), b=split(reads.b)), state, where)
    joined = op.Reshape(op.Transpose(y, perm=[1, 0, 3, 2, 4]), [0, -1, heads, width])
    return op.Slice(joined, [0], seq, [1]), last


def _mask(build: Build, which: int, tiles: int = 1) -> ir.Value:
    """Mask [16, 16] of pairs (later row, earlier column) in the two halves of a block."""
    at = np.arange(CHUNK_TOKENS)
    same = at[:, None] // (2 * which) == at[None, :] // (2 * which)
    halves = (at[:, None] // which % 2 == 1) & (at[None, :] // which % 2 == 0)
    mask = np.tile((same & halves).astype(np.float32), (tiles, tiles))
    return build.constant(f"pairs.{which}x{tiles}", mask)


def _turn(op: OpWriter, value: ir.Value) -> ir.Value:
    return op.Transpose(value, perm=[0, 1, 2, 4, 3])


@dataclass
class _Decays:
    """Products of a chunk's decays [chunks, batch, n_heads, 16, head_dim] by block size."""

    op: OpWriter
    build: Build
    total: ir.Value  # per block, the product over all its tokens, [chunks, batch, n_heads, 16 / size, head_dim]
    before: ir.Value | None = None  # per token, the product over its block's tokens before it; None while that is 1
    after: ir.Value | None = None  # per token, the product over its block's tokens after it; None while that is 1

    def times(self, value: ir.Value, factor: ir.Value | None, copies: int = 1) -> ir.Value:
        """A value per token, [..., copies * 16, head_dim], times a product per token."""
        if factor is None:
            return value
        return self.op.Mul(value, self.op.Concat(*[factor] * copies, axis=3) if copies > 1 else factor)

    def double(self, size: int, width: int) -> None:
        """From blocks of a size to blocks of twice the size."""
        op, blocks = self.op, CHUNK_TOKENS // (2 * size)
        pairs = op.Reshape(self.total, [0, 0, 0, blocks, 2, 1, width])
        left, right = op.Split(pairs, axis=4, num_outputs=2, outputs=2)
        is_right = self.build.constant("is_right", np.array([False, True]).reshape(2, 1, 1))
        one = self.build.constant("fill.1", np.float32(1))
        of_left = op.Where(is_right, left, one)
        of_right = op.Where(is_right, one, right)
        self.before = self._spread(self.before, of_left, blocks, size, width)
        self.after = self._spread(self.after, of_right, blocks, size, width)
        self.total = op.Reshape(op.Mul(left, right), [0, 0, 0, blocks, width])

    def _spread(self, product: ir.Value | None, factor: ir.Value, blocks: int, size: int, width: int) -> ir.Value:
        op = self.op
        if product is None:  # size 1: one token a half
            return op.Reshape(factor, [0, 0, 0, CHUNK_TOKENS, width])
        halves = op.Reshape(product, [0, 0, 0, blocks, 2, size, width])
        return op.Reshape(op.Mul(halves, factor), [0, 0, 0, CHUNK_TOKENS, width])


def _pairs(
    op: OpWriter, build: Build, later: ir.Value, earlier: ir.Value, decay: ir.Value, copies: int
) -> tuple[ir.Value, _Decays]:
    """Pair sums later_t . (decays between s and t, both excluded) earlier_s for all s < t."""
    # `later` and `earlier` are [chunks, batch, n_heads, copies * 16, head_dim], so many vectors per token; `decay` is
    # [chunks, batch, n_heads, 16, head_dim]. Returns the decays over the whole chunk too.
    # Decays between two tokens are products of factors, never quotients of running products or exponentials of
    # positive numbers, which overflow under strong decay. They are gathered by doubling blocks: at block size m, a pair
    # of tokens in the left and the right half of a block of 2m is joined by (product after the left one to the middle)
    # x (product from the middle to before the right one).
    products, total = _Decays(op, build, decay), None
    for size in BLOCK_SIZES:
        left = products.times(earlier, products.after, copies)
        right = products.times(later, products.before, copies)
        masked = op.Mul(op.MatMul(right, _turn(op, left)), _mask(build, size, copies))
        total = masked if total is None else op.Add(total, masked)
        products.double(size, build.shape.head_dim)
    return total, products


def _chunks6(op: OpWriter, build: Build, reads: Reads, state: ir.Value, where: str) -> Sequence[ir.Value]:
    weights, products = _pairs(op, build, reads.r, reads.k, reads.decay, 1)
    inside = op.MatMul(weights, reads.v)
    reading = op.Mul(reads.r, products.before)  # the state at the chunk's begin, decayed up to each token
    writing = _turn(op, op.Mul(reads.k, products.after))  # decayed up to the end of the chunk

    def body(op: OpWriter, before: ir.Value, *read: ir.Value) -> Sequence[ir.Value]:
        reading, writing, v, inside, decay = read
        after = op.Add(op.Mul(decay, before), op.MatMul(writing, v))
        return after, op.Add(op.MatMul(reading, before), inside)

    scanned = {"r": reading, "k": writing, "v": reads.v, "y": inside, "d": _turn(op, products.total)}
    return _scan(op, body, state, scanned, where)


def _chunks7(op: OpWriter, build: Build, reads: Reads, state: ir.Value, where: str) -> Sequence[ir.Value]:
    """Solve a chunk of RWKV-7 for u_t = a_t S_{t-1}."""
    # u = A S + M_ab u + M_ak v within a chunk, so u = (1 - M_ab)^-1 (A S + M_ak v).
    r, v, decay, a = reads.r, reads.v, reads.decay, reads.a
    earlier = op.Concat(reads.b, reads.k, axis=3)
    weights, products = _pairs(op, build, op.Concat(a, op.Mul(r, decay), axis=3), earlier, decay, 2)
    own = op.MatMul(r, _turn(op, earlier))  # y_t reads the state after its own token
    to_a, to_r = op.Split(weights, axis=3, num_outputs=2, outputs=2)
    to_r = op.Add(to_r, op.Mul(own, build.constant("own.1x2", np.tile(np.eye(CHUNK_TOKENS, dtype=np.float32), (1, 2)))))
    ab, ak = op.Split(to_a, axis=4, num_outputs=2, outputs=2)
    rb, rk = op.Split(to_r, axis=4, num_outputs=2, outputs=2)
    solve = _inverse(op, build, ab)
    from_state = op.MatMul(solve, op.Mul(a, products.before))  # of u, per unit of state
    from_values = op.MatMul(solve, op.MatMul(ak, v))  # of u, from the chunk's own values
    reading = op.Add(op.Mul(op.Mul(r, decay), products.before), op.MatMul(rb, from_state))
    inside = op.Add(op.MatMul(rk, v), op.MatMul(rb, from_values))
    scanned = {
        "s": op.Concat(from_state, reading, axis=3),
        "i": op.Concat(from_values, inside, axis=3),
        "v": v,
        "w": _turn(op, products.times(earlier, products.after, 2)),
        "d": _turn(op, products.total),
    }

    def body(op: OpWriter, before: ir.Value, *read: ir.Value) -> Sequence[ir.Value]:
        of_state, inside, v, writing, decay = read
        u, y = op.Split(op.Add(op.MatMul(of_state, before), inside), axis=2, num_outputs=2, outputs=2)
        after = op.Add(op.Mul(decay, before), op.MatMul(writing, op.Concat(u, v, axis=2)))
        return after, y

    return _scan(op, body, state, scanned, where)


def _inverse(op: OpWriter, build: Build, lower: ir.Value) -> ir.Value:
    """Invert 1 - M for strictly lower triangular M, by blocks; its power series would explode."""
    # The inverse of [[P, 0], [-Q, R]] is [[P^-1, 0], [R^-1 Q P^-1, R^-1]]: from blocks to blocks of twice the size.
    inverse: ir.Value | None = None
    for size in BLOCK_SIZES:
        joint = op.Mul(lower, _mask(build, size))
        if inverse is None:
            inverse = op.Add(joint, build.constant("own", np.eye(CHUNK_TOKENS, dtype=np.float32)))
        else:
            inverse = op.Add(inverse, op.MatMul(op.MatMul(inverse, joint), inverse))
    return inverse


def _scan(
    op: OpWriter,
    body: Callable[..., Sequence[ir.Value]],
    state: ir.Value,
    scanned: dict[str, ir.Value],
    where: str,
    **axes: list[int],
) -> Sequence[ir.Value]:
    """Run a step, from the state and an entry of each value to the state and an output, over the entries."""
    inputs = [_float(f"{where}.{name}", 4) for name in ("before", *scanned)]
    outputs = [_float(f"{where}.{name}", 4) for name in ("after", "out")]
    graph = op.subgraph(f"{where}.body", inputs, outputs, body)
    return op.Scan(state, *scanned.values(), body=graph, num_scan_inputs=len(scanned), outputs=2, **axes)
