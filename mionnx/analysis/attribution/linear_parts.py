"""`LinearParts`: the norms of a model, found in its graph and run by themselves, and tokens as directions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import HookError, InputError, ModelError
from mionnx.graph.dataflow import Dataflow
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.matrices import Head, head
from mionnx.graph.weight_value import WEIGHT_PLACE, product_of
from mionnx.machine.once import once_property
from mionnx.run.segments import Rows, Segments

Array = NDArray[np.float64]
PROBE_ENTRIES = 2.0**6  # entries of the probe: their square is so far above every epsilon that it does not count
SLACK = 1e-5  # what the linear map may differ by, relative to the largest output
COARSE = 2.0**-7  # the same in 16 bits
ROUNDED = 0.1  # and of a head whose inputs, or weights, are rounded to few bits
PROBED_ROWS, PROBED = 2, 64  # of a product that tells the factor in front of the head


@dataclass(frozen=True)
class LinearNorm:
    """A norm as the linear map that it is at the activations of one run.

    A norm is y = w (x - c mean x) / s(x) + b, with c 0 (RMSNorm) or 1 (LayerNorm) and one scale s for each position.
    With s held at what the actual stream gave, a part of the stream contributes w (part - c mean part) / s to y (Elhage
    et al., "A Mathematical Framework for Transformer Circuits", 2021; TransformerLens' `apply_ln_to_stack`).
    """

    weight: Array
    bias: Array
    centred: bool  # c, whether the mean is taken out
    scale: Array  # s, [..., 1], one for each position of the actual stream

    def apply(self, stack: NDArray[Any], weighted: bool = True) -> Array:
        """Contributions of parts of the stream, [component, ..., hidden], to the norm's output, its bias aside."""
        self._check(stack)
        parts = centre(stack.astype(np.float64), self.centred) / self.scale
        return parts * self.weight if weighted else parts

    def project(self, stack: NDArray[Any], direction: Array, weighted: bool = True) -> Array:
        """The products [component, ...] of `apply(stack)` with a direction [..., hidden], without making it."""
        self._check(stack)
        return np.einsum("c...h,...h->c...", stack, self.turned(direction, weighted))

    def turned(self, direction: Array, weighted: bool = True) -> Array:
        """The direction [..., hidden] in front of the norm that reads what one behind it reads: the map transposed."""
        # Taking out the mean is symmetric, so that it can be done to the direction.
        return centre(direction * self.weight if weighted else direction, self.centred) / self.scale

    def _check(self, stack: NDArray[Any]) -> None:
        """Refuse a stack at other positions than the scale's."""
        try:
            np.broadcast_shapes(stack.shape[1:-1], self.scale.shape[:-1])
        except ValueError:
            raise InputError(
                f"the stack is {list(stack.shape)}, and the norm was read at positions of shape "
                f"{list(self.scale.shape[:-1])}: give the pos_slice that the stack was made with"
            ) from None


def centre(values: Array, centred: bool) -> Array:
    """Values [..., hidden] less their mean, if `centred`."""
    return values - values.mean(axis=-1, keepdims=True) if centred else values


def linearise(norm: Callable[[NDArray[Any]], NDArray[Any]], stream: NDArray[Any], name: str) -> LinearNorm:
    """Find the linear map that equals a norm, [n, hidden] -> [n, hidden], at a stream [..., hidden], by running it."""
    hidden = stream.shape[-1]
    # Alternating signs, so that the mean is 0 and every entry of the weight shows.
    probe = np.where(np.arange(hidden) % 2, -PROBE_ENTRIES, PROBE_ENTRIES)
    # One run for all: zeros give the bias, a constant tells whether the mean is taken out, the probe gives the weight.
    rows = np.concatenate([[np.zeros(hidden), np.full(hidden, PROBE_ENTRIES), probe], stream.reshape(-1, hidden)])
    outputs = norm(rows.astype(stream.dtype)).astype(np.float64)
    bias, flat, probed = outputs[:3]  # b = f(0)
    tolerance = SLACK if stream.dtype.itemsize >= 4 else COARSE
    # Where the mean is taken out, a constant gives no more than b.
    centred = bool(np.abs(flat - bias).max() <= tolerance * np.abs(probed - bias).max())
    deviations = centre(probe, centred)
    # For this probe the scale is known: the root of the mean square, beside which epsilon does not count.
    weight = (probed - bias) / (deviations / np.sqrt((deviations**2).mean()))
    actual, gained = centre(rows[3:].astype(np.float64), centred) * weight, outputs[3:] - bias
    projected = (actual * gained).sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):  # by least squares: s = <u, u> / <u, f(x) - b>
        scale = (actual**2).sum(axis=-1, keepdims=True) / projected
        wrong = np.abs(actual / scale - gained).max() / np.abs(gained).max()
    if not wrong <= tolerance:
        raise ModelError(
            f"{name} is no norm that attribution knows, LayerNorm or RMSNorm: as a linear map it differs from what the "
            f"graph computes by {wrong:.1e} of its largest value"
        )
    return LinearNorm(weight, bias, centred, scale.reshape(*stream.shape[:-1], 1))


