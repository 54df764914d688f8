"""mionnx beside transformers' `generate` and TransformerLens on a CPU: tokens a second, plain, steered, captured.

    pip install -e ".[cpu,export,bench]"
    python benchmarks/generation_speed.py [--new 64] [--prompt 32] [--repeats 5] [--threads 0] [--save]

All programs run in one process, by turns, on the same random checkpoints and with the same threads, batch 1, greedy,
fp32, eager attention where it can be chosen; each figure is a median. Their greedy ids are compared first. "captured"
keeps the residual stream after every block at every step. `--save` writes benchmarks/results/generation_speed.md.
"""

import argparse
import os
import platform
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.progress import track
from tables import present
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from exporters.transformers import export
from mionnx import HookPoint, HookSpec, Intervention, MIModel

HERE = Path(__file__).parent
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2 124M": {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257},
    "llama 213M": {
        "hidden_size": 1024,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "intermediate_size": 2816,
        "vocab_size": 32000,
        "max_position_embeddings": 1024,
    },
    "llama 20M": {
        "hidden_size": 384,
        "num_hidden_layers": 8,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 1024,
        "vocab_size": 8192,
        "max_position_embeddings": 1024,
    },
}
CASES = ("plain", "steered", "captured")
PROGRAMS = ("transformers", "transformer_lens", "mionnx")
COLUMNS = ("model", "case", "transformers", "TransformerLens", "mionnx", "over transformers", "over TransformerLens")
Ids = list[int]


