"""`attribute_similarity`: which pairs of tokens make two texts similar, with the sum law that each method keeps.

Late interaction: with mean pooling m = mean of the last stream h_i the cosine is the sum over pairs of
h_i . g_j / (n_a n_b |m_a| |m_b|), exactly. The last stream is mixed, so that the shares are flat.

Integrated Jacobians (Moeller, Nikolaev and Pado, "An Attribution Method for Siamese Encoders", EMNLP 2023): with the
embedding e, references r, and J the mean of d e / d x along the straight way from a text's reference to the text,

    A_ij = (a - r)_i^T J_a,i^T J_b,j (b - r)_j,   sum = f(a, b) - f(r, b) - f(a, r) + f(r, r),   f = e . e.

Each J_i (x - r)_i is a derivative in one direction: a central difference of two rows of a batch, of which all layers
behind the streams that are compared are computed. D backward passes a step, the other way, cost D / 2n times as much.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.similarity.token_pairs import INTEGRATED, LATE, TokenPairs
from mionnx.errors import InputError, nearest
from mionnx.graph.hook_points import HookPoint
from mionnx.inputs.tokens import Tokens
from mionnx.machine.progress import Progress, shown
from mionnx.machine.ranges import at_least, at_most
from mionnx.machine.typed import typed
from mionnx.run.embedding import unit, with_prompt
from mionnx.run.encoder_texts import need_head, tokens_of
from mionnx.run.prompt import token_text
from mionnx.run.runner import Runner
from mionnx.run.segments import EMBEDDING, Arrays, Rows, Segments
from mionnx.spec.hook_spec import HookSpec

METHODS = {"integrated": INTEGRATED, "late": LATE}
MOST_STEPS = 10_000
WIDTH = 1e-2  # of a central difference, in lengths of its direction: errors of 1e-4 of the derivative in float32
PASS_TOKENS = 4096
FLAT = 1e-5  # by which an exact sum may miss the similarity
Numbers = NDArray[np.float64]


@typed()
def attribute_similarity(
    model: Runner,
    a: str,
    b: str,
    method: str = "integrated",
    *,
    layer: int = 0,
    steps: int = 50,
    prompt_name: str | None = None,
    progress: bool | None = None,
) -> TokenPairs:
    """Attribute the similarity of two texts to pairs of their tokens.

    Args:
        a, b: the two texts.
        method: "integrated" Jacobians along the way from texts of padding, or "late" interaction of the last stream,
            which is exact for mean pooling, and flat.
        layer: the layer whose input is compared with the references; later ones take less time, and what earlier
            layers mixed counts as each token's own.
        steps: points of each way.
        prompt_name: see `embed`; its tokens are among those of the pairs.
        progress: None for a bar when it takes longer than two seconds.

    Returns:
        the pairs [tokens of a, tokens of b], with f(r, b), f(a, r) and f(r, r), and the gap to the sum law.

    Raises:
        InputError: a model without sentence embeddings, no such layer or method, or a pooling that has no pairs.

    Example:
        model.attribute_similarity("A man plays the guitar.", "Someone performs music.").top(3)
    """
    need_head(model, "attribute_similarity", "embedding")
    if method not in METHODS:
        raise InputError(f"method={method!r}: {' or '.join(METHODS)}{nearest(method, METHODS)}")
    at_least("steps", steps, 1)
    at_most("steps", steps, MOST_STEPS)
    if not 0 <= layer < model.num_layers:
        raise InputError(f"layer={layer}: the model has the layers 0 to {model.num_layers - 1}")
    sides = tokens_of(model, with_prompt(model, [a, b], prompt_name))
    words_a, words_b = (tuple(token_text(model, token) for token in side.ids.tolist()) for side in sides)
    if method == "late":
        pairs, similarity = _late(model, sides)
        return TokenPairs(LATE, (a, b), words_a, words_b, pairs, similarity)
    with shown(progress) as show:
        texts = [_Text(model, side, layer) for side in sides]
        shares = []
        for number, text in enumerate(texts):
            shares.append(text.shares(steps, partial(_told, show, number * steps, 2 * steps)))
    (ea, ra), (eb, rb) = ((text.embedding, text.reference) for text in texts)
    return TokenPairs(
        INTEGRATED,
        (a, b),
        words_a,
        words_b,
        pairs=shares[0] @ shares[1].T,
        similarity=float(ea @ eb),
        reference_b=float(ra @ eb),
        a_reference=float(ea @ rb),
        references=float(ra @ rb),
        layer=layer,
        steps=steps,
    )


def _told(show: Progress, begin: int, total: int, step: int) -> None:
    show(INTEGRATED, begin + step, total)


def _late(model: Runner, sides: list[Tokens]) -> tuple[Numbers, float]:
    """The exact shares of the last streams' products."""
    last = HookPoint.ResidPost(model.num_layers - 1)
    final = HookPoint.FinalNorm if HookPoint.FinalNorm.name in model.hooked.metadata.hooks else last
    streams, vectors = [], []
    for side in sides:
        cache = model.forward(side, HookSpec().capture(final))
        streams.append(cache[final][0].astype(np.float64))
        vectors.append(_vector(model, cache.output().astype(np.float64))[0])
    similarity = float(vectors[0] @ vectors[1])
    means = [stream.mean(axis=0) for stream in streams]
    norms = [float(np.linalg.norm(mean)) for mean in means]
    sizes = len(streams[0]) * len(streams[1])
    pairs: Numbers = streams[0] @ streams[1].T / (sizes * norms[0] * norms[1])
    if abs(float(pairs.sum()) - similarity) > FLAT:
        raise InputError(
            "late interaction is a sum over pairs of tokens for mean pooling of the last stream and a cosine alone: "
            f"here it would miss the similarity by {float(pairs.sum()) - similarity:+.3g}; method='integrated' holds "
            "for any pooling"
        )
    return pairs, similarity


