"""`ModelPart`: a part of a model's graph, open by itself."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.engine.engines import open_program
from mionnx.engine.options import Options
from mionnx.graph.hooked_model import DTYPES, HookedModel


class ModelPart:
    """A subgraph of one model, open with that model's weights.

    Attributes:
        dtype: of the model's activations.
        ranks: input -> number of axes.
    """

    def __init__(self, graph: bytes, hooked: HookedModel, options: Options) -> None:
        self._program = open_program(graph, hooked.folder, options)
        self.dtype = DTYPES[hooked.metadata.dtype]
        self.ranks = {name: entry.rank for name, entry in self._program.inputs.items()}

    def run(
        self, outputs: Sequence[str], feeds: Mapping[str, NDArray[Any]], tokens: tuple[int, ...]
    ) -> dict[str, NDArray[Any]]:
        """Run the part.

        Args:
            outputs: names.
            feeds: the values that it begins with.
            tokens: (batch, seq) of the tokens that these values belong to: some families read the tokens' shape even
                in their last nodes.

        Returns:
            output -> array.
        """
        ids = np.zeros(tokens, np.int64)
        blank = {"input_ids": ids, "attention_mask": ids + 1, "position_ids": ids}
        return self._program.run(outputs, {**blank, **feeds})
