"""`EdgeAttribution`: a score for every edge between two nodes, with table, figure and page."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.circuits.importances import read_importances, write_importances
from mionnx.analysis.circuits.nodes import all_nodes
from mionnx.errors import InputError, nearest
from mionnx.graph.hook_points import layer_of
from mionnx.machine.brief import count
from mionnx.machine.decimals import decimal
from mionnx.machine.ranges import at_least
from mionnx.machine.typed import typed
from mionnx.run.runner import Runner
from mionnx.view import Columns, HeatMap, Shown, Table, View

PRINTED_EDGES = 5  # edges of a printed result
SHOWN_NODES = 128  # senders, and receivers, of a page: all 70,000 edges of a model of 30 layers take 2 MB
Edge = tuple[str, str]  # labels of sender and receiver
RANKS = ("size", "score")


def check_rank(rank: str) -> None:
    """Refuse an unknown order of edges."""
    if rank not in RANKS:
        raise InputError(f"rank={rank!r}; one of {', '.join(RANKS)}{nearest(str(rank), RANKS)}")


@dataclass(repr=False)
@typed(InputError)
class EdgeAttribution(Shown):
    """Scores of edges between nodes: the change of the metric, to first order.

    A score is how much the metric changes when this edge alone carries the other prompt's value.

    Attributes:
        scores: float64 [senders, receivers], mean over pairs; 0 where there is no edge.
        edges: bool [senders, receivers]: whether the receiver reads what the sender writes.
        senders, receivers: labels: "embed", "a2.h3" (head 3 of layer 2), "m1" (its MLP); of receivers "a2.h3<q>" (of a
            gate "a2.h3<g>"), "m1", "logits"; "a2.kv1<k>" where heads share keys and values, and of ungrouped scores
            "a2.h3<k>".
        hooks, receiving: hook point and head (None where a value has no heads) of each sender, and of each receiver, as
            `path_patch` names them; of ungrouped keys and values the head that reads them.
        clean, corrupted: the metric of the two runs, mean over pairs.
        patching: "noising" (corrupted values put into the clean run) or "denoising".
        rules, steps, along: see `edge_attribution`; 0 steps are scores of a file.
        cost: numbers of "edges", "pairs" and "seconds".
    """

    scores: NDArray[np.float64]
    edges: NDArray[np.bool_]
    senders: tuple[str, ...]
    receivers: tuple[str, ...]
    hooks: tuple[tuple[str, int | None], ...]
    receiving: tuple[tuple[str, int | None], ...]
    clean: float
    corrupted: float
    metric: str
    patching: str
    rules: str
    steps: int
    about: str
    cost: dict[str, float] = field(default_factory=dict)
    along: str = "inputs"
    IN_JSON = ("title", "senders", "receivers", "hooks", "receiving", "clean", "corrupted", "metric", "patching",
               "rules", "steps", "along", "about", "cost", "edges", "scores")  # fmt: skip

    @property
    def count(self) -> int:
        """Number of edges."""
        return int(self.edges.sum())

    @property
    def ungrouped(self) -> bool:
        """Whether keys and values are those of single query heads; also where no heads share them."""
        return not any(".kv" in label for label in self.receivers)

    @property
    def how(self) -> str:
        """The name of the method, with its steps and rules."""
        if not self.steps:
            return "scores of a file"
        between = "" if self.along == "inputs" else f"-{self.along}"
        name = "EAP" if self.steps == 1 else f"EAP-IG{between}, {self.steps} steps"
        return name if self.rules == "gradient" else f"{name}, {self.rules}"

    @property
    def title(self) -> str:
        """A short line for pictures."""
        return f"Edge attribution ({self.how}, {self.patching})"

    @property
    def costs(self) -> NDArray[np.float64]:
        """What corrupting each edge costs the metric, [senders, receivers]: above 0 for edges that help."""
        return -self.scores if self.patching == "noising" else self.scores

    def top(self, k: int = 10, rank: str = "size") -> list[tuple[str, str, float]]:
        """The k leading edges: sender, receiver, score; see `ranked`."""
        at_least("k", k, 0)
        return [
            (self.senders[sender], self.receivers[receiver], float(self.scores[sender, receiver]))
            for sender, receiver in self.ranked(rank)[:k].tolist()
        ]

    def ranked(self, rank: str = "size") -> NDArray[np.int64]:
        """[edges, 2]: sender and receiver of every edge, the leading one first.

        Args:
            rank: "size", the largest score to either side first; or "score", the edge first that helps most.
        """
        check_rank(rank)
        costs = self.costs if rank == "score" else np.abs(self.scores)
        # Stable: equal edges stay in execution order.
        order = np.argsort(-costs[self.edges], kind="stable")
        ranked: NDArray[np.int64] = np.argwhere(self.edges)[order]
        return ranked

    def to_importances(self, path: str | Path, model: Runner, edges: int | None = None) -> Path:
        """Write the scores as EAP-IG and the MIB circuit track read them, `.json` or `.pt`.

        What corrupting an edge costs is its score there. Keys and values of grouped heads stand there once for each
        query head, with their own score of ungrouped scores, else with an equal share.

        Args:
            model: the model that the scores are of.
            edges: how many leading edges are marked as the graph's.

        Raises:
            InputError: scores of some nodes only, or of another model.
            SpecFileError: another ending, or a file that cannot be written.
        """
        nodes = all_nodes(model, self.ungrouped)
        if [*self.senders] != [one.label for one in nodes.senders] or self.scores.shape != nodes.edges.shape:
            raise InputError(
                f"scores of {len(self.senders)} senders and {len(self.receivers)} receivers: a file has those of all "
                f"{len(nodes.senders)} and {len(nodes.receivers)} of {model.hooked.name}"
            )
        inside = np.zeros(self.scores.shape, bool)
        if edges is not None:
            at_least("edges", edges, 0)
            inside[tuple(self.ranked()[:edges].T)] = True
        return write_importances(self.costs, inside, Path(path), model, nodes)

    @classmethod
    def from_importances(cls, path: str | Path, model: Runner, ungrouped: bool = False) -> Self:
        """Read scores that EAP-IG wrote, or that were handed in to the MIB circuit track, `.json` or `.pt`.

        They are the `scores` of `circuit`; the metric of the two prompts is not in such a file, and NaN here.

        Args:
            ungrouped: keep the scores of keys and values of each query head, for `circuit(..., ungrouped=True)`; else
                those that share them are summed.

        Raises:
            InputError: scores of another model, of edges that it does not have, or that are not finite.
            SpecFileError: a damaged file, or one that holds something else.

        Example:
            scores = EdgeAttribution.from_importances("importances.json", model)
            model.circuit(clean, corrupted, scores=scores)
        """
        nodes = all_nodes(model, ungrouped)
        costs = read_importances(Path(path), model, nodes)
        return cls(
            np.where(nodes.edges, -costs, 0.0),
            nodes.edges,
            tuple(node.label for node in nodes.senders),
            tuple(node.label for node in nodes.receivers),
            tuple((node.hook, node.head) for node in nodes.senders),
            tuple((node.hook, node.head) for node in nodes.receivers),
            float("nan"),
            float("nan"),
            "metric",
            "noising",
            "gradient",
            0,
            Path(path).name,
        )

    def score(self, sender: str, receiver: str) -> float:
        """The score of one edge, by labels."""
        for label, labels, what in ((sender, self.senders, "sender"), (receiver, self.receivers, "receiver")):
            if label not in labels:
                raise InputError(f"no {what} {label!r} among {', '.join(labels[:6])}, ..")
        at = self.senders.index(sender), self.receivers.index(receiver)
        if not self.edges[at]:
            raise InputError(f"no edge from {sender} to {receiver}: the receiver comes before the sender")
        return float(self.scores[at])

    def _facts(self) -> Iterator[str]:
        yield from (self.how, self.patching, count(self.count, "edge"))
        yield f"{len(self.senders)} senders x {len(self.receivers)} receivers"

    def _lines(self) -> Iterator[str]:
        yield self.facts()
        for sender, receiver, score in self.top(PRINTED_EDGES):
            yield f"{decimal(score, 3):>9}  {sender} -> {receiver}"

    def facts(self) -> str:
        """One line with the metric of the two runs."""
        return f"{self.metric}: clean {self.clean:.4g}, corrupted {self.corrupted:.4g}"

    @property
    def meaning(self) -> str:
        """A sentence on what a score means."""
        run, other = ("clean", "corrupted") if self.patching == "noising" else ("corrupted", "clean")
        return (
            f"A score is how much {self.metric} changes, to first order, when this edge alone carries the {other} "
            f"prompt's value in the {run} run. Heads send to the queries, keys and values of later heads, to MLPs, and "
            "to the logits; below the diagonal there are no edges."
        )

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "top": self.top(50)}

    def view(self) -> View:
        """Heat map of senders and receivers; if more than 128, those of the leading edges."""
        rows, columns = self._leading(0), self._leading(1)
        scores = self.scores[np.ix_(rows, columns)]
        labels = {"sender": [self.senders[i] for i in rows], "receiver": [self.receivers[i] for i in columns]}
        facts = self.facts()
        if scores.size < self.scores.size:
            facts += (
                f"; of {len(self.senders)} senders and {len(self.receivers)} receivers, the {len(rows)} and "
                f"{len(columns)} of the leading edges"
            )
        panels = [HeatMap(labels, {f"change of {self.metric}": scores}), self.table()]
        return View(self.title, panels, about=self.about, facts=facts, meaning=self.meaning)

    def _leading(self, axis: int) -> list[int]:
        """Senders (0) or receivers (1) of the leading edges, in their order."""
        ends: list[int] = [*dict.fromkeys(self.ranked()[:, axis].tolist())]
        return (
            sorted(ends[:SHOWN_NODES]) if self.scores.shape[axis] > SHOWN_NODES else [*range(self.scores.shape[axis])]
        )

    def _columns(self) -> Columns:
        senders, receivers = self.ranked().T.tolist()
        columns: dict[str, Any] = {}
        for end, chosen, labels, hooks in (
            ("sender", senders, self.senders, self.hooks),
            ("receiver", receivers, self.receivers, self.receiving),
        ):
            columns[end] = [labels[i] for i in chosen]
            columns[f"{end}_layer"] = [layer_of(hooks[i][0]) for i in chosen]
            columns[f"{end}_head"] = [hooks[i][1] for i in chosen]
        return {**columns, "score": self.scores[senders, receivers]}

    def table(self, k: int = 10) -> Table:
        """Table for a terminal: the leading edges."""
        title, page = f"{self.title}\n{self.facts()}", {"heading": "The leading edges", "styles": {"receiver": "token"}}
        table = Table("sender", "receiver", f"change of {self.metric}", title=title, on_page=page)
        for sender, receiver, score in self.top(k):
            table.add_row(sender, receiver, decimal(score, 4))
        return table
