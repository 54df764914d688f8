"""`NormGraphs`: the norms of a model, found in its graph and run by themselves."""

from functools import cached_property
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from mionnx.analysis.attribution.linear_norm import LinearNorm, linearise
from mionnx.engine.options import Options
from mionnx.errors import HookError
from mionnx.graph import onnx_file
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.rewrite.apply_plan import parts
from mionnx.run.model_part import ModelPart

Part = tuple[str, str]  # the names of the values that a part of the graph begins and ends with
PRODUCTS = ("MatMul", "Gemm")
# What leaves a head's share of the attention output as it is, added to others.
PLAIN = frozenset({"Add", "Reshape", "Identity", "Cast", "Squeeze", "Unsqueeze"})


class NormGraphs:
    """The norms of one model, each a graph from [n, hidden] to [n, hidden], opened on first use."""

    def __init__(self, hooked: HookedModel, options: Options) -> None:
        self.hooked, self.options = hooked, options
        self._open: dict[tuple[Part, ...], ModelPart] = {}

    @cached_property
    def output_norms(self) -> dict[int, Part]:
        """See `output_norms`."""
        return output_norms(self.hooked)

    def run(self, part: Part, rows: NDArray[Any], beside: tuple[Part, ...] = ()) -> NDArray[Any]:
        """Run one norm.

        Args:
            part: where the norm begins and ends.
            rows: [n, hidden].
            beside: the norms to open as one graph with it, itself among them; the others run on zeros.
        """
        group = beside or (part,)
        if group not in self._open:
            self._open[group] = ModelPart(parts(self.hooked.proto, group), self.hooked, self.options)
        graph = self._open[group]
        feeds = {first: rows if first == part[0] else np.zeros_like(rows) for first, _ in group}
        shaped = {name: array if graph.ranks[name] == 2 else array[None] for name, array in feeds.items()}
        return graph.run([part[1]], shaped, (1, len(rows)))[part[1]].reshape(rows.shape)

    def linear(self, part: Part, stream: NDArray[Any], beside: tuple[Part, ...] = ()) -> LinearNorm:
        """The linear map that one norm is at a stream [..., hidden].

        Raises:
            ModelError: this part of the graph is no LayerNorm or RMSNorm.
        """
        name = f"{self.hooked.metadata.family}: what lies between {part[0]} and {part[1]}"
        return linearise(lambda rows: self.run(part, rows, beside), stream, name)


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
    """Layer -> the norm or factor behind its attention, where there is one.

    The part begins where the heads' shares have been added up, and ends in `hook_attn_out`.
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
