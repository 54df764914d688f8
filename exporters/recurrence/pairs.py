"""What the tokens of a chunk give each other: pair sums under decay, and the inverse that a delta rule asks for.

Decays between two tokens are products of factors, or exponentials of sums of numbers <= 0: never quotients of running
products or differences of running sums, which overflow or lose their digits under strong decay.
"""

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from exporters.op_writer import OpWriter

CHUNK_TOKENS = 16
BLOCK_SIZES = (1, 2, 4, 8)  # doubled up to half a chunk: then all pairs in it are joined


def turn(op: OpWriter, value: ir.Value) -> ir.Value:
    """Swap the last two of five axes."""
    return op.Transpose(value, perm=[0, 1, 2, 4, 3])


def matrix(op: OpWriter, name: str, values: NDArray[np.float32]) -> ir.Value:
    """A constant that all layers share."""
    return op.constant(values, np.float32, f"recurrence.{name}")


def diagonal(op: OpWriter) -> ir.Value:
    """The identity over the tokens of a chunk."""
    return matrix(op, "own", np.eye(CHUNK_TOKENS, dtype=np.float32))


class ByHead:
    """Decays of one number a head, from their logarithms [chunks, batch, n_heads, 16, 1]."""

    def __init__(self, op: OpWriter, log_decay: ir.Value) -> None:
        earlier = np.tri(CHUNK_TOKENS, k=-1, dtype=np.float32)  # of each token (row), the tokens before it
        self.op, self._g = op, log_decay
        self._earlier, later = matrix(op, "earlier", earlier), matrix(op, "later", earlier.T)
        self._before, self._after = (op.Exp(op.MatMul(one, log_decay)) for one in (self._earlier, later))
        self.total = op.Exp(op.ReduceSum(log_decay, [3], keepdims=1))

    def before(self, value: ir.Value, copies: int = 1) -> ir.Value:
        return _times(self.op, value, self._before, copies)

    def after(self, value: ir.Value, copies: int = 1) -> ir.Value:
        return _times(self.op, value, self._after, copies)

    def pairs(self, later: ir.Value, earlier: ir.Value, rows: int = 1, columns: int = 1) -> ir.Value:
        op, strict = self.op, self._earlier
        between = op.Exp(op.MatMul(op.Mul(strict, turn(op, self._g)), strict))
        between = op.Mul(between, strict)
        between = op.Concat(*[between] * rows, axis=3) if rows > 1 else between
        between = op.Concat(*[between] * columns, axis=4) if columns > 1 else between
        return op.Mul(op.MatMul(later, turn(op, earlier)), between)


class ByKey:
    """Decays [chunks, batch, n_heads, 16, key] of a number for each place of a key.

    Sums over the pairs are gathered by doubling blocks: at block size m, a pair of tokens in the left and the right
    half of a block of 2m is joined by (product after the left one to the middle) x (product from the middle to before
    the right one).
    """

    def __init__(self, op: OpWriter, decay: ir.Value, key: int) -> None:
        self.op, self.key = op, key
        # per block, the product over all its tokens, [chunks, batch, n_heads, 16 / size, key]
        self.total = decay
        # per token, the products over its block's tokens before it and after it; None while these are 1
        self._before: ir.Value | None = None
        self._after: ir.Value | None = None

    def before(self, value: ir.Value, copies: int = 1) -> ir.Value:
        return _times(self.op, value, self._before, copies)

    def after(self, value: ir.Value, copies: int = 1) -> ir.Value:
        return _times(self.op, value, self._after, copies)

    def pairs(self, later: ir.Value, earlier: ir.Value, rows: int = 1, columns: int = 1) -> ir.Value:
        op, total = self.op, None
        for size in BLOCK_SIZES:
            left, right = self.after(earlier, columns), self.before(later, rows)
            mask = _halves(op, size, rows, columns)
            masked = op.Mul(op.MatMul(right, turn(op, left)), mask)
            total = masked if total is None else op.Add(total, masked)
            self._double(size)
        return total

    def _double(self, size: int) -> None:
        """From blocks of a size to blocks of twice the size."""
        op, blocks = self.op, CHUNK_TOKENS // (2 * size)
        pairs = op.Reshape(self.total, [0, 0, 0, blocks, 2, 1, self.key])
        left, right = op.Split(pairs, axis=4, num_outputs=2, outputs=2)
        is_right = op.constant(np.array([False, True]).reshape(2, 1, 1), np.bool_, "recurrence.is_right")
        one = op.constant(1, np.float32, "recurrence.one")
        of_left, of_right = op.Where(is_right, left, one), op.Where(is_right, one, right)
        self._before = self._spread(self._before, of_left, blocks, size)
        self._after = self._spread(self._after, of_right, blocks, size)
        self.total = op.Reshape(op.Mul(left, right), [0, 0, 0, blocks, self.key])

    def _spread(self, product: ir.Value | None, factor: ir.Value, blocks: int, size: int) -> ir.Value:
        op = self.op
        if product is None:  # size 1: one token a half
            return op.Reshape(factor, [0, 0, 0, CHUNK_TOKENS, self.key])
        # not the product's blocks times the factor: OpenVINO (2026.4) multiplies a reshaped value in its own memory,
        # which others still read
        spread = op.Reshape(op.Expand(factor, [1, 1, 1, 1, 1, size, 1]), [0, 0, 0, CHUNK_TOKENS, self.key])
        return op.Mul(product, spread)


# The decays of a chunk. `pairs`, of which there is one call: for all s < t the sums later_t . (decays between s and t,
# both excluded) earlier_s, of so many vectors a token, [chunks, batch, n_heads, copies * 16, key]. After it `before`
# and `after` give vectors with the decays of the chunk's tokens before and after their own, `total` those of all.
Decays = ByHead | ByKey


def _times(op: OpWriter, value: ir.Value, factor: ir.Value | None, copies: int) -> ir.Value:
    """A value per token, [..., copies * 16, key], times a product per token."""
    if factor is None:
        return value
    return op.Mul(value, op.Concat(*[factor] * copies, axis=3) if copies > 1 else factor)


def _halves(op: OpWriter, size: int, rows: int = 1, columns: int = 1) -> ir.Value:
    """Mask [16, 16] of pairs (later row, earlier column) in the two halves of a block."""
    at = np.arange(CHUNK_TOKENS)
    same = at[:, None] // (2 * size) == at[None, :] // (2 * size)
    halves = (at[:, None] // size % 2 == 1) & (at[None, :] // size % 2 == 0)
    mask = np.tile((same & halves).astype(np.float32), (rows, columns))
    return matrix(op, f"halves.{size}.{rows}x{columns}", mask)


def inverse(op: OpWriter, lower: ir.Value) -> ir.Value:
    """Invert 1 - M for strictly lower triangular M, by blocks; its power series would explode."""
    # The inverse of [[P, 0], [-Q, R]] is [[P^-1, 0], [R^-1 Q P^-1, R^-1]]: from blocks to blocks of twice the size.
    result: ir.Value | None = None
    for size in BLOCK_SIZES:
        joint = op.Mul(lower, _halves(op, size))
        if result is None:
            result = op.Add(joint, diagonal(op))
        else:
            result = op.Add(result, op.MatMul(op.MatMul(result, joint), result))
    return result
