"""`ModelPart`: a part of a model's graph, open by itself."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.engine import onnx_runtime
from mionnx.graph.hooked_model import DTYPES, HookedModel


class ModelPart:
    """A subgraph of one model, open with that model's weights.

    Attributes:
        dtype: of the model's activations.
        ranks: input -> number of axes.
    """

    def __init__(self, graph: bytes, hooked: HookedModel, options: onnx_runtime.Options) -> None:
        self._session = onnx_runtime.open_session(graph, hooked.folder, options)
        self.dtype = DTYPES[hooked.metadata.dtype]
        self.ranks = {entry.name: len(entry.shape) for entry in self._session.get_inputs()}

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
        return onnx_runtime.run(self._session, outputs, {**blank, **feeds})
