"""Patching sweeps beside TransformerLens: GPT-2's shape, every cell compared.

    pip install -e ".[cpu,export,bench]"
    python benchmarks/sweep_speed.py [--lengths 16 64] [--repeats 2] [--sample 150] [--threads 0] [--save]

One random GPT-2 of 124M parameters, fp32, eager attention; both programs in one process, by turns, with the same
threads. The two prompts differ in one token, a quarter into them. mionnx' time is that of a new model object each
time: opening the model, cutting it into pieces and opening those is counted, and nothing is prepared beforehand.
TransformerLens runs one forward pass a cell, all alike; of more than `--sample` cells it runs that many, drawn at
random over all layers, heads and positions, and its time is that of the run whose values are patched in, plus that of
the sample times the share. All cells that it ran are compared.

"Bound" is the ratio if mionnx took no longer than the products that exact values need, at the speed of ONNX Runtime's
product of 1,536 rows with a matrix of the MLP: of each cell that differs, the layers behind it, from the first position
that it changes on, of the last layer only the last position behind the attention; no opening, no norms, no softmax.

The second table takes mionnx' shortcuts away and gives them back one after the other, once each, beside the time of
TransformerLens in the first; the last of them leaves out cells in which the two prompts have the same value. All cells
of heads and positions at once are not in it: without shortcuts they take minutes.

Lengths 16 and 64 take ten minutes, most of them TransformerLens'; `--lengths 16` takes three.
`--save` writes benchmarks/results/sweep_speed.md.
"""

import os
import platform
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("TQDM_DISABLE", "1")

import numpy as np
import onnx
import onnxruntime
import pandas
import torch
from gpt2_shape import exported, options_parser, set_threads
from rewritten_speed import Peers
from rich.progress import track
from tables import present
from transformer_lens import patching

from mionnx import MIModel
from mionnx.analysis.sweep.patched_runs import Shortcuts
from mionnx.analysis.sweep.result import SweepResult

ANSWER, VERSUS = 1000, 2000
Found = tuple[float, Any]
CASES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], Any, str]] = {
    "layer x head": ("hook_z", ("layer", "head"), ("layer", "head"), patching.layer_head_vector_patch_setter, "z"),
    "layer x position": ("hook_resid_pre", ("layer", "position"), ("layer", "pos"), patching.layer_pos_patch_setter,
                         "resid_pre"),
    "layer x head x position": ("hook_z", ("layer", "position", "head"), ("layer", "pos", "head"),
                                patching.layer_pos_head_vector_patch_setter, "z"),
}  # fmt: skip
STEPS = (
    ("engine", {"batch": False, "truncate": False, "last": False, "window": False, "skip": False}),
    ("batching", {"truncate": False, "last": False, "window": False, "skip": False}),
    ("truncation", {"last": False, "window": False, "skip": False}),
    ("last position", {"window": False, "skip": False}),
    ("causal window", {"skip": False}),
    ("skipped cells", {}),
)


def prompts(length: int, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """Two prompts that differ in one token, a quarter into them."""
    clean = np.random.default_rng(length).integers(3, vocab, length)
    corrupted = clean.copy()
    corrupted[length // 4] = (clean[length // 4] + 1) % vocab
    return clean, corrupted


def ours(folder: Path, threads: int, case: str, pair: tuple[np.ndarray, np.ndarray], **without: bool) -> SweepResult:
    """The sweep, from opening the model on."""
    hook, over, _, _, _ = CASES[case]
    model = MIModel.from_pretrained(folder / "hooked", threads=threads, base=False)
    return model.patch_sweep(*pair, hook, over, answer=ANSWER, versus=VERSUS, shortcuts=Shortcuts(**without))


def theirs(
    bridge: Any,
    case: str,
    pair: tuple[np.ndarray, np.ndarray],
    cells: np.ndarray,
    count: int,
    tokens: tuple[int, int] = (ANSWER, VERSUS),
) -> Found:
    """Run the same cells in TransformerLens, a forward pass each; scaled seconds, and values."""
    _, _, names, setter, activation = CASES[case]
    clean, corrupted = (torch.from_numpy(ids[None]) for ids in pair)
    with torch.no_grad():
        before, (_, cache) = timed(lambda: bridge.run_with_cache(clean))
        seconds, values = timed(
            lambda: patching.generic_activation_patch(
                bridge,
                corrupted,
                cache,
                lambda logits: logits[0, -1, tokens[0]] - logits[0, -1, tokens[1]],
                setter,
                activation,
                index_df=pandas.DataFrame(cells, columns=list(names)),
            ).numpy()
        )
    return before + seconds * count / len(cells), values


def multiply_adds(case: str, pair: tuple[np.ndarray, np.ndarray], shape: tuple[int, ...], width: int) -> float:
    """The multiplications that the products of a sweep's cells need, as few as exact values allow."""
    names, length = CASES[case][2], len(pair[0])
    first, total = int(np.argmax(pair[0] != pair[1])), 0.0
    for cell in np.ndindex(shape):
        at = dict(zip(names, cell, strict=True))
        start, layer = at.get("pos", first), at["layer"]
        if start < first:
            continue
        later, tokens = shape[0] - layer - 1, length - start
        whole = later + (CASES[case][0] == "hook_resid_pre")  # layers whose queries, keys and values are made anew
        attention = 2 * width * tokens * length
        total += whole * (3 * width**2 * tokens + attention)
        total += later * 9 * width**2 * tokens + 9 * width**2  # behind the last layer's attention one position is left
    return total


def product_speed(threads: int) -> float:
    """Multiplications a second of ONNX Runtime's product of many rows with a constant matrix."""
    rows, matrix = 1536, np.random.default_rng(0).standard_normal((768, 3072)).astype(np.float32)
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", ["x", "w"], ["y"])],
        "product",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [rows, 768])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(matrix, "w")],
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    opset = onnx.helper.make_operatorsetid("", 20)
    model = onnx.helper.make_model(graph, ir_version=10, opset_imports=[opset])
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    x = np.ones((rows, 768), np.float32)
    return rows * matrix.size / median(timed(lambda: session.run(None, {"x": x}))[0] for _ in range(20))


