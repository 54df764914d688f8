"""The six methods of the MIB circuit track's code on IOI templates: CPR, CMD and seconds, resumable.

    python benchmarks/mib.py [MODEL ...] [--pairs 16] [--resume FILE] [--save]

Methods, as `attribute` of EAP-IG names them: EAP (gradients at the clean prompt), EAP-IG-inputs (five steps between the
embeddings), EAP-IG-activations (five steps at what each layer's heads and each MLP write), clean-corrupted (the mean of
gradients at both prompts), information-flow-routes (Ferrando and Voita 2024: how near what a node writes is to what a
receiver reads), and exact (each edge patched by itself, all others kept; of models of few edges). Random edges stand
beside. CPR ranks edges by score, CMD by its size, at MIB's ten shares, every other edge patched exactly.

Each line is written to `--resume FILE` when it is done; another call goes on from there. Seconds are processor time, of
the scores, and of the twenty circuits.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from circuits import exact as paths
from tables import present

from mionnx import EdgeAttribution, HookPoint, HookSpec, MIModel
from mionnx.errors import MIError

SHIPPED = ("models/world-llama", "models/world-gpt2")
WORLD = ("When {} and {} went to the store , {} gave a drink to",)
TEMPLATES = (
    "When {} and {} went to the store, {} gave a drink to",
    "Then, {} and {} had a lot of fun at the school. {} gave a ring to",
    "After {} and {} went to the garden, {} gave a basketball to",
    "While {} and {} were working at the office, {} gave a snack to",
)
NAMES = ("Mary", "John", "Anna", "Paul", "Tom", "Lucy", "James", "Emma", "Peter", "Alice", "Kate", "David")
FEW = 5000  # edges up to which each is patched by itself
CLOSE = 1e-3  # how exactly the outputs of heads must add up, as a share


class Task:
    """The indirect object's name, in as many prompts: the right answer is the name that is given once."""

    def __init__(self, model: MIModel, count: int) -> None:
        self.model = model
        world = Path(str(model.hooked.folder)).name.startswith("world-")
        known = [one for one in NAMES if self._single(one if world else f" {one}")]
        both = [(a, b) for a in known for b in known if a != b]
        # Names change faster than templates, so that few pairs have several of both.
        texts = [(frame, *pair) for pair, frame in zip(both, (WORLD if world else TEMPLATES) * len(both), strict=False)]
        self.texts = texts[:count]
        self.clean = [frame.format(a, b, b) for frame, a, b in self.texts]
        self.corrupted = [frame.format(a, b, a) for frame, a, b in self.texts]
        start = "" if world else " "
        self.given = {"answer": [start + a for _, a, _ in self.texts], "versus": [start + b for _, _, b in self.texts]}

    def _single(self, name: str) -> bool:
        try:
            self.model.to_single_token(name)
        except MIError:
            return False
        return True

    def scores(self, **options: Any) -> EdgeAttribution:
        return self.model.edge_attribution(self.clean, self.corrupted, **self.given, **options)


def both_ends(task: Task) -> EdgeAttribution:
    """The mean of gradients at both prompts."""
    clean, corrupted = task.scores(), task.scores(patching="denoising")
    return replace(clean, scores=(clean.scores - corrupted.scores) / 2)


def exact(task: Task) -> EdgeAttribution | None:
    """The change of the metric when one edge alone carries the corrupted prompt's value."""
    like = task.scores()
    if like.count > FEW:
        return None
    return paths(task.model, task.clean, task.corrupted, like, "noising", **task.given)


