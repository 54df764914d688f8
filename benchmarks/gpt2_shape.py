"""GPT-2's shape with random weights, exported to a folder, and the options of the benchmarks that measure it."""

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from generation_speed import make

from exporters.transformers import export


def options_parser(about: str, repeats: int) -> argparse.ArgumentParser:
    """The options of every speed benchmark on this shape: --repeats, --threads and --save."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--threads", type=int, default=0, help="of both programs; 0: one for each core")
    parser.add_argument("--save", action="store_true")
    return parser


def set_threads(wanted: int) -> int:
    """Set torch's threads, and return their number."""
    threads = wanted or os.cpu_count() or 1
    torch.set_num_threads(threads)
    return threads


def gpt2(folder: Path) -> None:
    """Write a checkpoint of GPT-2 with 124 million parameters."""
    make("gpt2 124M", folder)


@contextmanager
def exported(checkpoint: Callable[[Path], object] = gpt2) -> Iterator[Path]:
    """Export a checkpoint to the folder `hooked` in a temporary folder in the folder `hooked` in it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint(folder)
        export(folder, folder / "hooked")
        yield folder
