"""Features set to other values by ordinary specs, and a column of a graph beside what then happens."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.features.transcoder import Floats
from mionnx.analysis.features.transcoder_set import TranscoderSet
from mionnx.analysis.tracing.effect_graph import EffectGraph, index_of
from mionnx.analysis.tracing.local_model import LocalModel
from mionnx.analysis.tracing.targets import feature_of
from mionnx.errors import InputError, InterventionError
from mionnx.graph.fragment import Fragment, written
from mionnx.graph.hook_points import HookPoint
from mionnx.machine.brief import Brief
from mionnx.machine.decimals import decimal
from mionnx.machine.typed import typed
from mionnx.run.hook_cache import HookCache
from mionnx.run.runner import Runner
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.intervention import Intervention

Goals = dict[tuple[int, int], list[tuple[int, float]]]  # layer, position -> features and their values


@dataclass(frozen=True, eq=False, repr=False)
class Confirmation(Brief):
    """A column of a graph, and what happens to the same nodes when the feature is set.

    Attributes:
        node: the feature; `factor`: what its activation was multiplied by.
        receivers: [n], names of the nodes.
        predicted: [n], change by the graph: effect times (factor - 1).
        constrained: [n], change with patterns and outputs of all MLPs held; norms' scales are not, which the graph
            takes for constants.
        free: [n], change with patterns held alone: indirect effects included.
    """

    node: str
    factor: float
    receivers: tuple[str, ...]
    predicted: NDArray[np.float64]
    constrained: NDArray[np.float64]
    free: NDArray[np.float64]

    @property
    def difference(self) -> float:
        """The largest difference of predicted and constrained changes, in shares of the largest change."""
        largest = max(float(np.abs(self.predicted).max()), 1e-30)
        return float(np.abs(self.predicted - self.constrained).max()) / largest

    def _lines(self) -> Iterator[str]:
        yield f"largest difference: {self.difference:.1e} of the largest change"
        for i in np.argsort(-np.abs(self.predicted), kind="stable")[:5]:
            changes = (self.predicted[i], self.constrained[i], self.free[i])
            predicted, constrained, free = (decimal(one, 3, sign=True) for one in changes)
            yield f"{self.receivers[i]}: predicted {predicted}, held {constrained}, free {free}"


@typed(InputError)
def intervene(
    self: EffectGraph,
    model: Runner,
    transcoders: TranscoderSet,
    *,
    fix: Mapping[str, float] | None = None,
    scale: Mapping[str, float] | None = None,
    constrained: Sequence[int] | None = None,
    frozen: bool = True,
) -> HookSpec:
    """A spec that sets features of this prompt to other values, to be run on `token_ids`.

    Args:
        model, transcoders: those of the graph.
        fix: node -> its activation, whatever it was; of a feature that is no node too.
        scale: node -> factor of its activation here; 0 ablates it.
        constrained: layers whose MLPs write what they wrote, and what the features add, so that nothing goes on through
            features of these; if left out, effects go on through all MLPs, and what is added is the difference to the
            activation at that moment.
        frozen: attention patterns stay those of the prompt.

    Raises:
        InterventionError: a name that is no feature's, one that is both fixed and scaled, no change at all, or layers
            to which the features do not write.

    Example:
        spec = graph.intervene(model, transcoders, scale={"1_230_4": 0.0})
        model.forward(graph.token_ids, spec).output()
    """
    local = LocalModel(model, transcoders)
    layers = range(local.layers)
    if constrained is not None and (wrong := [one for one in constrained if one not in layers]):
        raise InterventionError(f"constrained: layer {wrong[0]} of {local.layers}")
    goals = _goals(self, local, dict(fix or {}), dict(scale or {}))
    points = [*local.read_at, *local.write_at] if constrained else []
    patterns = [str(HookPoint.AttnPattern(i)) for i in layers] if frozen or constrained else []
    spec = HookSpec()
    clean = model.forward(self.token_ids, HookSpec().capture([local.read_at[0], *points, *patterns]))
    for point in patterns:
        spec.intervene(point, Intervention.Replace(clean[point]))
    if constrained:
        return _constrain(spec, local, goals, clean, [*dict.fromkeys(constrained)])
    for (layer, position), ones in goals.items():
        coder = transcoders.layer(layer)
        for ahead in range(coder.decoder.shape[1]):
            fragment = _setting(local, layer, ahead, ones)
            reads = local.read_at[layer]
            change = Intervention.Splice(fragment, reads=reads, positions=[position])
            spec.intervene(local.write_at[layer + ahead], change)
    return spec


def _goals(graph: EffectGraph, local: LocalModel, fix: dict[str, float], scale: dict[str, float]) -> Goals:
    if not (fix or scale):
        raise InterventionError("no feature is fixed and none is scaled: nothing would change")
    if both := [node for node in fix if node in scale]:
        raise InterventionError(f"{both[0]} is fixed, and cannot be scaled besides")
    own = {name: float(value) for name, value in zip(graph.sources, graph.activations, strict=False)}
    goals: Goals = defaultdict(list)
    for node, number in (*fix.items(), *scale.items()):
        layer, feature, position = feature_of(node, local.transcoders, len(graph.tokens), InterventionError)
        if node in scale and node not in own:
            raise InterventionError(f"{node} is no node of this graph, so that its activation is not known: use fix=")
        if not np.isfinite(number):
            raise InterventionError(f"{node}: {number} is no finite number")
        goals[layer, position].append((feature, number * own[node] if node in scale else float(number)))
    return goals


def _read(local: LocalModel, layer: int, values: Floats) -> Floats:
    """What features of a layer read of the value at its hook point."""
    scale = local.scale(layer)
    return values if scale is None else values / scale


def _constrain(spec: HookSpec, local: LocalModel, goals: Goals, clean: HookCache, constrained: list[int]) -> HookSpec:
    outputs = {i: np.array(clean[local.write_at[i]][0]) for i in constrained}
    for (layer, position), ones in goals.items():
        coder, features = local.transcoders.layer(layer), np.array([feature for feature, _ in ones])
        x = _read(local, layer, clean[local.read_at[layer]][0, [position]])
        change = np.array([goal for _, goal in ones], np.float32) - coder.values(x, features)[0]
        reached = [i for i in outputs if 0 <= i - layer < coder.decoder.shape[1]]
        if not reached:
            raise InterventionError(f"features of layer {layer} do not write to any of the layers {constrained}")
        for i in reached:
            outputs[i][position] += change @ np.asarray(coder.decoder[features, i - layer], np.float32)
    for i, output in outputs.items():
        skip, own = local.transcoders.layer(i).skip, local.scale(i)
        if skip is None:
            spec.intervene(local.write_at[i], Intervention.Replace(output[None]))
            continue
        # a skip connection stays live: it is linear, and no feature
        matrix = skip if own is None else skip / own[:, None]
        rest = output - clean[local.read_at[i]][0] @ matrix
        spec.intervene(local.write_at[i], Intervention.Replace(rest[None]))
        spec.intervene(local.write_at[i], Intervention.Splice(_skipping(matrix), reads=local.read_at[i]))
    return spec


def _skipping(matrix: Floats) -> Fragment:
    """The value and the product of what is read with a matrix."""
    width, out = matrix.shape
    return written(
        f"""<ir_version: 10, opset_import: ["": 21]>
