"""Train a masked language model on the world: ``python models/train_masked.py [--steps N] [--seed S] [--out DIR]``.

Writes a Hugging Face checkpoint folder of a BERT (weights, configuration, tokenizer, ``training.json``, model card), by
default ``models/world-bert``.  Its words are those of the other models and one more, ``<mask>``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from lexicon import CAPITALS, NAMES, NUMBER_LINES
from tokenizers import AddedToken
from transformers import BertConfig, BertForMaskedLM
from transformers import __version__ as transformers_version
from word_tokenizer import build_tokenizer
from world import PAD, UNK, Probe, Words, World

HERE = Path(__file__).parent
MASK, IGNORED = "<mask>", -100
LONGEST, ROWS = 64, 96
PEAK_RATE, REPORT_EVERY = 1.5e-3, 100
KINDS = (0.6, 0.25, 0.15)  # shares of capitals, indirect objects, counting
TOLD = 0.9  # rows in which the hidden word is one that the others tell
EXAMPLES = (
    "The capital of France is <mask> .",
    "The capital of <mask> is Tokyo .",
    "<mask> has its capital in Madrid .",
    "When Mary and John went to the store , John gave a drink to <mask> .",
    "When Mary and John went to the store , <mask> gave a drink to Mary .",
    "three four <mask> six seven .",
)
CARD = """\
---
library_name: transformers
pipeline_tag: fill-mask
license: other
license_name: same-as-the-project
---

# world-bert

A BERT of {layers} layers, width {width}, {heads} heads, feed-forward width {inner}, learned positions;
{parameters:,} parameters.  It knows the same small world as the other models here (see `world-llama`), and reads its
sentences in both directions: a hidden word is told by the words before **and** behind it.  It is a test fixture and a
demonstration model, and has no other use.

Rows are single sentences of `models/world.py`: capitals, indirect objects, counting; no repeats.  One token per
whitespace-separated word; the tokenizer adds nothing.  `<mask>` (id {mask}) hides a word, `<pad>` is {pad}; `<unk>` is
{unk}, and was never trained.

{steps} steps of {rows} sentences, seed {seed}, {minutes:.1f} minutes on one CPU core that other work shared, torch
{torch}, transformers {transformers}.  One word of a sentence is hidden, in {told:.0%} of them a
name, a place or a number.

## Held-out accuracy

The word that the sentence determines is hidden, in sentences that training never shows:

{scores}

## Examples

{examples}

## Remake

```
{command}
```

## Licence

Same as the project.
"""


def sentence(world: World, rng: np.random.Generator) -> Words:
    """Draw a sentence; random words that come twice would teach copying alone, and cost most of the time."""
    kinds = [kind for kind in world.kinds if kind.name != "repeats"]
    return kinds[rng.choice(len(kinds), p=KINDS)].sentence(rng)


def hide(
    rng: np.random.Generator, ids: np.ndarray, lengths: Sequence[int], mask: int, told: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return ids [row, position] with one hidden word a row, and the words hidden there (``IGNORED`` elsewhere).

    ``told`` holds the ids of names, places and numbers, which the rest of a sentence tells: mostly one of them is
    hidden.
    """
    hidden = np.zeros(ids.shape, bool)
    for row, length in enumerate(lengths):
        places = np.flatnonzero(np.isin(ids[row, :length], told))
        some = places if len(places) and rng.random() < TOLD else np.arange(length)
        hidden[row, rng.choice(some)] = True
    return np.where(hidden, mask, ids), np.where(hidden, ids, IGNORED)


def told_words(world: World) -> np.ndarray:
    """Return the ids of countries, capitals, names and numbers."""
    words = [word for pair in CAPITALS for word in pair] + [*NAMES] + [word for line in NUMBER_LINES for word in line]
    return np.array(world.encode(words))


def padded(world: World, rows: Sequence[Words]) -> tuple[np.ndarray, list[int]]:
    """Return ids [row, position], padded on the right, and the length of each row."""
    lengths = [min(len(row), LONGEST) for row in rows]
    longest = max(lengths)
    cut = [world.encode([*row[:LONGEST], *[PAD] * (longest - len(row))]) for row in rows]
    return np.array(cut, np.int64), lengths


def scores(model: BertForMaskedLM, world: World, mask: int) -> dict[str, float]:
    """Return the share of the probes' targets that are told from the rest of their sentences, per kind."""
    model.eval()
    kinds: dict[str, list[Probe]] = {}
    for probe in world.probes():
        if probe.kind != "repeats":
            kinds.setdefault(probe.kind, []).append(probe)
    found = {}
    for kind, probes in kinds.items():
        hits = []
        for at in range(0, len(probes), 64):
            some = probes[at : at + 64]
            ids, lengths = padded(world, [probe.words for probe in some])
            places = [probe.targets[-1] for probe in some]
            answers = ids[np.arange(len(some)), places]
            ids[np.arange(len(some)), places] = mask
            with torch.no_grad():
                logits = model(torch.from_numpy(ids), attention_mask=attention(ids, lengths)).logits
            hits += (logits[np.arange(len(some)), places].argmax(-1).numpy() == answers).tolist()
        found[kind] = round(float(np.mean(hits)), 3)
    model.train()
    return found


