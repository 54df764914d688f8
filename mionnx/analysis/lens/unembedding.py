"""`Unembedding`: tokens as directions in the space of the final norm's output."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.engine.options import Options
from mionnx.errors import ModelError
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.matrices import Head, head
from mionnx.machine.once import once_property
from mionnx.run.segments import Rows, Segments


class Unembedding(Segments):
    """The linear part of a model's head: logits = factor (W_U^T y + bias) + offset.

    y is the final norm's output. The factor (Cohere's `logit_scale`) and the offset are found by running the nodes
    behind the matrix product. A soft cap is no part of it: logits are then those before the cap.
    """

    def __init__(self, hooked: HookedModel, options: Options) -> None:
        super().__init__(hooked, options)
        self.head: Head = head(hooked)

    @once_property
    def _line(self) -> tuple[float, NDArray[np.float64] | None]:
        """The factor, and what is added to all logits, [vocab] or None."""
        own = None if self.head.bias is None else np.asarray(self.head.bias, np.float64)
        if self.head.capped or self.head.product == str(HookPoint.Logits):
            return 1.0, own
        probes = [self._after(value) for value in (0.0, 1.0, 2.0)]
        factors = probes[1] - probes[0]
        if np.abs(probes[2] - probes[1] - factors).max() > 1e-5 * np.abs(factors).max() or np.ptp(factors) > 1e-5 * abs(
            factors[0]
        ):
            raise ModelError(f"{self.model.metadata.family}: the logits are no multiple of what the head gives")
        offset = probes[0] + (0 if own is None else factors[0] * own)
        return float(factors[0]), offset if offset.any() else None

    def _after(self, value: float) -> NDArray[np.float64]:
        """The logits [vocab] that follow from a matrix product with this value everywhere."""
        product = np.full((1, 1, self.model.metadata.sizes.vocab_size), value)
        return self._from(self.head.product, str(HookPoint.Logits), product)[0, 0]

    def _from(self, first: str, last: str, values: NDArray[Any]) -> NDArray[np.float64]:
        return self.run(Rows.blank(*values.shape[:2]), {first: values}, [last])[last].astype(np.float64)

    def directions(self, ids: NDArray[np.integer[Any]]) -> NDArray[np.float64]:
        """Directions [..., hidden] of tokens [...]; times y they give logits less the offset."""
        columns = np.ascontiguousarray(np.moveaxis(self.head.weight[:, ids], 0, -1))
        return columns.astype(np.float64) * self._line[0]

    def offset(self, token: int) -> float:
        """The sum of the biases in a token's logit."""
        return 0.0 if self._line[1] is None else float(self._line[1][token])

    def uncapped(self, logits: NDArray[Any], stream: NDArray[Any]) -> NDArray[np.float64]:
        """The logits [vocab] that are linear in y: the model's, or those before a soft cap.

        Args:
            logits: [vocab].
            stream: [hidden], after the last layer.
        """
        if not self.head.capped:
            return logits.astype(np.float64)
        return self._from(self.end, self.head.product, stream[None, None]).reshape(-1)
