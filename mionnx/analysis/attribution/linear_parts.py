"""`LinearParts`: the norms of a model, found in its graph and run by themselves, and tokens as directions."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.attribution.linear_norm import LinearNorm, linearise
from mionnx.errors import HookError, ModelError
from mionnx.graph.dataflow import Dataflow
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.matrices import Head, head
from mionnx.graph.weight_value import WEIGHT_PLACE, product_of
from mionnx.machine.once import once_property
from mionnx.run.segments import Rows, Segments

Part = tuple[str, str]  # the names of the values that a part of the graph begins and ends with
AT_INPUTS = frozenset({"Reshape", "DynamicQuantizeLinear", "QuantizeLinear", "DequantizeLinear"})  # before a product
# What leaves a head's share of the attention output as it is, added to others.
PLAIN_OPERATORS = frozenset({"Add", "Reshape", "Identity", "Cast", "Squeeze", "Unsqueeze"})


class LinearParts(Segments):
    """The norms of one model, and the linear part of its head.

    That is logits = factor (W_U^T y + bias) + offset, where y is the final norm's output. The factor (Cohere's
    `logit_scale`) and the offset are found by running the nodes behind the matrix product. A soft cap is no part of it:
    logits are then those before the cap.
    """

    @once_property
    def head(self) -> Head:
        """The matrix product of the logits."""
        return head(self.model)

    @once_property
    def output_norms(self) -> dict[int, Part]:
        """See `output_norms`."""
        return output_norms(self.model)

    def norm(self, part: Part, rows: NDArray[Any], beside: tuple[Part, ...] = ()) -> NDArray[Any]:
        """Run one norm.

        Args:
            beside: the norms to open as one graph with it, itself among them; the others run on zeros.
        """
        group = beside or (part,)
        piece = self.open([*dict.fromkeys(first for first, _ in group)], [last for _, last in group])
        feeds = {first: rows if first == part[0] else np.zeros_like(rows) for first, _ in group}
        ranks = {name: entry.rank for name, entry in piece.program.inputs.items()}
        feeds = {name: array if ranks[name] == 2 else array[None] for name, array in feeds.items()}
        return self.compute(piece, Rows.blank(1, len(rows)), [part[1]], feeds)[part[1]].reshape(rows.shape)

    def linear(self, part: Part, stream: NDArray[Any], beside: tuple[Part, ...] = ()) -> LinearNorm:
        """The linear map that one norm is at a stream [..., hidden]."""
        name = f"{self.model.metadata.family}: what lies between {part[0]} and {part[1]}"
        return linearise(lambda rows: self.norm(part, rows, beside), stream, name)

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
            stream: [hidden], after the last layer.
        """
        if not self.head.capped:
            return logits.astype(np.float64)
        return self._from(self.end, self.head.product, stream[None, None]).reshape(-1)


def final_norm(hooked: HookedModel) -> Part:
    """The norm before the head."""
    return str(HookPoint.ResidPost(hooked.metadata.sizes.num_layers - 1)), str(HookPoint.FinalNorm)


def input_norm(hooked: HookedModel, layer: int, mlp: bool) -> Part:
    """The norm before a layer's attention, or before its MLP.

    Raises:
        HookError: an attention without queries (a recurrence): where its norm ends is not marked.
    """
    flow = Dataflow(hooked.proto)
    middle, before = str(HookPoint.ResidMid(layer)), str(HookPoint.ResidPre(layer))
    if mlp:
        return middle if middle in flow.producers else before, str(HookPoint.MlpPre(layer))
    query = str(HookPoint.AttnQ(layer))
    if query not in flow.producers:
        raise HookError(f"{hooked.metadata.family}: layer {layer} has no {query} to find its norm by")
    products = _products(flow, query, before)
    if not products:
        raise HookError(f"{query} comes from no matrix product")
    end = flow.nodes[max(products)].input[0]
    while (node := flow.producer(end)) is not None and node.op_type in AT_INPUTS:
        end = node.input[0]
    return before, end


def _products(flow: Dataflow, end: str, start: str) -> set[int]:
    return {i for i in flow.ancestors([end], {start}) if flow.nodes[i].op_type in WEIGHT_PLACE}


def output_norms(hooked: HookedModel) -> dict[int, Part]:
    """Layer -> the norm or factor behind its attention, where there is one.

    The part begins where the heads' shares have been added up, and ends in `hook_attn_out`.
    """
    flow, norms = Dataflow(hooked.proto), {}
    for layer in range(len(hooked.metadata.attention)):
        start, end = str(HookPoint.ResidPre(layer)), str(HookPoint.AttnOut(layer))
        value, plain = end, True
        while (node := flow.producer(value)) is not None and product_of(flow, node) is None:
            plain &= node.op_type in PLAIN_OPERATORS
            value = next((name for name in node.input if _products(flow, name, start)), "")
        if not plain:
            norms[layer] = (value, end)
    return norms
