"""What quantisation costs SmolLM2, by setting: KL and top token over a text, and the hook points that differ most.

The text is the README files of this repository, 2,000 tokens in windows of 250. Each setting beside the model of floats
that it was made from: the mean of KL(floats || quantised) over tokens in nats, the share of tokens with the same top
token, the perplexity of the text, and of all hook points of one window the one with the largest relative error. A bound
of KL is one over this text, in windows of `verify`; importance is of what the model writes by itself, without this
text. The second table: the matrices that cost most KL alone, in 4 bits (`verify`).

    python benchmarks/quantised_accuracy.py [--model smollm2] [--save]
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.progress import track
from scipy.special import log_softmax
from tables import present

from mionnx import HookSpec, MIModel
from mionnx.run.source_path import PACKAGED

WINDOW, WINDOWS = 250, 8
SHOWN = 128  # tokens of the window in which all hook points are compared
Z = {"symmetric": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "int4": {},
    "int4, level 4": {"accuracy_level": 4},
    "int4, table and unembedding in 8 bits": {"in_8_bits": ["lm_head.weight"]},
    "int4, blocks of 16": {"block_size": 16},
    "int4, blocks of 128": {"block_size": 128},
    "int4, zero points": Z,
    "int4, zero points, level 4": {**Z, "accuracy_level": 4},
    "int4, zero points, blocks of 128": {**Z, "block_size": 128},
    "int4, zero points, table and unembedding in floats": {**Z, "embedding": False, "unembedding": False},
    "int4, zero points, down projections in 8 bits": {**Z, "in_8_bits": ["*down_proj*"]},
    "int4, importance": {"importance": True},
    "int4, importance, blocks of 16": {"importance": True, "block_size": 16},
    "int4, zero points, importance": {**Z, "importance": True},
    "int4, KL of 0.1 at most": {"budget": 0.1},
    "int4, importance, KL of 0.1 at most": {"importance": True, "budget": 0.1},
    "int4, importance, KL of 0.02 at most": {"importance": True, "budget": 0.02},
    "int8": {"bits": 8},
    "int8, level 4": {"bits": 8, "accuracy_level": 4},
}
LISTED = 12
MATRICES = ("matrix", "error of its numbers", "of its output", "KL alone, nats", "same top token")
HEAD = ("setting", "MB", "KL, nats", "same top token", "perplexity", "largest relative error at", "error")


def windows(model: MIModel) -> tuple[str, NDArray[np.int64]]:
    """The text, and its tokens [windows, tokens]."""
    root = Path(__file__).parents[1]
    files = [root / "README.md", *sorted((root / "mionnx").glob("*/README.md"))]
    tokens = model.tokenize("\n".join(file.read_text() for file in files))
    text = tokens.text[: tokens.offsets[WINDOW * WINDOWS - 1][1]]
    return text, np.asarray(tokens.ids[: WINDOW * WINDOWS]).reshape(WINDOWS, WINDOW)


def costs(model: MIModel, made: MIModel, text: str) -> list[list[str]]:
    """A row for each of the matrices that cost most, and one for all of them."""
    losses = model.verify(other=made, texts=text, points="hook_final_norm", local=False).matrices
    rows = [
        [one.name, f"{one.weight_error:.3f}", f"{one.output_error:.3f}", f"{one.kl:.4f}", f"{one.top_1:.3f}"]
        for one in losses[:LISTED]
    ]
    return [*rows, [f"sum of all {len(losses)}", "-", "-", f"{sum(one.kl for one in losses):.4f}", "-"]]


def log_probabilities(model: MIModel, text: NDArray[np.int64]) -> NDArray[np.float32]:
    """[tokens, vocab] in nats, one window after another."""
    rows = [log_softmax(model.forward(window[None]).output()[0].astype(np.float32), axis=-1) for window in text]
    return np.concatenate(rows)


def worst(floats: dict[str, NDArray[Any]], model: MIModel, text: NDArray[np.int64]) -> tuple[str, float]:
    """The hook point with the largest relative error, in the Euclidean norm over all of its numbers."""
    errors = {}
    for name, value in model.forward(text[:1, :SHOWN], HookSpec().capture([*floats])).items():
        seen = np.isfinite(value) & (np.abs(value) < 1e30) & (np.abs(floats[name]) < 1e30)
        off = np.linalg.norm(np.where(seen, value - floats[name], 0))
        errors[name] = float(off / np.linalg.norm(np.where(seen, floats[name], 0)))
    name = max(errors, key=lambda one: errors[one])
    return name, errors[name]


def main() -> None:
    """Measure every setting and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    model = MIModel.from_pretrained(options.model)
    words, text = windows(model)
    following = np.stack([window[1:] for window in text])
    whole = log_probabilities(model, text)
    wanted = [str(point) for point in model.hook_points() if not point.derived and point.layer is not None]
    floats = dict(model.forward(text[:1, :SHOWN], HookSpec().capture(wanted)))

    def perplexity(found: NDArray[np.float32]) -> str:
        told = found.reshape(WINDOWS, WINDOW, -1)[:, :-1]
        return f"{np.exp(-np.take_along_axis(told, following[..., None], axis=-1).mean()):.2f}"

    def megabytes(one: MIModel) -> str:
        return f"{sum(file.stat().st_size for file in one.hooked.folder.glob('*.safetensors')) / 1e6:.0f}"

    def row(setting: str, made: MIModel) -> list[str]:
        found = log_probabilities(made, text)
        kl = max(0.0, float((np.exp(whole) * (whole - found)).sum(axis=-1).mean()))
        same = float((whole.argmax(-1) == found.argmax(-1)).mean())
        hook, error = worst(floats, made, text)
        return [setting, megabytes(made), f"{kl:.4f}", f"{same:.3f}", perplexity(found), hook, f"{error:.3f}"]

    matrices: list[list[str]] = []
    rows = [["floats", megabytes(model), "-", "-", perplexity(whole), "-", "-"]]
    with tempfile.TemporaryDirectory() as name:
        for number, (setting, given) in enumerate(track(SETTINGS.items(), "quantising", total=len(SETTINGS))):
            texts = {"texts": words} if "budget" in given else {}
            made = MIModel.from_pretrained(model.quantise(f"{name}/{number}", **given, **texts))
            matrices = costs(model, made, words) if not given else matrices
            rows.append(row(setting, made))
    if options.model in PACKAGED:
        made = MIModel.from_pretrained(options.model, dtype="int4")
        rows.append(row("the blocks of its own file, Q4_1", made))
        made = MIModel.from_pretrained(options.model, dtype="int4", accuracy_level=4)
        rows.append(row("the blocks of its own file, level 4", made))
    title = f"{options.model}, {WINDOWS * WINDOW} tokens, weights in blocks of 32 unless said"
    tables = [(HEAD, rows), (MATRICES, matrices)]
    said = f"KL is over windows of {WINDOW} tokens; `quantise` meets its bound over windows of 256 of the same text."
    present("quantised_accuracy", "What quantisation costs", title, tables, options.save, said)


if __name__ == "__main__":
    main()
