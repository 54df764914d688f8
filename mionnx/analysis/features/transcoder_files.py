"""Files of transcoders: what kind each is, by the names of its tensors, and the layer that it is of, by its path.

circuit-tracer, `layer_{i}.safetensors`: `W_enc` [f, d], `W_dec` [f, d], maybe `activation_function.threshold`, and
`W_skip`, turned. Across layers `W_enc_{i}.safetensors` with `W_enc_{i}` [f, d], and `W_dec_{i}.safetensors` with
`W_dec_{i}` [f, L - i, d]. Gemma Scope, `params.npz`: `W_enc` [d, f], `W_dec` [f, d], `threshold`. Gemma Scope 2:
`w_enc` [d, f], `w_dec` [f, d] or [f, L, d], `threshold`, maybe `affine_skip_connection`. SAELens, `cfg.json` and
`sae_weights.safetensors`: `W_enc` [d, f], `W_dec` [f, d], maybe `threshold`, and `W_skip`, turned. sparsify, `cfg.json`
and `sae.safetensors`: `encoder.weight` [f, d], `encoder.bias`, `W_dec` [f, d], maybe `W_skip`, turned.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.features.config import from_saelens
from mionnx.analysis.features.npz import read_npz
from mionnx.analysis.features.sae import PARAMS, SAE, SAE_CONFIG, SAE_WEIGHTS
from mionnx.analysis.features.transcoder import Floats, Transcoder
from mionnx.errors import InputError, ModelError
from mionnx.graph.folder_file import read_json
from mionnx.machine.tensor_file import map_tensors

Tensors = dict[str, NDArray[Any]]
LAYER_IN_PATH = re.compile(r"(?<![A-Za-z0-9])(?:layers?|blocks|h|W_enc)[._](\d{1,4})(?!\d)")
DECODER_FILE = re.compile(r"W_dec_(\d+)")
SPARSIFY = "sae.safetensors"
MOST_TRANSCODERS = 1000


def files_of(folder: Path) -> dict[int, Path]:
    """Layer -> its file, in the order of the layers."""
    files: dict[int, Path] = {}
    for path in sorted([*folder.rglob("*.safetensors"), *folder.rglob(PARAMS)]):
        if DECODER_FILE.fullmatch(path.stem):  # beside its encoder
            continue
        numbers = LAYER_IN_PATH.findall(str(path.relative_to(folder)))
        if not numbers:
            raise ModelError(f"{path}: neither its name nor its folder's says of which layer it is: layer_3, layers.3")
        layer = int(numbers[-1])
        if layer in files:
            raise ModelError(
                f"{folder} has two files of layer {layer}, {files[layer].relative_to(folder)} and "
                f"{path.relative_to(folder)}: give the folder of one set"
            )
        files[layer] = path
    if not files:
        raise ModelError(f"{folder} has no transcoders: no .safetensors and no {PARAMS} of a layer")
    if missing := sorted({*range(max(files) + 1)} - {*files})[:1]:
        raise ModelError(f"{folder} has transcoders up to layer {max(files)}, and none of layer {missing[0]}")
    return dict(sorted(files.items()))


def hooks_of(path: Path) -> tuple[str, str]:
    """The hook points that a file's own configuration names; empty where it names none."""
    if path.name == SAE_WEIGHTS:
        config = from_saelens(_config(path), {"W_enc"})
        return config.hook, config.hook_out
    if path.name == SPARSIFY:  # transcoders of a module that they are named after: "layers.3.mlp"
        return ("mlp.hook_in", "mlp.hook_out") if path.parent.name.endswith("mlp") else ("", "")
    return "", ""


def read_transcoder(path: Path, layer: int) -> Transcoder:
    """One layer's transcoder, its matrices mapped; of an `.npz` they are read."""
    one = _of_archive(path) if path.suffix == ".npz" else _of_tensors(path, layer)
    one.check(str(path))
    return one


def of_sae(sae: SAE, where: str) -> Transcoder:
    """A transcoder that was read as an SAE."""
    config, weights = sae.config, sae.weights
    if not config.transcoder:
        raise ModelError(f"{where} reads and gives one hook point: an SAE, and no transcoder")
    return _of_saelens(config.activation, config.normalisation, weights, where)


def of_encoder(sae: SAE) -> Transcoder:
    """The features of an SAE, or of a transcoder, each of which is active by itself.

    Raises:
        InputError: gated, top-k or normalised ones.
    """
    config, weights = sae.config, sae.weights
    if config.activation not in ("standard", "jumprelu") or config.normalisation != "none" or config.by_head:
        raise InputError(
            f"features of the kind {config.activation!r}, {config.normalisation!r} are not read from the values alone: "
            "ReLU and JumpReLU ones are, without normalisation"
        )
    bias = weights["b_enc"] - weights["b_dec"] @ weights["W_enc"] if config.subtracts_bias else weights["b_enc"]
    one = _of_saelens(config.activation, config.normalisation, {**weights, "b_enc": bias}, "the SAE")
    return replace(one, skip=None)


