"""How long the residual stream is: the scale on which a steering strength is small or large."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import HookError


@dataclass(frozen=True)
class SteeringCalibration:
    """Strengths in units of the stream that they are added to.

    Attributes:
        hook: the short name of the hook point.
        layers: the layers.
        stream_norms: [layers], the mean length of the value there over the prompts' tokens.
        direction_norms: [layers], the lengths of the directions.
    """

    hook: str
    layers: tuple[int, ...]
    stream_norms: NDArray[np.float64]
    direction_norms: NDArray[np.float64]

    @property
    def scales(self) -> NDArray[np.float64]:
        """[layers]: the strength at which what is added is as long as the stream itself."""
        return self.stream_norms / self.direction_norms

    def strength(self, layer: int, share: float) -> float:
        """The strength at which what is added to a layer has this share of the stream's length."""
        return share * float(self.scales[self._at(layer)])

    def share(self, layer: int, strength: float) -> float:
        """Which share of the stream's length a strength adds to a layer."""
        return strength / float(self.scales[self._at(layer)])

    def _at(self, layer: int) -> int:
        if layer not in self.layers:
            raise HookError(f"layer {layer!r} was not calibrated; these were: {', '.join(map(str, self.layers))}")
        return self.layers.index(layer)
