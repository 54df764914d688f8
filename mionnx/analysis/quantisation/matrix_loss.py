"""Cost of each quantised matrix by itself, put into the model of floats one at a time; KL of next tokens."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.quantisation.layer_chain import LayerChain, Stage
from mionnx.engine.options import Options
from mionnx.errors import ModelError
from mionnx.graph.hooked_model import HookedModel
from mionnx.inputs.token_batch import TokenBatch, make_token_batch
from mionnx.machine.progress import Progress, silent
from mionnx.machine.softmax import log_softmax
from mionnx.machine.stored import Storable
from mionnx.quantise.matrices import ExpertStack, Product, expert_of, find_weights, rows_of
from mionnx.quantise.quantised_graph import table_name
from mionnx.run.segments import Arrays

LOGITS_AT_ONCE = 2**20  # numbers looked at together
SAMPLE_TOKENS = 256  # over which a single matrix is measured
LENGTH = 128  # tokens of a prompt that are used for it

Numbers = Callable[[], NDArray[Any]]  # of a matrix as [out, in], of a stack [experts, out, in], made when needed


@dataclass
class Divergence:
    """KL(first || other) in nats over all positions so far, and equal top tokens."""

    positions: int = 0
    total: float = 0.0
    same: int = 0

    @classmethod
    def of(cls, firsts: Iterable[NDArray[np.float32]], others: Iterable[NDArray[Any]]) -> "Divergence":
        """Compare prompt by prompt: log probabilities of a first run, logits of another."""
        divergence = cls()
        for first, other in zip(firsts, others, strict=True):
            divergence.add(first, other)
        return divergence

    def add(self, first: NDArray[np.float32], other: NDArray[Any]) -> None:
        """Compare a first run's log probabilities with another's logits, [..., vocab]."""
        vocab = first.shape[-1]
        one, two = first.reshape(-1, vocab), other.reshape(-1, vocab)
        rows = max(1, LOGITS_AT_ONCE // vocab)
        for start in range(0, len(one), rows):
            self._add(one[start : start + rows], two[start : start + rows])

    def _add(self, first: NDArray[np.float32], other: NDArray[Any]) -> None:
        # KL = log E exp(d - m), d the difference of the logits and m its mean, both over the first distribution: small
        # differences keep their digits, which those of two logarithms of probabilities lose
        probabilities = np.exp(first)
        with np.errstate(invalid="ignore"):
            apart = other.astype(np.float32) - first
        apart[probabilities == 0] = 0  # also where both are minus infinity
        for _ in range(2):  # the second time for what the first one rounds away
            apart -= (probabilities * apart).sum(axis=-1, keepdims=True) / probabilities.sum(axis=-1, keepdims=True)
        kl = np.log1p((probabilities * np.expm1(apart)).sum(axis=-1).astype(np.float64))
        if np.isnan(kl).any():
            raise ModelError("the logits of a model with other weights are no numbers: its weights are damaged")
        self.positions += len(kl)
        self.total += float(kl.clip(min=0).sum())  # rounding can take it below 0
        self.same += int((first.argmax(-1) == other.argmax(-1)).sum())

    @property
    def mean(self) -> float:
        """KL by position."""
        return self.total / max(1, self.positions)

    @property
    def top_1(self) -> float:
        """Share of positions with the same top token."""
        return self.same / max(1, self.positions)


def log_probabilities(logits: NDArray[Any]) -> NDArray[np.float32]:
    """Logarithms of the probabilities of logits, in float32."""
    rows = [log_softmax(one.astype(np.float32), axis=-1) for one in logits.reshape(-1, logits.shape[-1])]
    return np.stack(rows).reshape(logits.shape)


@dataclass(frozen=True)
class MatrixLoss(Storable):
    """The cost of one matrix by itself."""

    name: str  # a weight; a stack of experts; one of its matrices, with ".expert" and its number behind it
    layer: int | None  # None for the table and the unembedding
    shape: tuple[int, ...]  # (out, in); (experts, out, in) for a stack
    bits: int  # the most of a stack's
    bytes: int  # scales included
    weight_error: float  # length of the difference of the numbers, as a share of theirs in floats
    # That of the product's output on what it reads in the model of floats; of the table, the numbers'.
    output_error: float
    kl: float  # KL(floats || floats with this matrix alone) in nats, the mean over positions
    top_1: float  # share of positions with the same top token


@dataclass(frozen=True)
class Candidate:
    """A matrix that may stand in place of the model's own."""

    name: str
    bits: int
    bytes: int
    numbers: Numbers
    # product, table: whether products read it; whether tokens pick its rows.
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

    def turned(self, name: str) -> bool:
        """Whether a weight is held [out, in]."""
        stack, _ = expert_of(name) or (name, None)
        products: list[Product | ExpertStack] = [*self.uses.products, *self.uses.stacks]
        return next((one.turned for one in products if one.weight == stack), True)

    def own(self, name: str) -> NDArray[Any]:
        """A weight [out, in], a stack of experts [experts, out, in], mapped from its file."""
        return rows_of(self.hooked, name, self.turned(name))

    def in_graph(self, name: str, numbers: NDArray[Any]) -> NDArray[Any]:
        """Numbers as the graph holds the weight; those of an expert within a copy of its stack."""
        oriented = numbers if self.turned(name) else numbers.swapaxes(-1, -2)
        expert = expert_of(name)
        if expert is None:
            return np.ascontiguousarray(oriented)
        # A copy of the stack, in which one matrix is another.
        stack = np.array(rows_of(self.hooked, expert[0], turned=True))
        stack[expert[1]] = oriented
        return stack


