"""The computation of a sparse autoencoder in ONNX' own notation, with the hook points that SAELens gives it.

1. hook_sae_input -> normalised, less b_dec -> hook_sae_acts_pre -> activation -> hook_sae_acts_post = hook_sae_acts
   -> hook_sae_recons -> normalisation undone -> hook_sae_output.
2. With the error term kept, the output is what comes of that, plus hook_sae_error: the value minus what would come of
   it if nothing inside were changed.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.features.config import Config, Weights
from mionnx.graph.fragment import Fragment, written

LAYER_NORM_EPSILON = 1e-5  # of SAELens' layer_norm, added to the deviation
Lines = list[str]


def autoencoder(config: Config, weights: Weights, error: bool) -> Fragment:
    """The fragment that replaces a value; with the error term, or without."""
    tensors, first = _tensors(config, weights), _first(config)
    lines = [*first, *_encode(config, "", tensors), *_decode(config, "", "hook_sae_acts"), *_shaped(config, "")]
    if not error:
        return _fragment(config, tensors, [*lines, _same("hook_sae_output", "out")], "hook_sae_output")
    # ONNX Runtime computes what the clean pass has in common with the other one once.
    lines += [*_encode(config, "clean_", tensors), *_decode(config, "clean_", "clean_acts"), *_shaped(config, "clean_")]
    lines += [
        f"error = Sub({'old' if config.transcoder else 'x'}, clean_out)",
        "hook_sae_error = Identity(error)",
        "hook_sae_output = Add(out, hook_sae_error)",
    ]
    return _fragment(config, tensors, lines, "hook_sae_output")


def ranking(config: Config, weights: Weights, inputs: Mapping[str, NDArray[np.int64]]) -> Fragment:
    """A fragment that ranks features and leaves the value unchanged."""
    # Its hook points: hook_top_values and hook_top_ids [batch, seq, k], hook_followed [batch, seq, n]. The inputs are
    # "k", int64 [1], how many are ranked, and "followed", int64 [n], whose activations leave the graph.
    # A weight that no node reads would be held in memory for nothing.
    unread = {"W_skip", "W_dec"} if config.subtracts_bias else {"W_skip", "W_dec", "b_dec"}
    tensors = {name: array for name, array in _tensors(config, weights).items() if name not in unread}
    lines = [*_first(config), *_encode(config, "clean_", tensors)]
    lines += [
        "hook_top_values, hook_top_ids = TopK <axis = -1> (clean_acts, k)",
        "hook_followed = Gather <axis = -1> (clean_acts, followed)",
        "y = Identity(x)",
    ]
    return _fragment(config, {**tensors, **inputs}, lines, "y", alone=True)


def _tensors(config: Config, weights: Weights) -> Weights:
    if not config.by_decoder_norm:
        return weights
    return {**weights, "decoder_norms": np.linalg.norm(weights["W_dec"], axis=1)}


def _fragment(
    config: Config, tensors: Mapping[str, NDArray[Any]], lines: Lines, output: str, alone: bool = False
) -> Fragment:
    inputs = [
        f"float[{', '.join(map(str, array.shape))}] {name}" if array.dtype.kind == "f" else f"int64[n_{name}] {name}"
        for name, array in tensors.items()
    ]
    width = tensors["W_enc"].shape[0]
    wide = "batch, seq, n_heads, head_dim" if config.by_head else f"batch, seq, {width}"
    values, result = [f"float[{wide}] x"], wide
    if config.transcoder and not alone:
        result = f"batch, seq, {tensors['W_dec'].shape[1]}"
        values = [f"float[{result}] old", f"float[{wide}] x"]
    head = f"sae ({', '.join([*values, *inputs])}) => (float[{result}] {output})"
    body = "\n  ".join(lines)
    return written(f'<ir_version: 10, opset_import: ["": 21]>\n{head} {{\n  {body}\n}}', tensors)


def _first(config: Config) -> Lines:
    """Constants, and the value as one vector a token."""
    lines = ["last = Constant <value = int64[1] {-1}> ()"]
    # A shape of 0 keeps an axis, -1 joins the others: heads and their widths.
    if config.by_head:
        lines += ["flat = Constant <value = int64[3] {0, 0, -1}> ()", "vector = Reshape(x, flat)"]
    else:
        lines.append("vector = Identity(x)")
    return [*lines, "hook_sae_input = Identity(vector)"]


def _encode(config: Config, tag: str, tensors: Weights) -> Lines:
    """From the vector, or the hook point behind it, to the activations."""
    # The clean pass has no hook points: nothing inside it is ever changed.
    source, pre = ("vector", f"{tag}pre") if tag else ("hook_sae_input", "hook_sae_acts_pre")
    centred = f"Sub({tag}normal, b_dec)" if config.subtracts_bias else f"Identity({tag}normal)"
    lines = _normalise(config, tag, source, tensors["W_enc"].shape[0])
    lines += [f"{tag}centred = {centred}", f"{tag}product = MatMul({tag}centred, W_enc)"]
    lines += _gated(tag) if config.activation == "gated" else [f"{tag}biased = Add({tag}product, b_enc)"]
    lines += [_same(pre, f"{tag}biased"), *_activate(config, tag, pre)]
    if not tag:
        lines += [_same("hook_sae_acts_post", "acts"), _same("hook_sae_acts", "hook_sae_acts_post")]
    return lines


def _same(name: str, value: str) -> str:
    return f"{name} = Identity({value})"


def _normalise(config: Config, tag: str, source: str, width: int) -> Lines:
    if config.normalisation == "layer_norm":  # the deviation is that of a sample: over width - 1
        return [
            f"{tag}mean = ReduceMean({source}, last)",
            f"{tag}off = Sub({source}, {tag}mean)",
            f"{tag}squares = Mul({tag}off, {tag}off)",
            f"{tag}sum = ReduceSum({tag}squares, last)",
            f"{tag}freedom = Constant <value = float {{{width - 1}.0}}> ()",
            f"{tag}variance = Div({tag}sum, {tag}freedom)",
            f"{tag}deviation = Sqrt({tag}variance)",
            f"{tag}small = Constant <value = float {{{LAYER_NORM_EPSILON}}}> ()",
            f"{tag}divisor = Add({tag}deviation, {tag}small)",
            f"{tag}normal = Div({tag}off, {tag}divisor)",
        ]
    if config.normalisation == "constant_norm_rescale":
        return [
            f"{tag}length = ReduceL2({source}, last)",
            f"{tag}root = Constant <value = float {{{width**0.5!r}}}> ()",
            f"{tag}factor = Div({tag}root, {tag}length)",
            f"{tag}normal = Mul({source}, {tag}factor)",
        ]
    return [_same(f"{tag}normal", source)]


def _gated(tag: str) -> Lines:
    """Two encoders that share a matrix, for whether and how much (Rajamanoharan et al. 2024)."""
    return [
        f"{tag}gate = Add({tag}product, b_gate)",
        f"{tag}scale = Exp(r_mag)",
        f"{tag}scaled = Mul({tag}product, {tag}scale)",
        f"{tag}biased = Add({tag}scaled, b_mag)",
    ]


def _activate(config: Config, tag: str, pre: str) -> Lines:
    if config.activation == "standard":
        return [f"{tag}acts = Relu({pre})"]
    if config.activation == "topk":
        return _largest(config, tag, pre)
    compared = f"{tag}gate, {tag}nought" if config.activation == "gated" else f"{pre}, threshold"
    return [
        f"{tag}nought = Constant <value = float {{0.0}}> ()",
        f"{tag}open = Greater({compared})",
        f"{tag}positive = Relu({pre})",
        f"{tag}acts = Where({tag}open, {tag}positive, {tag}nought)",
    ]


def _largest(config: Config, tag: str, pre: str) -> Lines:
    """The largest k, then ReLU on them, as SAELens does."""
    ranked = f"{tag}ranked"
    return [
        f"{ranked} = Mul({pre}, decoder_norms)" if config.by_decoder_norm else _same(ranked, pre),
        f"{tag}kept = Constant <value = int64[1] {{{config.k}}}> ()",
        f"{tag}values, {tag}ids = TopK <axis = -1> ({ranked}, {tag}kept)",
        f"{tag}positive = Relu({tag}values)",
        f"{tag}shape = Shape({ranked})",
        f"{tag}zeros = ConstantOfShape({tag}shape)",
        f"{tag}acts = ScatterElements <axis = -1> ({tag}zeros, {tag}ids, {tag}positive)",
    ]


def _decode(config: Config, tag: str, acts: str) -> Lines:
    lines = []
    if config.by_decoder_norm:
        lines.append(f"{tag}unscaled = Div({acts}, decoder_norms)")
        acts = f"{tag}unscaled"
    lines += [f"{tag}written = MatMul({acts}, W_dec)", f"{tag}sum_out = Add({tag}written, b_dec)"]
    recons = f"{tag}recons" if tag else "hook_sae_recons"
    lines.append(_same(recons, f"{tag}sum_out"))
    # A transcoder gives another value than it reads, whose scale the input's does not tell.
    if config.normalisation == "none" or config.transcoder:
        return [*lines, _same(f"{tag}restored", recons)]
    if config.normalisation == "layer_norm":
        return [*lines, f"{tag}wide = Mul({recons}, {tag}deviation)", f"{tag}restored = Add({tag}wide, {tag}mean)"]
    return [*lines, f"{tag}restored = Div({recons}, {tag}factor)"]


def _shaped(config: Config, tag: str) -> Lines:
    """Restore the value's shape, and add the skip connection, which reads the value itself."""
    if config.by_head:
        return [f"{tag}as = Shape(x)", f"{tag}out = Reshape({tag}restored, {tag}as)"]
    if not config.skip:
        return [_same(f"{tag}out", f"{tag}restored")]
    return [
        f"{tag}across = Transpose <perm = [1, 0]> (W_skip)",
        f"{tag}skipped = MatMul(x, {tag}across)",
        f"{tag}out = Add({tag}restored, {tag}skipped)",
    ]