skip (float[batch, seq, {out}] old, float[batch, seq, {width}] x, float[{width}, {out}] w)
=> (float[batch, seq, {out}] y) {{
  product = MatMul(x, w)
  y = Add(old, product)
}}""",
        {"w": np.ascontiguousarray(matrix)},
    )


def _setting(local: LocalModel, layer: int, ahead: int, ones: list[tuple[int, float]]) -> Fragment:
    """The value and (goal - activation now) times the decoder, of some features."""
    coder, scale = local.transcoders.layer(layer), local.scale(layer)
    features = np.array([feature for feature, _ in ones])
    encoder = np.asarray(coder.encoder[features], np.float32)
    weights: dict[str, NDArray[Any]] = {
        "enc": (encoder if scale is None else encoder / scale).T,
        "bias": coder.bias[features],
        "limit": np.zeros(len(ones)) if coder.threshold is None else coder.threshold[features],
        "dec": np.asarray(coder.decoder[features, ahead], np.float32),
        "goal": np.array([goal for _, goal in ones]),
    }
    # a second feature that is nothing: a weight of one number would be part of the structure
    weights = {
        name: np.ascontiguousarray(np.concatenate([one, np.zeros_like(one)], axis=int(name == "enc")), np.float32)
        for name, one in weights.items()
    }
    inputs = ", ".join(f"float[{', '.join(map(str, one.shape))}] {name}" for name, one in weights.items())
    width, out = weights["enc"].shape[0], weights["dec"].shape[1]
    return written(
        f"""<ir_version: 10, opset_import: ["": 21]>
