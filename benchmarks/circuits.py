"""Edge attribution beside exact path patching, and how faithful circuits of the leading edges are.

The truth of an edge is `path_patch` of its sender to its receiver alone, every edge of the model one by one. Each
method is told by its Pearson correlation with that, by how many of the ten leading edges are the same, and by the
faithfulness of the circuits that its leading edges make; the exact effects rank edges too. Times are processor seconds
of this process, of the second call, so that no graph is opened in them; path patching runs once, and opens its graphs.
Of a model with many edges only the noising direction of two methods is shown, and no exact paths.

    python benchmarks/circuits.py [MODEL ...] [--save results/circuits.md] [--picture results/pictures/circuit.png]
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mionnx import Circuit, EdgeAttribution, MIModel
from mionnx.errors import InputError

SHIPPED = ("models/world-llama", "models/world-gpt2")
GIFT = "When Mary and John went to the store{comma} {giver} gave a drink to"
METHODS: dict[str, dict[str, Any]] = {
    "EAP": {},
    "EAP, frozen_norm": {"rules": "frozen_norm"},
    "EAP, relp": {"rules": "relp"},
    "EAP-IG, 5 steps": {"steps": 5},
    "EAP-IG, 20 steps": {"steps": 20},
}
OF_MANY = ("EAP", "EAP-IG, 5 steps")
SENDERS = {"z": ("layer", "head"), "mlp_out": ("layer",), "resid_pre": ("layer",)}
SIZES = (10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
MANY = 5000  # edges from which on exact paths take too long
TOP = 10


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """The result of a call, and the seconds of its repetition."""
    call()
    begin = time.process_time()
    return call(), time.process_time() - begin


def exact(
    model: MIModel, clean: Any, corrupted: Any, like: EdgeAttribution, direction: str, **metric: Any
) -> EdgeAttribution:
    """The effect of every edge by path patching, one receiver and one kind of sender at a time."""
    scores = np.zeros(like.scores.shape)
    for column, (hook, head) in enumerate(like.receiving):
        receiver = hook if head is None else (hook, head)
        for sender, over in SENDERS.items():
            first = [0] if sender == "resid_pre" else None
            given: dict[str, Any] = {"patching": direction, "layers": first, "progress": False, **metric}
            try:
                found = model.path_patch(clean, corrupted, [receiver], sender, over, **given)
            except InputError:  # all senders come after this receiver
                continue
            scores[rows_of(like, sender), column] = found.effect.ravel()
    return replace(like, scores=np.where(like.edges, scores, 0.0), rules="exact", patching=direction)


def rows_of(like: EdgeAttribution, sender: str) -> list[int]:
    """The numbers of the senders of a kind; the embedding is the stream before layer 0."""
    ending = {"z": "attn.hook_z", "mlp_out": "hook_mlp_out", "resid_pre": "hook_embed"}[sender]
    return [number for number, (hook, _) in enumerate(like.hooks) if hook.endswith(ending)]


def agreement(found: EdgeAttribution, truth: EdgeAttribution) -> tuple[float, int]:
    """Pearson correlation over edges, and how many of the leading ones are the same."""
    pearson = np.corrcoef(found.scores[found.edges], truth.scores[truth.edges])[0, 1]
    leading = [{(sender, receiver) for sender, receiver, _ in one.top(TOP)} for one in (found, truth)]
    return float(pearson), len(leading[0] & leading[1])


def row(name: str, told: tuple[float, int] | None, circuit: Circuit, seconds: float) -> str:
    """One line of the table."""
    first = ["-", "-"] if told is None else [f"{told[0]:.3f}", str(told[1])]
    shares = [f"{share:.2f}" for share in circuit.faithfulness]
    return "| " + " | ".join([name, *first, *shares, f"{seconds:.2f}"]) + " |"


def exact_row(
    model: MIModel, clean: str, corrupted: str, like: EdgeAttribution, direction: str, sizes: list[int]
) -> tuple[EdgeAttribution, str]:
    """The exact effects of all edges, and a line of the table."""
    begin = time.process_time()
    truth = exact(model, clean, corrupted, like, direction)
    seconds = time.process_time() - begin
    circuit = model.circuit(clean, corrupted, sizes, scores=truth)
    line = row(f"path_patch, {direction}", None, circuit, seconds)
    print(line, flush=True)
    return truth, line


def table(name: str, picture: Path | None) -> list[str]:
    """The table of one model, in markdown."""
    model = MIModel.from_pretrained(name)
    comma = " ," if Path(name).name.startswith("world-") else ","
    clean, corrupted = (GIFT.format(comma=comma, giver=giver) for giver in ("John", "Mary"))
    plain = model.edge_attribution(clean, corrupted)
    sizes = [size for size in SIZES if size < plain.count]
    head = ["method", "Pearson", f"top {TOP} in common", *(f"k = {size}" for size in sizes), "seconds"]
    about = f"{len(plain.senders)} senders, {len(plain.receivers)} receivers, {plain.count} edges."
    lines = [f"## {Path(name).name}", "", about, "", "| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    many = plain.count > MANY
    for direction in ("noising",) if many else ("noising", "denoising"):
        truth = None
        if not many:
            truth, line = exact_row(model, clean, corrupted, plain, direction, sizes)
            lines.append(line)
        for method, given in METHODS.items():
            if many and method not in OF_MANY:
                continue
            asked = {**given, "patching": direction}
            found, seconds = timed(lambda asked=asked: model.edge_attribution(clean, corrupted, **asked))
            begin = time.process_time()
            circuit = model.circuit(clean, corrupted, sizes, scores=found)
            spent = time.process_time() - begin
            told = None if truth is None else agreement(found, truth)
            lines.append(row(f"{method}, {direction}", told, circuit, seconds))
            print(lines[-1], flush=True)
    ends = model.circuit(clean, corrupted, [0, plain.count], scores=plain)
    off = max(abs(ends.values[0] - ends.corrupted), abs(ends.values[1] - ends.clean))
    lines += ["", f"The {len(sizes)} circuits of a line: {spent:.2f} s. No edge and all edges are {off:.1e} from "
              f"{ends.metric} {ends.corrupted:.2f} and {ends.clean:.2f}.", ""]  # fmt: skip
    if picture:
        model.circuit(clean, corrupted).save(picture)
    return lines


def main() -> None:
    """Print the tables, and write them where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=SHIPPED)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    lines = [
        "# Edges beside exact path patching, and circuits of them",
        "",
        "Gift prompt, 14 tokens: John gives (clean) or Mary (corrupted); logit_diff of the two top tokens. Pearson and "
        f"top {TOP}: with the exact effect of every edge, one by one, in the same direction. k: the faithfulness of "
        "the circuit of the k leading edges, every other edge patched exactly; 1 is the clean run, 0 the corrupted "
        "one. Processor seconds: of the scores of all edges; path_patch has two or three sweeps a receiver, and opens "
        "their graphs.",
        "",
    ]
    for number, name in enumerate(given.models):
        lines += table(name, None if number else given.picture)
    print("\n".join(lines))
    if given.save:
        given.save.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
