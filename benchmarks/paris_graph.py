"""How world-llama gets from "France" to "Paris": the graph of its transcoders, each claim beside an intervention.

    pip install -e ".[cpu]"
    python benchmarks/paris_graph.py [--save]

The graph of "The capital of France is" with the set in models/world-llama/transcoders (trained by
models/train_transcoders.py). The same prompt of every country tells at which countries each leading feature is active.
Then features are changed, with attention patterns as they are in the prompt: those of one place that lead the graph are
set to 0, and beside them as many others of that place; or another country's are put in their place. `--save` writes
benchmarks/results/paris_graph.md and benchmarks/results/pictures/trace.png.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tables import RESULTS, present

from mionnx import AttributionGraph, MIModel, TranscoderSet
from mionnx.machine.decimals import decimal
from mionnx.machine.softmax import softmax

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from lexicon import CAPITALS

PICTURE = RESULTS / "pictures" / "trace.png"
FRAME, ASKED, OTHER = "The capital of {} is", "France", "Germany"
COUNTRY, LAST = 4, 5  # positions of the country and of the last token
SHOWN, CUT = 10, 4  # features of the table; features of a place that are set to 0
PLACES = [(layer, position) for position in (COUNTRY, LAST) for layer in range(4)]


class Study:
    """The model, its transcoders, and the graph of each country's prompt."""

    def __init__(self) -> None:
        self.model = MIModel.from_pretrained(Path(__file__).parents[1] / "models" / "world-llama")
        self.transcoders = TranscoderSet.load("world-llama")
        self.capitals = dict(CAPITALS)
        self.graphs = {name: self.trace(name) for name in self.capitals}
        self.graph = self.graphs[ASKED]

    def trace(self, country: str) -> AttributionGraph:
        """The graph of a country's prompt, towards its capital."""
        return self.model.trace(FRAME.format(country), self.transcoders, answer=self.capitals[country], progress=False)

    def features(self, country: str, layer: int, position: int) -> dict[int, float]:
        """Feature -> activation at a place, those of most influence first."""
        graph = self.graphs[country]
        own = graph.influence()
        here = np.flatnonzero((graph.features[:, 0] == layer) & (graph.features[:, 1] == position))
        here = here[np.argsort(-own[here], kind="stable")]
        return {int(graph.features[i, 2]): float(graph.activations[i]) for i in here}

    def probabilities(self, fix: dict[str, float], country: str = ASKED) -> np.ndarray:
        """Of the next token, with features of a country's prompt set to values."""
        graph = self.graphs[country]
        spec = graph.intervene(self.model, self.transcoders, fix=fix) if fix else None
        return softmax(self.model.forward(graph.token_ids, spec).output()[0, -1].astype(np.float64))

    def swapped(self, country: str, other: str, places: Sequence[tuple[int, int]]) -> dict[str, float]:
        """The features of some places, one country's off and the other's on."""
        fix = {}
        for layer, position in places:
            values = dict.fromkeys(self.features(country, layer, position), 0.0)
            values |= self.features(other, layer, position)
            fix |= {f"{layer}_{feature}_{position}": value for feature, value in values.items()}
        return fix

    def answer(self, own: np.ndarray) -> list[str]:
        """The next token, and the probabilities of both capitals."""
        ids = [self.model.token_id(self.capitals[name]) for name in (ASKED, OTHER)]
        return [self.model.to_string(int(own.argmax())), *(decimal(float(own[one]), 3) for one in ids)]

    def active_at(self, layer: int, feature: int, position: int) -> list[str]:
        """The countries at whose prompts a feature is active at a position, by activation."""
        found = {name: self.features(name, layer, position).get(feature, 0.0) for name in self.capitals}
        return sorted((name for name in found if found[name]), key=lambda name: -found[name])


def leading(study: Study) -> Iterator[list[str]]:
    """Rows of the features of most influence."""
    graph = study.graph
    for node, share in graph.top(len(graph.sources)):
        if node not in graph.sources[: len(graph.features)]:
            continue
        layer, feature, position = map(int, node.split("_"))
        countries = study.active_at(layer, feature, position)
        most = ", ".join(countries[:4]) + (" ..." if len(countries) > 4 else "")
        raises = ", ".join(graph.promotes.get(node, ())[:3])
        yield [node, graph.tokens[position], decimal(share, 3), f"{len(countries)}: {most}", raises]