def routes(task: Task) -> EdgeAttribution | None:
    """Each node's share of what a receiver reads: |read| - |read - written|, 1-norms, at least 0, of their sum."""
    model, like = task.model, task.scores()
    streams = {column: stream_of(model, hook) for column, (hook, _) in enumerate(like.receiving)}
    spec = HookSpec().capture(["hook_embed", *dict.fromkeys(streams.values())])
    spec.capture(["*.attn.hook_z", "*.hook_mlp_out", "*.hook_attn_out"])
    outputs, costs = np.asarray(model.W_O), np.zeros(like.scores.shape)
    for text in task.clean:
        cache = model.forward(text, spec)
        written = [cache["hook_embed"][0]]
        for layer in range(model.num_layers):
            heads = np.einsum("shd,hdm->hsm", cache["z", layer][0], outputs[layer])
            whole = cache["attn_out", layer][0]
            bias = whole - heads.sum(axis=0)
            if np.abs(bias - bias[:1]).max() > CLOSE * np.abs(whole).max():
                return None  # the output is normed before it is added: no head writes a share of its own
            written += [*heads, cache["mlp_out", layer][0]]
        stacked, shares = np.stack(written), dict[str, Any]()
        for column, stream in streams.items():
            earlier = like.edges[:, column]
            key = f"{stream} {earlier.sum()}"
            if key not in shares:
                read = cache[stream][0]
                near = np.abs(read).sum(-1) - np.abs(stacked[earlier] - read).sum(-1)
                near = np.maximum(near, 0)
                shares[key] = (near / np.maximum(near.sum(axis=0), 1e-9)).mean(axis=1) / len(task.clean)
            costs[earlier, column] += shares[key]
    return replace(like, scores=-costs)


def stream_of(model: MIModel, hook: str) -> str:
    """The stream that a receiver reads."""
    point = HookPoint.parse(hook)
    if point.layer is None:
        return str(HookPoint.ResidPost(model.num_layers - 1))
    return str((HookPoint.ResidMid if point.variant == "MlpPre" else HookPoint.ResidPre)(point.layer))


def at_random(task: Task) -> EdgeAttribution:
    """Scores drawn at random."""
    like = task.scores()
    return replace(like, scores=np.random.default_rng(0).normal(size=like.scores.shape))


METHODS: dict[str, Callable[[Task], EdgeAttribution | None]] = {
    "EAP": Task.scores,
    "EAP-IG-inputs": partial(Task.scores, steps=5),
    "EAP-IG-activations": partial(Task.scores, steps=5, along="activations"),
    "clean-corrupted": both_ends,
    "information-flow-routes": routes,
    "exact": exact,
    "random": at_random,
}


def line_of(task: Task, method: str) -> list[str]:
    """CPR, CMD, the seconds of scores and of circuits; dashes where a method does not apply."""
    begin = time.process_time()
    scores = METHODS[method](task)
    seconds = time.process_time() - begin
    if scores is None:
        return ["-"] * 4
    begin = time.process_time()
    by_score, by_size = (
        task.model.circuit(task.clean, task.corrupted, "mib", scores=scores, rank=rank, **task.given)
        for rank in ("score", "size")
    )
    spent = time.process_time() - begin
    return [f"{by_score.cpr:.3f}", f"{by_size.cmd:.3f}", f"{seconds:.1f}", f"{spent:.1f}"]


def main() -> None:
    """Print the table, and keep it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=SHIPPED)
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--methods", nargs="+", default=[*METHODS], choices=[*METHODS])
    parser.add_argument("--resume", type=Path, help="a file of lines that are done, and to which others are added")
    parser.add_argument("--save", action="store_true", help="write results/mib.md")
    chosen = parser.parse_args()
    done = {}
    if chosen.resume and chosen.resume.exists():
        done = {(name, method, count): line for name, method, count, *line in map(json.loads, chosen.resume.open())}
    rows = []
    for folder in chosen.models:
        name, task = Path(folder).name, None
        for method in chosen.methods:
            key = (name, method, chosen.pairs)
            if key not in done:
                task = task or Task(MIModel.from_pretrained(folder, threads=1), chosen.pairs)
                done[key] = line_of(task, method)
                if chosen.resume:
                    with chosen.resume.open("a") as file:
                        file.write(json.dumps([*key, *done[key]]) + "\n")
            rows.append([name, method, *done[key]])
            print(*rows[-1], flush=True)
    columns = ["model", "method", "CPR (1 is the model)", "CMD (0 is best)", "seconds of scores", "of 20 circuits"]
    note = "A dash: each edge of more than 5,000 by itself, or outputs of heads that are normed before they are added."
    title = f"Indirect objects, {chosen.pairs} pairs, one thread"
    present("mib", "Methods of the MIB circuit track", title, [(columns, rows)], chosen.save, notes=[note])


if __name__ == "__main__":
    main()
