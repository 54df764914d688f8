"""Tokens as directions: what a final-normed stream is multiplied with to give their logits."""

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.engine import onnx_runtime
from mionnx.errors import ModelError
from mionnx.graph.extract import extract
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import DTYPES, HookedModel
from mionnx.graph.matrices import Head, head


class Unembedding:
    """The linear part of a model's head: logits = factor (W_U^T y + bias) + offset of the final-normed stream y.

    The factor (Cohere's `logit_scale`) and the offset are found by running what follows the matrix product. A soft cap
    is no part of it: logits are then those before the cap.
    """

    def __init__(self, hooked: HookedModel, options: onnx_runtime.Options) -> None:
        self.hooked, self.options = hooked, options
        self.head: Head = head(hooked)

    @cached_property
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
            raise ModelError(f"{self.hooked.metadata.family}: the logits are no multiple of what the head gives")
        offset = probes[0] + (0 if own is None else factors[0] * own)
        return float(factors[0]), offset if offset.any() else None

    def _after(self, value: float) -> NDArray[np.float64]:
        """[vocab]: what becomes of a product that is this everywhere."""
        given = np.full((1, 1, self.hooked.metadata.sizes.vocab_size), value, DTYPES[self.hooked.metadata.dtype])
        return self._run(self.head.product, str(HookPoint.Logits), given)[0, 0]

    def _run(self, first: str, last: str, given: NDArray[Any]) -> NDArray[np.float64]:
        graph = extract(self.hooked.proto, [first], [last]).SerializeToString()
        opened = onnx_runtime.open_session(graph, self.hooked.folder, self.options)
        ids = np.zeros(given.shape[:2], np.int64)
        feeds = {"input_ids": ids, "attention_mask": ids + 1, "position_ids": ids, first: given}
        return onnx_runtime.run(opened, [last], feeds)[last].astype(np.float64)

    def directions(self, ids: NDArray[np.integer[Any]]) -> NDArray[np.float64]:
        """[..., hidden] of tokens [...]: what y is multiplied with, the factor included."""
        columns = np.ascontiguousarray(np.moveaxis(self.head.weight[:, ids], 0, -1))
        return columns.astype(np.float64) * self._line[0]

    def offset(self, token: int) -> float:
        """What biases add to a token's logit."""
        return 0.0 if self._line[1] is None else float(self._line[1][token])

    def bare(self, logits: NDArray[Any], stream: NDArray[Any]) -> NDArray[np.float64]:
        """The logits [vocab] that are linear in y: the model's, or, under a soft cap, what the cap reads.

        Args:
            logits: [vocab].
            stream: [hidden], after the last layer.
        """
        if not self.head.capped:
            return logits.astype(np.float64)
        last = str(HookPoint.ResidPost(self.hooked.metadata.sizes.num_layers - 1))
        return self._run(last, self.head.product, stream[None, None]).reshape(-1)