def sample(calls: Sequence[TokenBatch], model: HookedModel) -> list[TokenBatch]:
    """The beginnings of prompts that single matrices are measured on, spread over all of them."""
    # long prompts share the tokens, short ones all take part
    count = max(1, SAMPLE_TOKENS // LENGTH) if max(call.seq for call in calls) >= LENGTH else len(calls)
    places = sorted({round(place) for place in np.linspace(0, len(calls) - 1, min(count, len(calls)))})
    chosen, left = list[TokenBatch](), SAMPLE_TOKENS
    for place in places:
        if left > 0:
            # Two tokens at least: the last predicts nothing.
            ids = calls[place].input_ids[:, : min(LENGTH, max(2, left))]
            types = calls[place].token_type_ids
            batch = make_token_batch(ids, None, None, model)
            chosen.append(batch if types is None else replace(batch, token_type_ids=types[:, : ids.shape[1]]))
            left -= ids.size
    return chosen


def matrix_losses(
    model: FloatModel, candidates: Sequence[Candidate], calls: Sequence[TokenBatch], progress: Progress = silent
) -> list[MatrixLoss]:
    """Measure each candidate by itself, at most one for each weight, on the beginnings of prompts."""
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
    chain, name, numbers = model.chain, candidate.name, candidate.numbers()
    fed = dict.fromkeys(candidate.inputs, model.in_graph(name, numbers))
    error = _relative_error([(model.own(name), numbers)])
    stack, rows = expert_of(name) or (name, ...)
    values = [value for value in chain.products.get(stack, []) if value in own[0]]
    outputs = [chain.step(piece, stage, fed, values)[1] for stage in stages] if values and not candidate.table else []
    pairs = [
        (one[value][rows], other[value][rows]) for one, other in zip(own, outputs, strict=False) for value in values
    ]
    kl, top_1 = 0.0, 1.0
    if rows is ... or not all(np.array_equal(*pair) for pair in pairs):  # an expert that nobody chose costs nothing
        divergence = Divergence.of(first, chain.logits_of(stages, lambda _: fed, piece))
        kl, top_1 = divergence.mean, divergence.top_1
    head = any(one.head for one in model.uses.products if one.weight == name)
    layer = piece if piece in range(chain.layers) and not head else None
    output_error = _relative_error(pairs) if pairs else error
    return MatrixLoss(name, layer, numbers.shape, candidate.bits, candidate.bytes, error, output_error, kl, top_1)


def _relative_error(pairs: Iterable[tuple[NDArray[Any], NDArray[Any]]]) -> float:
    """Length of the differences of arrays, as a share of the length of the first ones."""
    error = size = 0.0
    for own, other in pairs:
        exact = own.astype(np.float32)
        error += float(np.square(exact - other.astype(np.float32)).sum())
        size += float(np.square(exact).sum())
    # Of a matrix of zeros any difference is an error of 1.
    return float(np.sqrt(error / size)) if size else float(error > 0)
