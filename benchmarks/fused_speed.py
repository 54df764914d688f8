"""Adopted files with fused operators: a spec that touches nothing, beside the file itself in plain ONNX Runtime.

    python benchmarks/fused_speed.py FOLDER [--environments ENVIRONMENTS] [--repeats 21] [--save]

FOLDER gets random decoders of 12 layers and 768 dimensions as onnxruntime-genai's builder writes them (Llama, fp32 and
int4), and as ONNX Runtime's optimizer makes them of optimum's (GPT-2, Llama); they are made once, see `stock_files.py`.
Each is adopted. By turns in one process: the stock file in a session of its own with default options, the same session
once more as its own candidate (the control: how far from 1 it is, noise alone takes a figure), an empty spec in mionnx,
the same with `fused=False` (the nodes that stand for fused operators), and one layer captured. First the logits of the
empty spec are compared with the stock file's: every bit has to be the same.

Processor time of one thread, so that other work on the machine counts little. Figures are medians of ratios of
neighbouring runs; each round begins with another program.
"""

import argparse
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import numpy as np
import onnxruntime
import stock_files
from stock_kinds import KINDS
from tables import present

from exporters.adopt import adopt
from mionnx import HookSpec, MIModel

LARGE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4}
SIZES: dict[str, dict[str, Any]] = {
    "llama": {**LARGE, "intermediate_size": 2048, "max_position_embeddings": 1024},
    "gpt2": {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024},
}
FILES = (
    ("genai-fp32", "llama"),
    ("genai-int4", "llama"),
    ("optimum-past", "llama"),
    ("optimum-past", "gpt2"),
    ("ort-optimizer", "llama"),
    ("ort-optimizer", "gpt2"),
)
CALLS = ((1, 16, 0), (2, 64, 0), (1, 1, 64))  # batch, new tokens, past
Work = Callable[[], Any]


def make(folder: Path, environments: Path) -> list[tuple[str, str]]:
    """Make the files that are missing; those that have fused operators."""
    stock = stock_files.Stock(folder)
    for family, sizes in SIZES.items():
        stock_files.CONFIGS[family] = {**stock_files.CONFIGS[family], **sizes}
        if not stock.checkpoint(family).exists():
            stock_files.make_checkpoint(family, stock.checkpoint(family), stock_files.ROOT / "models" / "world-llama")
    for kind, family in FILES:
        if (kind, family) not in stock.entries:
            name = KINDS[kind].environment
            wanted = stock_files.REQUIREMENTS.get(name, ())
            python = stock_files.python_of(environments / name, wanted) if name else Path(sys.executable)
            for result in stock_files.run_jobs([stock.job(kind, family)], python, folder):
                stock.keep(result)
    return [(kind, family) for kind, family in FILES if kind != "optimum-past"]


def feeds(session: onnxruntime.InferenceSession, model: MIModel, ids: np.ndarray, past: int) -> dict[str, np.ndarray]:
    """The inputs of a stock file: no padding, a random past."""
    rows, seq = ids.shape
    known = {
        "input_ids": ids,
        "attention_mask": np.ones((rows, past + seq), np.int64),
        "position_ids": np.tile(np.arange(past, past + seq), (rows, 1)),
    }
    carried = np.random.default_rng(1).standard_normal((rows, model.num_kv_heads, past, model.head_dim))
    return {entry.name: known.get(entry.name, carried.astype(np.float32)) for entry in session.get_inputs()}


def programs(
    session: onnxruntime.InferenceSession, models: dict[str, MIModel], call: tuple[int, int, int]
) -> dict[str, Work]:
    """What is compared; the logits of the first two are the same bits."""
    rows, seq, past = call
    fused = models["empty spec"]
    ids = np.random.default_rng(0).integers(3, fused.vocab_size, (rows, seq))
    given, cache = feeds(session, fused, ids, past), None
    if past:
        cache = fused.forward(np.ones((rows, past), np.int64), use_cache=True).kv_cache
        for layer in range(fused.num_layers):
            for name, value in zip(("key", "value"), cache.layers[layer], strict=True):
                given[f"past_key_values.{layer}.{name}"] = np.asarray(value)
    spec = HookSpec().capture(f"blocks.{fused.num_layers // 2}.*")
    found: dict[str, Work] = dict.fromkeys(("stock file", "control"), lambda: session.run(["logits"], given)[0])
    for name, model in models.items():
        found[name] = lambda model=model: model.forward(ids, cache=cache).output()
    found["one layer captured"] = lambda: fused.forward(ids, spec, cache=cache).output()
    if not np.array_equal(found["stock file"](), found["empty spec"]()):
        raise SystemExit(f"{call}: the logits of the empty spec are not the file's")
    return found


def alternate(work: dict[str, Work], repeats: int) -> dict[str, list[float]]:
    """Seconds of each program, by turns after a warm-up."""
    times: dict[str, list[float]] = {name: [] for name in work}
    names = [*work]
    for turn in range(repeats + 2):
        first = turn % len(names)
        for name, run in [(name, work[name]) for name in names[first:] + names[:first]]:
            begin = process_time()
            run()
            if turn > 1:
                times[name].append(process_time() - begin)
    return times


def measured(kind: str, family: str, folder: Path, repeats: int) -> list[tuple[str, ...]]:
    """The rows of one file."""
    file, target = folder / f"{kind}-{family}" / "model.onnx", folder / "adopted" / f"{kind}-{family}"
    if not target.exists():
        adopt(file, target)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(file), settings, providers=["CPUExecutionProvider"])
    models = {
        "empty spec": MIModel.from_pretrained(target, threads=1, prepack=True),
        "fused=False": MIModel.from_pretrained(target, threads=1, prepack=True, fused=False, base=False),
    }
    rows = []
    for call in CALLS:
        times = alternate(programs(session, models, call), repeats)
        stock = times.pop("stock file")
        ratios = [f"{median(a / b for a, b in zip(one, stock, strict=True)):.3f}" for one in times.values()]
        rows.append((f"{kind} {family}", "{} x {}, past {}".format(*call), f"{median(stock) * 1e3:.1f}", *ratios))
        print(*rows[-1], flush=True)
    return rows


def main() -> None:
    """Make the files, measure, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--environments", type=Path, help="folder of virtual environments; default: in FOLDER")
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/fused_speed.md")
    given = parser.parse_args()
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    files = make(folder, (given.environments or folder / ".environments").resolve())
    rows = [row for kind, family in files for row in measured(kind, family, folder, given.repeats)]
    title = f"Processor time beside the stock file, {platform.machine()}, one thread, {given.repeats} repeats"
    columns = ("file", "batch x new tokens", "stock file, ms")
    columns += ("control", "empty spec", "fused=False", "one layer captured")
    said = (
        "Ratios of times: 1 is the stock file's speed, below is faster. Control: the stock file once more, as its own "
        "candidate. Logits of the empty spec: every bit the file's."
    )
    present("fused_speed", "Fused operators of adopted files", title, [(columns, rows)], given.save, said)


if __name__ == "__main__":
    main()
