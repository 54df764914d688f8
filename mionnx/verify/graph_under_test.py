"""`GraphUnderTest`: one model with one spec on some prompts, as a graph that can be run in parts."""

from collections.abc import Iterable, Iterator, Sequence
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
from mionnx.rewrite import rewrite
from mionnx.rewrite.plan import Outputs
from mionnx.spec.hook_spec import HookSpec

Arrays = dict[str, NDArray[Any]]
LOGITS_POINT = "hook_logits"
GROUP = 2**24  # bytes of values that are fetched together


class GraphUnderTest:
    """One model with one spec on some prompts.

    Attributes:
        spec: interventions, each at one hook point.
        names: the hook points that are compared, in execution order; the last is `hook_logits`.
        title: distinguishes it from another graph in the same comparison; empty if there is one only.
    """

    def __init__(
        self, model: HookedModel, spec: HookSpec, names: Sequence[str], calls: Sequence[TokenBatch], title: str = ""
    ) -> None:
        model.need_weights()
        self.model, self.names, self.calls, self.title = model, list(names), list(calls), title
        self.spec = HookSpec().extend(spec)
        # the names are captured instead, and globs and predicates resolved for runtimes that know names only
        self.spec.captures.clear()
        self.spec.interventions = [*index_hooks(spec, model).interventions]

    @cached_property
    def bound(self) -> BoundSpec:
        """The spec on the model, with every compared hook point captured."""
        spec = HookSpec().extend(self.spec)
        for name in self.names:
            spec.capture(name)
        return bind(spec, self.model, Outputs(carried=False))

    @cached_property
    def proto(self) -> onnx.ModelProto:
        """Graph with the spec's interventions and the type of every value, without weights."""
        written, _ = rewrite(self.model.proto, self.bound.plan, self.model.metadata)
        proto = onnx_file.parse(written)
        feeds = self.feeds(self.calls[0])  # no input of these has a default: OpenVINO takes one that has for a constant
        weights = [tensor for tensor in proto.graph.initializer if tensor.name not in feeds]
        del proto.graph.initializer[:]
        proto.graph.initializer.extend(weights)
        return onnx.shape_inference.infer_shapes(proto)

    @cached_property
    def dataflow(self) -> Dataflow:
        """Data flow of the graph."""
        return Dataflow(self.proto)

    @cached_property
    def types(self) -> dict[str, int]:
        """Value -> its ONNX element type."""
        graph = self.proto.graph
        values = (*graph.value_info, *graph.input, *graph.output)
        return {value.name: value.type.tensor_type.elem_type for value in values}

    def graph_hash(self) -> str:
        """SHA-256 of the graph with the spec's interventions, in hexadecimal."""
        plan = bind(self.spec, self.model, Outputs(carried=False)).plan  # without the compared hook points
        written, _ = rewrite(self.model.proto, plan, self.model.metadata)
        return sha256(onnx_file.parse(written).SerializeToString(deterministic=True)).hexdigest()

    def hashes(self) -> dict[str, str]:
        """SHA-256 of the rewritten graph, of the bytes of its weights, and of the spec."""
        weights = sha256()
        # In the order of names: the same hash wherever the files lie.
        for name in sorted(onnx_file.locations(self.model.proto)):
            with (self.model.folder / name).open("rb") as file:
                # Piece by piece: a file may be larger than memory.
                while block := file.read(2**20):
                    weights.update(block)
        return {"graph": self.graph_hash(), "weights": weights.hexdigest(), "spec": self.spec.sha256}

    def feeds(self, call: TokenBatch) -> Arrays:
        """The inputs of one call: tokens, an empty past, and the spec's values."""
        return {name: np.asarray(value) for name, value in self.bound.inputs(call).items()}

    def nodes_of(self, starts: Iterable[str], ends: Iterable[str]) -> list[str]:
        """The nodes between some values and others, as `name (operator)`, in the order in which they run."""
        nodes = [self.dataflow.nodes[at] for at in sorted(self.dataflow.ancestors([*ends], [*starts]))]
        return [f"{node.name} ({node.op_type})" for node in nodes]

    def part(self, starts: Sequence[str], ends: Sequence[str]) -> onnx.ModelProto:
        """Extract the nodes between some values and others; bfloat16 is float32 at the borders."""
        return widened(extract(self.dataflow, starts, ends))

    def groups(self, names: Sequence[str]) -> Iterator[list[str]]:
        """Group names so that the values of a group have at most `GROUP` bytes, or are one value."""
        group: list[str] = []
        size = 0
        for name in names:
            axes = self.model.axes(HookPoint.parse(name))
            shapes = [shape_of(axes, dynamic_sizes(call.batch, call.seq, call.total)) for call in self.calls]
            largest = max((4 * prod(shape) for shape in shapes), default=0)  # float32 at the borders of a part
            if group and size + largest > GROUP:
                yield group
                group, size = [], 0
            group.append(name)
            size += largest
        if group:
            yield group

    def longer(self, call: TokenBatch, ids: NDArray[np.int64]) -> TokenBatch:
        """A call with tokens [batch, n] after its prompt [batch, seq]."""
        both = np.concatenate([call.input_ids, ids], axis=1)
        batch = make_token_batch(both, None, None, self.model, [call.seq] * call.batch)
        # `make_token_batch` knows no generation: how far the text will go is that of the first call.
        return replace(batch, final_lengths=call.final_lengths)


def widened(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Make bfloat16 inputs and outputs of a model float32: few runtimes take bfloat16."""
    narrow, wide = onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT
    renamed: dict[str, str] = {}
    casts: list[list[onnx.NodeProto]] = []
    for values, kind in ((proto.graph.input, narrow), (proto.graph.output, wide)):
        casts.append([])
        for value in values:
            if value.type.tensor_type.elem_type == narrow:
                value.type.tensor_type.elem_type = wide
                inner = renamed[value.name] = f"{value.name}.narrow"
                ends = (value.name, inner) if kind == narrow else (inner, value.name)
                casts[-1].append(onnx.helper.make_node("Cast", [ends[0]], [ends[1]], to=kind))
    if renamed:
        _rename(proto, renamed)
        nodes = [*casts[0], *proto.graph.node, *casts[1]]
        del proto.graph.node[:]
        proto.graph.node.extend(nodes)
    return proto


def _rename(proto: onnx.ModelProto, renamed: dict[str, str]) -> None:
    for node in proto.graph.node:
        for names in (node.input, node.output):
            names[:] = [renamed.get(name, name) for name in names]
    # These names are the wide inputs and outputs now, which describe themselves.
    values = [value for value in proto.graph.value_info if value.name not in renamed]
    del proto.graph.value_info[:]
    proto.graph.value_info.extend(values)
