"""Largest differences from TransformerLens in the parts of the residual stream, on the same weights.

    pip install -e ".[cpu,export,bench]"
    python benchmarks/transformer_lens_parity.py

Random GPT-2 and Llama shapes, fp32, eager; `decompose_resid`, `accumulated_resid`, `stack_head_results`,
`apply_ln_to_stack`, `logit_attrs` and the logit lens, on a raw bridge and, for what TransformerLens gives with the
norms' weights folded in, in its compatibility mode. Differences are of values of order 1.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformer_lens import ActivationCache
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from exporters.transformers import export
from mionnx import MIModel

HERE = Path(__file__).parent
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 96, "n_head": 6, "n_layer": 3, "vocab_size": 471, "n_positions": 64},
    "llama": {
        "hidden_size": 96,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "num_hidden_layers": 3,
        "intermediate_size": 160,
        "vocab_size": 471,
        "max_position_embeddings": 64,
    },
}
IDS = np.random.default_rng(0).integers(3, 101, (2, 9))
TOKENS, OTHERS = np.array([5, 7]), np.array([11, 13])
Difference = tuple[str, float]


def make(family: str, folder: Path) -> None:
    """A random checkpoint; norms are not all ones and biases not all zeros."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SHAPES[family]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.08)
    model.save_pretrained(folder)


def bridge(folder: Path) -> TransformerBridge:
    """The checkpoint in TransformerLens, as its users open it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(HERE.parent / "models" / "world-llama")
    return TransformerBridge.boot_transformers(str(folder), hf_model=model, tokenizer=tokenizer)


def gap(ours: tuple[Any, list[str]] | np.ndarray, theirs: tuple[Any, list[str]] | torch.Tensor) -> float:
    """The largest difference of two results; their labels must be the same."""
    if isinstance(ours, tuple) and isinstance(theirs, tuple):
        if ours[1] != list(theirs[1]):
            raise SystemExit(f"other labels: {ours[1]}, {theirs[1]}")
        ours, theirs = ours[0], theirs[0]
    other = theirs.detach().numpy()
    if ours.shape != other.shape:
        raise SystemExit(f"other shapes: {ours.shape}, {other.shape}")
    return float(np.abs(ours - other).max())


def stacks(ours: MIModel, cache: ActivationCache) -> Iterator[Difference]:
    """The stream taken apart."""
    for mode in ("all", "mlp", "attn"):
        theirs = cache.decompose_resid(mode=mode, return_labels=True)
        yield f"decompose_resid({mode})", gap(ours.decompose_resid(IDS, mode=mode), theirs)
    theirs = cache.decompose_resid(1, mlp_input=True, pos_slice=-1, return_labels=True)
    yield (
        "decompose_resid(layer 1, mlp_input, pos -1)",
        gap(ours.decompose_resid(IDS, 1, mlp_input=True, pos_slice=-1), theirs),
    )
    for options in ({}, {"incl_mid": True}, {"layer": 2, "mlp_input": True}, {"apply_ln": True}):
        theirs = cache.accumulated_resid(**options, return_labels=True)
        yield f"accumulated_resid({options})", gap(ours.accumulated_resid(IDS, **options), theirs)
    for options in ({}, {"layer": 2, "incl_remainder": True}, {"pos_slice": -1}):
        theirs = cache.stack_head_results(**options, return_labels=True)
        yield f"stack_head_results({options})", gap(ours.stack_head_results(IDS, **options), theirs)


def attributions(ours: MIModel, cache: ActivationCache) -> Iterator[Difference]:
    """Norms and logits, on a raw bridge: without the norms' weights."""
    for layer, mlp_input in ((None, False), (1, False), (2, True)):
        stack, _ = ours.decompose_resid(IDS, layer, mlp_input=mlp_input)
        theirs = cache.apply_ln_to_stack(torch.from_numpy(stack), layer, mlp_input=mlp_input)
        made = ours.apply_ln_to_stack(stack, IDS, layer, mlp_input=mlp_input, weighted=False)
        yield f"apply_ln_to_stack(layer {layer}, mlp_input {mlp_input})", gap(made, theirs)
    stack, _ = ours.stack_head_results(IDS)
    for name, given in {"one token": (5, None), "two": (5, 11), "for each row": (TOKENS, OTHERS)}.items():
        tensors = [torch.from_numpy(one) if isinstance(one, np.ndarray) else one for one in given]
        made = ours.logit_attrs(stack, IDS, *given, weighted=False)
        yield f"logit_attrs({name})", gap(made, cache.logit_attrs(torch.from_numpy(stack), *tensors))


def lens(ours: MIModel, cache: ActivationCache) -> Iterator[Difference]:
    """The logit lens of every layer."""
    theirs = cache.logit_lens(return_type="log_probs", positions=None, layers=range(ours.num_layers + 1)).values
    for row, ids in enumerate(IDS):
        found = ours.logit_lens(ids, k=5)
        full = theirs[1:, row].numpy()  # the first is the stream before layer 0
        there = np.take_along_axis(full, found.top_ids, axis=-1)
        yield f"logit lens, log-probabilities (row {row})", float(np.abs(found.readout.top - there).max())


def folded(ours: MIModel, theirs: TransformerBridge) -> Iterator[Difference]:
    """With the norms' weights, which TransformerLens folds into the unembedding."""
    theirs.enable_compatibility_mode(
        fold_ln=True, center_writing_weights=False, center_unembed=False, fold_value_biases=False
    )
    _, cache = theirs.run_with_cache(torch.from_numpy(IDS))
    stack, _ = ours.decompose_resid(IDS)
    given = torch.from_numpy(stack)
    yield "logit_attrs(with weights)", gap(ours.logit_attrs(stack, IDS, 5, 11), cache.logit_attrs(given, 5, 11))


def differences(folder: Path) -> list[Difference]:
    """(what was compared, the largest difference) of a checkpoint."""
    export(folder, folder / "hooked")
    ours, theirs = MIModel.from_pretrained(folder / "hooked"), bridge(folder)
    with torch.no_grad():
        _, cache = theirs.run_with_cache(torch.from_numpy(IDS))
        found = [*stacks(ours, cache), *attributions(ours, cache), *lens(ours, cache)]
        return [*found, *folded(ours, bridge(folder))]


def main() -> None:
    """Print the table."""
    found = {}
    for family in SHAPES:
        with tempfile.TemporaryDirectory() as name:
            make(family, Path(name))
            found[family] = dict(differences(Path(name)))
    table = Table("what", *found, title="largest difference from TransformerLens")
    for what in found["gpt2"]:
        table.add_row(what, *(f"{found[family][what]:.1e}" for family in found))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
