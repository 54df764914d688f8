"""Forward passes: what hooks cost mionnx, and mionnx beside transformers with torch hooks and TransformerLens.

    pip install -e ".[cpu,export,bench]"
    python benchmarks/rewritten_speed.py [--repeats 9] [--threads 0] [--save]

One random GPT-2 of 124M parameters, fp32; all programs in one process, by turns, with the same threads; each figure is
a median of ratios of neighbouring runs.

(a) `forward` beside a bare ONNX Runtime session on the same graph: with an empty spec, all residual streams captured,
    every hook point captured, and a steering vector with an attention knockout.
(b) The residual streams captured (`run_with_cache`, forward hooks), and a steering vector (`run_with_hooks`), in eager
    attention, batch 1 and 8, 16 to 256 tokens. The programs' results are compared first.

`--save` writes benchmarks/results/rewritten_speed.md.
"""

import platform
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnxruntime
import torch
from generation_speed import torch_hooks
from gpt2_shape import exported, options_parser, set_threads
from rich.progress import track
from tables import present
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoModelForCausalLM, AutoTokenizer
from turns import Work, alternate, ratio

from mionnx import HookPoint, HookSpec, Intervention, KnockoutSpec, MIModel, create_knockout_mask
from mionnx.engine.session import UNSTABLE_FUSIONS

LENGTHS, BATCHES = (16, 64, 256), (1, 8)
LARGE = 1024  # tokens of all rows, from which on half as many repeats are made

HERE = Path(__file__).parent


def own_cost(model: MIModel, threads: int, repeats: int) -> list[tuple[str, ...]]:
    """(a): the rows of mionnx beside a bare session."""
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    # As mionnx' sessions: threads that go on spinning after a run would be charged to the program that runs next.
    settings.add_session_config_entry("session.force_spinning_stop", "1")
    bare = onnxruntime.InferenceSession(
        str(model.hooked.folder / "model.onnx"), settings, disabled_optimizers=list(UNSTABLE_FUSIONS)
    )
    rows = []
    for length in (16, 64):
        ids = np.random.default_rng(length).integers(3, model.vocab_size, (1, length))
        feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(length)[None]}
        empty = np.zeros((1, model.num_kv_heads, 0, model.head_dim), np.float32)
        feeds |= {f"past_key_values.{i}.{k}": empty for i in range(model.num_layers) for k in ("key", "value")}
        direction = np.random.default_rng(1).normal(0, 1, model.hidden_size)
        mask = create_knockout_mask(KnockoutSpec().edge(length - 1, 2), model.num_heads, length)
        specs = {
            "empty spec": HookSpec(),
            f"{model.num_layers} residual streams captured": HookSpec().capture("blocks.*.hook_resid_post"),
            "every hook point captured": HookSpec().capture(lambda name: not name.endswith("hook_result")),
            "steering and knockout": HookSpec()
            .intervene(HookPoint.ResidPost(6), Intervention.Add(direction))
            .intervene(HookPoint.AttnScores(5), Intervention.Knockout(mask)),
        }
        programs: dict[str, Work] = {"bare": lambda feeds=feeds: bare.run(["logits"], feeds)}
        programs |= {name: lambda ids=ids, spec=spec: model.forward(ids, spec) for name, spec in specs.items()}
        times = alternate(programs, repeats)
        base = f"{median(times['bare']) * 1000:.1f} ms"
        rows += [(f"{length} tokens", name, base, ratio(times[name], times["bare"])) for name in specs]
    return rows


class Peers:
    """The same model in transformers and TransformerLens."""

    def __init__(self, folder: Path) -> None:
        def eager() -> Any:
            found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
            return found.eval()

        tokenizer = AutoTokenizer.from_pretrained(HERE.parent / "models" / "world-llama")
        self.hugging_face = eager()
        self.bridge = TransformerBridge.boot_transformers(str(folder), hf_model=eager(), tokenizer=tokenizer)

    def transformers(self, ids: np.ndarray, case: str, layer: int, direction: torch.Tensor) -> np.ndarray:
        """Logits, with forward hooks."""
        with torch_hooks(self.hugging_face, case, layer, direction), torch.no_grad():
            return self.hugging_face(torch.from_numpy(ids), use_cache=False).logits.numpy()

    def transformer_lens(self, ids: np.ndarray, case: str, layer: int, direction: torch.Tensor) -> np.ndarray:
        """Logits, with its own cache or hooks."""
        tokens = torch.from_numpy(ids)
        with torch.no_grad():
            if case == "captured":
                logits, _ = self.bridge.run_with_cache(tokens, names_filter=lambda name: name.endswith(".hook_out"))
            else:
                hook = (f"blocks.{layer}.hook_out", lambda value, hook: value + direction)
                logits = self.bridge.run_with_hooks(tokens, fwd_hooks=[hook])
        return logits.numpy()


def beside_peers(model: MIModel, peers: Peers, repeats: int) -> list[tuple[str, ...]]:
    """(b): the rows of mionnx beside the others."""
    layer, rows = model.num_layers // 2, []
    vector = np.random.default_rng(1).normal(0, 1, model.hidden_size).astype(np.float32)
    direction = torch.from_numpy(vector)
    specs = {
        "captured": HookSpec().capture("blocks.*.hook_resid_post"),
        "steered": HookSpec().intervene(HookPoint.ResidPost(layer), Intervention.Add(vector)),
    }
    for batch in track(BATCHES, "beside the peers"):
        for length in LENGTHS:
            ids = np.random.default_rng(length).integers(3, model.vocab_size, (batch, length))
            for case, spec in specs.items():
                programs: dict[str, Work] = {
                    "transformers": lambda ids=ids, case=case: peers.transformers(ids, case, layer, direction),
                    "lens": lambda ids=ids, case=case: peers.transformer_lens(ids, case, layer, direction),
                    "mionnx": lambda ids=ids, spec=spec: model.forward(ids, spec).output(),
                }
                logits = [program() for program in programs.values()]
                if max(np.abs(one - logits[2]).max() / np.abs(one).max() for one in logits[:2]) > 5e-5:
                    raise SystemExit(f"{case}, {batch} x {length}: the programs give other logits")
                times = alternate(programs, repeats if batch * length < LARGE else (repeats + 1) // 2)
                ours = f"{median(times['mionnx']) * 1000:.0f} ms"
                ahead = [ratio(times[name], times["mionnx"]) for name in ("transformers", "lens")]
                rows.append((case, f"{batch} x {length}", ours, *ahead))
    return rows


def main() -> None:
    """Measure everything and print the tables."""
    options = options_parser("Forward passes with hooks, beside the peers.", repeats=9).parse_args()
    threads = set_threads(options.threads)
    with exported() as folder:
        model = MIModel.from_pretrained(folder / "hooked", threads=threads, base=False)
        first = own_cost(model, threads, options.repeats)
        second = beside_peers(model, Peers(folder), options.repeats)
    heads = (
        ("tokens", "what", "bare session", "mionnx / bare"),
        (
            "what",
            "batch x tokens",
            "mionnx",
            "transformers / mionnx",
            "TransformerLens / mionnx",
        ),
    )
    runs = f"medians of {options.repeats} runs, of half as many at 8 x 256"
    title = f"GPT-2 124M, fp32, {threads} threads, {platform.machine()}; {runs}"
    tables = list(zip(heads, (first, second), strict=True))
    present("rewritten_speed", "Forward passes with hooks", title, tables, options.save)


if __name__ == "__main__":
    main()
