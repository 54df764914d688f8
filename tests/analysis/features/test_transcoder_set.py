"""Transcoders in the files of all who train them: one set of numbers, written in each layout, is read as the same."""

import json
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from mionnx import SAE, HookError, InputError, ModelError, TranscoderSet
from mionnx.analysis.features.config import Config

LAYERS, WIDTH, FEATURES, SEQ, K = 2, 6, 20, 5, 3
HOOKS = {"hook": "mlp.hook_pre", "hook_out": "hook_mlp_out"}
Arrays = dict[str, np.ndarray]


def arrays(layer: int) -> Arrays:
    """One layer: [f, d], the skip connection as x is multiplied with it; numbers that float16 holds."""
    random = np.random.default_rng(layer)
    shapes = {"enc": (FEATURES, WIDTH), "dec": (FEATURES, LAYERS - layer, WIDTH), "skip": (WIDTH, WIDTH)}
    shapes |= {"b_enc": (FEATURES,), "b_dec": (WIDTH,), "threshold": (FEATURES,)}
    made = {name: random.standard_normal(shape).astype(np.float16).astype(np.float32) for name, shape in shapes.items()}
    return made | {"threshold": np.abs(made["threshold"])}


def save(path: Path, tensors: Arrays) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, path)


def biases(one: Arrays) -> Arrays:
    return {"b_enc": one["b_enc"], "b_dec": one["b_dec"]}


def circuit_tracer(folder: Path, layer: int, one: Arrays) -> None:
    file = {"W_enc": one["enc"], "W_dec": one["dec"][:, 0], **biases(one), "W_skip": one["skip"].T}
    save(folder / f"layer_{layer}.safetensors", file | {"activation_function.threshold": one["threshold"]})
    (folder / "config.yaml").write_text(
        "feature_input_hook: mlp.hook_in  # theirs\nfeature_output_hook: 'hook_mlp_out'\n"
    )


def across_layers(folder: Path, layer: int, one: Arrays) -> None:
    names = {"W_enc": "enc", "b_enc": "b_enc", "b_dec": "b_dec", "threshold": "threshold"}
    save(folder / f"W_enc_{layer}.safetensors", {f"{name}_{layer}": one[own] for name, own in names.items()})
    save(folder / f"W_dec_{layer}.safetensors", {f"W_dec_{layer}": one["dec"]})


def gemma_scope(folder: Path, layer: int, one: Arrays) -> None:
    path = folder / f"layer_{layer}" / "width_16k" / "average_l0_76"
    path.mkdir(parents=True)
    file = {"W_enc": one["enc"].T, "W_dec": one["dec"][:, 0], **biases(one), "threshold": one["threshold"]}
    np.savez(path / "params.npz", **file)


def gemma_scope_2(folder: Path, layer: int, one: Arrays) -> None:
    file = {"w_enc": one["enc"].T, "w_dec": one["dec"][:, 0], **biases(one), "threshold": one["threshold"]}
    path = folder / f"layer_{layer}_width_16k_l0_small_affine" / "params.safetensors"
    save(path, file | {"affine_skip_connection": one["skip"]})


def gemma_scope_2_across(folder: Path, layer: int, one: Arrays) -> None:
    decoder = np.zeros((FEATURES, LAYERS, WIDTH), np.float32)
    decoder[:, layer:] = one["dec"]
    file = {"w_enc": one["enc"].T, "w_dec": decoder, **biases(one), "threshold": one["threshold"]}
    save(folder / f"params_layer_{layer}.safetensors", file)


def saelens(folder: Path, layer: int, one: Arrays) -> None:
    path = folder / f"blocks.{layer}.hook_resid_mid"
    file = {"W_enc": one["enc"].T, "W_dec": one["dec"][:, 0], **biases(one), "W_skip": one["skip"].T}
    save(path / "sae_weights.safetensors", file | {"threshold": one["threshold"]})
    metadata = {"sae_lens_version": "6.54.12", "hook_name": f"blocks.{layer}.hook_resid_mid"}
    metadata["hook_name_out"] = f"blocks.{layer}.hook_mlp_out"
    (path / "cfg.json").write_text(json.dumps({"architecture": "jumprelu_skip_transcoder", "metadata": metadata}))


def sparsify(folder: Path, layer: int, one: Arrays) -> None:
    path = folder / f"layers.{layer}.mlp"
    file = {
        "encoder.weight": one["enc"],
        "encoder.bias": one["b_enc"],
        "W_dec": one["dec"][:, 0],
        "b_dec": one["b_dec"],
    }
    save(path / "sae.safetensors", file | {"W_skip": one["skip"].T})
    (path / "cfg.json").write_text(json.dumps({"activation": "topk", "k": K, "transcode": True, "d_in": WIDTH}))


# Layout -> its writer; whether it goes across layers, and whether it has a skip connection.
LAYOUTS: dict[Callable[[Path, int, Arrays], None], tuple[bool, bool]] = {
    circuit_tracer: (False, True),
    across_layers: (True, False),
    gemma_scope: (False, False),
    gemma_scope_2: (False, True),
    gemma_scope_2_across: (True, False),
    saelens: (False, True),
    sparsify: (False, True),
}


