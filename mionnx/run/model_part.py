"""`ModelPart`: a part of a model's graph, open by itself."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mionnx.engine.engines import engine_of
from mionnx.engine.options import Options
from mionnx.graph.hooked_model import DTYPES, HookedModel
from mionnx.graph.onnx_file import ModelProto
from mionnx.run import prepacked


class ModelPart:
    """A subgraph of one model, open with that model's weights.

    Attributes:
        dtype: of the model's activations.
        ranks: input -> number of axes.
    """

    def __init__(self, graph: bytes, hooked: HookedModel, options: Options, base: Path | None = None) -> None:
        hooked.need_weights()
        folder = hooked.folder if base is None else base
        self._program = engine_of(options).open(graph, folder, options, optimised=base is not None)
        self.dtype = DTYPES[hooked.metadata.dtype]
        self.ranks = {name: entry.rank for name, entry in self._program.inputs.items()}

    @classmethod
    def after(cls, hook: str, make: Callable[[ModelProto], bytes], hooked: HookedModel, options: Options) -> Self:
        """Open the part behind a hook point, with the packed weights of a base if there is one.

        Args:
            hook: where the part begins.
            make: makes the part, from the graph of the model or that of its base.
            hooked, options: see `Runner.opened`.
        """
        base = prepacked.ready(hooked, options)
        if base is None or not base.has(hook):
            return cls(make(hooked.proto), hooked, options)
        return cls(make(base.proto), hooked, options, base.folder)

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
