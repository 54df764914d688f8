"""Taps on embeddings scaled and added up in a model's own code, without a module (CTRL)."""

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from exporters.transformers.attention import Taps
from mionnx.graph.hook_points import HookPoint


class TapEmbedding(TorchFunctionMode):
    """Tap embeddings scaled in place, and rows taken out of a table of positions.

    Args:
        taps: of the model.
        rows: of the table.
    """

    def __init__(self, taps: Taps, rows: int) -> None:
        super().__init__()
        self.taps, self.rows = taps, rows

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (Tensor.mul_, Tensor.__imul__):
            return self.taps.at(HookPoint.Embed, result)
        table = func is Tensor.__getitem__ and args[0].dim() == 2 and args[0].is_floating_point()
        return self.taps.at(HookPoint.PosEmbed, result) if table and args[0].shape[0] == self.rows else result