Part = tuple[str, str]  # the names of the values that a part of the graph begins and ends with
AT_INPUTS = frozenset({"Reshape", "DynamicQuantizeLinear", "QuantizeLinear", "DequantizeLinear"})  # before a product
# What leaves a head's share of the attention output as it is, added to others.
PLAIN_OPERATORS = frozenset({"Add", "Reshape", "Identity", "Cast", "Squeeze", "Unsqueeze"})


class LinearParts(Segments):
    """The norms of one model, found in its graph and run by themselves, and the linear part of its head.

    That is logits = factor (front W_U^T y + bias) + offset, where y is the final norm's output. Both factors (Cohere's
    `logit_scale`; MiniCPM's in front) and the offset are found by running the nodes around the matrix product. A soft
    cap is no part of it: logits are then those before the cap.
    """

    @once_property
    def head(self) -> Head:
        """The matrix product of the logits."""
        return head(self.model)

    @once_property
    def front(self) -> float | None:
        """The factor of the final norm's output in the head's product; None where the head transforms it first."""
        final, product = str(HookPoint.FinalNorm), self.head.product
        width = self.model.metadata.sizes.hidden_size
        y = np.random.default_rng(0).standard_normal((1, PROBED_ROWS, width))
        begin = final if final in self.model.metadata.hooks else self.end
        if len(self.head.weight) != width or not self.flow.needed([begin], [product]):  # OPT-350m: a narrower table
            return None
        outputs = self._from(begin, product, y)[..., :PROBED]
        outputs = outputs if self.head.bias is None else outputs - np.asarray(self.head.bias[:PROBED], np.float64)
        plain = y @ np.asarray(self.head.weight[:, :PROBED], np.float64)
        factor = float((outputs * plain).sum() / (plain * plain).sum())
        exact = self.model.metadata.dtype in ("float32", "float64")
        slack = ROUNDED if self.model.rounds_activations or self.model.in_blocks else 10 * SLACK if exact else COARSE
        if not np.abs(outputs - factor * plain).max() <= slack * np.abs(outputs).max():
            return None
        return 1.0 if abs(factor - 1) <= slack else factor

    @property
    def factor(self) -> float:
        """What a product of W_U's column with the final norm's output counts for in a logit."""
        if self.front is None:
            raise InputError(
                f"the head of {self.model.name} transforms the final norm's output before its product with the "
                "unembedding: logits are no linear function of it"
            )
        return self.front * self._line[0]

    @once_property
    def output_norms(self) -> dict[int, Part]:
        return output_norms(self.model)

    def norm(self, part: Part, rows: NDArray[Any], beside: tuple[Part, ...] = ()) -> NDArray[Any]:
        """Run one norm; those `beside` it, itself among them, are opened as one graph, where they run on zeros."""
        group = beside or (part,)
        piece = self.open([*dict.fromkeys(first for first, _ in group)], [last for _, last in group])
        feeds = {first: rows if first == part[0] else np.zeros_like(rows) for first, _ in group}
        ranks = {name: entry.rank for name, entry in piece.program.inputs.items()}
        # Norms of some families run on [rows, hidden], without a batch axis.
        feeds = {name: array if ranks[name] == 2 else array[None] for name, array in feeds.items()}
        return self.compute(piece, Rows.blank(1, len(rows)), [part[1]], feeds)[part[1]].reshape(rows.shape)

    def linear(self, part: Part, stream: NDArray[Any], beside: tuple[Part, ...] = ()) -> LinearNorm:
        """The linear map that one norm is at a stream [..., hidden]."""
        name = f"{self.model.metadata.family}: what lies between {part[0]} and {part[1]}"
        return linearise(lambda rows: self.norm(part, rows, beside), stream, name)

    @once_property
    def _line(self) -> tuple[float, NDArray[np.float64] | None]:
        """The factor, and what is added to all logits, [vocab] or None."""
        own = None if self.head.bias is None else np.asarray(self.head.bias, np.float64)
        # The product is the logits already, or a soft cap follows it, before which logits are taken.
        if self.head.capped or self.head.product == str(HookPoint.Logits):
            return 1.0, own
        probes = [self._after(value) for value in (0.0, 1.0, 2.0)]  # a third point tells a line from a curve
        factors = probes[1] - probes[0]
        # The factor must be the same for all logits, and from 1 to 2 as from 0 to 1.
        if np.abs(probes[2] - probes[1] - factors).max() > 1e-5 * np.abs(factors).max() or np.ptp(factors) > 1e-5 * abs(
            factors[0]
        ):
            raise ModelError(f"{self.model.metadata.family}: the logits are no multiple of what the head gives")
        offset = probes[0] + (0 if own is None else factors[0] * own)
        return float(factors[0]), offset if offset.any() else None

    def _after(self, value: float) -> NDArray[np.float64]:
        """The logits [vocab] that follow from a matrix product with this value everywhere."""
        product = np.full((1, 1, self.model.metadata.sizes.vocab_size), value)
        return self._from(self.head.product, str(HookPoint.Logits), product)[0, 0]

    def _from(self, first: str, last: str, values: NDArray[Any]) -> NDArray[np.float64]:
        return self.run(Rows.blank(*values.shape[:2]), {first: values}, [last])[last].astype(np.float64)

    def directions(self, ids: NDArray[np.integer[Any]]) -> NDArray[np.float64]:
        """Directions [..., hidden] of tokens [...]; times y they give logits less the offset."""
        count = self.head.weight.shape[1]
        if ids.size and not 0 <= ids.min() <= ids.max() < count:
            raise InputError(
                f"token {int(ids.max() if ids.min() >= 0 else ids.min())}: the head gives 0 to {count - 1}"
            )
        columns = np.ascontiguousarray(np.moveaxis(self.head.weight[:, ids], 0, -1))
        return columns.astype(np.float64) * self.factor

    def offset(self, token: int) -> float:
        """The sum of the biases in a token's logit."""
        return 0.0 if self._line[1] is None else float(self._line[1][token])

    def uncapped(self, logits: NDArray[Any], stream: NDArray[Any]) -> NDArray[np.float64]:
        """The logits [vocab] that are linear in y: the model's, or those before a soft cap, by the last stream."""
        if not self.head.capped:
            return logits.astype(np.float64)
        return self._from(self.end, self.head.product, stream[None, None]).reshape(-1)


