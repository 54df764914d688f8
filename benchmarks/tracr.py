"""How well methods tell the edges of circuits whose truth is known: programs compiled to transformers by Tracr.

An area under the ROC curve (AUROC) is the probability that a true edge scores above one that is none, 0.5 by chance.
The truth is had twice: all edges of the program, and those of them that carry any difference between the prompts of
these pairs. Edges of positions and constants carry none, so that no method that patches one prompt into another can
tell them: the first column of a method says what it misses of the program, the second what it misses of what there is.

    python benchmarks/tracr.py [PROGRAM ...] [--save]
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tables import present

from mionnx import EdgeAttribution, MIModel

FOLDER = Path(__file__).parents[1] / "models" / "tracr"
METHODS: dict[str, dict[str, Any]] = {
    "EAP": {},
    "EAP-IG 5": {"steps": 5},
    "EAP relp": {"rules": "relp"},
    "EAP frozen_norm": {"rules": "frozen_norm"},
}
EXACT = "each left out"


def auroc(scores: np.ndarray, truth: np.ndarray) -> float:
    """The probability that a true edge scores above another; ties count half."""
    good, other = scores[truth], scores[~truth]
    return float((good[:, None] > other).mean() + (good[:, None] == other).mean() / 2)


def metric_of(model: MIModel, truth: dict[str, Any], ids: list[np.ndarray]) -> dict[str, Any]:
    """What is measured of a pair: the logits of its two answers, or the first output where that is a number."""
    if not truth["categorical"]:
        cotangent = np.eye(1, model.vocab_size, dtype=np.float32)[0]
        return {"metric": lambda logits: logits[:, 0], "cotangent": cotangent}
    ends = [int(model.forward(one).output()[0, -1, : truth["output"]].argmax()) for one in ids]
    return {"answer": ends[0], "versus": ends[1]}


def left_out(model: MIModel, ids: list[np.ndarray], like: EdgeAttribution, metric: dict[str, Any]) -> np.ndarray:
    """The exact effect of each edge: all others are kept."""
    own = {key: value for key, value in metric.items() if key != "cotangent"}
    effects = np.zeros(like.scores.shape)
    for at in map(tuple, np.argwhere(like.edges).tolist()):
        others = np.ones(like.scores.shape)
        others[at] = 0
        circuit = model.circuit(ids[0], ids[1], like.count - 1, scores=replace(like, scores=others), **own)
        effects[at] = circuit.values[0] - circuit.clean
    return effects


def row(name: str) -> list[str]:
    """One program: sizes, and the areas of all methods."""
    truth = json.loads((FOLDER / name / "truth.json").read_text())
    model = MIModel.from_pretrained(FOLDER / name, threads=1)
    totals: dict[str, Any] = dict.fromkeys([*METHODS, EXACT], 0.0)
    for pair in truth["pairs"]:
        ids = [np.array(one)[None] for one in pair]
        metric = metric_of(model, truth, ids)
        for method, options in METHODS.items():
            scores = model.edge_attribution(*ids, **metric, **options)
            totals[method] = totals[method] + np.abs(scores.scores)
        totals[EXACT] = totals[EXACT] + np.abs(left_out(model, ids, scores, metric))
    labels = [[sender, receiver] for sender in scores.senders for receiver in scores.receivers]
    flat = scores.edges.ravel()
    is_true = {key: np.array([label in truth[key] for label in labels])[flat] for key in ("edges", "carrying")}
    areas: Callable[[np.ndarray], str] = lambda total: " / ".join(  # noqa: E731
        f"{auroc(total.ravel()[flat], is_true[key]):.3f}" for key in is_true
    )
    shape = f"{model.num_layers} x {model.num_heads}, {scores.count}"
    counts = f"{is_true['edges'].sum()}; {is_true['carrying'].sum()}"
    return [name, shape, counts, *(areas(totals[method]) for method in totals)]


def main() -> None:
    """Print the table, and keep it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", default=sorted(path.name for path in FOLDER.glob("*/")))
    parser.add_argument("--save", action="store_true", help="write results/tracr.md")
    chosen = parser.parse_args()
    columns = ["program", "layers x heads, edges", "true; carrying", *METHODS, EXACT]
    title = "AUROC of the mean size of scores over 12 pairs: of all true edges / of those that carry a difference"
    note = "`each left out`: the exact change of the metric when this edge alone carries the other prompt's value."
    rows = [row(name) for name in chosen.programs]
    present("tracr", "Edges of programs whose truth is known", title, [(columns, rows)], chosen.save, notes=[note])


if __name__ == "__main__":
    main()
