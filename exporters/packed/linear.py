"""Linear layers of integers, in any of the formats, stacks of them (experts), and their blocks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import ExportError
from mionnx.graph.blocks import EXPERT, SIZES, Blocks, GivenBlocks, of_integers, pack, unpack

BITS = (4, 8)
INSTEAD = "its numbers open in floats: --dtype float32"


@dataclass(frozen=True)
class Linear:
    """A layer y = x w^T with w = (q - z) s."""

    name: str
    inputs: int
    outputs: int
    bits: int
    group_size: int  # neighbouring inputs that share a scale; all of them for one group
    groups: NDArray[np.int64] | None  # int64 [inputs], the group of each input; None where they are neighbours
    zeros: NDArray[np.uint8] | None  # uint8 [outputs, groups]; None where all are 2^(bits - 1)
    # Reads the integers [outputs, inputs] and the scales, float32 [outputs, groups].
    read: Callable[[], tuple[NDArray[Any], NDArray[np.float32]]]

    def numbers(self) -> NDArray[np.float32]:
        """The numbers that the integers stand for, [outputs, inputs]."""
        integers, scales = self.parts()
        of_input = np.arange(self.inputs) // self.group_size if self.groups is None else self.groups
        zeros = np.full(scales.shape, 2 ** (self.bits - 1)) if self.zeros is None else self.zeros
        shifted = integers.astype(np.float32) - zeros.astype(np.float32)[:, of_input]
        return shifted * scales[:, of_input]

    def parts(self) -> tuple[NDArray[Any], NDArray[np.float32]]:
        """The integers and the scales, of the shapes of the layer."""
        integers, scales = self.read()
        # Checked here, since numpy would repeat rows and columns that do not fit.
        last = (self.inputs - 1) // self.group_size if self.groups is None else self.groups.max(initial=0)
        fits = integers.shape == (self.outputs, self.inputs) and scales.ndim == 2 and len(scales) == self.outputs
        if not fits or last >= scales.shape[1] or (self.zeros is not None and self.zeros.shape != scales.shape):
            zeros = None if self.zeros is None else list(self.zeros.shape)
            raise ExportError(
                f"{self.name}: integers {list(integers.shape)}, scales {list(scales.shape)} and zero points {zeros} do "
                f"not fit a weight {[self.outputs, self.inputs]} in groups of {self.group_size}"
            )
        return integers, scales

    def blocks(self) -> GivenBlocks:
        """The same integers, scales and zero points in blocks of the operator."""
        size, order = self._block_size(), self._order()

        def read() -> Blocks:
            integers, scales = self.parts()
            count = -(-self.inputs // size)
            # a group of several blocks: each has the group's scale once more
            spread = self.group_size // size if scales.shape[1] > 1 else count
            zeros = None if self.zeros is None else np.repeat(self.zeros, spread, axis=1)[:, :count]
            # group by group: inputs of one group side by side
            integers = integers if order is None else integers[:, order]
            return of_integers(integers, np.repeat(scales, spread, axis=1)[:, :count], zeros, self.bits, size)

        has_zeros = self.zeros is not None
        return GivenBlocks(self.outputs, self.inputs, self.bits, size, has_zeros, False, order, read)

    def named_blocks(self, weight: str) -> dict[str, GivenBlocks]:
        """The blocks by the name that the weight has in a graph."""
        return {weight: self.blocks()}

    def _block_size(self) -> int:
        """The largest size of blocks that make up a group, or the row of a single group."""
        if self.group_size >= self.inputs:
            # a single group may be cut anywhere: by the largest size that leaves no filled-up block
            return next((size for size in SIZES if self.inputs % size == 0), min(SIZES))
        fitting = [size for size in SIZES if self.group_size % size == 0]
        if not fitting:
            raise ExportError(
                f"{self.name}: groups of {self.group_size} inputs are no blocks of {', '.join(map(str, SIZES[::-1]))}, "
                f"which ONNX Runtime multiplies with; {INSTEAD}"
            )
        return fitting[0]

    def _order(self) -> NDArray[np.int64] | None:
        """The inputs, group by group; None where they are so already."""
        if self.groups is None:
            return None
        # stable: inputs of a group stay in order
        order, regular = np.argsort(self.groups, kind="stable"), np.arange(self.inputs) // self.group_size
        if np.array_equal(self.groups, regular):
            return None
        if not np.array_equal(self.groups[order], regular):
            raise ExportError(
                f"{self.name}: its g_idx puts other than {self.group_size} inputs into some group, which no blocks "
                f"are; {INSTEAD}"
            )
        return order.astype(np.int64)


@dataclass(frozen=True)
class Stack:
    """A parameter of stacked experts."""

    experts: Sequence[Sequence[Linear]]  # of each, the layers whose outputs follow each other in its matrix
    turned: bool  # whether a matrix of the parameter is [inputs, outputs]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Sizes of the parameter."""
        outputs, inputs = sum(layer.outputs for layer in self.experts[0]), self.experts[0][0].inputs
        return (len(self.experts), inputs, outputs) if self.turned else (len(self.experts), outputs, inputs)

    def numbers(self) -> NDArray[np.float32]:
        stack = np.empty(self.shape, np.float32)
        for matrix, layers in zip(stack, self.experts, strict=True):
            rows = matrix.T if self.turned else matrix  # a view: what is written to it lands in the stack
            begin = 0
            for layer in layers:
                rows[begin : begin + layer.outputs] = layer.numbers()
                begin += layer.outputs
        return stack

    def named_blocks(self, weight: str) -> dict[str, GivenBlocks]:
        """The blocks of each expert, by the names that its matrices have in a graph."""
        return {f"{weight}{EXPERT}{number}": _joined(layers) for number, layers in enumerate(self.experts)}


