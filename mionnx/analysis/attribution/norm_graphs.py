"""`NormGraphs`: the norms of a model, found in its graph and run by themselves."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.attribution.linear_norm import LinearNorm, linearise
from mionnx.errors import HookError
from mionnx.graph.dataflow import Dataflow
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.weight_value import WEIGHT_PLACE, product_of
from mionnx.machine.once import once_property
from mionnx.run.segments import Rows, Segments

Part = tuple[str, str]  # the names of the values that a part of the graph begins and ends with
BEFORE = frozenset({"Reshape", "DynamicQuantizeLinear", "QuantizeLinear", "DequantizeLinear"})  # before a product
# What leaves a head's share of the attention output as it is, added to others.
PLAIN = frozenset({"Add", "Reshape", "Identity", "Cast", "Squeeze", "Unsqueeze"})


class NormGraphs(Segments):
    """The norms of one model, each a graph from [n, hidden] to [n, hidden]."""

    @once_property
    def output_norms(self) -> dict[int, Part]:
        """See `output_norms`."""
        return output_norms(self.model)

    def norm(self, part: Part, rows: NDArray[Any], beside: tuple[Part, ...] = ()) -> NDArray[Any]:
        """Run one norm.

        Args:
            part: where the norm begins and ends.
            rows: [n, hidden].
            beside: the norms to open as one graph with it, itself among them; the others run on zeros.
        """
        group = beside or (part,)
        piece = self.open([*dict.fromkeys(first for first, _ in group)], [last for _, last in group])
        feeds = {first: rows if first == part[0] else np.zeros_like(rows) for first, _ in group}
        ranks = {name: entry.rank for name, entry in piece.program.inputs.items()}
        feeds = {name: array if ranks[name] == 2 else array[None] for name, array in feeds.items()}
        return self.compute(piece, Rows.blank(1, len(rows)), [part[1]], feeds)[part[1]].reshape(rows.shape)

    def linear(self, part: Part, stream: NDArray[Any], beside: tuple[Part, ...] = ()) -> LinearNorm:
        """The linear map that one norm is at a stream [..., hidden].

        Raises:
            ModelError: this part of the graph is no LayerNorm or RMSNorm.
        """
        name = f"{self.model.metadata.family}: what lies between {part[0]} and {part[1]}"
        return linearise(lambda rows: self.norm(part, rows, beside), stream, name)


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
    while (node := flow.producer(end)) is not None and node.op_type in BEFORE:
        end = node.input[0]
    return before, end


def _products(flow: Dataflow, end: str, start: str) -> set[int]:
    """The matrix products between two values."""
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
            plain &= node.op_type in PLAIN
            value = next((name for name in node.input if _products(flow, name, start)), "")
        if not plain:
            norms[layer] = (value, end)
    return norms
