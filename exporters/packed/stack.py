"""A stack of experts that are packed one by one, and the blocks of each."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from exporters.packed.linear import Linear
from mionnx.graph.blocks import EXPERT, GivenBlocks


@dataclass(frozen=True)
class Stack:
    """A parameter of stacked experts.

    Attributes:
        experts: of each, the layers whose outputs follow each other in its matrix.
        turned: whether a matrix of the parameter is [inputs, outputs].
    """

    experts: tuple[tuple[Linear, ...], ...]
    turned: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        """Sizes of the parameter."""
        outputs, inputs = sum(layer.outputs for layer in self.experts[0]), self.experts[0][0].inputs
        return (len(self.experts), inputs, outputs) if self.turned else (len(self.experts), outputs, inputs)

    def numbers(self) -> NDArray[np.float32]:
        """The numbers of the parameter."""
        found = np.empty(self.shape, np.float32)
        for matrix, layers in zip(found, self.experts, strict=True):
            rows = matrix.T if self.turned else matrix
            begin = 0
            for layer in layers:
                rows[begin : begin + layer.outputs] = layer.numbers()
                begin += layer.outputs
        return found

    def named_blocks(self, weight: str) -> dict[str, GivenBlocks]:
        """The blocks of each expert, by the names that its matrices have in a graph."""
        return {f"{weight}{EXPERT}{number}": layers[0].blocks() for number, layers in enumerate(self.experts)}