def _joined(layers: Sequence[Linear]) -> GivenBlocks:
    parts = [layer.blocks() for layer in layers]
    first, has_zeros = parts[0], any(part.zero_points for part in parts)
    forms = {(part.bits, part.block_size, None if part.order is None else part.order.tobytes()) for part in parts}
    if len(forms) > 1:
        raise ExportError(
            f"{' and '.join(layer.name for layer in layers)} are one matrix of the graph, and differ in their bits, "
            f"the size of their groups or the order of their inputs; {INSTEAD}"
        )

    def read() -> Blocks:
        matrices = [part.read() for part in parts]
        points = [_points(blocks, first.bits) for blocks in matrices]
        return Blocks(
            np.concatenate([blocks.packed for blocks in matrices]),
            np.concatenate([blocks.scales for blocks in matrices]),
            np.concatenate(points) if has_zeros else None,
        )

    return replace(first, rows=sum(part.rows for part in parts), zero_points=has_zeros, read=read)


def _points(blocks: Blocks, bits: int) -> NDArray[np.uint8]:
    """Packed zero points, of blocks without any too."""
    if blocks.zero_points is not None:
        return blocks.zero_points
    return pack(np.full(blocks.scales.shape, 2 ** (bits - 1), np.uint8), bits)


def check_bits(name: str, bits: float) -> int:
    """Refuse integers of other widths than 4 and 8 bits."""
    if bits not in BITS:
        raise ExportError(f"{name} has integers of {bits:g} bits; of {' and '.join(map(str, BITS))} are read")
    return int(bits)


def check_groups(what: str, groups: NDArray[np.int64], inputs: int, count: int) -> NDArray[np.int64]:
    """Refuse a tensor that does not say a group for each input; returns it."""
    if groups.shape != (inputs,) or not ((groups >= 0) & (groups < count)).all():
        raise ExportError(f"{what} {list(groups.shape)} names no groups of {inputs} inputs, of {count}")
    return groups


def split_words(words: NDArray[np.int32], bits: int) -> NDArray[np.uint8]:
    """The integers in words of 32 bits along the last axis, the one in the lowest bits first."""
    return unpack(np.ascontiguousarray(words, "<i4").view(np.uint8), bits)


def without_middle(zeros: NDArray[np.uint8], bits: int) -> NDArray[np.uint8] | None:
    """Zero points; None if all of them are the middle."""
    return None if (zeros == 2 ** (bits - 1)).all() else zeros