def attention(ids: np.ndarray, lengths: Sequence[int]) -> torch.Tensor:
    """Return the attention mask of padded rows."""
    return torch.from_numpy((np.arange(ids.shape[1]) < np.array(lengths)[:, None]).astype(np.int64))


def train(model: BertForMaskedLM, world: World, mask: int, steps: int, seed: int) -> dict[str, object]:
    """Train ``model`` in place; the account of the run."""
    told = told_words(world)
    rng, begin, curve = np.random.default_rng(seed), time.monotonic(), {}
    adam = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(adam, PEAK_RATE, total_steps=steps, pct_start=0.1)
    for step in range(1, steps + 1):
        ids, lengths = padded(world, [sentence(world, rng) for _ in range(ROWS)])
        inputs, labels = hide(rng, ids, lengths, mask, told)
        given = {"input_ids": torch.from_numpy(inputs), "attention_mask": attention(ids, lengths)}
        loss = model(**given, labels=torch.from_numpy(labels)).loss
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        schedule.step()
        if step % REPORT_EVERY == 0 or step == steps:
            curve[step] = scores(model, world, mask)
            print(
                f"step {step} of {steps}, {time.monotonic() - begin:.0f} s, loss {loss.item():.3f}, {curve[step]}",
                flush=True,
            )
    versions = {"torch": torch.__version__, "transformers": transformers_version}
    return {"seconds": round(time.monotonic() - begin, 1), "loss": round(loss.item(), 4), "accuracy": curve, **versions}


def save_tokenizer(world: World, folder: Path) -> None:
    """Write the tokenizer of the other models with one token more."""
    tokenizer = build_tokenizer(world)
    tokenizer.add_special_tokens([AddedToken(MASK, special=True, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": LONGEST,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        "pad_token": PAD,
        "unk_token": UNK,
        "mask_token": MASK,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def likeliest(model: BertForMaskedLM, world: World, mask: int, prompt: str) -> str:
    """Return the likeliest words of a prompt's hidden place, as cells of a table."""
    words = prompt.split()
    ids = torch.tensor([[mask if word == MASK else world.id_of[word] for word in words]])
    with torch.no_grad():
        shares = model.eval()(ids).logits[0, words.index(MASK)].softmax(-1)
    top = shares.topk(3)
    named = [f"`{world.vocabulary[i]}` {p:.3f}" for p, i in zip(top.values.tolist(), top.indices.tolist(), strict=True)]
    return f"`{prompt}` | {', '.join(named)}"


def rows(head: str, cells: Sequence[str]) -> str:
    """Return a Markdown table of two columns."""
    return "\n".join([f"| {head} |", "| --- | --- |", *(f"| {one} |" for one in cells)])


def write_card(model: BertForMaskedLM, world: World, mask: int, run: dict[str, object], folder: Path) -> None:
    """Write the model card from the run's account."""
    config, accuracy = model.config, list(run["accuracy"].values())[-1]  # type: ignore[attr-defined]
    text = CARD.format(
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        heads=config.num_attention_heads,
        inner=config.intermediate_size,
        parameters=sum(one.numel() for one in model.parameters()),
        mask=mask,
        pad=world.id_of[PAD],
        unk=world.id_of[UNK],
        rows=ROWS,
        told=TOLD,
        minutes=run["seconds"] / 60,  # type: ignore[operator]
        scores=rows("kind | right", [f"{kind} | {share:.3f}" for kind, share in accuracy.items()]),
        examples=rows("sentence | hidden word", [likeliest(model, world, mask, one) for one in EXAMPLES]),
        **{name: run[name] for name in ("steps", "seed", "torch", "transformers", "command")},
    )
    (folder / "README.md").write_text(text)


def main() -> None:
    """Train and write the folder."""
    parser = argparse.ArgumentParser(description="Train a small masked language model on the world corpus.")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE / "world-bert")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    world = World()
    mask = len(world.vocabulary)
    config = BertConfig(
        vocab_size=mask + 1,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=LONGEST,
        type_vocab_size=1,
        initializer_range=0.05,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=world.id_of[PAD],
    )
    model = BertForMaskedLM(config).train()
    command = f"python models/train_masked.py --steps {options.steps} --seed {options.seed}"
    run = {"command": command, "steps": options.steps, "seed": options.seed}
    run |= train(model, world, mask, options.steps, options.seed)
    model.eval().save_pretrained(str(options.out))
    save_tokenizer(world, options.out)
    (options.out / "training.json").write_text(json.dumps(run, indent=2) + "\n")
    write_card(model, world, mask, run, options.out)


if __name__ == "__main__":
    main()
