"""`Circuit`: how faithful circuits of growing size are, with table, figure and page."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.circuits.edge_scores import EdgeAttribution
from mionnx.errors import InputError
from mionnx.machine.brief import count
from mionnx.machine.decimals import decimal
from mionnx.machine.ranges import at_least, at_most
from mionnx.machine.resampling import TIE, draws, percentiles
from mionnx.machine.typed import typed
from mionnx.view import Columns, Graph, Lines, Series, Shown, Table, View, readable

DRAWN = 300  # edges of a page's largest drawing
PICTURED = 60  # edges of a figure
GOOD = 0.8  # faithfulness of the circuit that a figure draws, if a small one reaches it
Edge = tuple[str, str, float]  # labels of sender and receiver, and a number
MIB_SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # of all edges


@dataclass(repr=False)
@typed(InputError)
class Circuit(Shown):
    """The metric when only the leading edges carry what is computed now, by number of edges.

    Attributes:
        attribution: the scores by which edges were chosen.
        sizes: int64 [circuits]: numbers of kept edges, ascending.
        values, by_pair: the metric, float64 [circuits], mean over pairs, and [pairs, circuits].
        clean, corrupted: the metric of the two runs, mean over pairs.
        cost: numbers of "circuits", "pairs" and "seconds".
        rank: by what edges were chosen: "size" or "score".
        clean_by_pair, corrupted_by_pair: the metric of the two runs, float64 [pairs].
        controls: the metric of random circuits of equal size, float64 [controls, circuits], mean over pairs.
        ablation: what edges carry that are not kept: "patching", "zero" or "mean"; corrupted is then the metric of the
            model with no edge kept.
    """

    attribution: EdgeAttribution
    sizes: NDArray[np.int64]
    values: NDArray[np.float64]
    by_pair: NDArray[np.float64]
    clean: float
    corrupted: float
    metric: str
    about: str
    cost: dict[str, float] = field(default_factory=dict)
    rank: str = "size"
    clean_by_pair: NDArray[np.float64] | None = None
    corrupted_by_pair: NDArray[np.float64] | None = None
    controls: NDArray[np.float64] | None = None
    ablation: str = "patching"
    INSIDE: ClassVar = (EdgeAttribution,)
    IN_JSON = ("title", "about", "metric", "clean", "corrupted", "sizes", "values", "by_pair", "cost", "faithfulness",
               "rank", "ablation", "controls", "attribution")  # fmt: skip

    @property
    def faithfulness(self) -> NDArray[np.float64]:
        """Share of the metric's difference, (metric - corrupted) / (clean - corrupted), [circuits]."""
        if self.clean == self.corrupted:
            raise InputError(f"clean and corrupted both have {self.metric} {self.clean:.6g}: nothing to be faithful to")
        shares: NDArray[np.float64] = (self.values - self.corrupted) / (self.clean - self.corrupted)
        return shares

    @property
    def cpr(self) -> float:
        """The area under faithfulness over the share of edges (circuit performance ratio); 1 is the clean run's.

        Trapezoids over the ten shares of the MIB circuit track (Mueller et al. 2025, arXiv:2504.13151), which ranks by
        score for it: `circuit(..., "mib", rank="score")`.

        Raises:
            InputError: circuits of other sizes.
        """
        return _area(self._at_shares())

    @property
    def cmd(self) -> float:
        """The area between faithfulness and 1 over the share of edges (circuit-model distance), best 0.

        See `cpr`; MIB ranks by size for it.

        Raises:
            InputError: circuits of other sizes.
        """
        return _area(np.abs(1 - self._at_shares()))

    def _at_shares(self) -> NDArray[np.float64]:
        by_size = dict(zip(self.sizes.tolist(), self.faithfulness.tolist(), strict=True))
        sizes = mib_sizes(self.attribution.count)
        if missing := [size for size in sizes if size not in by_size]:
            raise InputError(f"no circuit of {missing[0]} edges: cpr and cmd are those of circuit(..., edges='mib')")
        return np.array([by_size[size] for size in sizes])

    def interval(
        self, confidence: float = 0.95, resamples: int = 1000, seed: int = 0
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The ends of a bootstrap interval of faithfulness, each [circuits]: percentiles over pairs drawn anew.

        Raises:
            InputError: one pair, or draws in which both runs have one metric.
        """
        clean, corrupted = self.clean_by_pair, self.corrupted_by_pair
        if clean is None or corrupted is None:
            raise InputError("this circuit was saved without the metric of each pair's runs: compute it anew")
        shares = draws(len(self.by_pair), resamples, seed)
        base, end = shares @ corrupted, shares @ clean
        if (base == end).any():
            raise InputError("pairs of which some draws have no difference between clean and corrupted")
        return percentiles((shares @ self.by_pair - base[:, None]) / (end - base)[:, None], confidence)

    @property
    def control_faithfulness(self) -> NDArray[np.float64]:
        """Faithfulness of the random circuits, [controls, circuits].

        Raises:
            InputError: there are none.
        """
        if self.controls is None or not len(self.controls):
            raise InputError("no random circuits: circuit(..., controls=20) has some")
        shares: NDArray[np.float64] = (self.controls - self.corrupted) / (self.clean - self.corrupted)
        return shares

    @property
    def beyond_controls(self) -> NDArray[np.float64]:
        """Share of random circuits that are as faithful as the leading edges', or more, [circuits]: a p-value.

        The circuit itself counts as one of them, so that it is at least 1 / (controls + 1).
        """
        others = self.control_faithfulness
        hits: NDArray[np.float64] = ((others >= self.faithfulness - TIE).sum(axis=0) + 1) / (len(others) + 1)
        return hits

    @property
    def title(self) -> str:
        """A short line for pictures."""
        return f"Circuits of the leading edges ({self.attribution.how})"

    def leading(self, edges: int) -> list[tuple[str, str, float]]:
        """The edges of the circuit of a size: sender, receiver, score."""
        at_most("edges", edges, self.attribution.count)
        return self.attribution.top(edges, self.rank)

    def smallest(self, faithfulness: float = GOOD) -> int | None:
        """Number of edges of the smallest of these circuits as faithful; None if none is."""
        at_least("faithfulness", faithfulness, 0)
        reached = self.sizes[self.faithfulness >= faithfulness]
        return int(reached[0]) if len(reached) else None

    def _facts(self) -> Iterator[str]:
        yield from (self.attribution.how, count(len(self.sizes), "circuit"))
        yield f"of {int(self.sizes[0])} to {int(self.sizes[-1])} of {self.attribution.count} edges"

    def _lines(self) -> Iterator[str]:
        yield self.facts()
        for size, share in zip(self.sizes.tolist(), self.faithfulness, strict=True):
            yield f"{size:>7} edges: faithfulness {decimal(share, 3)}"

    def facts(self) -> str:
        """One line with the metric of the two runs."""
        return f"{self.metric}: clean {self.clean:.4g}, corrupted {self.corrupted:.4g}"

    @property
    def meaning(self) -> str:
        """A sentence on what faithfulness means."""
        others = {
            "patching": ("what they wrote on the corrupted prompt", "between the two prompts", "the corrupted one"),
            "zero": ("zero", "between the model and none of its edges", "the model without them"),
            "mean": ("their mean over tokens", "between the model and none of its edges", "the model without them"),
        }
        carried, between, least = others[self.ablation]
        return (
            f"Kept edges carry what their senders write now, all others {carried}. Faithfulness is the share of the "
            f"difference in {self.metric} {between} that is left: 1 is the clean run, 0 {least}."
        )

    def _columns(self) -> Columns:
        pairs, circuits = self.by_pair.shape
        pair, edges = np.repeat(np.arange(pairs), circuits), np.tile(self.sizes, pairs)
        return {"pair": pair, "edges": edges, "value": self.by_pair.ravel()}

    def view(self) -> View:
        """Faithfulness over the number of edges, and the circuit of each size as nodes and lines."""
        edges = self._shares(min(DRAWN, int(self.sizes[-1])))
        notes = [f"{self.metric} {readable(value)}" for value in self.values]
        notes = [f"{note}\nfaithfulness {decimal(one, 3)}" for note, one in zip(notes, self.faithfulness, strict=True)]
        series, levels = [Series("faithfulness", self.faithfulness, notes=notes)], {"clean": 1, "corrupted": 0}
        if random := self.controls is not None and len(self.controls) > 0:
            series.append(
                Series(
                    f"mean of {len(self.control_faithfulness)} random circuits", self.control_faithfulness.mean(axis=0)
                )
            )
        ends = min(0.0, float(self.faithfulness.min())), max(1.0, float(self.faithfulness.max()))
        axes = (self.sizes, series, "kept edges", "faithfulness", *ends)
        curve = Lines(*axes, spaced="log", levels=levels, chooses="points", legend=random)
        note = (
            "Red edges raise the metric by being kept, blue ones lower it, both to first order; the wider the more. "
            "Dotted lines: keys and values, and the heads that share them. Point at a node to see its edges alone."
        )
        counts = self.sizes, self.attribution.count, self.metric, self.drawn()
        graph = Graph(edges, places(edges), self._shared(edges), *counts, note=note)
        chosen = [*self.sizes].index(self.smallest() or int(self.sizes[-1]))
        panels = [[curve, self.table()], graph]
        return View(self.title, panels, self.about, facts=self.facts(), meaning=self.meaning, chosen=chosen)

    def _shares(self, edges: int) -> list[Edge]:
        """The leading edges with what each adds to the metric, to first order, by being kept."""
        sign = -1 if self.attribution.patching == "noising" else 1
        # Scores are the effect of corrupting an edge, so keeping it has the opposite sign.
        return [(sender, receiver, sign * score) for sender, receiver, score in self.leading(edges)]

    def _shared(self, edges: list[Edge]) -> list[tuple[str, str]]:
        """Keys and values among the nodes of some edges, with the heads among them that read these."""
        names = nodes_of(edges)
        heads, groups = (
            len({name for name in map(node_of, labels) if name.startswith(start)})
            for labels, start in ((self.attribution.senders, "a0.h"), (self.attribution.receivers, "a0.kv"))
        )
        layers = dict.fromkeys(name.partition(".")[0] for name in names if ".kv" in name)
        # Query heads share keys and values in consecutive groups.
        pairs = [
            (f"{layer}.kv{head * groups // heads}", f"{layer}.h{head}") for layer in layers for head in range(heads)
        ]
        return [(keys, reader) for keys, reader in pairs if keys in names and reader in names]

    def drawn(self) -> int:
        """Number of edges of a figure: those of a faithfulness of 0.8, if few reach it."""
        reached = self.smallest()
        return min(PICTURED, int(self.sizes[-1]) if reached is None else reached)

    def table(self, k: int | None = None) -> Table:
        """Table for a terminal: metric and faithfulness of all circuits, or the first k."""
        title, page = f"{self.title}\n{self.facts()}", {"chooses": "points"}
        table = Table("edges", self.metric, "faithfulness", title=title, on_page=page)
        for size, value, share in [*zip(self.sizes.tolist(), self.values, self.faithfulness, strict=True)][:k]:
            table.add_row(str(size), decimal(value, 3), decimal(share, 3))
        return table


def mib_sizes(edges: int) -> list[int]:
    """Numbers of edges of the MIB circuit track's shares, rounded down; of a small model the first are 0."""
    return [int(share * edges) for share in MIB_SHARES]


def _area(values: NDArray[np.float64]) -> float:
    return float(np.trapezoid(values, MIB_SHARES))


def node_of(label: str) -> str:
    """The node of a label: that of "a2.h3<q>" is "a2.h3"."""
    return label.partition("<")[0]


def nodes_of(edges: Sequence[Edge]) -> list[str]:
    """The nodes of some edges, in the order in which they occur."""
    return [*dict.fromkeys(node_of(name) for sender, receiver, _ in edges for name in (sender, receiver))]


def level(name: str) -> float:
    """Height of a node: the embedding is lowest; in a layer keys and values, heads, MLP."""
    # "embed" and "logits" are the only names without a layer's number.
    if not name[1:2].isdigit():
        return -1.0 if name == "embed" else np.inf
    layer, _, head = name[1:].partition(".")
    return 3.0 * int(layer) + (2 if not head else 0 if head.startswith("kv") else 1)


def places(edges: Sequence[Edge]) -> dict[str, tuple[float, float]]:
    """Node -> its place among those of its level, and its level; empty levels are left out."""
    names = nodes_of(edges)
    levels = sorted({*map(level, names)})
    numbers = {name: float("".join(filter(str.isdigit, name.partition(".")[2])) or 0) for name in names}
    return {name: (numbers[name], float(levels.index(level(name)))) for name in names}