def _vector(model: Runner, vectors: Numbers) -> Numbers:
    """Embeddings of which the model's similarity is the product."""
    measure = model.hooked.metadata.pooling.get("similarity") or "cosine"
    if measure not in ("cosine", "dot"):
        raise InputError(f"the similarity of this model is {measure}, which is no product of embeddings")
    return np.asarray(unit(vectors)) if measure == "cosine" else vectors


@dataclass
class _Text:
    """A text, its reference, and its embedding as a function of the stream in front of a layer."""

    model: Runner
    tokens: Tokens
    layer: int

    def __post_init__(self) -> None:
        self.segments = self.model.opened(Segments)
        self.hook = self.segments.inputs_of(self.layer)[0]
        self.beside: Arrays = {}
        self.ids = self.tokens.ids
        self.x, self.r = self._stream(self.ids), self._stream(self._blank())
        self.embedding, self.reference = (self.embed(stream[None])[0] for stream in (self.x, self.r))

    def _blank(self) -> NDArray[np.int64]:
        """The text's special tokens, and padding in the place of its words."""
        pad = self.model.hooked.pad_token
        words = np.array([last > first for first, last in self.tokens.offsets])
        return np.where(words, pad, self.ids)

    def _stream(self, ids: NDArray[np.int64]) -> Numbers:
        """[seq, hidden] in front of the layer."""
        rows, stream = Rows(ids[None]), Arrays()
        for layer in range(EMBEDDING, self.layer):
            stream, _ = self.segments.layer(layer, rows, stream)
        self.beside = {name: value for name, value in stream.items() if name != self.hook}
        return stream[self.hook][0].astype(np.float64)

    def embed(self, streams: Numbers) -> Numbers:
        """[rows, d] of streams [rows, seq, hidden]."""
        rows = Rows(np.repeat(self.ids[None], len(streams), axis=0))
        beside = {name: np.repeat(value, len(streams), axis=0) for name, value in self.beside.items()}
        values = self.segments.values_at(rows, {self.hook: streams.astype(np.float32), **beside})
        return _vector(self.model, values.astype(np.float64))

    def shares(self, steps: int, show: Callable[[int], None]) -> Numbers:
        """[seq, d]: mean over the way of the derivatives of the embedding in the direction of each token's change."""
        direction = self.x - self.r
        count = len(direction)
        lengths = np.linalg.norm(direction, axis=-1)
        moved = np.flatnonzero(lengths > 0)  # special tokens are those of the reference in front of layer 0
        each = np.zeros((len(moved), *direction.shape))
        each[np.arange(len(moved)), moved] = direction[moved] * WIDTH
        total = np.zeros((count, len(self.embedding)))
        most = max(1, PASS_TOKENS // (2 * count))
        for step in range(steps):
            show(step)
            here = self.r + (step + 0.5) / steps * direction
            for begin in range(0, len(moved), most):
                some = each[begin : begin + most]
                ahead, behind = np.split(self.embed(np.concatenate([here + some, here - some])), 2)
                total[moved[begin : begin + most]] += (ahead - behind) / (2 * WIDTH * steps)
        return total
