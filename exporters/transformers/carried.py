"""What one layer carries from call to call, as the torch model has it and as the graph does."""

from typing import NamedTuple

from torch import Tensor

from mionnx.graph.layers import TERMS, Attention, CachePort, Heads, Layer, Recurrence


class Carries(NamedTuple):
    """What one layer carries from call to call: keys and values of its heads, what its recurrence keeps, or both."""

    heads: Heads | None
    recurrence: Recurrence | None = None

    def ports(self, layer: int) -> list[CachePort]:
        """The inputs and outputs of it."""
        own = Layer(Attention("", False) if self.heads else None, self.recurrence)
        return own.ports(layer, self.heads or (0, 0, 0), hidden=0)


def parted(own: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Keys and values of a layer's past; what its recurrence keeps: columns [batch, channels, kernel - 1], a state."""
    keys = 2 if len(own) > 1 and own[0].dim() == 4 else 0
    return own[:keys], own[keys:]


def carries(own: tuple[Tensor, ...], erases: bool) -> Carries:
    """What a layer carries, from its tensors; `erases` says whether its rule is the delta rule."""
    read, states = parted(own)
    heads = (read[0].shape[1], read[0].shape[3], read[1].shape[3]) if read else None
    if not states:
        return Carries(heads)
    columns = states[0] if states[0].dim() == 3 else None
    channels, kernel = (0, 0) if columns is None else (columns.shape[1], columns.shape[2] + 1)
    if states[-1] is columns:
        return Carries(heads, Recurrence(channels=channels, kernel=kernel, gates=["convolution"]))
    count, key_dim, value_dim = states[-1].shape[1:]
    terms = {"write", "decay"} | ({"convolution"} if kernel else set()) | ({"erase"} if erases else set())
    gates = [term for term in TERMS if term in terms]
    rule = "delta" if erases else "gated"
    return Carries(heads, Recurrence(rule, count, key_dim, value_dim, channels, kernel, gates=gates))
