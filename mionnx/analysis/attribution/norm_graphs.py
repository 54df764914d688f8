"""The norms of a model as functions of their own: where each begins and ends in the graph, and running it alone."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from mionnx.engine.engines import open_program
from mionnx.engine.options import Options
from mionnx.errors import HookError
from mionnx.graph import onnx_file
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.rewrite.apply_plan import parts

Part = tuple[str, str]  # the names of the values that a part of the graph begins and ends with
PRODUCTS = ("MatMul", "Gemm")
# What leaves a head's share of the attention output as it is, added to others.
PLAIN = frozenset({"Add", "Reshape", "Identity", "Cast", "Squeeze", "Unsqueeze"})


class Norms:
    """Parts of one model's graph, open as one program, that each take [n, hidden] to [n, hidden]."""

    def __init__(self, hooked: HookedModel, options: Options, pairs: Sequence[Part]) -> None:
        self.pairs, self.hidden = list(pairs), hooked.metadata.sizes.hidden_size
        self._program = open_program(parts(hooked.proto, self.pairs), hooked.folder, options)
        self._ranks = {name: entry.rank for name, entry in self._program.inputs.items()}

    def run(self, part: Part, rows: NDArray[Any]) -> NDArray[Any]:
        """One of the parts on rows [n, hidden]; the others run on zeros."""
        first, last = part
        ids = np.zeros((1, len(rows)), np.int64)  # some families read the shape of the tokens
        feeds = {"input_ids": ids, "attention_mask": ids + 1, "position_ids": ids}
        feeds |= {name: self._shaped(name, np.zeros_like(rows)) for name, _ in self.pairs}
        found = self._program.run([last], {**feeds, first: self._shaped(first, rows)})
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
    graph = onnx_file.edit(hooked.proto)
    tensors = graph.tensors()
    middle, before = str(HookPoint.ResidMid(layer)), str(HookPoint.ResidPre(layer))
    if mlp:
        return middle if middle in tensors else before, str(HookPoint.MlpPre(layer))
    query = tensors.get(str(HookPoint.AttnQ(layer)))
    if query is None:
        raise HookError(f"{hooked.metadata.family}: layer {layer} has no {HookPoint.AttnQ(layer)} to find its norm by")
    value = _product(query).inputs[0]
    while value.inputs and value.inputs[0].op == "Reshape":
        value = value.inputs[0].inputs[0]
    return before, value.name


def _product(value: gs.Tensor) -> gs.Node:
    """The nearest matrix product before a value."""
    seen, front = set(), [value]
    while front:
        node = front.pop(0).inputs[0]
        if node.op in PRODUCTS:
            return node
        fresh = [entry for entry in node.inputs if entry.inputs and id(entry) not in seen]
        seen |= {id(entry) for entry in fresh}
        front += fresh
    raise HookError(f"{value.name} comes from no matrix product")


def output_norms(hooked: HookedModel) -> dict[int, Part]:
    """Of each layer whose attention output is changed on its way to the stream (a norm, a factor) that part.

    It begins where the heads' shares have been added up, and ends in `hook_attn_out`.
    """
    graph = onnx_file.edit(hooked.proto)
    found = {}
    for layer in range(len(hooked.metadata.attention)):
        end = graph.tensors()[str(HookPoint.AttnOut(layer))]
        value, plain = end, True
        while value.inputs and value.inputs[0].op not in PRODUCTS:
            plain &= value.inputs[0].op in PLAIN
            value = _computed(value)
        if not plain:
            found[layer] = (value.name, end.name)
    return found


def _computed(value: gs.Tensor) -> gs.Tensor:
    """The input that a value is made from, rather than a weight or a shape."""
    found = (entry for entry in value.inputs[0].inputs if _from_product(entry))
    return next(found, gs.Variable.empty())


def _from_product(value: gs.Tensor) -> bool:
    while value.inputs:
        if value.inputs[0].op in PRODUCTS:
            return True
        value = next((entry for entry in value.inputs[0].inputs if entry.inputs), gs.Variable.empty())
    return False
