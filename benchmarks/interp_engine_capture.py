"""Capture with interp-engine: a part of `interp_engine_parity.py` that runs in the environment of that package.

    python benchmarks/interp_engine_capture.py CHECKPOINT IDS.npz OUT.npz

IDS.npz has `ids` [batch, seq] and `points`, names with a layer ("resid_pre.3") or without ("embeddings"); OUT.npz gets
an array for each name, and `version`.
"""

import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from interp_engine import Address, capture, load_model


def address(name: str) -> Address:
    """A point and its layer."""
    point, _, layer = name.partition(".")
    return Address(point, int(layer)) if layer else Address(point)


def main(checkpoint: str, given: str, out: str) -> None:
    """Capture every point in one pass of each row."""
    asked = np.load(given)
    names = asked["points"].tolist()
    addresses = [address(name) for name in names]
    model = load_model(checkpoint, backend="eager", dtype=torch.float32, device="cpu")
    with torch.no_grad():
        rows = [capture(model, torch.from_numpy(row[None]), addresses) for row in asked["ids"]]
    found = {
        name: np.concatenate([row[one].float().numpy() for row in rows])
        for name, one in zip(names, addresses, strict=True)
    }
    np.savez(Path(out), version=version("interp-engine"), **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
