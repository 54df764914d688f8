"""TransformerLens' own notebooks with a bridge on this engine: which cells run, and how far their numbers are apart.

    pip install -e ".[cpu,export,tl]" ipython plotly ipywidgets datasets matplotlib pandas
    pip install --no-deps circuitsvis "importlib_metadata<9" zipp
    python benchmarks/tl_notebooks.py [--source FOLDER] [--only WORD] [--kept FOLDER] [--save]

The code cells of the notebooks in the source distribution of the TransformerLens that is installed (`--source`: an
unpacked one) run as they stand, in IPython's own shell, one notebook in a process of its own: first with
TransformerLens' bridge, then with `mionnx.transformer_lens.bridge`. A cell that raises is recorded, and the next goes
on. After each cell the numbers and texts that the namespace holds are compared, tensors, arrays, numbers, lists of
them, caches and tables, and what was printed. Without a network: names of models mean small random ones of the same
family, in float32; data sets mean mionnx' READMEs; lenses of the hub random ones. TransformerLens' generation goes
without its cache of keys, with which it gives other tokens under transformers 5. What only draws and cannot be had
here (pysvelte, gradio) takes every call; %pip and programs of the shell do nothing. A cell that takes TransformerLens
more than `LIMIT` seconds of processor is cut in both. `--kept`: outcomes are written there, and read back by a run that
goes on.

Ten minutes; `--save` writes benchmarks/results/tl_notebooks.md.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tables import present
from tl_checkpoints import NAMES, arguments, checkpoint, environment, source, tokenizer
from tl_values import compare, texts_apart
from transformer_lens.tools.analysis import JacobianLens

LIMIT = 8  # seconds of processor of a cell
TOLERANCE = 1e-3  # relative; what is further apart is named
ENGINES = ("torch", "onnx")  # the first is TransformerLens' own
REFACTORED = ("Exploratory_Analysis_Demo",)  # notebooks that ask for circuits of heads in a basis of singular vectors
# What each of the others would need.
OUT = {
    "BERT": "an encoder: `bridge` is of decoders",
    "Colab_Compatibility": "opens models on Colab only",
    "GPT_OSS_Demo": "its blocks of 4 bits of 20 billion weights; hooks of experts",
    "Gemma3_Multimodal": "reads images from the network",
    "Grokking_Demo": "trains a model of its own, of no checkpoint",
    "Inspect_Bridge_Demo": "a RemoteBridge on transformers behind inspect_ai, not a TransformerBridge",
    "Inspect_vLLM_Provider_Demo": "vLLM on a GPU",
    "Jacobian_Lens_Coordinate_Patch_Benchmark_Demo": "opens no model",
    "LIT_Integration_Demo": "starts the server of lit-nlp, which is not installed",
    "LLaMA_GPU_Quantized": "bitsandbytes on a GPU",
    "LLaVA": "reads images from the network",
    "No_Position_Experiment": "trains a model of its own, of no checkpoint",
    "Othello_GPT": "a model of its own, whose weights are on the network",
    "Realtime_Training_Telemetry_Demo": "trains a model of its own, of no checkpoint",
    "T5": "an encoder with a decoder",
    "Tracr_to_Transformer_Lens_Demo": "a compiled model of its own, of no checkpoint",
    "vLLM_Bridge_Integration_Test": "vLLM on a GPU",
}
# Each is one token of the tokenizers of the models that the notebooks open.
WORDS = """
Claire The the Jupiter Mars Moon Sun Pacific Celsius Au O oxygen Shakespeare Juliet January December Tuesday Thursday
week year dollar four six cold light white green woof meow puppy triangle square Portuguese heart photosynthesis euro
currency boot China Chinese Beijing Canada Egypt Ottawa Cairo French English Arabic Europe North Asia Africa Euro Dollar
Yuan Pound time be G me five you cat
"""
VOCABULARY = 10_240  # Main_Demo draws tokens below 10,000
SMALL = {"vocab_size": 2048, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
WIDE = {"initializer_range": 0.1}  # so that heads and neurons do something
ROTARY = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 160,
          "max_position_embeddings": 2048, **WIDE}  # fmt: skip
# Folder -> the names that it is opened by, the class of its config, and what is other than there.
MODELS: dict[str, tuple[tuple[str, ...], str, dict[str, Any]]] = {
    "gpt2": (("gpt2", "gpt2-xl"), "GPT2Config",
             {"n_layer": 12, "n_head": 12, "n_embd": 96, "n_inner": 768, "n_positions": 1024, **WIDE, **SMALL}),
    "wide": (("distilgpt2", "openai-community/gpt2"), "GPT2Config",
             {"n_layer": 12, "n_head": 12, "n_embd": 96, "n_positions": 1024, **WIDE, **SMALL,
              "vocab_size": VOCABULARY}),
    "gpt2-medium": (("gpt2-medium",), "GPT2Config",
                    {"n_layer": 24, "n_head": 16, "n_embd": 160, "n_positions": 1024, **WIDE, **SMALL}),
    "neox": (("EleutherAI/gpt-neox-20b", "EleutherAI/pythia-70m", "stabilityai/stablelm-base-alpha-3b",
              "stabilityai/stablelm-tuned-alpha-3b"), "GPTNeoXConfig",
             {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 160, "num_hidden_layers": 4,
              "max_position_embeddings": 2048, **WIDE, **SMALL}),
    "llama": (("meta-llama/Llama-3.2-1B", "HuggingFaceTB/SmolLM2-135M"), "LlamaConfig",
              {**ROTARY, "hidden_size": 128, "num_attention_heads": 16, "num_key_value_heads": 8,
               "num_hidden_layers": 4, **SMALL}),
    "qwen2": (("Qwen/Qwen2-0.5B",), "Qwen2Config", {**ROTARY, "num_hidden_layers": 4, **SMALL}),
    "bloom": (("bigscience/bloom-560m",), "BloomConfig",
              {"hidden_size": 64, "n_layer": 24, "n_head": 4, **WIDE, **SMALL}),
    "gemma2": (("google/gemma-2-2b",), "Gemma2Config",
               {**ROTARY, "num_hidden_layers": 26, "head_dim": 16, "query_pre_attn_scalar": 16, **SMALL}),
}  # fmt: skip
# Lenses: the end of their file's name on the hub, the layers that they begin at, and d_model.
LENSES = {"gpt2_jacobian_lens.pt": (11, 96), "gemma-2-2b_jacobian_lens.pt": (25, 64)}


def checkpoints(folder: Path) -> dict[str, str]:
    """Write the models; each name that notebooks open -> its folder."""
    models, made = {}, tokenizer((*NAMES, *(f" {word}" for word in WORDS.split())))
    for place, (names, kind, options) in MODELS.items():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**options))
        where = checkpoint(folder / place, model, made)
        models |= dict.fromkeys(names, where)
    return models


def lenses(folder: Path) -> dict[str, str]:
    """Write random lenses; the end of each file's name on the hub -> a file."""
    torch.manual_seed(0)
    for name, (layers, width) in LENSES.items():
        maps = {layer: torch.eye(width) + 0.1 * torch.randn(width, width) for layer in range(layers)}
        JacobianLens(maps, n_prompts=1000, d_model=width).save(str(folder / name))
    return {name: str(folder / name) for name in LENSES}


