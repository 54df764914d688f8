"""`GraphUnderTest`: one model with one spec on some prompts, as a graph that can be run in parts."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from hashlib import sha256
from math import prod
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from mionnx.bind.bound_spec import BoundSpec, bind
from mionnx.bind.hook_index import index_hooks
from mionnx.graph import onnx_file
from mionnx.graph.axes import dynamic_sizes, shape_of
from mionnx.graph.dataflow import Dataflow, extract
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.inputs.token_batch import TokenBatch, make_token_batch
from mionnx.rewrite import Plan, rewrite
from mionnx.rewrite.plan import Outputs
from mionnx.spec.hook_spec import HookSpec

Arrays = dict[str, NDArray[Any]]
LOGITS_POINT = "hook_logits"
GROUP = 2**24  # bytes of values that are fetched together


class GraphUnderTest:
    """One model with one spec on some prompts.

    Attributes:
        spec: what intervenes, each at one hook point.
        names: the hook points that are compared, in execution order; the last is `hook_logits`.
        calls: one a prompt.
        title: what distinguishes it from another graph in the same comparison; empty if there is one only.
    """

    def __init__(
        self, model: HookedModel, spec: HookSpec, names: Sequence[str], calls: Sequence[TokenBatch], title: str = ""
    ) -> None:
        model.need_weights()
        self.model, self.names, self.calls, self.title = model, list(names), list(calls), title
        self.spec = HookSpec().extend(spec)
        self.spec.captures.clear()
        self.spec.interventions = [*index_hooks(spec, model).interventions]

    @cached_property
    def bound(self) -> BoundSpec:
        """The spec on the model, with every compared hook point captured."""
        spec = HookSpec().extend(self.spec)
        for name in self.names:
            spec.capture(name)
        return bind(spec, self.model, Outputs(carried=False))

    @property
    def plan(self) -> Plan:
        """The structure of the graph, with every compared hook point an output."""
        return self.bound.plan

    @cached_property
    def proto(self) -> onnx.ModelProto:
        """Graph with the spec's interventions and the type of every value, without weights.

        Inputs that are given have no defaults: OpenVINO takes one that has for a constant.
        """
        written, _ = rewrite(self.model.proto, self.plan, self.model.metadata)
        proto = onnx_file.parse(written)
        feeds = self.feeds(self.calls[0])
        weights = [tensor for tensor in proto.graph.initializer if tensor.name not in feeds]
        del proto.graph.initializer[:]
        proto.graph.initializer.extend(weights)
        return onnx.shape_inference.infer_shapes(proto)

    @cached_property
    def dataflow(self) -> Dataflow:
        """Producers and consumers of the graph's values."""
        return Dataflow(self.proto)

    @cached_property
    def types(self) -> dict[str, int]:
        """Value -> its ONNX element type."""
        graph = self.proto.graph
        values = (*graph.value_info, *graph.input, *graph.output)
        return {value.name: value.type.tensor_type.elem_type for value in values}

    def graph_hash(self) -> str:
        """SHA-256 of the graph with the spec's interventions, in hexadecimal.

        It does not depend on the hook points that are compared.
        """
        plan = bind(self.spec, self.model, Outputs(carried=False)).plan
        written, _ = rewrite(self.model.proto, plan, self.model.metadata)
        return sha256(onnx_file.parse(written).SerializeToString(deterministic=True)).hexdigest()

    def feeds(self, call: TokenBatch) -> Arrays:
        """The inputs of one call: tokens, an empty past, and the spec's values."""
        return {name: np.asarray(value) for name, value in self.bound.inputs(call).items()}

    def starts_of(self, values: Collection[str], ends: Iterable[str]) -> list[str]:
        """Known values that some others are computed from directly."""
        return self.dataflow.needed(values, [*ends])

    def part(self, starts: Sequence[str], ends: Sequence[str]) -> onnx.ModelProto:
        """Extract the nodes between some values and others; bfloat16 is float32 at the borders."""
        return widened(extract(self.dataflow, starts, ends))

    def groups(self, names: Sequence[str]) -> Iterator[list[str]]:
        """Group names so that the values of a group have at most `GROUP` bytes, or are one value."""
        group: list[str] = []
        size = 0
        for name in names:
            each = max((self._bytes(name, call) for call in self.calls), default=0)
            if group and size + each > GROUP:
                yield group
                group, size = [], 0
            group.append(name)
            size += each
        if group:
            yield group

    def _bytes(self, name: str, call: TokenBatch) -> int:
        dims = dynamic_sizes(call.batch, call.seq, call.total)
        return 4 * prod(shape_of(self.model.axes(HookPoint.parse(name)), dims))

    def longer(self, call: TokenBatch, ids: NDArray[np.int64]) -> TokenBatch:
        """A call with tokens after its prompt.

        Args:
            call: the prompt, [batch, seq].
            ids: [batch, n].
        """
        both = np.concatenate([call.input_ids, ids], axis=1)
        batch = make_token_batch(both, None, None, self.model.metadata.sizes, [call.seq] * call.batch)
        return replace(batch, final_lengths=call.final_lengths)


def widened(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Make bfloat16 inputs and outputs of a model float32: few runtimes take bfloat16."""
    first, last = [], []
    narrow, wide = onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT
    inputs: dict[str, str] = {}
    for value in proto.graph.input:
        if value.type.tensor_type.elem_type == narrow:
            inputs[value.name] = f"{value.name}.narrow"
            value.type.tensor_type.elem_type = wide
            first.append(onnx.helper.make_node("Cast", [value.name], [inputs[value.name]], to=narrow))
    outputs: dict[str, str] = {}
    for value in proto.graph.output:
        if value.type.tensor_type.elem_type == narrow:
            outputs[value.name] = f"{value.name}.narrow"
            value.type.tensor_type.elem_type = wide
            last.append(onnx.helper.make_node("Cast", [outputs[value.name]], [value.name], to=wide))
    renamed = {**inputs, **outputs}
    if renamed:
        _rename(proto, renamed)
        nodes = [*first, *proto.graph.node, *last]
        del proto.graph.node[:]
        proto.graph.node.extend(nodes)
    return proto


def _rename(proto: onnx.ModelProto, renamed: dict[str, str]) -> None:
    for node in proto.graph.node:
        for names in (node.input, node.output):
            names[:] = [renamed.get(name, name) for name in names]
    values = [value for value in proto.graph.value_info if value.name not in renamed]
    del proto.graph.value_info[:]
    proto.graph.value_info.extend(values)
