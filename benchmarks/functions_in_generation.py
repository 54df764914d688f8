"""Python functions at every step of a generation, with the cache: mionnx beside transformers with torch's hooks.

    pip install -e ".[cpu,export,bench]"
    python benchmarks/functions_in_generation.py [--new 32] [--prompt 16] [--repeats 5] [--threads 0] [--save]

One random GPT-2 of 124M parameters, fp32, greedy; both programs in one process, by turns, with the same threads; each
figure is a median of ratios of neighbouring runs. The function adds 0.01 to the residual stream, after one layer or
after each. Tokens and logits of the programs are compared first; beside them generations of mionnx without functions,
and with the same change as an intervention of the graph.

`--save` writes benchmarks/results/functions_in_generation.md.
"""

import argparse
import os
import platform
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.progress import track
from tables import present
from transformers import AutoModelForCausalLM, GPT2Config
from turns import alternate, ratio

from exporters.transformers import export
from mionnx import HookSpec, Intervention, MIModel

HEAD = ("functions at", "ms / token", "beside transformers", "beside an intervention", "beside none")
SHIFT = 0.01


def shift(activation: Any, hook: Any) -> Any:
    """The function."""
    return activation + np.float32(SHIFT)


@contextmanager
def torch_hooks(peer: Any, layers: list[int]) -> Iterator[None]:
    """The same function as forward hooks of torch."""

    def add(_: Any, inputs: Any, output: Any) -> Any:
        return (output[0] + SHIFT, *output[1:]) if isinstance(output, tuple) else output + SHIFT

    handles = [peer.transformer.h[layer].register_forward_hook(add) for layer in layers]
    yield
    for handle in handles:
        handle.remove()


def in_transformers(peer: Any, ids: np.ndarray, new: int, layers: list[int]) -> Any:
    """Its generation, with the logits of each step."""
    asked = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad(), torch_hooks(peer, layers):
        return peer.generate(torch.from_numpy(ids), **asked, output_logits=True, return_dict_in_generate=True)


def measure(model: MIModel, peer: Any, layers: list[int], ids: np.ndarray, new: int, repeats: int) -> list[str]:
    """One row of the table."""
    points = [f"blocks.{layer}.hook_resid_post" for layer in layers]
    hooks, asked = [(point, shift) for point in points], {"max_new_tokens": new, "eos_token_id": []}
    spec = HookSpec().intervene(points, Intervention.Add(np.float32(SHIFT)))
    found = model.generate(ids, fwd_hooks=hooks, output_logits=True, **asked)
    expected = in_transformers(peer, ids, new, layers)
    if found.ids[0].tolist() != expected.sequences[0].tolist():
        raise SystemExit(f"{len(layers)} functions: the programs give other tokens")
    pairs = zip(found.steps, expected.logits, strict=True)
    gap = max(np.abs(step.output()[:, -1] - logits.numpy()).max() / logits.abs().max().item() for step, logits in pairs)
    if gap > 5e-5:
        raise SystemExit(f"{len(layers)} functions: the programs give other logits, by {gap:.1e}")
    times = alternate(
        {
            "transformers": lambda: in_transformers(peer, ids, new, layers),
            "mionnx": lambda: model.generate(ids, fwd_hooks=hooks, **asked),
            "spec": lambda: model.generate(ids, spec, **asked),
            "bare": lambda: model.generate(ids, **asked),
        },
        repeats,
    )
    own = times["mionnx"]
    told = [f"{len(layers)} residual stream{'s' * (len(layers) > 1)}", f"{median(own) * 1000 / new:.1f}"]
    return [*told, *(ratio(times[one], own, 2) for one in ("transformers", "spec", "bare"))]


def main() -> None:
    """Measure everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("repeats", 5), ("threads", 0), ("new", 32), ("prompt", 16), ("layers", 12)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    threads = options.threads or os.cpu_count() or 1
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as name:
        torch.manual_seed(0)
        peer = AutoModelForCausalLM.from_config(GPT2Config(n_layer=options.layers)).eval()
        peer.save_pretrained(name)
        export(Path(name), Path(name) / "hooked")
        model = MIModel.from_pretrained(Path(name) / "hooked", threads=threads, base=False)
        ids = np.random.default_rng(0).integers(3, model.vocab_size, (1, options.prompt))
        cases = ([model.num_layers // 2], [*range(model.num_layers)])
        rows = [measure(model, peer, case, ids, options.new, options.repeats) for case in track(cases, "measuring")]
    title = (
        f"GPT-2, {options.layers} layers, fp32, {options.prompt} tokens and {options.new} new ones, {threads} threads, "
        f"{platform.machine()}; medians of {options.repeats}"
    )
    said = "Ratios of speeds: above 1, a generation with functions is the faster one."
    present("functions_in_generation", "Functions in a generation", title, [(HEAD, rows)], options.save, said)


if __name__ == "__main__":
    main()
