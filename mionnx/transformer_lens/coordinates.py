"""`Coordinates`: values of a graph in TransformerLens' layout, and in those of folded weights.

A folded model computes the same function: its values are those of the graph in other coordinates. Writing weights that
are centred give a stream less its mean, biases of values that are folded give values and z less these biases, a folded
norm gives what it norms without weight and bias, a centred unembedding gives logits less their mean, circuits of heads
that are refactored give queries, keys, values and z in another basis. So one graph, of any dtype, serves both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.weights.graph_weights import repeated
from mionnx.analysis.weights.weights import Weights
from mionnx.errors import HookError
from mionnx.transformer_lens.lens_points import BEFORE, HEAD_COPIES, LensPoint

Array = NDArray[Any]
LOWEST = float(np.finfo(np.float32).min)  # of masked scores in TransformerLens
SINGULAR = 1e6  # the condition of a basis in which float32 has no digits left
HEADS = (0, 2, 1, 3)  # [batch, head, seq, head_dim] <-> [batch, seq, head, head_dim]


OF_HEADS = ("heads", "values", "z")
PROJECTED = "projected"
# Ends of kinds that are computed of what goes into a norm: the weights that give it.
PRODUCTS_OF_KINDS = {PROJECTED: ("W_O", "b_O"), "W_Q product": ("W_Q", "b_Q"), "W_K product": ("W_K", "b_K")}
NORMED_LATER = "normed later"
KINDS_OF_LOGITS = ("logits", "changed logits")  # the latter are what hooks left; what hooks saw of them was centred


def _flat(value: Array) -> Array:
    """[batch, seq, head, d_head] -> [batch, seq, head * d_head]."""
    return value.reshape(*value.shape[:2], -1)


def bases_of(before: Weights, after: Weights, layers: int) -> dict[str, tuple[Array, Array]]:
    """The bases in which refactored weights give queries, keys and values; see `Coordinates.bases`.

    Raises:
        HookError: a head whose weights have less than d_head dimensions, and so no inverse.
    """
    bases: dict[str, tuple[Array, Array]] = {}
    for part in "QKV":
        turns = []
        for layer in range(layers):
            rows = []
            for weights in (before, after):
                matrix, bias = (weights.reader.read(f"{kind}_{part}", layer).astype(np.float64) for kind in "Wb")
                # of queries and keys biases are turned too, of values they are folded before
                rows.append(matrix if part == "V" else np.concatenate([matrix, bias[:, None]], axis=1))
            turns.append(np.linalg.pinv(rows[0]) @ rows[1])
        turn = np.stack(turns)
        if np.linalg.cond(turn).max() > SINGULAR:
            raise HookError(f"refactor_factored_attn_matrices: W_{part} of a head has less than d_head dimensions")
        bases[part.lower()] = turn, np.linalg.inv(turn)
    return bases


def centred(value: Array) -> Array:
    """A value less its mean over the last axis."""
    return value - value.mean(axis=-1, keepdims=True, dtype=np.float64).astype(value.dtype)


@dataclass(frozen=True)
class Coordinates:
    """What the values of hook points are in.

    Attributes:
        raw: the weights of the graph.
        weights: those that the bridge shows, folded or not.
        biased: those whose biases of values are not folded yet.
        norms, stream, logits, values: which foldings are in force.
        cap, factor: of logits behind the unembedding (Gemma 2, Cohere); 0 and 1 for none.
        bases: of queries, keys, values ("q", "k", "v"), where circuits are refactored: what they are multiplied with,
            [layer, head, d_head, d_head] in float64, and its inverse.
    """

    raw: Weights
    weights: Weights
    eps: float
    biased: Weights
    norms: bool = False
    stream: bool = False
    logits: bool = False
    values: bool = False
    cap: float = 0.0
    factor: float = 1.0
    bases: Mapping[str, tuple[Array, Array]] = field(default_factory=dict)

    def show(self, point: LensPoint, value: Array, mean: Array | float = 0.0) -> Array:
        """The value at a point, made of its source's.

        Args:
            mean: of a stream that hooks gave one, where the graph's own means nothing, [batch, seq, 1].
        """
        point, value = self._before_norm(point, value)
        return np.ascontiguousarray(SHOW_BY_KIND.get(point.kind, _as_it_is)(self, point, value, mean))

    def _before_norm(self, point: LensPoint, value: Array) -> tuple[LensPoint, Array]:
        """What goes into a norm that the graph does not name, and its kind, where a point's value is that or of it."""
        product = next((end for end in PRODUCTS_OF_KINDS if point.kind.endswith(end)), "")
        if not product:
            return point, value
        weight, bias = (self.raw.reader.read(name, point.layer) for name in PRODUCTS_OF_KINDS[product])
        if product == PROJECTED:
            entry = np.einsum("bshd,hdm->bsm", value, weight) + bias
        else:
            before = point._replace(norm="ln1")
            normed = self._normalized(before, value, 0.0) * self._affine(before)[0] + self._affine(before)[1]
            entry = np.einsum("bsm,hmd->bhsd", normed, weight) + bias[:, None]
        kind = point.kind.removesuffix(product).removesuffix(" of ") or NORMED_LATER
        return point._replace(kind=kind), entry.astype(np.float32)

    def _as_before_norm(self, point: LensPoint, shown: Array) -> Array:
        """What a point shows in the layout in which its norm reads it."""
        if not point.kind.startswith("heads of"):
            return shown
        heads = len(self.raw.reader.read(point.kind[-len("W_Q product") :].split()[0], point.layer))
        return shown.reshape(*shown.shape[:2], heads, -1).transpose(HEADS)

    def _stream(self, point: LensPoint, value: Array, mean: Array | float) -> Array:
        return centred(value) + mean if self.stream else value

    def _part(self, point: LensPoint, value: Array, mean: Array | float) -> Array:
        return centred(value) if self.stream else value

    def _heads(self, point: LensPoint, value: Array, mean: Array | float) -> Array:
        return _flat(self._turned(point, value.transpose(HEADS)))

    def _values(self, point: LensPoint, value: Array, mean: Array | float) -> Array:
        own = value.transpose(HEADS)
        return _flat(self._turned(point, own - self.value_bias(point.layer) if self.values else own))

    def _z(self, point: LensPoint, value: Array, mean: Array | float) -> Array:
        return _flat(self._z_of_heads(point, value))

    def _z_of_heads(self, point: LensPoint, value: Array) -> Array:
        own = value - self._bias_of_z(point.layer, value.shape[2]) if self.values else value
        return self._turned(point, own)

    def _result(self, point: LensPoint, value: Array, mean: Array | float) -> Array:
        return np.einsum("bshd,hdm->bshm", self._z_of_heads(point, value), self.weights.W_O[point.layer])

    def _turned(self, point: LensPoint, value: Array, back: bool = False, transposed: bool = False) -> Array:
        """Values of heads, [batch, seq, head, d_head], in the basis of the weights, or back in the graph's."""
        part = "v" if point.kind in ("z", "result") else point.source[-1]
        if part not in self.bases:
            return value
        matrix = self.bases[part][back][point.layer]
        return np.einsum("bshd,hed->bshe" if transposed else "bshd,hde->bshe", value, matrix).astype(np.float32)

    def _scale(self, point: LensPoint, value: Array, mean: Array | float) -> Array:
        wide = value.astype(np.float64)
        wide = wide - wide.mean(axis=-1, keepdims=True) if self._norm(point).centred else wide
        eps = self._norm(point).epsilon
        root = np.sqrt((wide**2).mean(axis=-1, keepdims=True) + (self.eps if eps is None else eps))
        return root.astype(np.float32)

    def _normalized(self, point: LensPoint, value: Array, mean: Array | float) -> Array:
        return (centred(value) if self._norm(point).centred else value) / self._scale(point, value, mean)

    def _norm_of(self, point: LensPoint, value: Array, mean: Array | float) -> Array:
        weight, bias = (np.ones(1), np.zeros(1)) if self.norms else self._affine(point)
        return (self._normalized(point, value, mean) * weight + bias).astype(np.float32)

    def _input(self, point: LensPoint, value: Array, mean: Array | float) -> Array:
        first = point.kind.removeprefix(HEAD_COPIES)[0]  # shown also where a graph has no hook point that reads it
        heads = len(self.raw.reader.read(f"W_{first}", point.layer))
        return np.repeat(self._stream(point, value, mean)[:, :, None], heads, axis=2)

    def _normed(self, point: LensPoint, value: Array, mean: Array | float) -> Array:
        if not self.norms:
            return value
        weight, bias = self._affine(point)
        return ((value - bias) / np.where(weight == 0, np.inf, weight)).astype(np.float32)

    def _logits(self, point: LensPoint, value: Array, mean: Array | float) -> Array:
        return centred(value) if self.logits else value

    def _uncapped(self, point: LensPoint, value: Array, mean: Array | float) -> Array:
        wide = value.astype(np.float64)
        return ((self.cap * np.arctanh(wide / self.cap) if self.cap else wide) / self.factor).astype(np.float32)

    def _capped(self, value: Array) -> Array:
        scaled = value * np.float32(self.factor)
        return self.cap * np.tanh(scaled / self.cap) if self.cap else scaled

    def _slope(self, value: Array) -> Array:
        """Of what comes behind the unembedding, at logits behind it."""
        inside = (value.astype(np.float64) / self.cap) ** 2 if self.cap else np.zeros_like(value)
        return (self.factor * (1 - inside)).astype(np.float32)

    def _scores(self, point: LensPoint, value: Array, mean: Array | float) -> Array:
        return np.where(np.isneginf(value), np.float32(LOWEST), value)

    def back(self, point: LensPoint, value: Array, like: Array) -> Array:
        """The source's value that shows as this one; `like` is the source's own."""
        if point.kind == "z":
            own: Array = self._turned(point, value.reshape(like.shape), back=True)
            own = own + self._bias_of_z(point.layer, like.shape[2]) if self.values else own
        elif point.kind in ("heads", "values"):
            batch, heads, seq, width = like.shape
            own = self._turned(point, value.reshape(batch, seq, heads, width), back=True)
            own = own + self.value_bias(point.layer) if point.kind == "values" and self.values else own
            own = own.transpose(HEADS)
        elif point.kind == "normed" and self.norms:
            weight, bias = self._affine(point)
            own = (centred(value) if self._norm(point).centred else value) * weight + bias
        elif point.kind == "uncapped":
            own = self._capped(value)
        else:
            own = value
        return np.ascontiguousarray(own, like.dtype)

    def landed(self, point: LensPoint, after: Array, before: Array, weights: str = "") -> Array:
        """What the change of a value that replaces nothing adds where it lands, by the weights that bring it there."""
        if weights:  # [batch, seq, head, d_model], a copy for each head; of fewer keys and values the first copies
            matrix = self.raw.reader.read(weights, point.layer)
            normed = (self._normalized(point, value[:, :, : len(matrix)], 0.0) for value in (after, before))
            change = np.subtract(*normed) * self._affine(point)[0]
            return np.einsum("bshm,hmd->bhsd", change, matrix).astype(np.float32)
        if point.kind.endswith((*PRODUCTS_OF_KINDS,)):
            own = (self._as_before_norm(point, value) for value in (after, before))
            return np.subtract(*(self._normalized(point, value, 0.0) for value in own)) * self._affine(point)[0]
        return (after - before).sum(axis=2) if point.kind == "result" else after - before

    def gradient(self, point: LensPoint, own: Array, landing: Array | None, value: Array) -> Array:
        """The gradient by the value at a point, made of those by its source, of this value, and by where it lands."""
        if not point.replaces and landing is not None:
            heads = own.shape[2] if point.kind == "result" else 0
            return np.repeat(landing[:, :, None], heads, axis=2) if heads else landing
        left = own if landing is None else own - landing
        if point.kind == "uncapped":
            return left * self._slope(value)
        if point.kind == "normed" and self.norms:
            left = left * self._affine(point)[0]
            return centred(left) if self._norm(point).centred else left
        if point.kind not in OF_HEADS:
            return left
        left = left if point.kind == "z" else left.transpose(HEADS)
        return _flat(self._turned(point, left, back=True, transposed=True))

    def passed_on(self, gradient: Array, before: Array, after: Array) -> Array:
        """A gradient by logits before the cap, with the slope of the cap before hooks for that after them."""
        return gradient * self._slope(before) / self._slope(after)

    def gradient_of_readers(
        self, point: LensPoint, value: Array, by_name: Mapping[str, Array], left: Array | None = None
    ) -> Array | None:
        """The gradient by what is computed of a source's value, made of those by what reads it; None without any.

        Args:
            left: what hooks left of the value at the point, if any were there.
        """
        if point.kind.startswith(HEAD_COPIES):
            shown = self.show(point, value)
            return self._of_copies(point, shown if left is None else left.reshape(shown.shape), by_name)
        readers = [(reader, name) for reader, name in point.read_by if reader in by_name]
        parts = [self._through(name, self._at_product(reader, name, point, value, by_name), point)
                 for reader, name in readers]  # fmt: skip
        if not parts:
            return None
        total = np.sum(parts, axis=0)
        if not point.norm:
            return total
        flat = point.kind.startswith("heads of")
        left = None if left is None else self._as_before_norm(point, left)
        point, value = self._before_norm(point, value)
        value = value if left is None else left
        later = flat or point.kind in (NORMED_LATER, BEFORE)
        if point.kind in ("scale", "normalized") or later or self.norms:
            total = total * self._affine(point)[0]
        if (self.norms or later) and self._norm(point).centred:  # what reads it has weights less their mean
            total = centred(total)
        if point.kind != "scale" and not later:
            return total
        normalized, scale = self._normalized(point, value, 0.0), self._scale(point, value, 0.0)
        if later:
            own = (total - normalized * (total * normalized).mean(axis=-1, keepdims=True)) / scale
            return _flat(own.transpose(HEADS)) if flat else own
        return -(total * normalized).sum(axis=-1, keepdims=True) / scale

    def _of_copies(self, point: LensPoint, value: Array, by_name: Mapping[str, Array]) -> Array | None:
        """The gradient by each head's copy of the stream, through the norm behind it, of that by what the head reads.

        x' = g w, less its mean where the norm takes out that; by the stream (x' - n mean(x' n)) / scale, n normalized.
        """
        if not (readers := [(name, by_name[reader]) for reader, name in point.read_by if reader in by_name]):
            return None
        matrices = {name: self.raw.reader.read(name, point.layer) for name, _ in readers}
        read = np.zeros(value.shape, np.float32)
        for name, own in readers:
            read[:, :, : len(matrices[name])] += np.einsum("bhsd,hmd->bshm", own, matrices[name])
        normalized, read = self._normalized(point, value, 0.0), read * self._affine(point)[0]
        read = centred(read) if self._norm(point).centred else read
        along = (read * normalized).mean(axis=-1, keepdims=True)
        return (read - normalized * along) / self._scale(point, value, 0.0)

    def _at_product(
        self, reader: str, name: str, point: LensPoint, value: Array, by_name: Mapping[str, Array]
    ) -> Array:
        """The gradient by a product, where what reads it lies behind a norm of its own too."""
        matrix, _, norm = name.partition(" of ")
        if not norm:
            return by_name[reader]
        before = point._replace(kind=f"{matrix} product", norm=norm, read_by=((reader, ""),))
        gradient = self.gradient_of_readers(before, value, by_name)
        assert gradient is not None
        return gradient

    def _through(self, name: str, gradient: Array, point: LensPoint) -> Array:
        if not name:
            return gradient
        name = name.partition(" of ")[0]
        matrix = self.raw.reader.read(name, point.layer)
        heads = name in ("W_Q", "W_K", "W_V")
        return np.einsum("bhsd,hmd->bsm", gradient, matrix) if heads else gradient @ matrix.T

    def cotangent(self, point: LensPoint, shown: Array, value: Array) -> Array:
        """A cotangent of the value at a point as one of its source, whose value is given."""
        like = value.shape
        if point.kind == "uncapped":
            return shown / np.maximum(self._slope(value), np.finfo(np.float32).tiny)
        if point.kind == "result":
            own = np.einsum("bshm,hdm->bshd", shown, self.weights.W_O[point.layer])
            return self._turned(point, own, transposed=True)
        if point.kind in OF_HEADS:
            batch, heads, seq, width = like if point.kind != "z" else (like[0], like[2], like[1], like[3])
            own = self._turned(point, shown.reshape(batch, seq, heads, width), transposed=True)
            return own if point.kind == "z" else own.transpose(HEADS)
        if point.kind == "normed" and self.norms:
            weight = self._affine(point)[0]
            return shown / np.where(weight == 0, np.inf, weight)
        if (point.kind in ("stream", "part") and self.stream) or (point.kind in KINDS_OF_LOGITS and self.logits):
            return centred(shown)
        return shown.reshape(like)

    def value_bias(self, layer: int) -> Array:
        """The biases of values, [kv_head, d_head]."""
        return self.biased.b_V[layer]

    def _bias_of_z(self, layer: int, heads: int) -> Array:
        return repeated(self.value_bias(layer), heads)

    def missing(self, layer: int, sums: Array) -> Array:
        """What z lacks where the rows of a changed pattern sum to something else than 1.

        With folded biases of values, these are added once, whatever the pattern; z of the graph has them times the sum.

        Args:
            sums: [batch, head, query].
        """
        return (1 - sums).transpose(0, 2, 1)[..., None] * self._bias_of_z(layer, sums.shape[1])

    def less_of_biases(self, layer: int, pattern: Array, z: Array) -> Array:
        """The gradient by a pattern whose biases of values are folded: they are added whatever it is."""
        lost = (z * self._bias_of_z(layer, z.shape[2])).sum(axis=-1)  # [batch, query, head]
        return pattern - lost.transpose(0, 2, 1)[..., None]

    def _norm(self, point: LensPoint) -> Any:
        return self.raw.graph.norm(point.norm, point.layer)

    def _affine(self, point: LensPoint) -> tuple[Array, Array]:
        read = self.raw.reader.read
        return read(f"{point.norm}_w", point.layer), read(f"{point.norm}_b", point.layer)


def _as_it_is(own: Coordinates, point: LensPoint, value: Array, mean: Array | float) -> Array:
    return value


SHOW_BY_KIND: dict[str, Callable[..., Array]] = {
    "stream": Coordinates._stream,
    BEFORE: Coordinates._stream,
    "part": Coordinates._part,
    "for its dtype": Coordinates._part,
    "every row": Coordinates._part,
    "heads": Coordinates._heads,
    "values": Coordinates._values,
    "z": Coordinates._z,
    "result": Coordinates._result,
    "scale": Coordinates._scale,
    "normalized": Coordinates._normalized,
    "norm of": Coordinates._norm_of,
    **dict.fromkeys((HEAD_COPIES + parts for parts in ("Q", "K", "V", "QKV")), Coordinates._input),
    "normed": Coordinates._normed,
    "logits": Coordinates._logits,
    "uncapped": Coordinates._uncapped,
    "scores": Coordinates._scores,
}