def changed(study: Study) -> Iterator[list[str]]:
    """Rows of interventions: a place's leading features cut, as many others cut, another country's put there."""
    graph = study.graph
    yield ["", "nothing is changed", *study.answer(study.probabilities({}))]
    for layer, position in PLACES:
        features = [*study.features(ASKED, layer, position)]
        where = f"layer {layer}, {graph.tokens[position]!r}"
        if len(features) < 2:
            continue
        few = min(CUT, len(features) // 2)
        for name, some in ((f"the {few} leading features to 0", features[:few]), ("the last to 0", features[-few:])):
            fix = {f"{layer}_{one}_{position}": 0.0 for one in some}
            yield [where, name, *study.answer(study.probabilities(fix))]
        fix = study.swapped(ASKED, OTHER, [(layer, position)])
        yield [where, f"{OTHER}'s features in place of {ASKED}'s", *study.answer(study.probabilities(fix))]


def every_pair(study: Study, places: Sequence[tuple[int, int]]) -> list[str]:
    """How often the features of the next country in some places give its capital, and how often still one's own."""
    names = [name for name in study.capitals if study.capitals[name] == study.answer(study.probabilities({}, name))[0]]
    ids = {name: study.model.token_id(study.capitals[name]) for name in names}
    moved, stayed = 0, 0
    for number, name in enumerate(names):
        other = names[(number + 1) % len(names)]
        top = int(study.probabilities(study.swapped(name, other, places), name).argmax())
        moved, stayed = moved + (top == ids[other]), stayed + (top == ids[name])
    return [f"{count} of {len(names)}" for count in (moved, stayed)]


def confirmed(study: Study) -> Iterator[list[str]]:
    """Rows of what the graph says that the leading features do to the logit, and what happens without them."""
    graph = study.graph
    nodes = [node for node, _ in graph.top(len(graph.sources)) if node in graph.sources[: len(graph.features)]][:SHOWN]
    for node in nodes:
        got = graph.confirm(study.model, study.transcoders, node)
        changes = (got.predicted[-1], got.constrained[-1], got.free[-1])
        yield [node, *(decimal(float(change), 2, sign=True) for change in changes)]


def main() -> None:
    """Trace, change, print the tables."""
    parser = argparse.ArgumentParser(description="How world-llama gets from France to Paris.")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    study = Study()
    graph, rows = study.graph, leading(study)
    places = [(0, COUNTRY)], [(1, COUNTRY)], [(2, LAST)], [(3, LAST)], [(2, LAST), (3, LAST)]
    pairs = [
        [", ".join(f"layer {layer}, {graph.tokens[position]!r}" for layer, position in some), *every_pair(study, some)]
        for some in places
    ]
    tables = [
        (
            ["feature", "token", "influence", "active at countries, of 56", "tokens that it raises"],
            [row for row, _ in zip(rows, range(SHOWN), strict=False)],
        ),
        (["place", "change", "next token", "Paris", "Berlin"], [*changed(study)]),
        (["features of the next country in place of one's own", "its capital", "one's own capital"], pairs),
        (
            ["feature to 0: change of the logit of Paris", "by the graph", "all MLPs held", "MLPs free"],
            [*confirmed(study)],
        ),
    ]
    if options.save:
        for name, layers, position in (("read the country", (0, 1), COUNTRY), ("write the capital", (2, 3), LAST)):
            best = [node for node, _ in graph.top(SHOWN * 3) if node in graph.sources[: len(graph.features)]]
            chosen = [node for node in best if int(node[0]) in layers and node.endswith(f"_{position}")]
            graph = graph.group(name, chosen)
        graph.prune(0.7).save(PICTURE)
    scores = f"replacement {decimal(graph.replacement_score, 3)}, completeness {decimal(graph.completeness_score, 3)}"
    said = f"{len(graph.features)} active features; {scores}. Attention patterns are those of the prompt throughout."
    title = f"{FRAME.format(ASKED)!r}, world-llama with the transcoders in its folder"
    notes = ["MLPs held: with live scales of norms, which the graph holds; free: with what goes on through others too"]
    present("paris_graph", "From France to Paris", title, tables, options.save, said, notes)


if __name__ == "__main__":
    main()
