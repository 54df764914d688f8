"""Files of sparse autoencoders: SAELens' folders and Gemma Scope's `params.npz`."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.features.config import Config, Weights, from_saelens
from mionnx.analysis.features.npz import read_npz
from mionnx.errors import ModelError
from mionnx.graph.folder_file import read_json
from mionnx.machine.tensor_file import read_tensors

SAE_CONFIG, SAE_WEIGHTS, PARAMS = "cfg.json", "sae_weights.safetensors", "params.npz"
FOLDED = ("scaling_factor", "finetuning_scaling_factor")


def read(path: Path, hook: str, hook_out: str) -> tuple[Config, Weights]:
    """Read an SAE's configuration and weights.

    Args:
        path: a folder with `cfg.json` and `sae_weights.safetensors`, or with `params.npz`; or one of these files.
        hook, hook_out: for Gemma Scope's files, which do not say; a `hook_out` makes it a transcoder.

    Raises:
        ModelError: nothing there, or a file that is damaged or of another kind.
    """
    try:
        folder = path if path.is_dir() else path.parent
        path.exists()
    except OSError as error:  # a name that no file can have
        raise ModelError(f"{path}: {error.strerror}") from error
    if path.suffix == ".npz" or (path.is_dir() and (path / PARAMS).is_file()):
        return _gemma_scope(path / PARAMS if path.is_dir() else path, hook, hook_out)
    if not (folder / SAE_CONFIG).is_file() or not (folder / SAE_WEIGHTS).is_file():
        raise ModelError(f"{path} has neither {SAE_CONFIG} with {SAE_WEIGHTS} nor {PARAMS}")
    cfg = read_json(folder / SAE_CONFIG)
    if not isinstance(cfg, dict) or not isinstance(cfg.get("metadata", {}), dict):
        raise ModelError(f"{folder / SAE_CONFIG} is no configuration of an SAE")
    weights = _unscaled(_tensors(folder / SAE_WEIGHTS), folder)
    try:
        return from_saelens(cfg, {*weights}), weights
    except ModelError as error:
        raise ModelError(f"{folder / SAE_CONFIG}: {error}") from error


def _tensors(path: Path) -> Weights:
    tensors = read_tensors(path, f"{path} is damaged", ModelError)[1]
    return {name: _floats(array, f"{path}: {name}") for name, array in tensors.items()}


def _floats(array: NDArray[Any], what: str) -> NDArray[np.float32]:
    if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
        raise ModelError(f"{what} has numbers of the dtype {array.dtype}; weights are floating-point")
    return np.ascontiguousarray(array.astype(np.float32))


def _unscaled(weights: Weights, folder: Path) -> Weights:
    """Weights without the scaling factor of old SAELens versions, which is 1 unless fine-tuned."""
    for name in FOLDED:
        if name in weights and not np.allclose(weights[name], 1):
            raise ModelError(f"{folder}: {name} is not 1: fold it into the decoder with SAELens first")
    return {name: array for name, array in weights.items() if name not in FOLDED}


def _gemma_scope(path: Path, hook: str, hook_out: str) -> tuple[Config, Weights]:
    """JumpReLU, b_dec not subtracted (Lieberum et al. 2024, "Gemma Scope")."""
    weights: Weights = {}
    for name, array in read_npz(path):
        if _cased(name) in weights:
            raise ModelError(f"{path} has two members for {_cased(name)}: refused")
        weights[_cased(name)] = _floats(array, f"{path}: {name}")
    return Config("jumprelu", transcoder=bool(hook_out), hook=hook, hook_out=hook_out), weights


def _cased(name: str) -> str:
    return f"W_{name[2:]}" if name.startswith("w_") else name