def final_norm(hooked: HookedModel) -> Part:
    """The norm before the head."""
    return str(HookPoint.ResidPost(hooked.metadata.sizes.num_layers - 1)), str(HookPoint.FinalNorm)


def input_norm(hooked: HookedModel, layer: int, mlp: bool) -> Part:
    """The norm before a layer's attention, or before its MLP; nothing marks that of a recurrence."""
    flow = Dataflow(hooked.proto)
    middle, before = str(HookPoint.ResidMid(layer)), str(HookPoint.ResidPre(layer))
    if mlp:
        return middle if middle in flow.producers else before, str(HookPoint.MlpPre(layer))
    query = str(HookPoint.AttnQ(layer))
    if query not in flow.producers:
        raise HookError(f"{hooked.metadata.family}: layer {layer} has no {query} to find its norm by")
    products = _products(flow, query, before)
    if not products:
        raise HookError(f"{query} comes from no matrix product")
    # The last product before the queries is their projection, which reads the norm.
    end = flow.nodes[max(products)].input[0]
    # Behind the norm the value may be reshaped, or quantised for the product: the norm ends before that.
    while (node := flow.producer(end)) is not None and node.op_type in AT_INPUTS:
        end = node.input[0]
    return before, end


def _products(flow: Dataflow, end: str, start: str) -> set[int]:
    return {i for i in flow.ancestors([end], {start}) if flow.nodes[i].op_type in WEIGHT_PLACE}


def output_norms(hooked: HookedModel) -> dict[int, Part]:
    """Layer -> the norm or factor behind its attention, if any: from the sum of heads' shares to `hook_attn_out`."""
    flow, norms = Dataflow(hooked.proto), {}
    for layer in (i for i, one in enumerate(hooked.metadata.layers) if one.attention):
        start, end = str(HookPoint.ResidPre(layer)), str(HookPoint.AttnOut(layer))
        value, plain = end, True
        while (node := flow.producer(value)) is not None and product_of(flow, node) is None:
            plain &= node.op_type in PLAIN_OPERATORS
            # The way back from the output to the heads goes along the operand that a weight's product feeds.
            value = next((name for name in node.input if _products(flow, name, start)), "")
        if not plain:
            norms[layer] = (value, end)
    return norms
