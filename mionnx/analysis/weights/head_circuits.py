"""Circuits of heads, from weights alone: which tokens a head attends to (QK), what it moves (OV), who reads whom.

Definitions are those of Elhage et al., "A Mathematical Framework for Transformer Circuits" (2021), as TransformerLens
has them: no scale of the scores, no biases, no norms of the stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.weights.factored_matrix import FactoredMatrix, transposed
from mionnx.analysis.weights.graph_weights import repeated
from mionnx.analysis.weights.named_weights import NamedWeights
from mionnx.errors import HookError, InputError
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.metadata import NORMED_STREAM
from mionnx.machine.ranges import at_least, index_within
from mionnx.machine.typed import typed
from mionnx.run.segments import Rows, Segments
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.intervention import Intervention

Array = NDArray[Any]
MODES = ("Q", "K", "V")
BLOCK = 2**11  # tokens whose effective embeddings are computed at once
ROWS = 2**14  # of a matrix that stays in its file


@typed()
def QK(weights: NamedWeights, layer: int | None = None, distance: int = 0) -> FactoredMatrix:
    """W_Q W_K^T of each head: x QK y^T is the score of a query x for a key y, before scale, norms and biases.

    Args:
        layer: of this layer alone, [head, d_model, d_model]; None for all, [layer, head, d_model, d_model].
        distance: how many positions the key stands before the query. Under rotary positions it is W_Q R W_K^T, with the
            rotation R by that distance as the model's own graph computes it.

    Norms of heads' queries and keys (Qwen3, Gemma 3) scale each token by a number of its own; their weights are taken
    in, the scales are not.

    Raises:
        HookError: a distance in a model whose queries and keys do not turn; no such weights.
        InputError: another layer, a negative distance.

    Example:
        scores = model.W_E[:10] @ model.weights.QK(layer=1, distance=1)[3] @ model.W_E[:10].T
    """
    at_least("distance", distance, 0)
    pairs = [_query_key(weights, one, distance) for one in _layers(weights, layer)]
    return _joined(pairs, layer)


@typed()
def OV(weights: NamedWeights, layer: int | None = None) -> FactoredMatrix:
    """W_V W_O of each head: what it adds to the stream where it attends to a token, but for norm and biases.

    Args:
        layer: of this layer alone, [head, d_model, d_model]; None for all, [layer, head, d_model, d_model].

    Raises:
        HookError: no such weights.
        InputError: another layer.

    Example:
        model.weights.OV().norm()  # [layer, head]
    """
    return _joined([_value_output(weights, one) for one in _layers(weights, layer)], layer)


def _joined(pairs: list[FactoredMatrix], layer: int | None) -> FactoredMatrix:
    if layer is not None:
        return pairs[0]
    if len({pair.A.shape for pair in pairs}) > 1:
        raise HookError("layers have heads of other sizes: give a layer")
    return FactoredMatrix(np.stack([pair.A for pair in pairs]), np.stack([pair.B for pair in pairs]))


def _layers(weights: NamedWeights, layer: int | None) -> list[int]:
    count = weights.model.num_layers
    return [*range(count)] if layer is None else [index_within("layer", layer, count)]


def _wide(array: Array) -> Array:
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)


def _query_key(weights: NamedWeights, layer: int, distance: int) -> FactoredMatrix:
    query, key = (_wide(weights.reader.read(name, layer)) for name in ("W_Q", "W_K"))
    for name, norm in (("W_Q", "q_norm"), ("W_K", "k_norm")):
        product = weights.graph.product(name, layer)
        if product.normed and product.norm_behind is not None:
            weight = weights.reader.read(f"{norm}_w", layer)
            heads = weight.reshape(-1, 1, query.shape[-1])  # one for all heads, or (OLMo 2) numbers of each
            query, key = (query * heads, key) if name == "W_Q" else (query, key * heads)
    if distance:
        query = query @ rotation(weights, layer, distance).astype(query.dtype)
    return FactoredMatrix(query, transposed(repeated(key, len(query))))


def _value_output(weights: NamedWeights, layer: int) -> FactoredMatrix:
    value, output = (_wide(weights.reader.read(name, layer)) for name in ("W_V", "W_O"))
    return FactoredMatrix(repeated(value, len(output)), output)


def rotation(weights: NamedWeights, layer: int, distance: int) -> NDArray[np.float64]:
    """The rotation R [d_head, d_head] of queries to keys that stand so many positions before them: q R k^T."""
    hooked = weights.model.hooked
    if str(HookPoint.AttnRotQ(layer)) not in hooked.metadata.hooks:
        raise HookError(
            f"{hooked.metadata.family}: distance={distance}, but no queries and keys turn with their position in layer "
            f"{layer}: QK() is that of every distance"
        )
    ends = (HookPoint.AttnQ, HookPoint.AttnRotQ, distance), (HookPoint.AttnK, HookPoint.AttnRotK, 0)
    turned, still = (_rotated(weights, str(start(layer)), str(end(layer)), at) for start, end, at in ends)
    # some scale queries and keys while they turn them (YaRN); that is no part of the rotation
    at_zero = _rotated(weights, str(HookPoint.AttnQ(layer)), str(HookPoint.AttnRotQ(layer)), 0) @ still.T
    return turned @ still.T / at_zero[0, 0]


def _rotated(weights: NamedWeights, start: str, end: str, position: int) -> NDArray[np.float64]:
    """What the unit vectors of a head become at a position, [d_head, d_head]."""
    hooked = weights.model.hooked
    _, heads, _, width = hooked.axes(HookPoint.parse(start))
    if not isinstance(heads, int) or not isinstance(width, int):
        raise HookError(f"{start} has heads of no fixed size")
    piece = weights.model.opened(Segments).open([start], [end])
    if "position_ids" not in piece.program.inputs:
        raise HookError(f"{hooked.metadata.family}: the graph takes no positions, so no distance can be given")
    units = np.broadcast_to(np.eye(width, dtype=np.float32)[:, None, None], (width, heads, 1, width))
    feeds = {start: units, "position_ids": np.full((width, 1), position)}
    values = weights.model.opened(Segments).compute(piece, Rows.blank(width, 1), [end], feeds)[end]
    return values[:, 0, 0].astype(np.float64)


@typed()
def composition_scores(weights: NamedWeights, mode: str) -> NDArray[np.float64]:
    """How much of what one head writes another reads: ||L R|| / (||L|| ||R||), Frobenius norms.

    L is the OV of the earlier head; R is the later one's QK ("Q"), its transpose ("K"), or its OV ("V").

    Returns:
        [layer, head, later layer, head]; 0 unless the second layer comes later.

    Raises:
        InputError: another mode.
        HookError: no such weights; layers whose heads have other sizes.

    Example:
        scores = model.weights.composition_scores("K")
        earlier, head, later, induction = np.unravel_index(scores.argmax(), scores.shape)
    """
    if mode not in MODES:
        raise InputError(f"mode={mode!r}: one of {', '.join(MODES)}")
    count = weights.model.num_layers
    writing, reading = list[_Cores](), list[_Cores]()
    for layer in range(count):
        output = _value_output(weights, layer)
        writing.append(_Cores.of(output))
        circuit = output if mode == "V" else _query_key(weights, layer, 0)
        reading.append(_Cores.of(circuit.T if mode == "K" else circuit))
    heads = len(writing[0].norm)
    if any(len(one.norm) != heads for one in writing):
        raise HookError(f"layers have {sorted({len(one.norm) for one in writing})} heads: no one array has all pairs")
    scores = np.zeros((count, heads, count, heads))
    for first, left in enumerate(writing):
        for second in range(first + 1, count):
            right = reading[second]
            # ||A (B A') B'||, with the triangles of A and B' in their place: no matrix of d x d is made
            joint = left.B[:, None] @ right.A[None]
            norms = np.linalg.norm(left.tall[:, None] @ joint @ transposed(right.wide)[None], axis=(-2, -1))
            scores[first, :, second] = norms / (left.norm[:, None] * right.norm[None])
    return scores


class _Cores(NamedTuple):
    """The factors of a layer's circuits, [head, ...], the triangles R of A and of B^T, and the norms."""

    A: Array
    B: Array
    tall: Array
    wide: Array
    norm: Array

    @classmethod
    def of(cls, circuit: FactoredMatrix) -> _Cores:
        _, tall = np.linalg.qr(circuit.A)
        _, wide = np.linalg.qr(transposed(circuit.B))
        return cls(circuit.A, circuit.B, tall, wide, np.linalg.norm(tall @ transposed(wide), axis=(-2, -1)))


