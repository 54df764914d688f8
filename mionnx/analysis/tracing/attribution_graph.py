"""`AttributionGraph`: direct effects between the nodes of one prompt, and what is asked of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mionnx.analysis.features.dashboards import FeatureDashboards
from mionnx.analysis.tracing import attention_score, circuit_tracer_file, set_features, trace_view
from mionnx.analysis.tracing.effect_graph import EDGE_SHARE, NODE_SHARE, EffectGraph, index_of
from mionnx.errors import InputError
from mionnx.machine.brief import count, spelled
from mionnx.machine.decimals import decimal
from mionnx.machine.ranges import at_least
from mionnx.machine.typed import typed
from mionnx.view import Columns, Shown, View


@dataclass(frozen=True, eq=False, repr=False)
@typed(InputError)
class AttributionGraph(EffectGraph, Shown):
    """Direct effects of features, errors and tokens on features and logits, in one prompt (Ameisen et al. 2025).

    Nodes are named "layer_feature_position" (features), "error_layer_position", "E_token_position" (embeddings) and
    "logit_token"; effects are linear, with attention patterns, scales of norms and outputs of MLPs as constants.

    Attributes:
        prompt: the text; `tokens`, `token_ids`: [seq], of its tokens.
        layers: number of layers of the model, or of those whose features lead `toward` another node.
        hook, hook_out: the hook points that features read and stand for, "{}" for the layer.
        features: int64 [features, 3], layer, position and number of each feature that is a node.
        activations: [features].
        targets: the logits: token texts, or differences; `target_ids`: [logits, 2], answer and versus, -1 for none.
        probabilities: [logits], of the answers; the weights of their influence.
        effects: [features + logits, features + errors + tokens], the rows being targets; errors by layer and position.
        active: number of all active features.
        scan: the name by which a page of features knows them.
        groups: name -> nodes of a supernode.
        promotes: feature -> tokens whose logits it raises most by itself, of the features of most influence.
        excited: "layer_feature" -> texts that excite it most, see `describe`.
        cost: "seconds", and "bytes", an estimate of the memory.
        skip: first positions without features and errors.
        rules: "frozen_norm_pattern", or "frozen_norm" where patterns carry derivative.
        toward: the node in the place of logits, a feature or "hook point_position"; `toward_hook`, `toward_vector`
            [hidden]: the hook point, and what its value there is multiplied by.
    """

    intervene = set_features.intervene
    confirm = set_features.confirm
    attention = attention_score.attention

    def prune(
        self, nodes: float = NODE_SHARE, edges: float = EDGE_SHARE, toward: str | None = None
    ) -> AttributionGraph:
        """Keep the nodes and edges of most influence; all other effects are 0.

        Args:
            nodes, edges, toward: see `AttributionGraph.leading`.

        Example:
            graph.prune(0.5).figure()
        """
        best, few = self.leading(nodes, edges, toward), len(self.features)
        features = np.flatnonzero(best.nodes[:few])
        rows = np.concatenate([features, np.arange(few, len(self.effects))])
        columns = np.concatenate([features, np.arange(few, self.effects.shape[1])])
        effects = np.where(best.edges, self.effects, 0)[np.ix_(rows, columns)]
        return replace(self, features=self.features[features], activations=self.activations[features], effects=effects)

    def top(self, k: int = 10, toward: str | None = None) -> list[tuple[str, float]]:
        """The sources of most influence, by name.

        Args:
            toward: see `AttributionGraph.influence`.
        """
        at_least("k", k, 0)
        own, names = self.influence(toward), self.sources
        return [(names[i], float(own[i])) for i in np.argsort(-own, kind="stable")[:k]]

    def group(self, name: str, nodes: Sequence[str]) -> AttributionGraph:
        """The same graph with some nodes as one supernode, on its page and in circuit-tracer's file.

        Raises:
            InputError: no nodes, or one that is not there.

        Example:
            graph = graph.group("France", ["0_17_4", "1_3_4"])
        """
        if not nodes:
            raise InputError(f"the supernode {name!r} has no nodes")
        names = [*self.sources, *self.receivers[len(self.features) :]]
        for node in nodes:
            index_of(node, names)
        return replace(self, groups={**self.groups, name: tuple(nodes)})

    def describe(self, dashboards: FeatureDashboards, k: int = 3) -> AttributionGraph:
        """The same graph with the texts that excite its features most, which its page tells at each node.

        Args:
            dashboards: those of some of its features, from `max_activations`.
            k: texts of each.

        Raises:
            InputError: dashboards of none of its features.

        Example:
            graph.describe(model.max_activations(seen, transcoders, [node for node, _ in graph.top(20)])).page()
        """
        own = {f"{layer}_{feature}" for layer, _, feature in self.features.tolist()}
        if not (names := [name for name in dashboards.features if name in own]):
            raise InputError("the dashboards are of no feature of this graph")
        texts = {name: tuple(dashboards.texts(name, k)) for name in names}
        return replace(self, excited={**self.excited, **texts})

    def to_circuit_tracer(
        self, slug: str = "graph", scan: str | None = None, nodes: float = NODE_SHARE, edges: float = EDGE_SHARE
    ) -> dict[str, Any]:
        """The graph's leading part as circuit-tracer's file (schema 1), which its pages and Neuronpedia read.

        Args:
            slug: the graph's name.
            scan: the name by which a page of features knows them; the transcoders' own if left out.
            nodes, edges: see `AttributionGraph.leading`.
        """
        return circuit_tracer_file.entries(self, self.leading(nodes, edges), slug, scan, nodes)

    @classmethod
    def read(cls, path: str | Path) -> AttributionGraph:
        """Read a file of circuit-tracer's or Neuronpedia's (schema 1): its nodes and links, nothing that was pruned.

        Raises:
            InputError: no such file, or nodes of which two have one name.
        """
        return cls(**circuit_tracer_file.contents(Path(path)))

    def to_dict(self) -> dict[str, Any]:
        """The graph as `to_circuit_tracer` gives it."""
        return self.to_circuit_tracer()

    def _facts(self) -> Iterator[str]:
        yield from (spelled(self.prompt), f"{len(self.features):,} of {self.active:,} active features")
        yield from (count(self.layers, "layer"), " / ".join(map(repr, self.targets)))

    def _lines(self) -> Iterator[str]:
        yield f"replacement {decimal(self.replacement_score, 3)}, completeness {decimal(self.completeness_score, 3)}"
        for name, share in self.top(5):
            yield f"{name} {self._token(name)}: {decimal(share, 3)}"

    def _token(self, name: str) -> str:
        return repr(self.tokens[int(name.rpartition("_")[2])])

    def view(self) -> View:
        """The leading nodes, tokens across and layers up, and their edges."""
        return trace_view.view_of(self)

    def _columns(self) -> Columns:
        return trace_view.columns_of(self)
