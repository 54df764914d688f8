"""Train a small model on the world: ``python models/train.py llama|gpt2|rwkv7|hybrid [--steps N] [--seed S]``.

Writes a Hugging Face checkpoint folder (weights, configuration, tokenizer, ``training.json``, model card), by default
``models/world-ARCHITECTURE``.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from card import write_model_card
from evaluate import accuracy, by_kind, load_model, torch_logits
from rwkv7 import CONFIG, RWKV7
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)
from transformers import __version__ as transformers_version
from word_tokenizer import save_tokenizer
from world import EOS, PAD, Words, World

HERE = Path(__file__).parent

LONGEST = 256
TOKENS_PER_STEP = 48 * 64
ROW_LENGTHS = (64, 64, 64, LONGEST)
"""Row lengths of successive steps: mostly short rows, and enough long ones to train every position."""

PEAK_RATE = 2e-3
REPORT_EVERY = 250


@dataclass
class Training:
    """What a run was, and what it reached: the contents of ``training.json``.

    ``steps`` counts all steps, ``begun`` those of earlier runs that this one went on from; ``tokens`` are of a step.
    ``accuracy[step][kind]`` is measured on bare held-out prompts.
    """

    command: str
    steps: int
    seed: int
    begun: int = 0
    tokens: int = TOKENS_PER_STEP
    seconds: float = 0.0
    loss: float = math.nan
    accuracy: dict[int, dict[str, float]] = field(default_factory=dict)
    versions: dict[str, str] = field(
        default_factory=lambda: {"torch": torch.__version__, "transformers": transformers_version}
    )


def build_llama(world: World) -> PreTrainedModel:
    """Return an untrained Llama: grouped key/value heads, rotary positions, gated feed-forward."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(world.vocabulary),
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=LONGEST,
            tie_word_embeddings=False,
            **special_ids(world),
        )
    )


def build_gpt2(world: World) -> PreTrainedModel:
    """Return an untrained GPT-2: learned positions, biases, tied embeddings, no dropout."""
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(world.vocabulary),
            n_embd=128,
            n_layer=4,
            n_head=4,
            n_positions=LONGEST,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            **special_ids(world),
        )
    )


def build_rwkv7(world: World) -> RWKV7:
    """Return an untrained RWKV-7: a state of two heads of 64 x 64 a layer in place of attention."""
    return RWKV7({**CONFIG, "vocab_size": len(world.vocabulary), **special_ids(world)})


def build_hybrid(world: World) -> PreTrainedModel:
    """Return an untrained Qwen3.5: three layers of gated DeltaNet, then one of gated attention."""
    model = Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(
            vocab_size=len(world.vocabulary),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            linear_num_key_heads=4,
            linear_num_value_heads=4,
            linear_key_head_dim=32,
            linear_value_head_dim=32,
            max_position_embeddings=LONGEST,
            rms_norm_eps=1e-5,
            **special_ids(world),
        )
    )
    for name, bias in model.named_parameters():
        if name.endswith("dt_bias"):  # softplus gives steps of 0.001 to 0.1, as flash-linear-attention begins
            step = torch.exp(torch.rand_like(bias) * math.log(100) + math.log(0.001))
            bias.data = step + torch.log(-torch.expm1(-step))
    return model


Model = PreTrainedModel | RWKV7
ARCHITECTURES: dict[str, Callable[[World], Model]] = {
    "llama": build_llama,
    "gpt2": build_gpt2,
    "rwkv7": build_rwkv7,
    "hybrid": build_hybrid,
}


def special_ids(world: World) -> dict[str, int]:
    """Return the special ids as configuration entries; one word both separates and ends sentences."""
    return {"bos_token_id": world.id_of[EOS], "eos_token_id": world.id_of[EOS], "pad_token_id": world.id_of[PAD]}


