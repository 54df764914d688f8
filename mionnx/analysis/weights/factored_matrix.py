"""`FactoredMatrix`: a matrix as the product of a tall and a wide one, of which little is ever multiplied out.

Words and meanings are those of TransformerLens' class of the same name.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mionnx.errors import InputError
from mionnx.machine.arrays import to_array
from mionnx.machine.typed import typed

Array = NDArray[Any]


def transposed(array: Array) -> Array:
    """The last two axes exchanged."""
    return np.swapaxes(array, -1, -2)


class FactoredMatrix:
    """A matrix A @ B [..., ldim, rdim] of rank mdim at most, with A [..., ldim, mdim] and B [..., mdim, rdim].

    Leading axes (layer, head) are broadcast. 16-bit numbers become float32.

    Raises:
        InputError: factors that cannot be multiplied.

    Example:
        circuit = FactoredMatrix(model.W_V[2], model.W_O[2])  # of grouped heads `model.OV` repeats W_V
        circuit.S[0, :4], circuit.eigenvalues.shape
    """

    __array_ufunc__ = None  # array @ matrix is `__rmatmul__`

    def __init__(self, A: ArrayLike, B: ArrayLike) -> None:  # noqa: N803 - TransformerLens' names
        left, right = (_numbers(name, one) for name, one in (("A", A), ("B", B)))
        if left.shape[-1] != right.shape[-2]:
            raise InputError(
                f"factors {list(left.shape)} and {list(right.shape)}: A's last axis must be B's last but one"
            )
        try:
            leading = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
        except ValueError:
            raise InputError(f"leading axes of {list(left.shape)} and {list(right.shape)} do not fit") from None
        self.A = np.broadcast_to(left, (*leading, *left.shape[-2:]))
        self.B = np.broadcast_to(right, (*leading, *right.shape[-2:]))
        self.ldim, self.mdim, self.rdim = left.shape[-2], left.shape[-1], right.shape[-1]
        self.shape = (*leading, self.ldim, self.rdim)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def pair(self) -> tuple[Array, Array]:
        """A and B."""
        return self.A, self.B

    @property
    def AB(self) -> Array:
        """The product [..., ldim, rdim]."""
        return self.A @ self.B

    @property
    def BA(self) -> Array:
        """The product in the other order, [..., mdim, mdim], of a square matrix."""
        if self.ldim != self.rdim:
            raise InputError(f"BA of a matrix [{self.ldim}, {self.rdim}]: it must be square")
        return self.B @ self.A

    @property
    def T(self) -> FactoredMatrix:
        """The transposed matrix."""
        return FactoredMatrix(transposed(self.B), transposed(self.A))

    def __matmul__(self, other: Any) -> Any:
        if isinstance(other, FactoredMatrix):
            return (self @ other.A) @ other.B
        array = _read("other", other)
        self._check(array, array.ndim > 1, self.rdim)
        if array.ndim < 2:
            return (self.A @ (self.B @ array[..., None]))[..., 0]
        # the smaller of the two inner axes stays
        return FactoredMatrix(self.A, self.B @ array) if self.rdim > self.mdim else FactoredMatrix(self.AB, array)

    def __rmatmul__(self, other: Any) -> Any:
        array = _read("other", other)
        if array.ndim < 1 or array.shape[-1] != self.ldim:
            raise InputError(f"{list(array.shape)} @ {list(self.shape)}: the inner axes differ")
        if array.ndim < 2:
            return ((array[..., None, :] @ self.A) @ self.B)[..., 0, :]
        return FactoredMatrix(array @ self.A, self.B) if self.ldim > self.mdim else FactoredMatrix(array, self.AB)

    def _check(self, array: Array, matrix: bool, size: int) -> None:
        if array.ndim < 1 or array.shape[-2 if matrix else -1] != size:
            raise InputError(f"{list(self.shape)} @ {list(array.shape)}: the inner axes differ")

    def __mul__(self, factor: float) -> FactoredMatrix:
        number = _read("factor", factor)
        if number.ndim:
            raise InputError(f"a FactoredMatrix times an array {list(number.shape)}: @ multiplies matrices")
        if number.dtype.kind not in "fiu":
            raise InputError(f"factor must be a number, not {type(factor).__name__}")
        return FactoredMatrix(self.A * number, self.B)

    __rmul__ = __mul__

    def __getitem__(self, index: Any) -> FactoredMatrix:
        """Pick along leading axes, rows and columns; a row or column picked by its number stays an axis of length 1."""
        entries = index if isinstance(index, tuple) else (index,)
        if any(one is None for one in entries) or sum(one is Ellipsis for one in entries) > 1:
            raise InputError("a FactoredMatrix is indexed by numbers, slices and one ... ; no new axes")
        place = next((i for i, one in enumerate(entries) if one is Ellipsis), None)
        missing = self.ndim - len(entries) + (place is not None)
        if missing < 0:
            raise InputError(f"{len(entries)} indices of a matrix {list(self.shape)}")
        at = len(entries) if place is None else place
        full = [*entries[:at], *[slice(None)] * missing, *entries[at + (place is not None) :]]
        rows, columns = (
            slice(one, None if one == -1 else one + 1) if isinstance(one, int | np.integer) else one
            for one in full[-2:]
        )
        leading = tuple(full[:-2])
        try:
            return FactoredMatrix(self.A[leading][..., rows, :], self.B[leading][..., :, columns])
        except (IndexError, TypeError, ValueError, MemoryError) as error:  # numpy makes an array of a long range
            raise InputError(f"no index of a matrix {list(self.shape)}: {error}") from error

    @cached_property
    def _decomposition(self) -> tuple[Array, Array, Array]:
        left, left_core = np.linalg.qr(self.A)
        right, right_core = np.linalg.qr(transposed(self.B))
        u, s, vh = np.linalg.svd(left_core @ transposed(right_core))
        return left @ u, s, right @ transposed(vh)

    def svd(self) -> tuple[Array, Array, Array]:
        """U [..., ldim, n], S [..., n], V [..., rdim, n], n at most mdim: the matrix is U diag(S) V^T.

        The sign of a pair of singular vectors is not determined; `singular_vectors` fixes it.
        """
        # QR of both factors, then the SVD of a core of n x n
        return self._decomposition

    @property
    def U(self) -> Array:
        return self._decomposition[0]

    @property
    def S(self) -> Array:
        return self._decomposition[1]

    @property
    def V(self) -> Array:
        return self._decomposition[2]

    @property
    def eigenvalues(self) -> NDArray[np.complexfloating[Any]]:
        """The mdim eigenvalues of a square matrix that need not be 0: those of BA."""
        return np.linalg.eigvals(self.BA).astype(np.complex128)

    def norm(self) -> Array:
        """The Frobenius norm, [...]."""
        _, left = np.linalg.qr(self.A)
        _, right = np.linalg.qr(transposed(self.B))
        return np.linalg.norm(left @ transposed(right), axis=(-2, -1))

    def make_even(self) -> FactoredMatrix:
        """The same matrix, each factor with the square roots of the singular values."""
        root = np.sqrt(self.S)
        return FactoredMatrix(self.U * root[..., None, :], root[..., :, None] * transposed(self.V))

    def collapse_l(self) -> Array:
        """diag(S) V^T, [..., n, rdim]: the matrix without the orthogonal factor on its left."""
        return self.S[..., :, None] * transposed(self.V)

    def collapse_r(self) -> Array:
        """U diag(S), [..., ldim, n]."""
        return self.U * self.S[..., None, :]

    @typed()
    def get_corner(self, k: int = 3) -> Array:
        """The first k rows and columns."""
        return self.A[..., :k, :] @ self.B[..., :, :k]

    def __repr__(self) -> str:
        return f"FactoredMatrix({list(self.shape)}, rank {self.mdim} at most)"


def _read(name: str, values: ArrayLike) -> Array:
    try:
        return to_array(values)
    except ValueError as error:
        raise InputError(f"{name} must be numbers: {error}") from error


def _numbers(name: str, values: ArrayLike) -> Array:
    array = _read(name, values)
    if array.ndim < 2 or array.dtype.kind not in "fiuV":
        raise InputError(f"{name} is {array.dtype} {list(array.shape)}; it must be numbers [..., rows, columns]")
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)
