"""What TransformerLens' own programs open without a network: its source distribution, and small random checkpoints.

`tl_tests.py` and `tl_notebooks.py` run these programs in processes of their own, in which `tl_plugin.py` gives names of
models the meaning that is written here.
"""

import argparse
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerFast

ROOT = Path(__file__).parents[1]
# Each is one token of GPT-2's.
NAMES = (" London", " Paris", " Rome", " Berlin", " Moscow", " France", " Russia", " Spain", " Italy", " Mary")
NAMES += (" John", " Tom", " James", " Dan", " Sid", " Martin", " Amy")
END = "<|endoftext|>"
PIECES = 2000


def tokenizer(words: Sequence[str] = NAMES) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer, as GPT-2's, trained on the READMEs; each of the words is one token."""
    made = ByteLevelBPETokenizer()
    texts = [str(path) for path in sorted(ROOT.rglob("README.md"))]
    made.train(texts, vocab_size=PIECES - len(words), special_tokens=[END])
    fast = PreTrainedTokenizerFast(tokenizer_object=made._tokenizer, bos_token=END, eos_token=END, unk_token=END)
    fast.add_tokens([*words])
    return fast


def checkpoint(folder: Path, model: PreTrainedModel, beside: PreTrainedTokenizerFast) -> str:
    """Write a model and its tokenizer; the folder."""
    model.save_pretrained(folder)
    beside.save_pretrained(folder)
    return str(folder)


def arguments(description: str, files: str) -> Any:
    """Options of a run of TransformerLens' own programs."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--source", type=Path, help="an unpacked source distribution")
    parser.add_argument("--only", default="", help=f"of the {files}, those with this in their names")
    parser.add_argument("--kept", type=Path, help="where outcomes are kept")
    parser.add_argument("--save", action="store_true")
    return parser.parse_args()


def source(folder: Path) -> Path:
    """Fetch and unpack the source distribution of the version that is installed."""
    wanted = f"transformer-lens=={version('transformer-lens')}"
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", folder, wanted]
    subprocess.run([*map(str, command)], check=True)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    return next(path for path in folder.iterdir() if path.is_dir())


def environment(models: dict[str, str], engine: str, store: Path) -> dict[str, str]:
    """The variables of a process in which `tl_plugin` is loaded: no network, one thread, models by name.

    Args:
        engine: "onnx" for a bridge on mionnx' engine, "torch" for TransformerLens' own.
    """
    return {
        **os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TQDM_DISABLE": "1", "OMP_NUM_THREADS": "1",
        "MIONNX_TL_MODELS": json.dumps(models), "MIONNX_TL_ENGINE": engine, "MIONNX_CACHE": str(store),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")]),
    }  # fmt: skip
