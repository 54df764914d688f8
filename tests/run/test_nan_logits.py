"""NaN logits are refused by `forward`, the lens and sweeps, and the first hook point with NaN is named."""

import json
import pickle
import struct
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import onnxruntime
import pytest

from mionnx import Directions, HookSpec, InputError, Intervention, InterventionError, MIModel, ModelError
from mionnx.engine.device import DeviceArray
from mionnx.run.nan_logits import checked, has_nan

IDS = [5, 9, 12, 30]


def poison(folder: Path, tensor: str, value: float = np.nan, count: int | None = None) -> MIModel:
    """The model with a tensor's first numbers changed, opened in spite of it."""
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    begin, end = (8 + length + at for at in json.loads(data[8 : 8 + length])[tensor]["data_offsets"])
    end = end if count is None else begin + 4 * count
    data[begin:end] = np.full((end - begin) // 4, value, np.float32).tobytes()
    path.write_bytes(data)
    return MIModel.from_pretrained(folder, threads=1, prepack=False, check="none")


@pytest.mark.parametrize(
    ("tensor", "hook"),
    [
        ("model.embed_tokens.weight", r"hook_embed \[0, 0, 0\]"),
        ("model.layers.2.mlp.down_proj.weight", r"blocks\.2\.mlp\.hook_post \[0, 0, 0\]"),
        ("model.norm.weight", r"hook_final_norm \[0, 0, 0\]"),
    ],
)
def test_weights_that_are_nan_are_named(copy, tensor, hook):
    model = poison(copy, tensor)
    for arguments in ({}, {"use_cache": True, "attention_mask": [[1, 1, 1, 1]]}):
        with pytest.raises(ModelError, match=f"logits are NaN; first at .*({hook})"):
            model.forward([IDS], **arguments)
    with pytest.raises(InputError, match="NaN"):
        model.generate(IDS, max_new_tokens=1)
    with pytest.raises(ModelError, match="NaN"):
        model.logit_lens(np.array(IDS))
    with pytest.raises(ModelError, match="NaN"):
        model.patch_sweep(IDS, [5, 9, 13, 30], answer=5, versus=9, over=("layer",))


def test_analyses_that_reduce_captures_look_at_them_first(copy):
    model = poison(copy, "model.layers.1.self_attn.q_proj.weight")
    sound = model.attention("The capital of France is", layers=[0])
    assert np.isfinite(sound.patterns).all()
    directions = model.contrast("The capital of France is", "The capital of Germany is", layers=[0])
    later = Directions(directions.vectors, [3], directions.hook, directions.method, directions.pairs)
    for analysis in (
        lambda: model.attention("The capital of France is"),
        lambda: model.head_scores(batch=1, period=4),
        lambda: model.contrast("The capital of France is", "The capital of Germany is"),
        lambda: model.calibrate(later, "The capital of France is"),
    ):
        with pytest.raises(ModelError, match=r"blocks\.[123]\..* is NaN: the weights are damaged"):
            analysis()


def test_infinite_weights_are_named_where_they_become_nan(copy):
    model = poison(copy, "model.layers.1.mlp.down_proj.weight", np.inf)
    with pytest.raises(
        ModelError,
        match=r"logits are NaN; first at blocks\.1\.mlp\.hook_post|first at blocks\.1\.hook_mlp_out|hook_resid_post",
    ):
        model.forward(IDS)


def test_one_token_that_is_nan_is_found_in_its_row_only(copy):
    model = poison(copy, "model.embed_tokens.weight", count=128)  # token 0, in each row after the first
    assert not np.isnan(model.forward(IDS).output()).any()
    with pytest.raises(ModelError, match=r"hook_embed \[1, 2, 0\]"):
        model.forward([IDS, [5, 9, 0, 30]])


def test_captures_without_logits_show_the_nan(copy):
    model = poison(copy, "model.layers.2.mlp.down_proj.weight")
    found = model.forward(IDS, HookSpec().capture("*.hook_resid_post"), logits=False)
    assert [bool(np.isnan(found["resid_post", layer]).any()) for layer in range(4)] == [False, False, True, True]


def test_interventions_that_make_nan_are_said(shipped):
    spec = HookSpec().intervene("blocks.1.hook_resid_pre", Intervention.Scale(1e38))
    spec.intervene("blocks.1.hook_resid_pre", Intervention.Scale(1e38))
    with pytest.raises(
        InterventionError, match=r"NaN with scale at blocks\.1\.hook_resid_pre, .*; first at blocks\.1\."
    ):
        shipped.forward(IDS, spec)
    assert np.isfinite(shipped.forward(IDS).output()).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
def test_one_nan_is_found_in_any_dtype(dtype):
    array = np.random.default_rng(0).normal(size=(2, 3, 5)).astype(dtype)
    array[0, 0, :2] = np.inf, -np.inf
    assert not has_nan(array)
    for sign in (1.0, -1.0):
        array[1, 2, 3] = np.copysign(np.float32(np.nan), np.float32(sign))
        assert has_nan(array)
    assert not has_nan(array[:0])


def test_logits_on_another_device_are_looked_at_when_they_are_read():
    def refuse(array):
        if has_nan(array):
            raise ModelError("NaN")

    def on_device(values):
        return DeviceArray(onnxruntime.OrtValue.ortvalue_from_numpy(np.array(values, np.float32)))

    good = checked(on_device([1.0, 2.0]), refuse)
    assert np.asarray(good).tolist() == [1, 2]
    assert (good.shape, good.dtype, good.nbytes) == ((2,), np.float32, 8)
    assert pickle.loads(pickle.dumps(good)).tolist() == [1, 2]
    bad = checked(on_device([1.0, np.nan]), refuse)
    with pytest.raises(ModelError):
        np.asarray(bad)


def test_looking_costs_less_than_a_hundredth_of_a_pass(shipped):
    ids = np.tile(np.arange(5, 69), (4, 1))
    logits = shipped.forward(ids).output()

    def least(work) -> float:
        times = []
        for _ in range(15):
            begin = time.process_time()
            work()
            times.append(time.process_time() - begin)
        return min(times)

    assert least(lambda: has_nan(logits)) < 0.01 * least(lambda: shipped.forward(ids))
