"""Cost of each quantised matrix by itself: put into the model of floats, one at a time.

The error of a product's output is measured on what it reads in the model of floats; KL(floats || floats with this one
matrix) over the tokens of some prompts. A matrix that is both the table and the unembedding is put in at both places.
The matrices of a stack of experts are put in together, or one of them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.quantisation.layer_chain import LayerChain, Stage
from mionnx.analysis.quantisation.next_token import Divergence, log_probabilities
from mionnx.engine.options import Options
from mionnx.graph.hooked_model import HookedModel
from mionnx.inputs.token_batch import TokenBatch, make_token_batch
from mionnx.machine.progress import Progress, silent
from mionnx.machine.stored import Storable
from mionnx.quantise.matrices import ExpertStack, Product, expert_of, find_weights, rows_of
from mionnx.quantise.quantised_graph import table_name
from mionnx.run.segments import Arrays

SAMPLE_TOKENS = 256  # over which a single matrix is measured
LENGTH = 128  # tokens of a prompt that are used for it

Numbers = Callable[[], NDArray[Any]]  # of a matrix as [out, in], of a stack [experts, out, in], made when needed


@dataclass(frozen=True)
class MatrixLoss(Storable):
    """The cost of one matrix by itself.

    Attributes:
        name: of the weight; of a stack of experts; of one of its matrices, with ".expert" and its number behind it.
        layer: None of the table and the unembedding.
        shape: (out, in); (experts, out, in) of a stack.
        bits: of its numbers; the most of a stack's.
        bytes: that it takes, scales included.
        weight_error: length of the difference of the numbers, as a share of theirs in floats.
        output_error: the same of the product's output on what it reads in the model of floats; of the table, that of
            the numbers.
        kl: KL(floats || floats with this matrix alone) in nats, the mean over positions.
        top_1: share of positions with the same top token.
    """

    name: str
    layer: int | None
    shape: tuple[int, ...]
    bits: int
    bytes: int
    weight_error: float
    output_error: float
    kl: float
    top_1: float


@dataclass(frozen=True)
class Candidate:
    """A matrix that may stand in the place of the model's own.

    Attributes:
        product, table: whether products read it; whether tokens pick its rows.
    """

    name: str
    bits: int
    bytes: int
    numbers: Numbers
    product: bool = True
    table: bool = False

    @property
    def inputs(self) -> list[str]:
        """The inputs of a `LayerChain` that it is fed to."""
        expert = expert_of(self.name)
        return [expert[0] if expert else self.name] * self.product + [table_name(self.name)] * self.table


class FloatModel:
    """A model of floats whose matrices are replaced."""

    def __init__(self, hooked: HookedModel, options: Options) -> None:
        self.hooked, self.uses = hooked, find_weights(hooked)
        self.chain = LayerChain(hooked, self.uses, options)

    def is_head(self, name: str) -> bool:
        """Whether the logits come from a weight."""
        return any(one.head for one in self.uses.products if one.weight == name)

    def turned(self, name: str) -> bool:
        """Whether a weight is held [out, in]."""
        stack, _ = expert_of(name) or (name, None)
        products: list[Product | ExpertStack] = [*self.uses.products, *self.uses.stacks]
        return next((one.turned for one in products if one.weight == stack), True)

    def own(self, name: str) -> NDArray[Any]:
        """A weight [out, in], a stack of experts [experts, out, in], mapped from its file."""
        return rows_of(self.hooked, name, self.turned(name))

    def held(self, name: str, numbers: NDArray[Any]) -> NDArray[Any]:
        """Numbers as the graph holds the weight; those of an expert within a copy of its stack."""
        oriented = numbers if self.turned(name) else numbers.swapaxes(-1, -2)
        expert = expert_of(name)
        if expert is None:
            return np.ascontiguousarray(oriented)
        stack = np.array(rows_of(self.hooked, expert[0], turned=True))
        stack[expert[1]] = oriented
        return stack

    def with_all(
        self, candidates: Mapping[str, Candidate], calls: Sequence[TokenBatch], report: Callable[[int], None]
    ) -> Iterator[NDArray[Any]]:
        """The logits of each prompt with many matrices in the place of its own.

        Args:
            candidates: by the inputs that they are fed to.
            report: called for every matrix that was made.
        """

        def others(names: Any) -> Arrays:
            arrays: Arrays = {}
            for candidate in {one.name: one for name in names if (one := candidates.get(name)) is not None}.values():
                array = self.held(candidate.name, candidate.numbers())
                arrays |= {name: array for name in candidate.inputs if name in names}
                report(1)
            return arrays

        return self.chain.logits_of([*map(Stage.first, calls)], others)


def sample(calls: Sequence[TokenBatch], model: HookedModel) -> list[TokenBatch]:
    """The beginnings of prompts that single matrices are measured on, spread over all of them."""
    count = max(1, SAMPLE_TOKENS // LENGTH) if max(call.seq for call in calls) >= LENGTH else len(calls)
    places = sorted({round(place) for place in np.linspace(0, len(calls) - 1, min(count, len(calls)))})
    chosen, left = list[TokenBatch](), SAMPLE_TOKENS
    for place in places:
        if left > 0:
            ids = calls[place].input_ids[:, : min(LENGTH, max(2, left))]
            chosen.append(make_token_batch(ids, None, None, model.metadata.sizes))
            left -= ids.size
    return chosen


def matrix_losses(
    model: FloatModel, candidates: Sequence[Candidate], calls: Sequence[TokenBatch], progress: Progress = silent
) -> list[MatrixLoss]:
    """Measure each candidate by itself, on the beginnings of prompts.

    Args:
        candidates: at most one for each weight.
        calls: the prompts; see `sample`.
        progress: called as (stage, done, total) in matrices.
    """
    chain, calls = model.chain, sample(calls, model.hooked)
    places = {one.name: min(chain.place(name) for name in one.inputs) for one in candidates}
    stages, losses = [*map(Stage.first, calls)], dict[str, MatrixLoss]()
    first = [log_probabilities(logits) for logits in chain.logits_of(stages)]
    for piece in chain.pieces:
        here = [one for one in candidates if places[one.name] == piece]
        ends = [value for one in here for name in one.inputs for value in chain.products[name]]
        after, own = zip(*(chain.step(piece, stage, {}, ends) for stage in stages), strict=True)
        for candidate in here:
            losses[candidate.name] = _loss(model, candidate, piece, stages, own, first)
            progress("one matrix at a time", len(losses), len(candidates))
        stages = [*after]
    return [losses[one.name] for one in candidates]


def _loss(
    model: FloatModel,
    candidate: Candidate,
    piece: int,
    stages: Sequence[Stage],
    own: Sequence[Arrays],
    first: Sequence[NDArray[np.float32]],
) -> MatrixLoss:
    chain, numbers = model.chain, candidate.numbers()
    fed = dict.fromkeys(candidate.inputs, model.held(candidate.name, numbers))
    error = _share(model.own(candidate.name), numbers)
    stack, rows = expert_of(candidate.name) or (candidate.name, ...)
    values = [value for value in chain.products.get(stack, []) if value in own[0]]
    outputs = [chain.step(piece, stage, fed, values)[1] for stage in stages] if values and not candidate.table else []
    pairs = [
        (one[value][rows], other[value][rows]) for one, other in zip(own, outputs, strict=False) for value in values
    ]
    kl, top_1 = 0.0, 1.0
    if rows is ... or not all(np.array_equal(*pair) for pair in pairs):  # an expert that nobody chose costs nothing
        kl, top_1 = _divergence(chain.logits_of(stages, lambda _: fed, piece), first)
    layer = piece if piece in range(chain.layers) and not model.is_head(candidate.name) else None
    apart = _ratio([_parts(*pair) for pair in pairs]) if pairs else error
    return MatrixLoss(candidate.name, layer, numbers.shape, candidate.bits, candidate.bytes, error, apart, kl, top_1)


def _divergence(logits: Iterator[NDArray[Any]], first: Sequence[NDArray[np.float32]]) -> tuple[float, float]:
    """KL and the share of equal top tokens over all prompts."""
    divergence = Divergence()
    for one, beside in zip(logits, first, strict=True):
        divergence.add(beside, one)
    return divergence.mean, divergence.top_1


def _share(own: NDArray[Any], other: NDArray[Any]) -> float:
    return _ratio([_parts(own, other)])


def _parts(own: NDArray[Any], other: NDArray[Any]) -> tuple[float, float]:
    """Squared lengths of a difference and of the first array."""
    off = own.astype(np.float32) - other.astype(np.float32)
    return float(np.square(off).sum()), float(np.square(own.astype(np.float32)).sum())


def _ratio(parts: Sequence[tuple[float, float]]) -> float:
    error, size = np.sum(parts, axis=0)
    return float(np.sqrt(error / size)) if size else float(error > 0)
