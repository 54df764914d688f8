"""What senders write outside of a circuit: what they wrote on the corrupted prompt, zeros, or means over tokens.

1. A head is ablated by its value (`hook_z`), so that the bias of the attention's output stays, and so do learned
   positions beside the embedding; MLPs and mixers are ablated by their outputs, with their biases.
2. A sender that no kept edges lead to from the embedding is ablated too: what it computes of ablated values alone is no
   part of the circuit (EAP-IG prunes such nodes; with a corrupted prompt's values it would write just these).
3. The streams beside are sums of these: the model of which every sender is ablated, to which a circuit with no edge
   comes down, and which is the 0 of its faithfulness.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.circuits.node_values import OFF, NodeValues
from mionnx.analysis.circuits.nodes import Node, Nodes
from mionnx.analysis.circuits.parts import Floats, Parts
from mionnx.analysis.gradients.first_order import rows_of
from mionnx.analysis.sweep.ablation import class_places
from mionnx.analysis.sweep.comparison import Pair, Pairs
from mionnx.errors import InputError, nearest
from mionnx.graph.axes import sequence_axis
from mionnx.graph.hook_points import HookPoint
from mionnx.machine.moments import Moments
from mionnx.run.prompt import By, Ids, check_by, classes_of, prompt_ids
from mionnx.run.runner import Runner
from mionnx.run.tokenizing import Prompt
from mionnx.spec.hook_spec import HookSpec

PATCHING = "patching"  # the corrupted prompt's values
CARRIED = (PATCHING, "zero", "mean")
EMBED_HOOK = str(HookPoint.Embed)


def check_outside(ablation: str, reference: Prompt | None, by: By) -> None:
    """Refuse an ablation that does not exist, and what it has no use for."""
    check_by(by)
    if ablation not in CARRIED:
        raise InputError(f"ablation={ablation!r}; one of {', '.join(CARRIED)}{nearest(str(ablation), CARRIED)}")
    for name, value in (("reference", reference), ("by", by)):
        if ablation != "mean" and value is not None:
            raise InputError(f"{name}= is of means: ablation={ablation!r} has no use for it")


@dataclass(frozen=True)
class Outside:
    """What senders write where their edge is not kept."""

    ablation: str = PATCHING
    by: By = None
    means: dict[str, Moments] = field(default_factory=dict)  # hook point of a sender -> moments of its tokens

    def of(self, parts: Parts, values: NodeValues, ids: Ids) -> NodeValues:
        """The values of a pair with those outside of a circuit in the place of the corrupted prompt's."""
        if self.ablation == PATCHING:
            return values
        nodes = parts.nodes
        written = {name: self._written(name, values.of(name, 0), ids) for name in _hooks(nodes)}
        z = {layer: written[point][None] for layer, point in nodes.with_heads.items()}
        for layer, out in parts.attention_out(z).items():
            written[str(HookPoint.AttnOut(layer))] = out[0]
        written[nodes.stream(0)] = stream = _positions(values) + written[EMBED_HOOK]
        for layer in range(nodes.layers):
            for half, added in enumerate(nodes.outputs(layer), 1):
                stream = stream + written[added]
                if half == 1 and not nodes.parallel:
                    written[nodes.stream(2 * layer + 1)] = stream
            written[nodes.stream(2 * layer + 2)] = stream
        both = {name: np.stack([values.of(name, 0), value]) for name, value in written.items()}
        return NodeValues(both, values.logits)

    def _written(self, name: str, value: Floats, ids: Ids) -> Floats:
        """The value of a sender that is ablated, of the shape of one of its values."""
        if not self.means:
            return np.zeros_like(value)
        moments, axis = self.means[name], _tokens(name)
        mean = moments.mean[class_places(moments, classes_of(self.by, ids), self.by)]
        return np.array(np.broadcast_to(np.moveaxis(mean, 0, axis), value.shape), np.float32)


def make_outside(
    model: Runner, nodes: Nodes, ablation: str, compared: Pairs, reference: Prompt | None, by: By
) -> Outside:
    """Take the means, where means are asked for: of the reference prompts, else of the clean ones."""
    if ablation != "mean":
        return Outside(ablation)
    moments: dict[str, Moments] = {}
    pairs = compared.pairs if reference is None else [Pair(ids) for ids in prompt_ids(model, reference)]
    for pair in pairs:
        cache = model.forward(rows_of(pair, [pair.base]), HookSpec().capture(_hooks(nodes)), logits=False)
        classes = classes_of(by, pair.base)
        for name in _hooks(nodes):
            own = Moments.of(np.moveaxis(cache[name][0], _tokens(name), 0), classes)
            moments[name] = moments[name].merged(own) if name in moments else own
    return Outside(ablation, by, moments)


def reached(nodes: Nodes, masks: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The kept edges whose sender reads something of the embedding by kept edges, [circuits, senders, receivers]."""
    alive = np.zeros(masks.shape[:2], bool)
    alive[:, 0] = True  # the embedding
    counts = Counter(node.hook for node in (*nodes.senders, *nodes.receivers))
    # In execution order: what comes before a sender is known.
    for number, sender in enumerate(nodes.senders[1:], 1):
        own = [column for column, node in enumerate(nodes.receivers) if _reads_for(node, sender, counts)]
        alive[:, number] = (masks[:, :, own] & alive[:, :, None]).any(axis=(1, 2))
    return masks & alive[:, :, None]


def _reads_for(receiver: Node, sender: Node, counts: Counter[str]) -> bool:
    """Whether what a receiver reads goes into what a sender writes."""
    if sender.head is None or receiver.head is None:  # all of a mixer's heads read what it receives
        return receiver.label == sender.label.partition(".")[0]
    # A head reads the keys and values of its group.
    return (
        receiver.layer == sender.layer and sender.head * counts[receiver.hook] // counts[sender.hook] == receiver.head
    )


def captured(ablation: str) -> list[str]:
    """The hook points that are captured of a pair beside those of all circuits."""
    return [] if ablation == PATCHING else [EMBED_HOOK]


def _hooks(nodes: Nodes) -> list[str]:
    return [*dict.fromkeys(node.hook for node in nodes.senders)]


def _tokens(name: str) -> int:
    """The axis of the tokens in a value without its batch axis."""
    return sequence_axis(HookPoint.parse(name).axes or ()) - 1


def _positions(values: NodeValues) -> NDArray[Any]:
    """What the first stream has beside the embedding; the same of both prompts."""
    first = str(HookPoint.ResidPre(0))
    beside, other = (values.of(first, row) - values.of(EMBED_HOOK, row) for row in (0, 1))
    if np.abs(beside - other).max() > OFF * max(1.0, np.abs(values.of(first, 0)).max()):
        raise InputError(
            f"{first} is no sum of {EMBED_HOOK} and what does not depend on the tokens: it has no ablation"
        )
    return beside
