"""`LayerChain`: a model of floats cut before each layer, whose matrices can be others in single runs.

1. Each matrix is an input of its graph, whose default is the model's own: another one is fed, and no graph is made or
   opened anew. The table of the tokens has a name of its own, where a product reads the same weight.
2. A run with another matrix begins at the segment that reads it, with what an earlier run left before that segment.
3. Segments run one after another, all prompts in each: of all matrices those of one segment are in memory.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from mionnx.bind.bound_spec import bind
from mionnx.engine.engines import engine_of
from mionnx.engine.options import Options
from mionnx.graph import onnx_file
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.inputs.token_batch import TokenBatch
from mionnx.quantise.matrices import WeightUses
from mionnx.quantise.quantised_graph import table_name
from mionnx.rewrite import rewrite
from mionnx.rewrite.plan import Outputs
from mionnx.run.segment_chain import OpenSegment, open_segments
from mionnx.spec.hook_spec import HookSpec

Arrays = dict[str, NDArray[Any]]
Others = Callable[[Collection[str]], Arrays]  # names of matrices that a segment reads -> those that are others
LOGITS = "logits"


def unchanged(names: Collection[str]) -> Arrays:
    """No other matrices."""
    return {}


class LayerChain:
    """An open chain of a model's layers.

    Attributes:
        segments: the graphs, in order.
        products: weight, or stack of experts -> the values of its products; none of a table that is only looked up in.
        read: weight -> what its first product reads.
        read_later: of each segment, what later ones read.
    """

    def __init__(self, model: HookedModel, found: WeightUses, options: Options, inputs: bool = False) -> None:
        model.need_weights()
        self.bound = bind(HookSpec(), model, Outputs(carried=False))
        self.products: dict[str, list[str]] = {} if found.table is None else {table_name(found.table): []}
        for product in found.products:
            self.products.setdefault(product.weight, []).append(product.node.output[0])
        self.products |= {stack.weight: [stack.node.output[0]] for stack in found.stacks}
        self.read: dict[str, str] = {}
        for product in found.products if inputs else ():
            self.read.setdefault(product.weight, product.node.input[0])
        made, report = rewrite(model.proto, self.bound.plan, model.metadata)
        proto = _fed(onnx_file.parse(made), found, self.products, self.read.values())
        cuts = tuple(name for name in model.metadata.hooks if HookPoint.parse(name).variant == "ResidPre")
        chain = open_segments(
            proto, report, self.bound.plan, cuts, model.folder, options, engine_of(options), optimised=False, cost=0
        )
        self.segments: tuple[OpenSegment, ...] = chain.segments
        self.read_later = [
            {name for later in self.segments[i + 1 :] for name in later.inputs} for i in range(len(self))
        ]

    def __len__(self) -> int:
        return len(self.segments)

    def feeds(self, call: TokenBatch) -> Arrays:
        """The inputs of a prompt."""
        return {name: np.asarray(value) for name, value in self.bound.inputs(call).items()}

    def place(self, weight: str) -> int:
        """The first segment that reads a matrix."""
        return next(i for i, segment in enumerate(self.segments) if weight in segment.defaults)

    def layer(self, at: int) -> int | None:
        """The layer that a segment is; None before the first."""
        return HookPoint.parse(self.segments[at - 1].hooks[-1]).layer if at else None

    def step(self, at: int, values: Mapping[str, NDArray[Any]], others: Arrays, wanted: Collection[str] = ()) -> Arrays:
        """Run one segment.

        Args:
            at: its number.
            values: what it reads.
            others: matrices in the place of the model's own, by name.
            wanted: values of products, or what they read, that are given too.

        Returns:
            these, and what later segments read.
        """
        segment = self.segments[at]
        needed = [name for name in segment.outputs if name in self.read_later[at] or name in wanted or name == LOGITS]
        feeds = {name: values[name] for name in segment.inputs} | {
            name: value for name, value in others.items() if name in segment.defaults
        }
        return segment.program.run(needed, feeds)

    def run(self, states: Sequence[Arrays], others: Others = unchanged, first: int = 0) -> Iterator[NDArray[Any]]:
        """Run several prompts to their logits [batch, seq, vocab].

        Args:
            states: of each prompt its inputs and what was computed before the first segment; left alone.
            others: asked for the matrices of each segment.
            first: number of the first segment.
        """
        states = [dict(state) for state in states]
        for at in range(first, len(self)):
            segment, last = self.segments[at], at == len(self) - 1
            given = others(segment.defaults)
            for state in states:
                state |= self.step(at, state, given)
                logits = state.pop(LOGITS, None)
                for name in segment.done:
                    state.pop(name, None)
                if last and logits is not None:
                    yield logits


def _fed(
    proto: onnx.ModelProto, found: WeightUses, products: Mapping[str, Sequence[str]], read: Iterable[str]
) -> onnx.ModelProto:
    """Make inputs of a graph's matrices, and outputs of their products and of what is read."""
    held = {tensor.name: tensor for tensor in proto.graph.initializer}
    if found.table is not None and found.lookup is not None:
        own = onnx.TensorProto.FromString(held[found.table].SerializeToString())
        own.name = table_name(found.table)
        proto.graph.initializer.append(own)
        held[own.name] = own
        lookup = next(node for node in proto.graph.node if found.lookup.output[0] in node.output)
        lookup.input[0] = own.name
    for name, values in products.items():
        tensor = held[name]
        proto.graph.input.append(onnx.helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims)))
        _give(proto, values, tensor.data_type)
    _give(proto, read, next(value.type.tensor_type.elem_type for value in proto.graph.output))
    return proto


def _give(proto: onnx.ModelProto, names: Iterable[str], dtype: int) -> None:
    """Make outputs of values, once each."""
    known = {value.name for value in (*proto.graph.output, *proto.graph.input)}
    new = [name for name in dict.fromkeys(names) if name not in known]
    proto.graph.output.extend(onnx.helper.make_tensor_value_info(name, dtype, None) for name in new)
