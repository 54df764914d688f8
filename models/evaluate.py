"""Held-out accuracy of a checkpoint: ``python models/evaluate.py models/world-llama``.

A probe is a sentence that training never shows; it counts at those of its positions whose word is determined by the
words before.  The prediction is greedy.  The measure needs of a model no more than a function from ids to logits, so
it serves any architecture, and an exported graph as well as the checkpoint.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rwkv7 import RWKV7, is_rwkv7
from transformers import AutoModelForCausalLM, PreTrainedModel
from world import EOS, HELD_OUT_SEED, PAD, Probe, Words, World

Ids = NDArray[np.int64]
Logits = Callable[[Ids], NDArray[np.float32]]
"""From ids [row, position] to logits [row, position, vocabulary]; the logits at a position predict the next id."""

Context = Callable[[np.random.Generator], Words]
"""Draws the words to put before a probe."""


@dataclass(frozen=True)
class Score:
    """Accuracy on one kind of sentence: one entry of ``accuracy`` per entry of the contexts that were asked for."""

    kind: str
    prompts: int
    targets: int
    accuracy: dict[str, float]


def contexts(world: World) -> dict[str, Context]:
    """What may stand before a probe: nothing, a separator, or a row's worth of other sentences (about 100 words)."""

    def full_row(rng: np.random.Generator) -> Words:
        words: list[str] = []
        while len(words) < 90:
            words += [*world.sentence(rng), EOS]
        return tuple(words)

    return {"bare": lambda _: (), "after a separator": lambda _: (EOS,), "late in a row": full_row}


def _padded(world: World, rows: Sequence[Words]) -> Ids:
    """Encode words as ids [row, position], padded on the right, where a causal model's logits do not look."""
    longest = max(len(row) for row in rows)
    return np.array([world.encode([*row, *[PAD] * (longest - len(row))]) for row in rows], dtype=np.int64)


def _batch_hits(logits: Logits, world: World, probes: Sequence[Probe], befores: Sequence[Words]) -> list[bool]:
    """For every target of every probe, whether the most likely word at the position before it is the target."""
    ids = _padded(world, [(*before, *probe.words) for probe, before in zip(probes, befores, strict=True)])
    correct = logits(ids)[:, :-1].argmax(-1) == ids[:, 1:]
    return [
        bool(correct[row, len(before) + target - 1])
        for row, (probe, before) in enumerate(zip(probes, befores, strict=True))
        for target in probe.targets
    ]


def accuracy(logits: Logits, world: World, probes: Sequence[Probe], context: Context, batch: int = 64) -> float:
    """Return the share of the probes' targets that ``logits`` predicts, each probe after a fresh ``context``."""
    rng = np.random.default_rng(HELD_OUT_SEED)
    befores = [context(rng) for _ in probes]
    starts = range(0, len(probes), batch)
    hits = [_batch_hits(logits, world, probes[at : at + batch], befores[at : at + batch]) for at in starts]
    return float(np.mean(np.concatenate(hits)))


def by_kind(probes: Sequence[Probe]) -> Iterator[tuple[str, list[Probe]]]:
    """Yield the probes of each kind, in order of first appearance."""
    for kind in dict.fromkeys(probe.kind for probe in probes):
        yield kind, [probe for probe in probes if probe.kind == kind]


def evaluate(logits: Logits, world: World) -> list[Score]:
    """Score every kind of sentence in every context."""
    return [
        Score(
            kind,
            len(probes),
            sum(len(probe.targets) for probe in probes),
            {name: accuracy(logits, world, probes, context) for name, context in contexts(world).items()},
        )
        for kind, probes in by_kind(world.probes())
    ]


def table(scores: Sequence[Score]) -> str:
    """Return the scores as a Markdown table."""
    names = list(scores[0].accuracy)
    head = ["kind", "held-out prompts", "predicted words", *names]
    rows = [
        [score.kind, str(score.prompts), str(score.targets), *[f"{score.accuracy[name]:.3f}" for name in names]]
        for score in scores
    ]
    rule = ["---", *["--:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, rule, *rows])


def load_model(folder: Path) -> PreTrainedModel | RWKV7:
    """Read a checkpoint folder, in float32."""
    if is_rwkv7(folder):
        return RWKV7.from_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def torch_logits(model: PreTrainedModel | RWKV7) -> Logits:
    """Wrap a causal model as a function on arrays."""

    def logits(ids: Ids) -> NDArray[np.float32]:
        inputs = torch.from_numpy(ids)
        with torch.inference_mode():
            values: torch.Tensor = model(input_ids=inputs, attention_mask=torch.ones_like(inputs)).logits
        return values.numpy()

    return logits


def main() -> None:
    """Print the table for the checkpoint folder named on the command line."""
    parser = argparse.ArgumentParser(description="Print held-out accuracy per kind of sentence.")
    parser.add_argument("folder", type=Path, help="checkpoint folder, such as models/world-llama")
    torch.set_num_threads(2)
    model = load_model(parser.parse_args().folder)
    print(table(evaluate(torch_logits(model.eval()), World())))


if __name__ == "__main__":
    main()