def _of_saelens(activation: str, normalisation: str, weights: Tensors, where: str) -> Transcoder:
    if activation not in ("standard", "jumprelu") or normalisation != "none":
        raise ModelError(f"{where}: a graph is traced through ReLU, JumpReLU and top-k features, not {activation} ones")
    return Transcoder(
        weights["W_enc"].T,
        _floats(weights["b_enc"]),
        weights["W_dec"][:, None],
        _floats(weights["b_dec"]),
        _floats(weights["threshold"]) if activation == "jumprelu" else None,
        skip=_floats(weights["W_skip"].T) if "W_skip" in weights else None,
    )


def _of_archive(path: Path) -> Transcoder:
    weights = {f"W_{name[2:]}" if name.startswith("w_") else name: array for name, array in read_npz(path)}
    _need(weights, path, "W_enc", "W_dec", "b_enc", "b_dec", "threshold")
    return _of_saelens("jumprelu", "none", weights, str(path))


def _of_tensors(path: Path, layer: int) -> Transcoder:
    tensors = map_tensors(path, f"{path} is damaged", ModelError)
    if path.name == SAE_WEIGHTS:
        _need(tensors, path, "W_enc", "W_dec", "b_enc", "b_dec")
        config = from_saelens(_config(path), {*tensors})
        if not config.transcoder:
            raise ModelError(f"{path} is an SAE, and no transcoder: it gives the hook point that it reads")
        if config.activation == "jumprelu":
            _need(tensors, path, "threshold")
        return _of_saelens(config.activation, config.normalisation, tensors, str(path))
    if "encoder.weight" in tensors:
        return _of_sparsify(tensors, path)
    if f"W_enc_{layer}" in tensors:
        return _across_layers(tensors, path, layer)
    if "w_enc" in tensors:
        return _of_gemma_scope_2(tensors, path, layer)
    return _of_circuit_tracer(tensors, path)


def _of_circuit_tracer(tensors: Tensors, path: Path) -> Transcoder:
    _need(tensors, path, "W_enc", "W_dec", "b_enc", "b_dec")
    threshold, skip = (tensors.get(name) for name in ("activation_function.threshold", "W_skip"))
    return Transcoder(
        *(tensors["W_enc"], _floats(tensors["b_enc"]), tensors["W_dec"][:, None], _floats(tensors["b_dec"])),
        None if threshold is None else _floats(threshold).reshape(-1),
        skip=None if skip is None else _floats(skip.T),
    )


def _across_layers(tensors: Tensors, path: Path, layer: int) -> Transcoder:
    _need(tensors, path, f"W_enc_{layer}", f"b_enc_{layer}", f"b_dec_{layer}")
    other = path.with_name(f"W_dec_{layer}.safetensors")
    decoders = map_tensors(other, f"{other} is damaged, or not there", ModelError)
    _need(decoders, other, f"W_dec_{layer}")
    threshold = tensors.get(f"threshold_{layer}")
    return Transcoder(
        *(tensors[f"W_enc_{layer}"], _floats(tensors[f"b_enc_{layer}"])),
        *(decoders[f"W_dec_{layer}"], _floats(tensors[f"b_dec_{layer}"])),
        None if threshold is None else _floats(threshold).reshape(-1),
    )


def _of_gemma_scope_2(tensors: Tensors, path: Path, layer: int) -> Transcoder:
    _need(tensors, path, "w_enc", "w_dec", "b_enc", "b_dec", "threshold")
    decoder, skip = tensors["w_dec"], tensors.get("affine_skip_connection")
    return Transcoder(
        *(tensors["w_enc"].T, _floats(tensors["b_enc"])),
        # across layers there is an entry for each layer of the model, of which those before this one are nothing
        *(decoder[:, None] if decoder.ndim == 2 else decoder[:, layer:], _floats(tensors["b_dec"])),
        _floats(tensors["threshold"]),
        skip=None if skip is None else _floats(skip),  # as it is multiplied, not turned
    )


def _of_sparsify(tensors: Tensors, path: Path) -> Transcoder:
    _need(tensors, path, "encoder.weight", "encoder.bias", "W_dec", "b_dec")
    config = _config(path)
    kind, k, skip = config.get("activation", "topk"), config.get("k"), tensors.get("W_skip")
    if kind != "topk" or not config.get("transcode"):
        raise ModelError(f"{path}: a graph is traced through transcoders of the activation topk, not {kind!r} SAEs")
    if not isinstance(k, int) or isinstance(k, bool) or k < 1:
        raise ModelError(f"{path}: a top-k transcoder must say how many features it keeps, got k={k!r}")
    return Transcoder(
        *(tensors["encoder.weight"], _floats(tensors["encoder.bias"])),
        *(tensors["W_dec"][:, None], _floats(tensors["b_dec"])),
        k=k,
        skip=None if skip is None else _floats(skip.T),
    )


def _config(path: Path) -> dict[str, Any]:
    config = read_json(path.with_name(SAE_CONFIG))
    if not isinstance(config, dict) or not isinstance(config.get("metadata", {}), dict):
        raise ModelError(f"{path.with_name(SAE_CONFIG)} is no configuration of a transcoder")
    return config


def _need(tensors: Tensors, path: Path, *names: str) -> None:
    if missing := [name for name in names if name not in tensors]:
        raise ModelError(f"{path}: no {', '.join(missing)}; it has {', '.join(sorted(tensors)) or 'nothing'}")


def _floats(array: NDArray[Any]) -> Floats:
    return np.ascontiguousarray(array, np.float32)
