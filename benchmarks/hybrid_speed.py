"""mionnx beside transformers in eager mode with its cache: prefill and decoding of hybrids and state-space models.

    python benchmarks/hybrid_speed.py [--families mamba2,qwen3_5_text] [--repeats 5] [--save]

A few layers of the sizes that models have, random weights, batch 1, float32, one thread each, by turns in one process;
logits are compared before anything is timed. Wall time; medians, and medians of ratios of neighbouring runs. `--save`
writes benchmarks/results/hybrid_speed.md.
"""

import argparse
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import transformers
from rich.progress import track
from tables import present
from transformers import AutoConfig, AutoModelForCausalLM
from turns import alternate, ratio

from exporters.transformers import export
from exporters.transformers.attention import cache_word
from mionnx import MIModel

LENGTHS = (128, 512, 2048)
DECODED = 16
TOLERANCE = 1e-3  # of the largest logit: random deep recurrences magnify rounding
VOCAB = {"vocab_size": 4096, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SHAPES: dict[str, dict[str, Any]] = {
    "mamba": {"hidden_size": 768, "state_size": 16, "num_hidden_layers": 6, "intermediate_size": 1536},
    "mamba2": {
        "hidden_size": 768,
        "state_size": 128,
        "num_hidden_layers": 6,
        "num_heads": 24,
        "head_dim": 64,
        "n_groups": 1,
        "chunk_size": 256,
    },
    "qwen3_5_text": {
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
    },
    "lfm2": {
        "hidden_size": 1024,
        "intermediate_size": 4608,
        "num_hidden_layers": 6,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "conv", "full_attention"] * 2,
    },
    "granitemoehybrid": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "mamba_n_heads": 48,
        "mamba_d_state": 128,
        "mamba_d_head": 32,
        "mamba_n_groups": 1,
        "num_local_experts": 0,
        "shared_intermediate_size": 2048,
        "layers_block_type": ["linear_attention"] * 5 + ["full_attention"],
    },
}
COLUMNS = ("model", "what", "transformers, ms", "mionnx, ms", "ratio")


def measure(family: str, repeats: int, folder: Path) -> list[tuple[str, ...]]:
    """Rows of one family: prefill of each length, and decoding after it, a token."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **VOCAB, **SHAPES[family])
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    theirs.save_pretrained(folder / "checkpoint")
    export(folder / "checkpoint", folder / "hooked")
    ours, word = MIModel.from_pretrained(folder / "hooked", threads=1), cache_word(theirs)
    rows = []
    for length in LENGTHS:
        ids = np.random.default_rng(length).integers(3, VOCAB["vocab_size"], length)
        rows.append(row(family, f"prefill {length}", *prefill(theirs, ours, ids), repeats))
        rows.append(
            row(family, f"decode after {length}, a token", *decoding(theirs, ours, word, ids), repeats, DECODED)
        )
    return rows


def prefill(theirs: Any, ours: MIModel, ids: np.ndarray) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Passes over a text that leave a cache, compared first."""
    tokens = torch.from_numpy(ids)[None]

    @torch.no_grad()
    def their_pass() -> np.ndarray:
        return theirs(input_ids=tokens, use_cache=True).logits.numpy()

    def our_pass() -> np.ndarray:
        return ours.forward(ids, use_cache=True).output()

    expected = their_pass()
    off = np.abs(our_pass() - expected).max() / np.abs(expected).max()
    assert off < TOLERANCE, off
    return their_pass, our_pass


def decoding(theirs: Any, ours: MIModel, word: str, ids: np.ndarray) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Greedy tokens after a text, whose caches are made before the clock starts and go on from turn to turn."""
    with torch.no_grad():
        left = {"theirs": theirs(input_ids=torch.from_numpy(ids)[None], use_cache=True)[word]}
    begun = ours.forward(ids, use_cache=True)
    left["ours"] = begun.kv_cache or begun.state
    generator = np.random.default_rng(0)

    @torch.no_grad()
    def their_steps() -> None:
        for token in generator.integers(3, VOCAB["vocab_size"], DECODED):
            made = theirs(input_ids=torch.tensor([[int(token)]]), use_cache=True, **{word: left["theirs"]})
            left["theirs"] = made[word]

    def our_steps() -> None:
        for token in generator.integers(3, VOCAB["vocab_size"], DECODED):
            made = ours.forward([int(token)], cache=left["ours"], use_cache=True)
            left["ours"] = made.kv_cache or made.state

    return their_steps, our_steps


def row(
    family: str, what: str, theirs: Callable[[], Any], ours: Callable[[], Any], repeats: int, units: int = 1
) -> tuple[str, ...]:
    """Milliseconds of both, and the ratio."""
    times = alternate({"theirs": theirs, "ours": ours}, repeats)
    shown = [f"{1000 * median(times[name]) / units:.1f}" for name in ("theirs", "ours")]
    return family, what, *shown, ratio(times["theirs"], times["ours"], 2)


def main() -> None:
    """Measure everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(SHAPES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    rows = []
    for family in track(options.families.split(","), "families"):
        with tempfile.TemporaryDirectory() as folder:
            rows += measure(family, options.repeats, Path(folder))
    title = f"transformers {transformers.__version__} eager with its cache, fp32, one thread, medians of "
    title += f"{options.repeats}; {platform.processor() or platform.machine()}"
    said = "A ratio above 1 means that mionnx is ahead."
    present("hybrid_speed", "Hybrids beside transformers", title, [(COLUMNS, rows)], options.save, said)


if __name__ == "__main__":
    main()
