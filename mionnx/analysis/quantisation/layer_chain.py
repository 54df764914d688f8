"""`LayerChain`: a model of floats in pieces, whose matrices can be others in single runs, and what each of them reads.

A run with another matrix begins at the piece that reads it, with what an earlier run left before that piece.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray

from mionnx.engine.options import Options
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.output_head import LOGITS
from mionnx.inputs.token_batch import TokenBatch
from mionnx.machine.progress import Progress, silent
from mionnx.quantise.matrices import WeightUses, find_weights
from mionnx.quantise.quantised_graph import table_name
from mionnx.run.predictions import distributions
from mionnx.run.segments import EMBEDDING, Arrays, Rows, Segments

Importance = dict[str, NDArray[np.float64]]  # weight -> the mean square of each of its inputs, [in]
Others = Callable[[Sequence[str]], Arrays]  # names of matrices that a piece reads -> those that are others


class Stage(NamedTuple):
    """A prompt, and the values that its next piece begins with."""

    rows: Rows
    stream: Arrays

    @classmethod
    def first(cls, call: TokenBatch) -> "Stage":
        """A prompt before the first piece."""
        return cls(Rows(call.input_ids, types=call.token_type_ids), {})


class LayerChain(Segments):
    """The pieces of a model of floats, from the embedding to the head."""

    def __init__(self, model: HookedModel, weights: WeightUses, options: Options, inputs: bool = False) -> None:
        # weight, or stack of experts -> the values of its products; none of a table that is only looked up in.
        self.products: dict[str, list[str]] = {} if weights.table is None else {table_name(weights.table): []}
        self.read: dict[str, str] = {}  # weight -> what its first product reads
        for product in weights.products:
            self.products.setdefault(product.weight, []).append(product.node.output[0])
            if inputs:
                self.read.setdefault(product.weight, product.node.input[0])
        self.products |= {stack.weight: [stack.node.output[0]] for stack in weights.stacks}
        # without a base: it would be one of this graph alone
        super().__init__(replace(model, proto=_fed(model.proto, weights, self.products)), replace(options, base=False))
        self.pieces = range(EMBEDDING, self.layers + 1)
        self.matrices: dict[int, list[str]] = {}  # piece -> the weights that it reads
        self.values: dict[int, list[str]] = {}  # piece -> the values of products, and what they read, that it computes
        values = dict.fromkeys([*(value for of_one in self.products.values() for value in of_one), *self.read.values()])
        for piece in self.pieces:
            nodes = self.flow.ancestors(self.inputs_of(piece + 1), self.inputs_of(piece))
            reads = self.flow.read_by(nodes)
            self.matrices[piece] = [name for name in self.products if name in reads]
            self.values[piece] = [value for value in values if self.flow.producers.get(value) in nodes]

    def place(self, weight: str) -> int:
        """The first piece that reads a matrix; behind the last if the main output does not, as a pooler beside it."""
        return next((piece for piece in self.pieces if weight in self.matrices[piece]), self.layers + 1)

    def step(
        self, piece: int, stage: Stage, others: Mapping[str, NDArray[Any]], ends: Iterable[str] = ()
    ) -> tuple[Stage, Arrays]:
        """Run one piece; returns the prompt before the next one, and the values of `ends` that this one computes."""
        # `others` are matrices in place of the model's own, by name.
        own = [name for name in self.values[piece] if name in {*ends}]
        stream, values = self.layer(piece, *stage, None, own, self.values[piece], others)
        return Stage(stage.rows, stream), values

    def logits_of(
        self, stages: Sequence[Stage], others: Others | None = None, first: int = EMBEDDING
    ) -> Iterator[NDArray[Any]]:
        """Run several prompts to the logits of their predictions [..., choices], see `distributions`."""
        # `others` gives the matrices of each piece
        # pieces one after another, all prompts in each: of all matrices those of one piece are in memory
        stages = [*stages]
        for piece in range(first, self.layers + 1):
            matrices = {} if others is None else others(self.matrices[piece])
            for number, stage in enumerate(stages):
                stages[number], _ = self.step(piece, stage, matrices)
                if piece == self.layers:
                    yield distributions(stages[number].stream[LOGITS], self.model.metadata)


def _fed(origin: onnx.ModelProto, weights: WeightUses, matrices: Iterable[str]) -> onnx.ModelProto:
    """Make inputs of a graph's matrices, in a copy."""
    # Another matrix is fed, and no graph is made or opened anew: an input's default is the model's own matrix.
    proto = onnx.ModelProto.FromString(origin.SerializeToString())
    tensors = {tensor.name: tensor for tensor in proto.graph.initializer}
    if weights.table is not None and weights.lookup is not None:
        # where a product reads the table too, each has a name of its own
        own = onnx.TensorProto.FromString(tensors[weights.table].SerializeToString())
        own.name = table_name(weights.table)
        proto.graph.initializer.append(own)
        tensors[own.name] = own
        lookup = next(node for node in proto.graph.node if weights.lookup.output[0] in node.output)
        lookup.input[0] = own.name
    shapes = {name: (tensors[name].data_type, [*tensors[name].dims]) for name in matrices}
    proto.graph.input.extend(onnx.helper.make_tensor_value_info(name, *shape) for name, shape in shapes.items())
    return proto


def mean_squares(
    model: HookedModel, calls: Sequence[TokenBatch], options: Options, progress: Progress = silent
) -> Importance:
    """Measure the importance of the inputs of a model's matrices: their mean squares over all tokens of prompts."""
    chain = LayerChain(model, find_weights(model), options, inputs=True)
    stages, tokens = [*map(Stage.first, calls)], sum(call.input_ids.size for call in calls)
    squares = Importance()
    for number, piece in enumerate(chain.pieces):
        progress("what matrices read", number, len(chain.pieces))
        here = {name: value for name, value in chain.read.items() if chain.place(name) == piece}
        for prompt, stage in enumerate(stages):
            stages[prompt], values = chain.step(piece, stage, {}, here.values())
            values |= stage.stream
            sums = {value: _squares(values[value]) for value in {*here.values()}}
            for name, value in here.items():
                squares[name] = squares.get(name, np.zeros(1)) + sums[value] / tokens
    return squares


def _squares(value: NDArray[np.floating]) -> NDArray[np.float64]:
    rows = value.reshape(-1, value.shape[-1])
    return np.asarray(np.square(rows, dtype=np.float64).sum(axis=0))