def expected(x: np.ndarray, one: Arrays, top_k: bool) -> np.ndarray:
    """Activations [seq, features] by the equations."""
    pre = x @ one["enc"].T.astype(np.float64) + one["b_enc"]
    if top_k:
        limit = -np.sort(-pre, axis=1)[:, [K - 1]]
        return np.where(pre >= limit, np.maximum(pre, 0), 0)
    return np.where(pre > one["threshold"], pre, 0)


@pytest.mark.parametrize("write", LAYOUTS, ids=lambda write: write.__name__)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=["f32", "f16", "bf16"])
def test_every_layout_is_read_as_the_same_features(write, dtype, tmp_path, monkeypatch):
    if write is gemma_scope and dtype is ml_dtypes.bfloat16:
        pytest.skip("an .npz has no bfloat16")
    monkeypatch.setattr("mionnx.analysis.features.transcoder.ENCODED", 7)  # several blocks of features
    layers = [{name: array.astype(dtype) for name, array in arrays(i).items()} for i in range(LAYERS)]
    for i, one in enumerate(layers):
        write(tmp_path, i, one)
    own = {} if write in (circuit_tracer, saelens, sparsify) else HOOKS
    transcoders, (across, skips) = TranscoderSet.load(tmp_path, **own), LAYOUTS[write]
    reads = "hook_resid_mid" if write is saelens else "mlp.hook_pre"
    out = "mlp.hook_post" if write is sparsify else "hook_mlp_out"
    assert (transcoders.hook, transcoders.hook_out) == (f"blocks.{{}}.{reads}", f"blocks.{{}}.{out}")
    assert (len(transcoders), transcoders.across, transcoders.skips) == (LAYERS, across, skips)
    x = np.random.default_rng(9).standard_normal((SEQ, WIDTH)).astype(np.float32)
    for i, array in enumerate(layers):
        one, coder = {name: value.astype(np.float32) for name, value in array.items()}, transcoders.layer(i)
        acts, active = expected(x, one, write is sparsify), coder.active(x, "here")
        assert (active.position.tolist(), active.feature.tolist()) == tuple(map(np.ndarray.tolist, np.nonzero(acts)))
        assert np.abs(active.value - acts[acts > 0]).max() < 1e-5
        assert np.array_equal(active.encoder[active.place], one["enc"][active.feature])
        decoders = one["dec"] if across else one["dec"][:, :1]
        assert np.array_equal(active.decoder[active.place], decoders[active.feature])
        assert not skips or np.array_equal(coder.skip, one["skip"])
        assert np.array_equal(coder.output_bias, one["b_dec"])


def test_matrices_stay_on_disk(tmp_path):
    circuit_tracer(tmp_path, 0, arrays(1))
    coder = TranscoderSet.load(tmp_path).layer(0)
    assert isinstance(coder.encoder, np.memmap)
    assert isinstance(coder.decoder, np.memmap)


def damage(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for i in range(LAYERS):
            one = arrays(i)
            circuit_tracer(folder, i, one | ({name: change(one[name])} if i == 1 else {}))

    return write


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (lambda folder: None, "has no transcoders"),
    "a missing layer": (lambda folder: circuit_tracer(folder, 1, arrays(1)), "none of layer 0"),
    "another width": (damage("enc", lambda array: array[:, :-1]), "W_skip is|width"),
    "a feature less": (damage("dec", lambda array: array[:-1]), "does not fit"),
    "NaN": (damage("b_enc", lambda array: array * np.nan), "b_enc has NaN"),
    "no layer's number": (lambda folder: save(folder / "some.safetensors", arrays(0)), "of which layer"),
    "no decoder": (lambda folder: save(folder / "layer_0.safetensors", {"W_enc": arrays(0)["enc"]}), "no W_dec"),
    "two sets": (lambda folder: [gemma_scope_2(folder / part, 0, arrays(0)) for part in "ab"], "two files of layer 0"),
    "text": (lambda folder: (folder / "layer_0.safetensors").write_text("text"), "is damaged"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_are_no_transcoders_are_refused(name, tmp_path):
    write, words = REFUSED[name]
    write(tmp_path)
    with pytest.raises(ModelError, match=words):
        TranscoderSet.load(tmp_path, **HOOKS)


def test_saes_are_put_together(tmp_path):
    saelens(tmp_path, 0, arrays(1))
    sae = SAE.load(tmp_path / "blocks.0.hook_resid_mid")
    assert repr(TranscoderSet([sae])).endswith("blocks.{}.hook_resid_mid to blocks.{}.hook_mlp_out)")
    with pytest.raises(InputError, match="no transcoders"):
        TranscoderSet([])
    plain = SAE(Config("standard"), {name: sae.weights[name] for name in ("W_enc", "W_dec", "b_enc", "b_dec")})
    with pytest.raises(ModelError, match="no transcoder"):
        TranscoderSet([plain], **HOOKS)
    gemma_scope(tmp_path / "b", 0, arrays(1))
    with pytest.raises(HookError, match="do not say what features read"):
        TranscoderSet.load(tmp_path / "b")