def timed(work: Any) -> Found:
    """Seconds, and the result."""
    begin = time.perf_counter()
    result = work()
    return time.perf_counter() - begin, result


def drawn(shape: tuple[int, ...], sample: int, seed: int) -> np.ndarray:
    """Some cells of a sweep."""
    cells = np.array(list(np.ndindex(shape)))
    return cells[np.sort(np.random.default_rng(seed).permutation(len(cells))[:sample])]


def compare(folder: Path, bridge: Any, lengths: list[int], repeats: int, sample: int, threads: int) -> list[list[str]]:
    """The rows of the first table."""
    rows, speed = [], product_speed(threads)
    for length in lengths:
        for case in track(CASES, f"{length} tokens"):
            pair = prompts(length, bridge.cfg.d_vocab)
            ours_seconds, theirs_seconds, ratios, apart = [], [], [], 0.0
            for turn in range(repeats):
                one, found = timed(lambda case=case, pair=pair: ours(folder, threads, case, pair))
                cells = drawn(found.values.shape, sample, turn)
                other, values = theirs(bridge, case, pair, cells, found.values.size)
                apart = max(apart, float(np.abs(found.values[tuple(cells.T)] - values).max()))
                ours_seconds.append(one)
                theirs_seconds.append(other)
                ratios.append(other / one)
            least = multiply_adds(case, pair, found.values.shape, bridge.cfg.d_model) / speed
            figures = [f"{median(theirs_seconds):.1f} s", f"{median(ours_seconds):.2f} s", f"{median(ratios):.1f}"]
            figures.append(f"{median(theirs_seconds) / least:.1f}")
            rows.append([f"{length}", case, f"{found.values.size}", *figures, f"{apart:.1e}"])
    return rows


def split(folder: Path, length: int, vocab: int, rows: list[list[str]], threads: int) -> list[list[str]]:
    """The rows of the second table, of those of the first: what each shortcut brings, added one after the other."""
    pair, found = prompts(length, vocab), []
    for _, case, _, theirs_seconds, *_ in track([row for row in rows if row[0] == f"{length}"][:2], "shortcuts"):
        seconds = [timed(partial(ours, folder, threads, case, pair, **without))[0] for _, without in STEPS]
        found.append([case, *(f"{float(theirs_seconds.split()[0]) / own:.1f}" for own in seconds)])
    return found


def main() -> None:
    """Measure everything and print the tables."""
    parser = options_parser("Patching sweeps beside TransformerLens.", repeats=2)
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--sample", type=int, default=150)
    parser.add_argument("--no-split", action="store_true")
    options = parser.parse_args()
    threads = set_threads(options.threads)
    with exported() as folder:
        bridge = Peers(folder).bridge
        first = compare(folder, bridge, options.lengths, options.repeats, options.sample, threads)
        second = []
        if not options.no_split:
            second = split(folder, options.lengths[0], bridge.cfg.d_vocab, first, threads)
    sampled = f"at most {options.sample} cells run in TransformerLens"
    title = f"GPT-2 124M, fp32, {threads} threads, {platform.machine()}; medians of {options.repeats}; {sampled}"
    heads = (
        ("tokens", "cells over", "cells", "TransformerLens", "mionnx", "ratio", "bound", "largest difference"),
        (f"ratio at {options.lengths[0]} tokens, with", *(step for step, _ in STEPS)),
    )
    tables = list(zip(heads, (first, second), strict=True))
    present("sweep_speed", "Patching sweeps", title, tables, options.save, " ".join(__doc__.split("\n\n")[2:4]))


if __name__ == "__main__":
    main()