set_features (float[batch, seq, {out}] old, float[batch, seq, {width}] x, {inputs}) => (float[batch, seq, {out}] y) {{
  product = MatMul(x, enc)
  pre = Add(product, bias)
  positive = Relu(pre)
  none = Constant <value = float {{0.0}}> ()
  open = Greater(pre, limit)
  act = Where(open, positive, none)
  off = Sub(goal, act)
  change = MatMul(off, dec)
  y = Add(old, change)
}}""",
        weights,
    )


@typed(InputError)
def confirm(
    self: EffectGraph, model: Runner, transcoders: TranscoderSet, node: str, factor: float = 0.0
) -> Confirmation:
    """Set one feature, and compare what happens to all nodes with the graph's column.

    Args:
        model, transcoders: those of the graph.
        node: a feature of the graph, by name.
        factor: what its activation is multiplied by; 0 ablates it.

    Raises:
        InputError: no such feature, or the factor 1.

    Example:
        print(graph.confirm(model, transcoders, "1_230_4"))
    """
    if factor == 1:
        raise InputError("factor=1 changes nothing")
    column = index_of(node, self.sources[: len(self.features)])
    local, numbers = LocalModel(model, transcoders), []
    changed = [intervene(self, model, transcoders, scale={node: factor}, constrained=layers)
               for layers in ([*range(local.layers)], None)]  # fmt: skip
    for spec in (HookSpec(), *changed):
        # the last too: what is held behind the end would otherwise change nothing that is asked for
        points = dict.fromkeys([*local.read_at, str(HookPoint.FinalNorm), *filter(None, [self.toward_hook])])
        cache = model.forward(self.token_ids, spec.capture([*points]), logits=False)
        numbers.append(_numbers(self, local, cache))
    clean, constrained, free = numbers
    predicted = self.effects[:, column].astype(np.float64) * (factor - 1)
    return Confirmation(node, factor, tuple(self.receivers), predicted, constrained - clean, free - clean)


def _numbers(graph: EffectGraph, local: LocalModel, cache: HookCache) -> NDArray[np.float64]:
    """Pre-activations of the graph's features, without biases, and the numbers of its logits: [features + logits]."""
    numbers = np.zeros(len(graph.effects))
    for layer in np.unique(graph.features[:, 0]).tolist():
        rows = np.flatnonzero(graph.features[:, 0] == layer)
        position, feature = graph.features[rows, 1], graph.features[rows, 2]
        x = _read(local, layer, cache[local.read_at[layer]][0]).astype(np.float64)
        encoder = np.asarray(local.transcoders.layer(layer).encoder[feature], np.float64)
        numbers[rows] = (x[position] * encoder).sum(axis=1)
    vector = graph.toward_vector
    directions = local.directions(graph.target_ids) if vector is None else vector[None]
    end = cache[graph.toward_hook or str(HookPoint.FinalNorm)][0, -1]
    numbers[len(graph.features) :] = directions.astype(np.float64) @ end.astype(np.float64)
    return numbers
