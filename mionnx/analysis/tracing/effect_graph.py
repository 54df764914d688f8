"""`EffectGraph`: nodes, direct effects between them, and the influence that follows; the base of `AttributionGraph`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.tracing.influence import Leading, influence, leading, shares
from mionnx.errors import InputError, nearest
from mionnx.machine.ranges import at_least, at_most
from mionnx.machine.typed import typed
from mionnx.rewrite.gradient.way_back import FROZEN_PATTERN

NODE_SHARE, EDGE_SHARE = 0.8, 0.98  # shares of all influence that pruning leaves, as in circuit-tracer


@dataclass(frozen=True, eq=False, repr=False)
@typed(InputError)
class EffectGraph:
    """Nodes of one prompt and the direct effects between them; see `AttributionGraph`."""

    prompt: str
    tokens: tuple[str, ...]
    token_ids: NDArray[np.int64]
    layers: int
    hook: str
    hook_out: str
    features: NDArray[np.int64]
    activations: NDArray[np.float32]
    targets: tuple[str, ...]
    target_ids: NDArray[np.int64]
    probabilities: NDArray[np.float64]
    effects: NDArray[np.float32]
    active: int
    scan: str = ""
    groups: dict[str, tuple[str, ...]] = field(default_factory=dict)
    promotes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    cost: dict[str, float] = field(default_factory=dict)
    excited: dict[str, tuple[str, ...]] = field(default_factory=dict)
    skip: int = 1
    rules: str = FROZEN_PATTERN
    toward: str = ""
    toward_hook: str = ""
    toward_vector: NDArray[np.float32] | None = None

    @property
    def sources(self) -> list[str]:
        """Names of the columns of `effects`."""
        seq = len(self.tokens)
        names = [f"{layer}_{feature}_{position}" for layer, position, feature in self.features.tolist()]
        names += [f"error_{layer}_{position}" for layer in range(self.layers) for position in range(seq)]
        return names + [f"E_{token}_{position}" for position, token in enumerate(self.token_ids.tolist())]

    @property
    def receivers(self) -> list[str]:
        """Names of the rows of `effects`."""
        logits = [f"logit_{a}" if b < 0 else f"logit_{a}_{b}" for a, b in self.target_ids.tolist()]
        return self.sources[: len(self.features)] + ([self.toward] if self.toward else logits)

    def _weights(self, toward: str | None = None) -> NDArray[np.float64]:
        """How much each row counts, [features + logits]: probabilities of logits, or all on one node."""
        weights = np.zeros(len(self.effects))
        if toward is None:
            weights[len(self.features) :] = self.probabilities
        else:
            weights[index_of(toward, self.receivers)] = 1
        return weights

    def influence(self, toward: str | None = None) -> NDArray[np.float64]:
        """What share of the logits, or of one node, goes through each source, [features + errors + tokens].

        Args:
            toward: the node, a feature or a logit, by name; the logits by their probabilities if left out.

        Raises:
            InputError: no such node.
        """
        return influence(self.effects, self.features[:, 0], np.arange(len(self.features)), self._weights(toward))

    def leading(self, nodes: float = NODE_SHARE, edges: float = EDGE_SHARE, toward: str | None = None) -> Leading:
        """Masks of the nodes and edges of most influence, as circuit-tracer prunes.

        Args:
            nodes: share of all influence that nodes are to have.
            edges: share of the influence between these that edges are to have.
            toward: see `AttributionGraph.influence`.

        Raises:
            InputError: shares outside 0 to 1.
        """
        for name, share in (("nodes", nodes), ("edges", edges)):
            at_least(name, share, 0)
            at_most(name, share, 1)
        return leading(self.effects, self.features[:, 0], len(self.tokens), self._weights(toward), nodes, edges)

    @property
    def replacement_score(self) -> float:
        """Share of the influence that ends in tokens rather than in errors."""
        own = self.influence()
        tokens = own[-len(self.tokens) :].sum()
        return float(tokens / (tokens + own[self._errors].sum()))

    @property
    def completeness_score(self) -> float:
        """Share of what nodes read that comes of features and tokens, weighted by influence."""
        few, explained = len(self.features), 1 - shares(self.effects)[:, self._errors].sum(axis=1)
        weight = self._weights()
        weight[:few] += self.influence()[:few]
        return float((explained * weight).sum() / weight.sum())

    @property
    def _errors(self) -> slice:
        few = len(self.features)
        return slice(few, few + self.layers * len(self.tokens))


def index_of(node: str, names: Sequence[str]) -> int:
    """The index of a node among names."""
    if node not in names:
        raise InputError(f"no node {node!r} among {len(names):,}{nearest(node, names)}")
    return names.index(node)
