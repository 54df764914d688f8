"""Laws that hold in every decoder or encoder, whatever its weights: an adopted graph is run once and checked.

No reference is needed. What is named wrongly breaks a law: a pattern that is no pattern, keys that are values, a branch
without its bias.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from exporters.adopt.mixer import recurred
from exporters.adopt.recognise import sum_of, ungated
from exporters.probe import PROBE_TOKENS, Array, Probe, open_part, open_session, probe, run
from mionnx.errors import ExportError
from mionnx.graph.dataflow import Dataflow
from mionnx.graph.fused_operators import MASKED_SCORE
from mionnx.graph.io_names import PASTS, past_of
from mionnx.graph.output_head import LOGITS
from mionnx.graph.stock_graph import difference

PADDING = 2
INT8 = 1 / 127  # one step of activations that are rounded to 8 bits: a last bit before may move a whole step
INT8_CALLS = 32 * INT8  # where the scale of activations is one of a whole call, and calls differ
ROUNDS = frozenset(("DynamicQuantizeLinear", "DynamicQuantizeMatMul", "QuantizeLinear"))


@dataclass(frozen=True)
class LawResult:
    """Outcome of a law, which is told in words."""

    law: str
    layer: int | None  # the layer where it holds least; None if it is of the whole model
    difference: float  # the largest difference of the two sides, relative to the largest number
    allowed: float  # the difference that rounding explains

    @property
    def holds(self) -> bool:
        """Whether the difference is one of rounding; NaN is none."""
        return bool(self.difference <= self.allowed)

    def __str__(self) -> str:
        where = "" if self.layer is None else f" (layer {self.layer})"
        return f"{self.law}{where}: {self.difference:.1e}, allowed {self.allowed:.1e}"


def probe_points(proto: onnx.ModelProto, folder: Path, names: Sequence[str]) -> Probe:
    """Run a graph once, with its hook points, the sums behind normed ones and heads before their gates as outputs."""
    beside = {of(name) for name in names for of in (sum_of, ungated)}
    beside &= {name for node in proto.graph.node for name in node.output}
    return probe(proto, folder, [*names, *sorted(beside - {*names})])


def check_laws(
    probed: Probe, proto: onnx.ModelProto, folder: Path, layers: int, sinks: bool, both: bool = False
) -> list[LawResult]:
    """Check every law; a result is that of the layer with the largest difference. `both`: of an encoder."""
    results = [
        compare(law, layer, left, right, probed.rounding)
        for layer in range(layers)
        for law, left, right in _laws_of_layer(probed.values, layer, sinks, both)
    ]
    last = f"blocks.{layers - 1}.hook_resid_post"
    head = open_part(Dataflow(proto), folder, [last], [LOGITS])
    (lens,) = run(head, [LOGITS], {**probed.feeds, last: probed.values[last]})
    end = compare("lens of the last layer = logits", None, lens, probed.values[LOGITS], probed.rounding)
    return [*worst_of(results), end]


def worst_of(results: Iterable[LawResult]) -> list[LawResult]:
    """Of each law the result that is farthest from it; NaN is farther than any number."""
    worst = dict[str, LawResult]()
    for one in results:
        # `not <=`, since every comparison with NaN is false
        if one.law not in worst or not one.difference <= worst[one.law].difference:
            worst[one.law] = one
    return [*worst.values()]


def check_extension(probed: Probe, proto: onnx.ModelProto, folder: Path, layers: int) -> list[LawResult]:
    """Check a mask and a cache, or states: padding before the text, and the text in two calls, change no logits."""
    session = open_session(proto, folder)
    allowed = INT8_CALLS if rounds_activations(proto) else layers * probed.rounding
    logits, half = probed.values[LOGITS], PROBE_TOKENS // 2
    (padded,) = run(session, [LOGITS], {name: _padded(name, value) for name, value in probed.feeds.items()})
    results = [compare("logits after padding = logits", None, padded[:, PADDING:], logits, allowed)]
    presents = [entry.name for entry in session.get_outputs() if past_of(entry.name)]
    if presents:
        early = {name: value if name.startswith(PASTS) else value[:, :half] for name, value in probed.feeds.items()}
        first, *cache = run(session, [LOGITS, *presents], early)
        pasts = (str(past_of(name)) for name in presents)
        late = {name: value if "mask" in name else value[:, half:] for name, value in probed.feeds.items()}
        (second,) = run(session, [LOGITS], {**late, **dict(zip(pasts, cache, strict=True))})
        both = np.concatenate([first, second], axis=1)
        results.append(compare("logits in two parts = logits", None, both, logits, allowed))
    return results


def check_padding(probed: Probe, proto: onnx.ModelProto, folder: Path, layers: int) -> list[LawResult]:
    """Check an encoder on texts with padding behind them: no token reads it, and no stream of a token changes."""
    points = [f"blocks.{layer}.{name}" for layer in range(layers) for name in ("hook_resid_post", "attn.hook_pattern")]
    session = open_session(proto, folder, points)
    feeds = {name: _padded_behind(name, value) for name, value in probed.feeds.items()}
    padded = dict(zip(points, run(session, points, feeds), strict=True))
    rounds, tokens = rounds_activations(proto), PROBE_TOKENS
    results = list[LawResult]()
    for layer in range(layers):
        stream, pattern = (f"blocks.{layer}.{name}" for name in ("hook_resid_post", "attn.hook_pattern"))
        behind = padded[pattern][..., :tokens, tokens:]
        results.append(compare("no weight on padding", layer, behind, np.zeros_like(behind), probed.rounding))
        allowed = INT8_CALLS if rounds else layers * probed.rounding
        same = padded[stream][:, :tokens]
        results.append(compare("stream before padding = stream", layer, same, probed.values[stream], allowed))
    return worst_of(results)


def _padded_behind(name: str, value: Array) -> Array:
    """An input of the probe with padding behind the text."""
    # a row of the table of positions, and of tokens, that the probe has
    filler = value[:, -PADDING:] if name in ("position_ids", "input_ids") else np.zeros_like(value[:, :PADDING])
    return np.concatenate([value, filler], axis=1)


def _padded(name: str, value: Array) -> Array:
    """An input of the probe with padding before the text."""
    filler = np.zeros((value.shape[0], PADDING), value.dtype)
    return value if name.startswith(PASTS) else np.concatenate([filler + (name == "input_ids"), value], axis=1)


def rounds_activations(proto: onnx.ModelProto) -> bool:
    """Whether a graph rounds activations to 8 bits, by itself or inside of a kernel."""
    return any(
        node.op_type in ROUNDS or any(entry.name == "accuracy_level" and entry.i == 4 for entry in node.attribute)
        for node in proto.graph.node
    )


def rounding(proto: onnx.ModelProto, probed: Probe) -> float:
    """The difference that the rounding of one layer explains."""
    return INT8 if rounds_activations(proto) else probed.rounding


def refuse_broken(laws: Iterable[LawResult], graph: str) -> None:
    """Refuse a graph, named as the beginning of a sentence, that breaks a law."""
    broken = [str(law) for law in laws if not law.holds]
    if broken:
        raise ExportError(f"{graph} not understood: {'; '.join(broken)}")


def compare(law: str, layer: int | None, left: Array, right: Array, allowed: float) -> LawResult:
    """Compare the two sides of a law."""
    off = difference(left, right) if np.shape(left) == np.shape(right) else np.inf
    return LawResult(law, layer, off, allowed)


def _laws_of_layer(
    values: Mapping[str, Array], layer: int, sinks: bool, both: bool
) -> Iterator[tuple[str, Array, Array]]:
    """Each law in words, with its two sides."""

    def get(name: str) -> Array | None:
        return values.get(f"blocks.{layer}.{name}")

    if get("attn.hook_pattern") is not None:
        yield from _laws_of_attention(get, values, layer, sinks, both)
    if get("ssm.hook_y") is not None:
        y, state = recurred(*(get(f"ssm.hook_{part}") for part in ("q", "k", "v", "log_decay", "write")))
        yield ("y = q state", get("ssm.hook_y"), y)
        yield ("state = the sum of what is written", get("ssm.hook_state"), state)
    pre, mid, post = get("hook_resid_pre"), get("hook_resid_mid"), get("hook_resid_post")
    mid_sum, post_sum = get(sum_of("hook_resid_mid")), get(sum_of("hook_resid_post"))
    mid_sum, post_sum = mid if mid_sum is None else mid_sum, post if post_sum is None else post_sum
    if mid is not None:
        yield ("mid = pre + attn_out", pre + get("hook_attn_out"), mid_sum)
        yield ("post = mid + mlp_out", mid + get("hook_mlp_out"), post_sum)
    elif get("hook_mlp_out") is None:
        yield ("post = pre + attn_out", pre + get("hook_attn_out"), post_sum)
    else:
        yield ("post = pre + attn_out + mlp_out", pre + get("hook_attn_out") + get("hook_mlp_out"), post_sum)
    logits, chosen = get("mlp.hook_router_logits"), get("mlp.hook_expert_indices")
    if logits is not None and chosen is not None:
        largest = np.sort(logits, axis=-1)[..., : -chosen.shape[-1] - 1 : -1]
        yield ("chosen experts = largest router logits", np.take_along_axis(logits, chosen, -1), largest)


def _laws_of_attention(
    get: Callable[[str], Array | None], values: Mapping[str, Array], layer: int, sinks: bool, both: bool
) -> Iterator[tuple[str, Array, Array]]:
    pattern, v, z = get("attn.hook_pattern"), get("attn.hook_v"), get("attn.hook_z")
    before = get(ungated("attn.hook_z"))  # behind a gate z is what the output projection reads
    z = z if before is None else before
    q, k = (values.get(f"blocks.{layer}.attn.hook_rot_{x}", get(f"attn.hook_{x}")) for x in "qk")
    # in float64, then in the pattern's dtype: a float16 sum over keys rounds at each step
    sums = pattern.sum(-1, dtype=np.float64).astype(pattern.dtype)
    # a sink takes a share of each row: rows sum to at most 1
    yield ("pattern rows sum to 1", np.maximum(sums, 1) if sinks else sums, np.ones_like(sums))
    if not both:
        yield ("pattern is causal", np.triu(pattern, 1), np.zeros_like(pattern))
    groups = pattern.shape[1] // v.shape[1]
    yield ("z = pattern v", np.einsum("bhqk,bhkd->bqhd", pattern, np.repeat(v, groups, 1)), z)
    yield ("scores rise with q k", *_rises(q, np.repeat(k, groups, 1), get("attn.hook_scores"), both))
    if f"present.{layer}.key" in values:
        yield ("present = keys", values[f"present.{layer}.key"], k)
        yield ("present = values", values[f"present.{layer}.value"], v)


def _rises(q: Array, k: Array, scores: Array, both: bool) -> tuple[Array, Array]:
    """Scores of each query in the order of q k, and sorted: equal if they rise with q k."""
    if q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise ExportError(f"queries {list(q.shape)} and keys {list(k.shape)} are no two that are multiplied")
    products = np.einsum("bhqd,bhkd->bhqk", q.astype(np.float64), k.astype(np.float64))
    # A scale and a soft cap keep the order; so does a mask, among the keys that are seen. What positions add (ALiBi) is
    # the same in all rows: the differences of two rows rise with those of their q k.
    # later keys, or those of a window, come last in the order, and count as equal
    hidden = scores <= MASKED_SCORE if both else np.broadcast_to(~np.tri(scores.shape[-1], dtype=bool), scores.shape)
    alone, wide = _rise(products, scores.astype(np.float64), hidden), scores.astype(np.float64)
    with np.errstate(invalid="ignore"):  # of two masked scores
        between = _rise(products[1:] - products[:-1], wide[1:] - wide[:-1], hidden[1:])
    off = [float(np.abs(one - other).max(initial=0)) for one, other in (alone, between)]
    pair = alone if not off[1] < off[0] else between
    return pair[0].astype(scores.dtype), pair[1].astype(scores.dtype)


def _rise(products: Array, scores: Array, hidden: Array) -> tuple[Array, Array]:
    """The seen scores of each query in the order of some products, and sorted."""
    products = products.copy()
    products[hidden] = np.inf
    shown = np.where(np.isinf(products), 0, scores)
    order = np.argsort(products, axis=-1)
    ordered, visible = np.take_along_axis(shown, order, -1), np.take_along_axis(np.isfinite(products), order, -1)
    return ordered, np.where(visible, np.sort(np.where(visible, ordered, np.inf), -1), ordered)
