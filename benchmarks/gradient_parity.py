"""Gradients at every hook point of every tested family, beside torch's autograd in float64.

    python benchmarks/gradient_parity.py [FAMILY ...] [--save]

Tiny random checkpoints, one text of 1, 15, 16, 40 and 130 tokens, the derivative of the logits times random numbers. An
error is the largest difference at a hook point, relative to the largest number there; a cell has the worst of all hook
points, and torch's own in float32 behind it. Of RWKV torch runs a loop in float64, and its own error is the largest of
four runs whose values differ in the last bit. The second table has float16 weights, and the same beside torch in
float16. `--save` writes benchmarks/results/gradient_parity.md.
"""

import argparse
import gc
import platform
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tables import present

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "shared"))

import families  # noqa: E402
from gradient_oracle import gradients as by_autograd  # noqa: E402
from oracle import Inputs  # noqa: E402
from rwkv_autograd import gradients as by_loop  # noqa: E402
from rwkv_checkpoints import write  # noqa: E402
from tiny_configs import tiny_config  # noqa: E402
from transformers import PreTrainedModel  # noqa: E402

from exporters import rwkv  # noqa: E402
from exporters.transformers import export  # noqa: E402
from mionnx import HookSpec, MIModel  # noqa: E402

LENGTHS = (1, 15, 16, 40, 130)
NAMES = (*families.CONFIGS, "qwen3_moe", "gpt_oss", "rwkv6", "rwkv7")
HALF = ("gpt2", "llama", "gemma2", "mixtral", "rwkv6", "rwkv7")  # in float16 too
ROOM = {"max_position_embeddings": 256, "n_positions": 256}
DRAWS = 4
Gradients = Mapping[str, NDArray[np.floating]]


def worst(found: Gradients, exact: Gradients) -> tuple[float, str]:
    """The largest relative difference, and the hook point where it is."""
    off = {}
    for name in found.keys() & exact.keys():
        value, largest = found[name].reshape(exact[name].shape).astype(np.float64), np.abs(exact[name]).max()
        off[name] = float(np.abs(value - exact[name]).max() / max(largest, 1e-12))
    where = max(off, key=off.__getitem__)
    return off[where], where


class Family:
    """A tiny random checkpoint of a family, exported, and torch's gradients of it."""

    def __init__(self, name: str, folder: Path, half: bool = False) -> None:
        dtype = "float16" if half else "float32"
        self.half, self.version = half, int(name[-1]) if name.startswith("rwkv") else None
        self.reference: PreTrainedModel | None = None
        if self.version is not None:
            (folder / "checkpoint").mkdir(parents=True)
            write(f"{self.version}-pth", folder / "checkpoint")
            rwkv.export(folder / "checkpoint", folder / "hooked", dtype)
        else:
            config = tiny_config(name)
            families.CONFIGS[name] = {**config, **{key: value for key, value in ROOM.items() if key in config}}
            made = families.make_checkpoint(name, folder / "checkpoint")
            self.reference = made.half() if half else made  # the weights as they are stored
            export(folder / "checkpoint", folder / "hooked", dtype)
        self.model = MIModel.from_pretrained(folder / "hooked", threads=1)

    def by_torch(
        self, ids: NDArray[np.int64], seed: NDArray[np.float64], dtype: torch.dtype, draw: int = 0
    ) -> Gradients:
        """Torch's gradients in a dtype."""
        if self.version is not None:
            found = by_loop(self.version, ids.tolist(), seed[0], dtype, draw=draw, stored=self.half)
            return {name: value[None] for name, value in found.items()}
        assert self.reference is not None
        return by_autograd(self.reference, Inputs(ids[None], np.ones_like(ids)[None]), seed, dtype)

    def row(self, length: int) -> tuple[float, str, float]:
        """Our worst error and where, and torch's own, of one text."""
        random = np.random.default_rng(length)
        ids = random.integers(3, families.VOCAB, length)
        seed = random.normal(size=(1, length, families.VOCAB))
        spec = HookSpec().gradient("*").set_metric("cotangent", cotangent=seed)
        found = dict(self.model.forward(ids, spec, logits=False).grad or {})
        exact = self.by_torch(ids, seed, torch.float64, 0)
        single = torch.float16 if self.half else torch.float32
        draws = range(DRAWS if self.version is not None else 1)
        own = max(worst(self.by_torch(ids, seed, single, draw), exact)[0] for draw in draws)
        return *worst(found, exact), own


def measured(names: list[str], half: bool, lengths: tuple[int, ...]) -> list[list[str]]:
    """A row a family: hook points, the errors at each length, the largest ratio and where."""
    rows = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            family = Family(name, Path(folder), half)
            cells = [family.row(length) for length in lengths]
            count = len(dict(family.model.gradients([5, 6, 7], "*", "loss").grad or {}))
        ratio, where = max((off / own, where) for off, where, own in cells)
        rows.append([name, str(count), *(f"{off:.1e} / {own:.1e}" for off, _, own in cells), f"{ratio:.1f}", where])
        print(*rows[-1], sep=" | ", flush=True)
        gc.collect()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=list(NAMES))
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    families.single_threaded()
    columns = ["family", "hook points", *(f"{length} tokens" for length in LENGTHS), "largest ratio", "where"]
    tables = [(columns, measured(given.families, False, LENGTHS))]
    if half := [name for name in given.families if name in HALF]:
        some = (1, 16, 40)
        columns = ["float16", "hook points", *(f"{length} tokens" for length in some), "largest ratio", "where"]
        tables.append((columns, measured(half, True, some)))
    title = f"Relative error of gradients, mionnx / torch {torch.__version__} in the same dtype, {platform.machine()}"
    present("gradient_parity", "Gradients beside torch's autograd in float64", title, tables, given.save)


if __name__ == "__main__":
    main()
