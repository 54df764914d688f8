"""`Config`: the computation of a sparse autoencoder or transcoder, whatever file it came from."""

import re
from dataclasses import dataclass
from reprlib import repr as brief
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import ModelError

Weights = dict[str, NDArray[np.float32]]
BIASES = {"jumprelu": ("b_enc", "threshold"), "gated": ("b_gate", "b_mag", "r_mag")}
BIASES |= dict.fromkeys(("standard", "topk"), ("b_enc",))
ARCHITECTURES = {  # SAELens' name -> activation, whether it is a transcoder
    "standard": ("standard", False),
    "gated": ("gated", False),
    "jumprelu": ("jumprelu", False),
    "batchtopk": ("jumprelu", False),
    "matryoshka_batchtopk": ("jumprelu", False),
    "topk": ("topk", False),
    "transcoder": ("standard", True),
    "skip_transcoder": ("standard", True),
    "jumprelu_transcoder": ("jumprelu", True),
    "jumprelu_skip_transcoder": ("jumprelu", True),
}
NORMALISATIONS = ("none", "expected_average_only_in", "layer_norm", "constant_norm_rescale")


@dataclass(frozen=True)
class Config:
    """The kind of computation."""

    activation: str  # "standard" (ReLU), "jumprelu", "topk" or "gated"
    transcoder: bool = False  # whether it gives another value than it reads
    skip: bool = False  # whether a linear map of its input is added to what it gives
    # Of what goes in: "none", "layer_norm" or "constant_norm_rescale". SAELens' "expected_average_only_in" is "none"
    # here and there: its factor is folded into the weights.
    normalisation: str = "none"
    subtracts_bias: bool = False  # whether b_dec is taken from what goes in
    k: int = 0  # of "topk", how many features are kept
    by_decoder_norm: bool = False  # of "topk", whether features are ranked by how long what they add is
    by_head: bool = False  # whether the value is [batch, seq, n_heads, head_dim], read as one vector a token (`hook_z`)
    hook: str = ""  # the hook point that it was trained on, as its file says; empty if it does not
    hook_out: str = ""  # of a transcoder, the hook point whose value it gives


def from_saelens(cfg: dict[str, Any], names: set[str]) -> Config:
    """A configuration from SAELens' `cfg.json` of any version, with SAELens' own meaning."""
    # Newer versions have some of the entries in a table of their own.
    facts = {**cfg.get("metadata", {}), **cfg}
    version = re.match(r"[0-9]{1,9}(?![0-9])", str(facts.get("sae_lens_version")))
    old = version is None or int(version[0]) < 6
    name = str(facts.get("architecture") or "standard")
    function = facts.get("activation_fn", facts.get("activation_fn_str", "relu"))
    options = facts.get("activation_fn_kwargs") or {}
    if not isinstance(options, dict):
        raise ModelError(f"activation_fn_kwargs is {brief(options)}, and no table")
    k = facts.get("k", options.get("k"))
    # In older files the architecture of a top-k SAE is "standard", and its activation tells.
    if function == "topk" and k is not None:
        name = "topk"
    if name not in ARCHITECTURES:
        raise ModelError(f"an SAE of the architecture {brief(name)}; known here: {', '.join(ARCHITECTURES)}")
    if function not in ("relu", "topk"):
        raise ModelError(f"an SAE with the activation {brief(function)}; known here: relu, topk")
    activation, transcoder = ARCHITECTURES[name]
    hook = str(facts.get("hook_name") or facts.get("hook_point") or "")
    # Before version 6 the name of the hook point said that heads are read as one vector.
    shape = facts.get("reshape_activations") or ("hook_z" if old and "hook_z" in hook else "none")
    largest = k if activation == "topk" else 0
    if type(largest) is not int or (activation == "topk" and largest < 1):
        raise ModelError(f"a top-k SAE must say how many features it keeps, got k={brief(k)}")
    return Config(
        activation,
        transcoder,
        "W_skip" in names,
        _normalisation(facts.get("normalize_activations")),
        # SAELens' own defaults: an SAE does, a transcoder does not.
        bool(facts.get("apply_b_dec_to_input", not transcoder)),
        largest,
        bool(facts.get("rescale_acts_by_decoder_norm", False)),
        shape == "hook_z",
        hook,
        str(facts.get("hook_name_out") or ""),
    )


def _normalisation(name: Any) -> str:
    if isinstance(name, bool) or name is None:  # of the first versions
        name = "expected_average_only_in" if name else "none"
    if name not in NORMALISATIONS:
        raise ModelError(f"an SAE with normalize_activations={brief(name)}; known here: {', '.join(NORMALISATIONS)}")
    return "none" if name == "expected_average_only_in" else name


def check(config: Config, weights: Weights, where: str) -> None:
    """Check the names and shapes of weights against a configuration."""
    required = {"W_enc", "W_dec", "b_dec", *BIASES[config.activation], *(("W_skip",) if config.skip else ())}
    if required != {*weights}:
        missing, surplus = sorted(required - {*weights}), sorted({*weights} - required)
        raise ModelError(
            f"{where}: a {config.activation} SAE has {sorted(required)}; missing {missing}, surplus {surplus}"
        )
    if weights["W_enc"].ndim != 2 or weights["W_dec"].ndim != 2:
        raise ModelError(f"{where}: W_enc and W_dec must be matrices")
    (d_in, d_sae), d_out = weights["W_enc"].shape, weights["W_dec"].shape[1]
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(BIASES[config.activation], (d_sae,))
    shapes |= {"W_enc": (d_in, d_sae), "W_dec": (d_sae, d_out), "b_dec": (d_out,), "W_skip": (d_out, d_in)}
    for name, array in weights.items():
        if array.shape != shapes[name]:
            raise ModelError(f"{where}: {name} is {list(array.shape)}, and should be {list(shapes[name])}")
        if np.isnan(array).any():
            raise ModelError(f"{where}: {name} has NaN")
    if not config.transcoder and d_in != d_out:
        raise ModelError(
            f"{where}: an SAE reads {d_in} numbers a token and gives {d_out}: a transcoder needs hook_out="
        )
    if config.transcoder and (config.subtracts_bias or config.by_head):
        raise ModelError(f"{where}: a transcoder neither subtracts b_dec from its input nor reads by heads")
    if config.k > d_sae:
        raise ModelError(f"{where}: the largest {config.k} of {d_sae} features")
