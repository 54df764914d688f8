"""A stack of experts that are packed one by one, and the blocks of each."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from exporters.packed.linear import INSTEAD
from mionnx.errors import ExportError
from mionnx.graph.blocks import EXPERT, Blocks, GivenBlocks, pack


class Layer(Protocol):
    """A layer of an expert."""

    @property
    def name(self) -> str:
        """Its name in the checkpoint."""

    @property
    def inputs(self) -> int:
        """Its inputs."""

    @property
    def outputs(self) -> int:
        """Its outputs."""

    def numbers(self) -> NDArray[np.float32]:
        """Its numbers, [outputs, inputs]."""

    def blocks(self) -> GivenBlocks:
        """The same as blocks."""


@dataclass(frozen=True)
class Stack:
    """A parameter of stacked experts.

    Attributes:
        experts: of each, the layers whose outputs follow each other in its matrix.
        turned: whether a matrix of the parameter is [inputs, outputs].
    """

    experts: Sequence[Sequence[Layer]]
    turned: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        """Sizes of the parameter."""
        outputs, inputs = sum(layer.outputs for layer in self.experts[0]), self.experts[0][0].inputs
        return (len(self.experts), inputs, outputs) if self.turned else (len(self.experts), outputs, inputs)

    def numbers(self) -> NDArray[np.float32]:
        """The numbers of the parameter."""
        stack = np.empty(self.shape, np.float32)
        for matrix, layers in zip(stack, self.experts, strict=True):
            rows = matrix.T if self.turned else matrix
            begin = 0
            for layer in layers:
                rows[begin : begin + layer.outputs] = layer.numbers()
                begin += layer.outputs
        return stack

    def named_blocks(self, weight: str) -> dict[str, GivenBlocks]:
        """The blocks of each expert, by the names that its matrices have in a graph.

        Raises:
            ExportError: those of layers of one expert are of different kinds; see `Linear.blocks`.
        """
        return {f"{weight}{EXPERT}{number}": _joined(layers) for number, layers in enumerate(self.experts)}


def _joined(layers: Sequence[Layer]) -> GivenBlocks:
    """The blocks of layers whose outputs follow each other.

    Raises:
        ExportError: blocks of different kinds.
    """
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
        points = [_points(blocks, first.bits) for blocks in matrices] if has_zeros else None
        return Blocks(
            np.concatenate([blocks.packed for blocks in matrices]),
            np.concatenate([blocks.scales for blocks in matrices]),
            None if points is None else np.concatenate(points),
        )

    return replace(first, rows=sum(part.rows for part in parts), zero_points=has_zeros, read=read)


def _points(blocks: Blocks, bits: int) -> NDArray[np.uint8]:
    """Packed zero points, of blocks without any too."""
    if blocks.zero_points is not None:
        return blocks.zero_points
    return pack(np.full(blocks.scales.shape, 2 ** (bits - 1), np.uint8), bits)