def run(notebooks: list[Path], engine: str, folder: Path, kept: Path, cut: dict[str, list[int]]) -> None:
    """Run the notebooks that have no record yet on an engine."""
    left = [book for book in notebooks if not (kept / engine / f"{book.stem}.json").exists()]
    if not left:
        return
    variables = environment(json.loads((folder / "models.json").read_text()), engine, kept / "store") | {
        "MIONNX_TL_FILES": (folder / "lenses.json").read_text(), "MIONNX_TL_CUT": json.dumps(cut),
        "MIONNX_TL_LIMIT": str(LIMIT if engine == ENGINES[0] else 3 * LIMIT), "MPLBACKEND": "Agg",
        "PYTHONWARNINGS": "ignore", "PYTHONHASHSEED": "0",
    }  # fmt: skip
    program = Path(__file__).with_name("tl_cells.py")
    command = [sys.executable, program, kept / engine, *left]
    with (kept / f"{engine}.log").open("a") as log:
        subprocess.run([*map(str, command)], env=variables, stdout=log, stderr=log, check=True)


def record(kept: Path, engine: str, book: Path) -> dict[str, Any]:
    """What was recorded of a notebook on an engine."""
    file = kept / engine / f"{book.stem}.json"
    if not file.exists():
        raise SystemExit(f"{book.stem} ended its process on {engine}: see {kept / engine}.log")
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def both(kept: Path, book: Path) -> dict[str, Any]:
    """Compare the cells of a notebook: counts of them, of what was compared, and what is apart, by cell."""
    theirs, ours = (record(kept, engine, book) for engine in ENGINES)
    zero = {"cut": 0, "theirs": 0, "ours": 0, "compared": 0, "largest": 0.0, **ours["counts"]}
    found: dict[str, Any] = {"cells": len(theirs["cells"]), "seconds": [0.0, 0.0], "apart": [], "alike": [], **zero}
    for number, (one, other) in enumerate(zip(theirs["cells"], ours["cells"], strict=True)):
        if one["state"] == "cut":
            found["cut"] += 1
            continue
        found["seconds"] = [a + b["seconds"] for a, b in zip(found["seconds"], (one, other), strict=True)]
        found["theirs"] += one["state"] == "ran"
        found["ours"] += other["state"] == "ran"
        if one["state"] == "raised" == other["state"]:
            found["alike"].append([number, one["said"], other["said"]])
        elif one["state"] != other["state"]:
            found["apart"].append([number, f"{one['state']}, here {other['state']}: {one['said']}{other['said']}"])
        elif said := texts_apart(one["text"], other["text"].replace("OnnxBridge", "TransformerBridge"), TOLERANCE):
            found["apart"].append([number, f"prints {said}"])
        files = [kept / engine / book.stem / f"{number}.npz" for engine in ENGINES]
        if all(file.exists() for file in files):
            theirs, ours = files
            apart = compare(theirs, ours, TOLERANCE, signs=book.stem not in REFACTORED)
            found["compared"] += apart.compared
            found["largest"] = max(found["largest"], apart.largest)
            found["apart"] += [[number, f"{name} by {by:.2g}"] for name, by in apart.names]
    return found