@typed()
def copying_scores(weights: NamedWeights, effective: bool = False) -> NDArray[np.float64]:
    """Whether a head raises the logit of the token it attends to, from -1 (it lowers each) to 1 (it copies).

    That is the sum of the eigenvalues of W_E OV W_U, over the sum of their moduli.

    Args:
        effective: read tokens as they are behind the first layer's MLP, not as the embedding has them.

    Returns:
        [layer, head].

    Raises:
        HookError: no such weights; with `effective`, an encoder.

    Example:
        model.weights.copying_scores().round(2)
    """
    embedding = effective_embedding(weights) if effective else weights.W_E
    unembedding = weights.W_U
    hidden = unembedding.shape[0]
    through = np.zeros((hidden, hidden))
    for first in range(0, len(embedding), ROWS):
        part = slice(first, first + ROWS)
        through += unembedding[:, part].astype(np.float64) @ embedding[part].astype(np.float64)
    scores = []
    for layer in range(weights.model.num_layers):
        circuit = _value_output(weights, layer)
        # the eigenvalues of the [vocab, vocab] matrix that are not 0 are those of W_O W_U W_E W_V
        values = np.linalg.eigvals(circuit.B @ through @ circuit.A)
        scores.append(values.sum(axis=-1).real / np.abs(values).sum(axis=-1))
    return np.stack(scores)


