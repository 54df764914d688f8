"""The norms of a model as functions of their own: where each begins and ends in the graph, and running it alone."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.engine import onnx_runtime
from mionnx.errors import HookError
from mionnx.graph.dataflow import Dataflow
from mionnx.graph.extract import extract
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel

Part = tuple[str, str]  # the names of the values that a part of the graph begins and ends with
PRODUCTS = ("MatMul", "Gemm")
# What leaves a head's share of the attention output as it is, added to others.
PLAIN = frozenset({"Add", "Reshape", "Identity", "Cast", "Squeeze", "Unsqueeze"})


class Norms:
    """Parts of one model's graph, open as one session, that each take [n, hidden] to [n, hidden]."""

    def __init__(self, hooked: HookedModel, options: onnx_runtime.Options, pairs: Sequence[Part]) -> None:
        self.pairs, self.hidden = list(pairs), hooked.metadata.sizes.hidden_size
        starts, ends = dict.fromkeys(first for first, _ in self.pairs), [last for _, last in self.pairs]
        model = extract(hooked.proto, starts, ends).SerializeToString()
        self._session = onnx_runtime.open_session(model, hooked.folder, options)
        self._ranks = {entry.name: len(entry.shape) for entry in self._session.get_inputs()}

    def run(self, part: Part, rows: NDArray[Any]) -> NDArray[Any]:
        """One of the parts on rows [n, hidden]; the others run on zeros."""
        first, last = part
        ids = np.zeros((1, len(rows)), np.int64)  # some families read the shape of the tokens
        feeds = {"input_ids": ids, "attention_mask": ids + 1, "position_ids": ids}
        feeds |= {name: self._shaped(name, np.zeros_like(rows)) for name, _ in self.pairs}
        found = onnx_runtime.run(self._session, [last], {**feeds, first: self._shaped(first, rows)})
        return found[last].reshape(-1, self.hidden)

    def _shaped(self, name: str, rows: NDArray[Any]) -> NDArray[Any]:
        return rows if self._ranks[name] == 2 else rows[None]


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
    while (node := flow.producer(end)) is not None and node.op_type == "Reshape":
        end = node.input[0]
    return before, end


def _products(flow: Dataflow, end: str, start: str) -> set[int]:
    """The matrix products between two values."""
    return {i for i in flow.ancestors([end], {start}) if flow.nodes[i].op_type in PRODUCTS}


def output_norms(hooked: HookedModel) -> dict[int, Part]:
    """Layer -> the part that changes its attention output on the way to the stream (a norm, a factor).

    It begins where the heads' shares have been added up, and ends in `hook_attn_out`.
    """
    flow, norms = Dataflow(hooked.proto), {}
    for layer in range(len(hooked.metadata.attention)):
        start, end = str(HookPoint.ResidPre(layer)), str(HookPoint.AttnOut(layer))
        value, plain = end, True
        while (node := flow.producer(value)) is not None and node.op_type not in PRODUCTS:
            plain &= node.op_type in PLAIN
            value = next((name for name in node.input if _products(flow, name, start)), "")
        if not plain:
            norms[layer] = (value, end)
    return norms