def batches(world: World, steps: int, seed: int, tokens: int) -> Iterator[torch.Tensor]:
    """Yield ids [row, position] for each step: always as many tokens, in rows of ``ROW_LENGTHS`` by turns."""
    rng = np.random.default_rng(seed)
    for step in range(steps):
        length = ROW_LENGTHS[step % len(ROW_LENGTHS)]
        yield torch.from_numpy(world.rows(rng, tokens // length, length))


def optimiser(model: torch.nn.Module, steps: int) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Return AdamW and its one-cycle schedule."""
    adam = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    return adam, torch.optim.lr_scheduler.OneCycleLR(adam, PEAK_RATE, total_steps=steps, pct_start=0.1)


def next_word_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of ids [row, position] under the logits [row, position, word] one place before."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def quick_accuracy(model: Model, world: World) -> dict[str, float]:
    """Return the accuracy per kind on bare prompts, for at most a hundred prompts of each kind."""

    def bare(_: np.random.Generator) -> Words:
        return ()

    model.eval()
    scores = {
        kind: accuracy(torch_logits(model), world, probes[:: math.ceil(len(probes) / 100)], bare)
        for kind, probes in by_kind(world.probes())
    }
    model.train()
    return {kind: round(score, 3) for kind, score in scores.items()}


def train(model: Model, world: World, run: Training) -> None:
    """Train ``model`` in place, printing and noting in ``run`` how it comes along."""
    begin = time.monotonic() - run.seconds
    cycle = run.steps - run.begun
    adam, schedule = optimiser(model, cycle)
    for step, ids in enumerate(batches(world, cycle, run.seed + run.begun, run.tokens), start=run.begun + 1):
        loss = next_word_loss(model(input_ids=ids).logits, ids)
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        schedule.step()
        if step % REPORT_EVERY == 0 or step == run.steps:
            run.seconds, run.loss = round(time.monotonic() - begin, 1), round(loss.item(), 4)
            run.accuracy[step] = quick_accuracy(model, world)
            print(
                f"step {step} of {run.steps}, {run.seconds:.0f} s, loss {run.loss:.3f}, {run.accuracy[step]}",
                flush=True,
            )


def save(model: Model, world: World, run: Training, folder: Path) -> None:
    """Write the checkpoint folder."""
    model.eval().save_pretrained(str(folder))
    save_tokenizer(world, folder, LONGEST)
    (folder / "training.json").write_text(json.dumps(asdict(run), indent=2) + "\n")
    write_model_card(folder)


def resume(folder: Path, run: Training) -> tuple[Model, Training]:
    """Return the checkpoint of an earlier run, and a run whose account goes on where that one's ended."""
    earlier = json.loads((folder / "training.json").read_text())
    command = f"{earlier['command']} && {run.command} --resume"
    accuracy = {int(step): scores for step, scores in earlier["accuracy"].items()}
    model = load_model(folder)
    begun = earlier["steps"]
    steps, seconds = begun + run.steps, earlier["seconds"]
    return model, replace(run, command=command, steps=steps, begun=begun, seconds=seconds, accuracy=accuracy)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small model on the world corpus.")
    parser.add_argument("architecture", choices=sorted(ARCHITECTURES))
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint, in a new learning rate cycle")
    parser.add_argument("--tokens", type=int, default=TOKENS_PER_STEP, help="of a step")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="checkpoint folder (default: models/world-ARCHITECTURE)")
    return parser.parse_args()


def main() -> None:
    """Train the architecture named on the command line and write its folder."""
    options = arguments()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    world = World()
    model = ARCHITECTURES[options.architecture](world)
    folder = options.out or HERE / f"world-{options.architecture}"
    command = f"python models/train.py {options.architecture} --steps {options.steps} --seed {options.seed}"
    command += f" --tokens {options.tokens}" * (options.tokens != TOKENS_PER_STEP)
    run = Training(command, options.steps, options.seed, tokens=options.tokens)
    if options.resume:
        model, run = resume(folder, run)
    train(model, world, run)
    save(model, world, run, folder)


if __name__ == "__main__":
    main()
