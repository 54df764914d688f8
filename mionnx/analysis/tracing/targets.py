"""What a graph leads to: logits, or a number at another hook point: a feature's, a probe's."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.features.transcoder import Floats
from mionnx.analysis.features.transcoder_set import NORMED_INPUT, TranscoderSet
from mionnx.analysis.steering.directions import Direction
from mionnx.analysis.tracing.local_model import LocalModel
from mionnx.errors import HookError, InputError, MIError
from mionnx.graph.hook_points import HookPoint, layer_of
from mionnx.machine.ranges import index_within
from mionnx.machine.softmax import softmax
from mionnx.rewrite.gradient.way_back import FINAL_POINT
from mionnx.run.prompt import token_of
from mionnx.run.runner import Runner

Answer = int | str | Sequence[int | str]


@dataclass(frozen=True)
class End:
    """A number at a hook point and the last position: the product of a vector and the value there.

    Attributes:
        name, text: of the node: how it is called, and what it is.
        layers: how many of the first layers have features that lead there.
        vector: [hidden].
    """

    name: str
    text: str
    hook: str
    layers: int
    vector: Floats


def feature_of(node: str, transcoders: TranscoderSet, tokens: int, error: type[MIError]) -> tuple[int, int, int]:
    """Layer, number and position of a feature by its name, "layer_feature_position", in a text of some tokens."""
    parts = node.split("_")
    if len(parts) != 3 or not all(part.isdecimal() and len(part) < 10 for part in parts):
        raise error(f'{node!r} names no feature: "layer_feature_position", as "1_230_4"')
    layer, feature, position = map(int, parts)
    if layer >= len(transcoders) or position >= tokens:
        raise error(f"{node}: layer {layer} of {len(transcoders)}, position {position} of {tokens}")
    if feature >= (features := transcoders.layer(layer).features):
        raise error(f"{node}: feature {feature} of {features}")
    return layer, feature, position


def end_of(
    model: Runner, transcoders: TranscoderSet, toward: str | Direction, position: int, texts: Sequence[str]
) -> tuple[End, int]:
    """The end that a feature or a direction is, in a text of some tokens, and its position."""
    if isinstance(toward, Direction):
        place = index_within("position", position, len(texts))
        layers, text = _below(model, transcoders, toward), f"{toward.hook} at {texts[place]!r}"
        return End(f"{toward.hook}_{place}", text, toward.hook, layers, toward.vector), place
    if position != -1:
        raise InputError(f"position={position} is that of a Direction; {toward!r} names its own")
    local = LocalModel(model, transcoders)
    layer, feature, place = feature_of(toward, transcoders, len(texts), InputError)
    if not layer:
        raise InputError(f"{toward} is of layer 0: no features lead to it")
    vector, scale = np.asarray(transcoders.layer(layer).encoder[feature], np.float32), local.scale(layer)
    text = f"feature {feature} of layer {layer} at {texts[place]!r}"
    return End(toward, text, local.read_at[layer], layer, vector if scale is None else vector / scale), place


def _below(model: Runner, transcoders: TranscoderSet, toward: Direction) -> int:
    """How many layers lie below a direction's hook point."""
    layer = layer_of(toward.hook)
    if toward.hook == FINAL_POINT:
        layers = model.num_layers
    elif layer is None:
        raise HookError(f"no features lead to {toward.hook}: give a direction of a residual stream")
    else:
        read = HookPoint.MlpPre(layer) if transcoders.hook == NORMED_INPUT else transcoders.hook.format(layer)
        behind, before = str(HookPoint.ResidPost(layer)), [HookPoint.ResidPre(layer), HookPoint.ResidMid(layer), read]
        if toward.hook != behind and toward.hook not in (names := [*map(str, before)]):
            raise HookError(f"a graph leads to {', '.join([*names, behind, FINAL_POINT])}, and not to {toward.hook}")
        layers = layer + (toward.hook == behind)
    if not layers:
        raise HookError(f"no features lead to {toward.hook}, which lies before the first layer's MLP")
    if toward.vector.shape != (model.hidden_size,):
        raise InputError(f"a direction of {len(toward.vector)} numbers, for a stream of {model.hidden_size}")
    return layers


def pairs_of(model: Runner, answer: Answer | None, versus: int | str | None) -> NDArray[np.int64] | None:
    """Answer and versus of each target, [targets, 2], -1 for none; None where the prompt tells."""
    if answer is None:
        if versus is not None:
            raise InputError("versus= is taken from an answer's logit: give answer= too")
        return None
    answers = [answer] if isinstance(answer, int | str) else [*answer]
    if not answers:
        raise InputError("answer= has no tokens")
    other = -1 if versus is None else token_of(model, versus)
    pairs = [(token_of(model, one), other) for one in answers]
    if wrong := [own for own, other in pairs if own == other]:
        raise InputError(f"answer and versus are both token {wrong[0]}: their difference is 0")
    return np.array(pairs)


def logits_of(
    logits: NDArray[np.float64] | None, pairs: NDArray[np.int64] | None, most: int, share: float
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Pairs of answer and versus, and the probabilities of the answers; of differences, one share each."""
    if logits is None:  # the one target is another number
        return np.full((1, 2), -1), np.ones(1)
    own = softmax(logits)
    if pairs is None:
        top = np.argsort(-own, kind="stable")[:most]
        top = top[: int(np.searchsorted(np.cumsum(own[top]), share)) + 1]
        return np.stack([top, np.full(len(top), -1)], axis=1), own[top]
    if (pairs[:, 1] >= 0).all():
        return pairs, np.full(len(pairs), 1 / len(pairs))
    return pairs, own[pairs[:, 0]]