def outcomes(books: list[Path], folder: Path, kept: Path) -> dict[str, dict[str, Any]]:
    """What each notebook's comparison found, made or read back."""
    left = [book for book in books if not (kept / f"{book.stem}.json").exists()]
    (folder / "models.json").write_text(json.dumps(checkpoints(folder)))
    (folder / "lenses.json").write_text(json.dumps(lenses(folder)))
    for engine in ENGINES:
        (kept / engine).mkdir(parents=True, exist_ok=True)
    run(left, ENGINES[0], folder, kept, {})
    cut = {book.stem: [number for number, cell in enumerate(record(kept, ENGINES[0], book)["cells"])
                       if cell["state"] == "cut"] for book in left}  # fmt: skip
    run(left, ENGINES[1], folder, kept, cut)
    for book in left:
        (kept / f"{book.stem}.json").write_text(json.dumps(both(kept, book)))
        for engine in ENGINES:
            shutil.rmtree(kept / engine / book.stem, ignore_errors=True)
    return {book.stem: json.loads((kept / f"{book.stem}.json").read_text()) for book in books}


def rows(found: dict[str, dict[str, Any]]) -> list[list[str]]:
    """A row for each notebook, and one for all."""
    table, counted = [], ("cells", "cut", "theirs", "ours", "compared", "passes", "torch")
    total: dict[str, Any] = {name: sum(one[name] for one in found.values()) for name in counted}
    total["largest"] = max((one["largest"] for one in found.values()), default=0.0)
    total["apart"] = [cell for one in found.values() for cell in one["apart"]]
    total["seconds"] = np.sum([one["seconds"] for one in found.values()], axis=0).tolist()
    for name, one in [*found.items(), ("all", total)]:
        numbers = (one["cells"], one["cut"], one["theirs"], one["ours"], one["passes"], one["torch"])
        table.append([name, *map(str, numbers), f"{one['compared']:,}", str(len(one["apart"])),
                      f"{one['largest']:.1e}", *(f"{seconds:.0f}" for seconds in one["seconds"])])  # fmt: skip
    return table


def gathered(found: dict[str, dict[str, Any]]) -> list[list[str]]:
    """What is apart, by notebook and cell; what differs in a number of a layer or a place alone is one row."""
    counts: dict[tuple[str, str, str], int] = {}
    for name, one in found.items():
        for cell, said in one["apart"]:
            text = said if said.startswith("prints") else re.sub(r"\d+(?=\.)|(?<=\[)\d+(?=\])", "N", said, count=2)
            key = name, str(cell), plain(re.sub(r" by [\d.e+-]+$", "", text))
            counts[key] = counts.get(key, 0) + 1
    return [[*key, str(count)] for key, count in counts.items()]


def plain(text: str) -> str:
    """A text that fits a cell of a table."""
    return " ".join(text.replace("|", "/").split())[:160]


def main() -> None:
    """Run both, compare, and print."""
    options = arguments(__doc__.splitlines()[0], "notebooks")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        where = options.source or source(folder)
        (kept := (options.kept or folder / "kept").absolute()).mkdir(exist_ok=True)
        books = sorted((where / "demos").glob("*.ipynb"))
        books = [book for book in books if book.stem not in OUT and options.only in book.stem]
        found = outcomes(books, folder, kept)
    title = f"TransformerLens {version('transformer-lens')}: {len(found)} notebooks"
    columns = ["notebook", "code cells", "cut", "run with TransformerLens' bridge", "run here", "passes here",
               "passes in torch", "values compared", "apart", "largest difference",
               "seconds with TransformerLens' bridge", "seconds here"]  # fmt: skip
    apart = gathered(found)
    alike = [[name, str(cell), plain(said)] for name, one in found.items() for cell, said, _ in one["alike"]]
    tables = [
        (columns, rows(found)),
        (["apart", "cell", "what", "how often"], apart or [["none", "", "", ""]]),
        (["raise with both", "cell", "what TransformerLens' says"], alike or [["none", "", ""]]),
        (["left out", "why"], [[name, why] for name, why in OUT.items()]),
    ]
    said = (
        f"Seconds are of one processor; cells that take TransformerLens' bridge more than {LIMIT} are cut in both. "
        f"Differences are relative to the largest number of a value; more than {TOLERANCE} is apart."
    )
    present("tl_notebooks", "TransformerLens' own notebooks on this engine", title, tables, options.save, said)


if __name__ == "__main__":
    main()