def make(family: str, folder: Path) -> None:
    """A random checkpoint of a family's shape."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family.split()[0], **SHAPES[family])
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    model.save_pretrained(folder)


class Programs:
    """The same model in three programs; each method generates and returns the new ids."""

    def __init__(self, folder: Path, prompt: int, new: int, threads: int) -> None:
        torch.set_num_threads(threads)
        export(folder, folder / "hooked")
        self.ours = MIModel.from_pretrained(folder / "hooked", threads=threads)
        self.theirs: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.theirs.generation_config.eos_token_id = None
        tokenizer = AutoTokenizer.from_pretrained(HERE.parent / "models" / "world-llama")
        eager = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        self.bridge = TransformerBridge.boot_transformers(str(folder), hf_model=eager, tokenizer=tokenizer)
        rng = np.random.default_rng(0)
        self.ids, self.new = rng.integers(3, self.ours.vocab_size, (1, prompt)), new
        self.direction = rng.normal(0, 1, self.ours.hidden_size).astype(np.float32)
        self.layer = self.ours.num_layers // 2

    def mionnx(self, case: str) -> Ids:
        """As a user of mionnx writes it."""
        spec = HookSpec()
        if case == "steered":
            spec.intervene(HookPoint.ResidPost(self.layer), Intervention.Add(self.direction))
        if case == "captured":
            spec.capture("blocks.*.hook_resid_post")
        return self.ours.generate(self.ids, spec, max_new_tokens=self.new, eos_token_id=[]).new_ids[0].tolist()

    def transformers(self, case: str) -> Ids:
        """With forward hooks on the blocks."""
        with torch_hooks(self.theirs, case, self.layer, torch.from_numpy(self.direction)), torch.no_grad():
            ids = self.theirs.generate(
                torch.from_numpy(self.ids),
                attention_mask=torch.ones(1, self.ids.shape[1], dtype=torch.int64),
                max_new_tokens=self.new,
                do_sample=False,
                pad_token_id=0,
            )
        return ids[0, self.ids.shape[1] :].tolist()

    def transformer_lens(self, case: str) -> Ids:
        """With its own hooks."""
        direction, kept = torch.from_numpy(self.direction), []
        hooks: list[tuple[str, Callable[..., Any]]] = []
        if case == "steered":
            hooks = [(f"blocks.{self.layer}.hook_out", lambda value, hook: value + direction)]
        if case == "captured":
            hooks = [
                (f"blocks.{i}.hook_out", lambda value, hook: kept.append(value)) for i in range(self.ours.num_layers)
            ]
        with self.bridge.hooks(fwd_hooks=hooks), torch.no_grad():
            ids = self.bridge.generate(
                torch.from_numpy(self.ids),
                max_new_tokens=self.new,
                stop_at_eos=False,
                do_sample=False,
                verbose=False,
                return_type="tokens",
            )
        return ids[0, self.ids.shape[1] :].tolist()


@contextmanager
def torch_hooks(model: PreTrainedModel, case: str, layer: int, direction: torch.Tensor) -> Any:
    """Forward hooks on the blocks, for as long as they are needed."""
    blocks = model.get_submodule("transformer.h" if hasattr(model, "transformer") else "model.layers")
    kept: list[torch.Tensor] = []

    def steer(_module: Any, _inputs: Any, output: Any) -> Any:
        return (output[0] + direction, *output[1:]) if isinstance(output, tuple) else output + direction

    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        kept.append(output[0] if isinstance(output, tuple) else output)

    wanted = {"plain": [], "steered": [(blocks[layer], steer)], "captured": [(block, keep) for block in blocks]}[case]
    handles = [module.register_forward_hook(hook) for module, hook in wanted]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def measure(family: str, options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Case -> program -> tokens a second, by turns; every turn runs all cases."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(family, folder)
        programs = Programs(folder, options.prompt, options.new, options.threads or os.cpu_count() or 1)
        speeds: dict[str, dict[str, list[float]]] = {case: {program: [] for program in PROGRAMS} for case in CASES}
        texts: dict[str, Ids] = {}
        for turn in range(options.repeats + 1):
            for case in CASES:
                found: dict[str, Ids] = {}
                for program in PROGRAMS:
                    begin = time.perf_counter()
                    found[program] = getattr(programs, program)(case)
                    if turn:
                        speeds[case][program].append(options.new / (time.perf_counter() - begin))
                if len({tuple(ids) for ids in found.values()}) != 1:
                    raise SystemExit(f"{family}, {case}: the programs do not generate the same ids: {found}")
                texts[case] = found["mionnx"]
        if texts["steered"] == texts["plain"]:
            raise SystemExit(f"{family}: steering changed nothing, so nothing shows that it was in force")
        return speeds


def bandwidth(threads: int) -> float:
    """GB of fp32 weights that this machine reads a second: the bound on decoding at batch 1."""
    torch.set_num_threads(threads)
    weight, vector, times = torch.randn(32000, 4096), torch.randn(4096), []
    for _ in range(7):
        begin = time.perf_counter()
        torch.mv(weight, vector)
        times.append(time.perf_counter() - begin)
    return weight.numel() * 4 / median(times) / 1e9


def rows_of(family: str, speeds: dict[str, dict[str, list[float]]]) -> tuple[list[tuple[str, ...]], str]:
    """The table's rows, and how hooked generation compares with unhooked."""

    def ratio(one: list[float], other: list[float]) -> float:
        return median(a / b for a, b in zip(one, other, strict=True))

    rows = []
    for case in CASES:
        ours, lens, plain = (speeds[case][program] for program in ("mionnx", "transformer_lens", "transformers"))
        values = [f"{median(speed):.1f}" for speed in (plain, lens, ours)]
        rows.append((family, case, *values, f"{ratio(ours, plain):.2f}", f"{ratio(ours, lens):.2f}"))
    own = {case: ratio(speeds[case]["mionnx"], speeds["plain"]["mionnx"]) for case in CASES[1:]}
    return rows, f"{family}: mionnx steered {own['steered']:.3f} and captured {own['captured']:.3f} of its plain speed"


def main() -> None:
    """Measure everything and print the table."""
    parser = argparse.ArgumentParser(description="Tokens a second of mionnx, transformers and TransformerLens.")
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    rows, notes = [], []
    for family in track(SHAPES, "measuring"):
        found, note = rows_of(family, measure(family, options))
        rows += found
        notes.append(note)
    threads = options.threads or os.cpu_count() or 1
    notes.append(f"this machine reads {bandwidth(threads):.1f} GB of weights a second, which bounds every program here")
    title = (
        f"tokens a second, batch 1, prompt {options.prompt}, {options.new} new, fp32, {threads} threads; "
        f"medians of {options.repeats}; {platform.machine()}"
    )
    heading = "Generation beside transformers and TransformerLens"
    said = "The last columns are ratios of neighbouring runs: above 1, mionnx is ahead."
    present("generation_speed", heading, title, [(COLUMNS, rows)], options.save, said, notes)


if __name__ == "__main__":
    main()