def effective_embedding(weights: NamedWeights) -> NDArray[np.float32]:
    """Each token's embedding and what the first layer's MLP makes of it, [vocab, d_model]; no attention."""
    model = weights.model
    hooks, point = model.hooked.metadata.hooks, HookPoint.ResidPost(0)
    spec = HookSpec().capture(point)
    if model.hooked.metadata.bidirectional or str(HookPoint.AttnOut(0)) not in hooks:
        raise HookError(f"{model.hooked.metadata.family}: effective embeddings are those of decoders with attention")
    for place in (HookPoint.PosEmbed, HookPoint.AttnOut(0), HookPoint.SsmOut(0)):
        if str(place) in hooks:
            spec.intervene(place, Intervention.Zero())
    blocks = list(_blocks(model.vocab_size))
    parts = [model.forward(ids[:, None], spec, logits=False)[point][:, 0] for ids in blocks]
    return np.concatenate(parts)


def _blocks(count: int) -> Iterator[NDArray[np.int64]]:
    for first in range(0, count, BLOCK):
        yield np.arange(first, min(first + BLOCK, count))


@typed()
def accumulated_bias(
    weights: NamedWeights, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True
) -> NDArray[np.float32]:
    """The sum of the biases that attention and MLPs have added to the stream before a layer, [d_model].

    Args:
        layer: up to the stream that this layer reads; the number of layers for the stream before the final norm.
        mlp_input: up to the layer's MLP, so with the bias of its attention.
        include_mlp_biases: b_out too, not b_O alone.

    Raises:
        InputError: another layer.
        HookError: outputs that are normed before they are added, or the stream itself (BERT).

    Example:
        model.weights.accumulated_bias(model.num_layers)
    """
    count = weights.model.num_layers
    if NORMED_STREAM in weights.model.hooked.metadata.exporter:
        raise HookError(f"{weights.model.hooked.metadata.family}: the stream is normed, no bias stays in it as it is")
    if not 0 <= layer <= count - mlp_input:
        raise InputError(f"layer={layer}, mlp_input={mlp_input}: layers are 0 to {count - mlp_input}")
    names = [("b_O", one) for one in range(layer + mlp_input)]
    names += [("b_out", one) for one in range(layer) if include_mlp_biases]
    total = np.zeros(weights.model.hidden_size, np.float64)
    for name, one in names:
        post = {"b_O": "ln1_post", "b_out": "ln2_post"}[name]
        if weights.graph.has_norm(post, one):
            raise HookError(f"layer {one} norms what it adds ({post}): its bias is no constant of the stream")
        if name == "b_O" and str(HookPoint.SsmOut(one)) in weights.model.hooked.metadata.hooks:
            raise HookError(f"layer {one} has a mixer beside its attention, whose bias has no name: no sum has it")
        total += weights.reader.read(name, one)
    return total.astype(np.float32)
