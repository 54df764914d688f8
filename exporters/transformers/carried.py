"""What one layer carries from call to call, as the torch model has it and as the graph does."""

from typing import NamedTuple

from torch import Tensor

from mionnx.graph.layers import TERMS, Attention, CachePort, Heads, Layer, Recurrence


class Carries(NamedTuple):
    """What one layer carries from call to call: keys and values of its heads, or what its recurrence keeps."""

    heads: Heads | None
    recurrence: Recurrence | None = None

    def ports(self, layer: int) -> list[CachePort]:
        """The inputs and outputs of it."""
        own = Layer(Attention("", False) if self.heads else None, self.recurrence)
        return own.ports(layer, self.heads or (0, 0, 0), hidden=0)


def is_state(own: tuple[Tensor, ...]) -> bool:
    """Whether a layer's past is that of a recurrence: columns [batch, channels, kernel - 1] come first."""
    return own[0].dim() == 3


def carries(own: tuple[Tensor, ...], erases: bool) -> Carries:
    """What a layer carries, from its tensors; `erases` says whether its rule is the delta rule."""
    if not is_state(own):
        key, value = own
        return Carries((key.shape[1], key.shape[3], value.shape[3]))
    columns, *states = own
    channels, kernel = columns.shape[1], columns.shape[2] + 1
    if not states:
        return Carries(None, Recurrence(channels=channels, kernel=kernel, gates=["convolution"]))
    heads, key_dim, value_dim = states[0].shape[1:]
    terms = {"write", "decay", "convolution"} | ({"erase"} if erases else set())
    gates = [term for term in TERMS if term in terms]
    rule = "delta" if erases else "gated"
    return Carries(None, Recurrence(rule, heads, key_dim, value_dim, channels, kernel, gates=gates))
