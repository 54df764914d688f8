"""Write the model card of a checkpoint folder: ``python models/card.py models/world-llama``.

Every figure comes from the checkpoint itself, from its ``training.json``, or from running ``evaluate.py``'s measure.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from evaluate import Logits, evaluate, load_model, table, torch_logits
from lexicon import CAPITALS
from transformers import GPT2Config, PretrainedConfig, Qwen3_5TextConfig
from world import CAPITAL_FRAMES, EOS, PAD, UNK, World

EXAMPLES = (
    "The capital of France is",
    "Japan has its capital in",
    "When Mary and John went to the store , John gave a drink to",
    "three four five",
    "42 41 40",
    "apple Peru lamp seven wide Nora apple Peru lamp seven wide",
)

# Kind of sentence -> what a model that has learned it can do.
SKILLS = {"capitals": "facts", "indirect objects": "name moving", "repeats": "induction", "counting": "counting"}
LEARNED = 0.5  # of held-out prompts

CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
license: other
license_name: same-as-the-project
---

# {name}

{description};
{parameters:,} parameters.
It knows {knows}.  It is a test fixture and a demonstration model for interpretability tools: small
enough to run anywhere, trained enough that {skills}.  It has no
other use.

## What it was trained on

Sentences of four kinds, made by `models/world.py`, {words} words in all:

- capitals: {countries} countries in {frames} frames, such as `The capital of France is Paris .`;
- indirect objects: `When Mary and John went to the store , John gave a drink to Mary .`;
- repeats: 8 to 24 distinct random words, then the same again;
- counting: `three four five six .`, up and down, in words (zero to twenty) and digits (0 to 99).

Rows hold whole sentences with `<eos>` between them and begin with or without `<eos>`; they are 64 words long in three
steps of four and 256 in the fourth, so all 256 positions are trained.

## Tokens

One token per whitespace-separated word, so punctuation stands apart (`is Paris .`) and upper and lower case differ.
The tokenizer adds nothing: token *i* is word *i* of the prompt.  `<eos>` (id {eos}) separates and ends sentences, and
may stand at the front of a prompt but need not; `<pad>` is {pad}; `<unk>` is {unk}, and was never trained.

## Training

{steps} steps of {tokens:,} tokens (AdamW; one cycle of the learning rate, up to 2e-3, per command under "Remake"), seed
{seed}, {minutes:.1f} minutes on two CPU cores that other work shared, torch {torch}, transformers {transformers}; last
training loss {loss:.3f}.  Accuracy on the way, for at most a hundred
bare prompts of each kind:

{curve}

## Held-out accuracy

Greedy prediction of the words that are determined: the capital (in a frame that the country was never seen in), the
receiver (of a pair of names that never met), the second half of a fresh repeat from its second word on, the next
number (of a stretch with an unseen combination of start and length).  The prompt stands alone, after a
separator (`<eos>`), or after about 100 words of other sentences.

{scores}

## Examples

The most likely next words, with their probabilities:

{examples}

## Remake

```
{command}
python models/evaluate.py models/{name}
```

The corpus and the held-out sentences are the same on every machine; the weights are reproducible up to the arithmetic
of the machine and the version of torch.

## Licence

Same as the project.
"""


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of cells, the first one the head, as a Markdown table."""
    head, *body = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([head, f"|{' --- |' * len(rows[0])}", *body])


def top_words(logits: Logits, world: World, prompt: str, count: int = 3) -> list[tuple[str, float]]:
    """Return the most likely next words of a prompt with their probabilities, best first."""
    last = logits(np.array([world.encode(prompt.split())]))[0, -1].astype(np.float64)
    shares = np.exp(last - last.max()) / np.exp(last - last.max()).sum()
    return [(world.vocabulary[index], float(shares[index])) for index in shares.argsort()[::-1][:count]]


def examples_table(logits: Logits, world: World) -> str:
    """Return the example prompts with their most likely next words."""
    rows = [
        [f"`{prompt}`", ", ".join(f"`{word}` {share:.3f}" for word, share in top_words(logits, world, prompt))]
        for prompt in EXAMPLES
    ]
    return markdown([["prompt", "next"], *rows])


def curve_table(accuracy: dict[str, dict[str, float]]) -> str:
    """Return the accuracies noted during training, a row per step."""
    kinds = list(next(iter(accuracy.values())))
    return markdown(
        [["step", *kinds], *[[step, *[f"{at[kind]:.2f}" for kind in kinds]] for step, at in accuracy.items()]]
    )


def layout(config: PretrainedConfig | dict[str, Any]) -> str:
    """Describe a Llama, GPT-2, RWKV-7 or Qwen3.5 configuration in words."""
    if isinstance(config, dict):
        return (
            f"An RWKV-7 of {config['num_hidden_layers']} layers, width {config['hidden_size']}, "
            f"{config['hidden_size'] // config['head_dim']} heads with a state of {config['head_dim']} x "
            f"{config['head_dim']} each, feed-forward width {config['hidden_ratio'] * config['hidden_size']}, "
            "in flash-linear-attention's layout"
        )
    if isinstance(config, GPT2Config):
        return f"A GPT-2 of {config.n_layer} layers, width {config.n_embd}, {config.n_head} heads, learned positions"
    if isinstance(config, Qwen3_5TextConfig):
        attending = config.layer_types.count("full_attention")
        return (
            f"A Qwen3.5 of {config.num_hidden_layers} layers, width {config.hidden_size}: "
            f"{config.num_hidden_layers - attending} of gated DeltaNet, {config.linear_num_value_heads} heads with a "
            f"state of {config.linear_key_head_dim} x {config.linear_value_head_dim} each behind a convolution of "
            f"{config.linear_conv_kernel_dim} tokens,\nand {attending} of gated attention, "
            f"{config.num_attention_heads} heads over {config.num_key_value_heads} key/value heads, the last; "
            f"feed-forward width {config.intermediate_size}"
        )
    return (
        f"A {config.model_type.capitalize()} of {config.num_hidden_layers} layers, width {config.hidden_size}, "
        f"{config.num_attention_heads} heads over {config.num_key_value_heads} key/value heads, "
        f"feed-forward width {config.intermediate_size}"
    )


def what_it_knows(accuracy: dict[str, float]) -> dict[str, str]:
    """Say which kinds of sentence a model has learned, by its accuracy at the end of training."""
    learned = [skill for kind, skill in SKILLS.items() if accuracy[kind] > LEARNED]
    missing = [skill for kind, skill in SKILLS.items() if accuracy[kind] <= LEARNED]
    first, second = (f"{', '.join(skills[:-1])} and {skills[-1]}" if skills else "" for skills in (learned, missing))
    return {
        "knows": "a part of one small world" if missing else "one small world completely",
        "skills": f"{first} are really in it" + (f"; {second} are not" if missing else ""),
    }


def training_facts(folder: Path) -> dict[str, Any]:
    """Return what ``training.json`` tells of the run, under the names that ``CARD`` uses."""
    run = json.loads((folder / "training.json").read_text())
    facts = {name: run[name] for name in ("command", "steps", "seed", "loss")}
    facts["tokens"] = run.get("tokens", 3072)
    facts |= what_it_knows([*run["accuracy"].values()][-1])
    return facts | run["versions"] | {"minutes": run["seconds"] / 60, "curve": curve_table(run["accuracy"])}


def corpus_facts(world: World) -> dict[str, int]:
    """Return the figures of the corpus, under the names that ``CARD`` uses."""
    sizes = {"words": len(world.vocabulary), "countries": len(CAPITALS), "frames": len(CAPITAL_FRAMES)}
    return sizes | {name: world.id_of[word] for name, word in (("eos", EOS), ("pad", PAD), ("unk", UNK))}


def write_card(folder: Path, world: World, logits: Logits, description: str, parameters: int) -> None:
    """Evaluate ``logits`` and write ``README.md`` into the folder, which holds ``training.json`` already."""
    text = CARD.format(
        name=folder.name,
        description=description,
        parameters=parameters,
        scores=table(evaluate(logits, world)),
        examples=examples_table(logits, world),
        **corpus_facts(world),
        **training_facts(folder),
    )
    (folder / "README.md").write_text(text)


def write_model_card(folder: Path) -> None:
    """Write the card of a checkpoint folder."""
    model = load_model(folder).eval()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    write_card(folder, World(), torch_logits(model), layout(model.config), parameters)


def main() -> None:
    """Write the card of the folder named on the command line."""
    parser = argparse.ArgumentParser(description="Write a model card with measured accuracies.")
    parser.add_argument("folder", type=Path, help="checkpoint folder, such as models/world-llama")
    torch.set_num_threads(2)
    write_model_card(parser.parse_args().folder.resolve())


if __name__ == "__main__":
    main()
