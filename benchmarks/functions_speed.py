"""Python functions as hooks: what cutting a graph costs, and mionnx beside TransformerLens.

    pip install -e ".[cpu,export,bench]"
    python benchmarks/functions_speed.py [--repeats 9] [--threads 0] [--lengths 16 64 256] [--layers 12] [--save]

One random GPT-2 of 124M parameters, fp32; all programs in one process, by turns, with the same threads; each figure is
a median of ratios of neighbouring runs. A function that returns what it is given stands at one residual stream, at the
residual stream after every layer, and (mionnx only) at every hook point; beside it a plain `forward` without hooks. The
programs' logits are compared first. `first call` is what cutting and opening the graph takes.

`--layers` makes a smaller model, to try the program out. `--save` writes benchmarks/results/functions_speed.md.
"""

import platform
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from gpt2_shape import exported, gpt2, options_parser, set_threads
from rewritten_speed import Work, alternate, ratio
from rich.progress import track
from tables import present
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config

from mionnx import MIModel
from mionnx.run.segment_chain import SegmentChain

HERE = Path(__file__).parent
HEAD = ("tokens", "functions at", "segments", "first call", "forward", "mionnx", "mionnx / forward", "TL / mionnx")


def same(activation: Any, hook: Any) -> Any:
    """A function that changes nothing."""
    return activation


def small(folder: Path, layers: int) -> None:
    """A GPT-2 of fewer layers."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(GPT2Config(n_layer=layers)).save_pretrained(folder)


def peer(folder: Path) -> TransformerBridge:
    """The same model in TransformerLens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(HERE.parent / "models" / "world-llama")
    return TransformerBridge.boot_transformers(str(folder), hf_model=model, tokenizer=tokenizer)


def in_transformer_lens(bridge: TransformerBridge, ids: np.ndarray, hooks: list[Any]) -> np.ndarray:
    """Logits, with its own hooks."""
    with torch.no_grad():
        return bridge.run_with_hooks(torch.from_numpy(ids), fwd_hooks=hooks).numpy()


def measure(model: MIModel, bridge: TransformerBridge, length: int, repeats: int) -> list[tuple[str, ...]]:
    """The rows of one length."""
    ids = np.random.default_rng(length).integers(3, model.vocab_size, (1, length))
    layers, rows = range(model.num_layers), []
    middle = model.num_layers // 2
    everywhere = [point.name for point in model.hook_points() if not point.derived]
    cases = {
        "one residual stream": ([f"blocks.{middle}.hook_resid_post"], [f"blocks.{middle}.hook_out"]),
        "all residual streams": (
            [f"blocks.{layer}.hook_resid_post" for layer in layers],
            [f"blocks.{layer}.hook_out" for layer in layers],
        ),
        f"all {len(everywhere)} hook points": (everywhere, None),
    }
    plain = model.forward(ids).output()
    for name, (here, there) in cases.items():
        hooks = [(hook, same) for hook in here]
        begin = time.perf_counter()
        logits = model.run_with_hooks(ids, hooks)
        first = time.perf_counter() - begin
        if not np.array_equal(logits, plain):
            raise SystemExit(f"{name}, {length} tokens: functions that change nothing changed the logits")
        programs: dict[str, Work] = {
            "forward": lambda: model.forward(ids).output(),
            "mionnx": lambda hooks=hooks: model.run_with_hooks(ids, hooks),
        }
        if there is not None:
            programs["lens"] = lambda there=there: in_transformer_lens(bridge, ids, [(hook, same) for hook in there])
            if np.abs(programs["lens"]() - plain).max() / np.abs(plain).max() > 5e-5:
                raise SystemExit(f"{name}, {length} tokens: the programs give other logits")
        times = alternate(programs, repeats)
        chain = next(one for one in reversed(model.variants.open.values()) if isinstance(one, SegmentChain))
        own, bare = times["mionnx"], times["forward"]
        milliseconds = [f"{median(seconds) * 1000:.1f} ms" for seconds in (bare, own)]
        ahead = ratio(times["lens"], own) if "lens" in times else "-"
        rows.append(
            (str(length), name, str(len(chain.segments)), f"{first:.2f} s", *milliseconds, ratio(own, bare), ahead)
        )
    return rows


def main() -> None:
    """Measure everything and print the table."""
    parser = options_parser("Python functions as hooks, beside a plain pass and TransformerLens.", repeats=9)
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--layers", type=int, default=12)
    options = parser.parse_args()
    threads = set_threads(options.threads)
    with exported(gpt2 if options.layers == 12 else partial(small, layers=options.layers)) as folder:
        model, bridge = MIModel.from_pretrained(folder / "hooked", threads=threads, base=False), peer(folder)
        found = [measure(model, bridge, length, options.repeats) for length in track(options.lengths, "measuring")]
    rows = [row for part in found for row in part]
    machine = f"{threads} threads, {platform.machine()}"
    title = f"GPT-2, {options.layers} layers, fp32, {machine}; medians of {options.repeats}"
    present("functions_speed", "Python functions as hooks", title, [(HEAD, rows)], options.save)


if __name__ == "__main__":
    main()
