"""Results that stay where they are computed, buffers that are used again, bfloat16: the paths of a GPU, on the CPU."""

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

from mionnx import HookPoint, HookSpec, InputError, Intervention, KVCache, MIModel, ModelError, Options
from mionnx.engine.cuda_graphs import CudaGraphs, Replay
from mionnx.engine.device import CPU, DeviceArray, copied, empty, fetch, overwrite, put
from mionnx.engine.onnx_runtime import OrtProgram
from mionnx.run.decoding import rolls

BF16, F32 = onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT


@pytest.fixture
def staying(monkeypatch):
    """Results are held, as on another device."""
    monkeypatch.setattr(OrtProgram, "compute", OrtProgram.run_on_device)


@pytest.fixture(scope="module")
def rounding():
    """A graph that has bfloat16 inputs and outputs: x as bfloat16, and y back as float32."""
    nodes = [helper.make_node("Cast", ["x"], ["half"], to=BF16), helper.make_node("Cast", ["y"], ["whole"], to=F32)]
    ends = [helper.make_tensor_value_info(name, kind, None) for name, kind in (("x", F32), ("y", BF16))]
    outs = [helper.make_tensor_value_info(name, kind, None) for name, kind in (("half", BF16), ("whole", F32))]
    model = helper.make_model(
        helper.make_graph(nodes, "g", ends, outs), opset_imports=[helper.make_opsetid("", 21)], ir_version=10
    )
    return onnxruntime.InferenceSession(model.SerializeToString())


@pytest.mark.parametrize("shape", [(3, 4), (2, 0, 5), ()])
def test_bfloat16_goes_in_and_comes_out(rounding, shape):
    values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    half = np.asarray(values).astype(ml_dtypes.bfloat16)
    found = OrtProgram(rounding, Options()).run(["half", "whole"], {"x": np.asarray(values), "y": half, "unread": half})
    assert found["half"].dtype == ml_dtypes.bfloat16
    assert found["half"].shape == found["whole"].shape == shape
    assert np.array_equal(found["half"], half)
    assert np.array_equal(found["whole"], half.astype(np.float32))
    held = DeviceArray(put(half, CPU))
    assert (held.shape, held.dtype, held.nbytes) == (shape, ml_dtypes.bfloat16, half.nbytes)
    assert np.array_equal(fetch(put(held, CPU)), half)
    assert np.array_equal(fetch(copied(put(half, CPU), CPU)), half)  # as from and to another device
    there = empty(shape, BF16, CPU)
    overwrite(there, half)
    assert np.array_equal(fetch(there), half)


def test_what_stays_is_what_would_have_come(family, models, staying, monkeypatch):
    model, ids = models(family), np.random.default_rng(0).integers(3, 64, (2, 9))
    spec = HookSpec().capture("*").intervene(HookPoint.ResidPost(0), Intervention.Scale(1.1, positions=[3, -1]))
    held = model.forward(ids[:, :6], spec, use_cache=True)
    assert isinstance(held._captured[str(HookPoint.ResidPost(1))], DeviceArray)
    assert all(isinstance(part, DeviceArray) for layer in held.kv_cache.device_parts() for part in layer.values())
    after = model.forward(ids[:, 6:], cache=held.kv_cache)
    monkeypatch.undo()
    plain = model.forward(ids[:, :6], spec, use_cache=True)
    assert [*held] == [*plain]
    assert all(np.array_equal(held[name], plain[name], equal_nan=True) for name in plain)
    assert np.array_equal(held.output(), plain.output())
    assert held["resid_post", 1] is held["resid_post", 1]  # fetched once
    assert repr(held) == repr(plain)
    assert np.array_equal(after.output(), model.forward(ids[:, 6:], cache=plain.kv_cache).output())


def test_a_cache_that_stays_can_be_changed_and_saved(models, staying, tmp_path):
    model, ids = models("llama"), np.arange(3, 9)[None]
    cache = model.forward(ids, use_cache=True).kv_cache
    before = cache.get_layer(0)
    cache.clear_layer(1)
    assert cache.get_layer(0) is before
    assert not cache.get_layer(1)[0].any()
    assert len(cache.layers[:1]) == 1
    assert cache.layers[-1] is cache.get_layer(1)
    cache.save(tmp_path / "cache.safetensors")
    again = KVCache.load(tmp_path / "cache.safetensors")
    next_ids = np.array([[9]])
    assert np.array_equal(model.forward(next_ids, cache=again).output(), model.forward(next_ids, cache=cache).output())


def test_a_recurrent_state_that_stays(rwkv, staying, monkeypatch):
    model, ids = rwkv("7-fla"), np.arange(1, 10)[None]
    held = model.forward(ids[:, :5])
    after = model.forward(ids[:, 5:], initial_state=held.state)
    monkeypatch.undo()
    plain = model.forward(ids[:, 5:], initial_state=model.forward(ids[:, :5]).state)
    assert np.array_equal(after.output(), plain.output())


def test_functions_see_arrays_where_values_stay(models, staying, monkeypatch):
    model, ids, seen = models("gpt2"), np.arange(3, 9)[None], []

    def hook(value, hook):
        seen.append(type(value))
        return value * 0.5

    held = model.run_with_hooks(ids, [("blocks.0.hook_resid_post", hook)])
    monkeypatch.undo()
    assert seen == [np.ndarray]
    assert np.array_equal(held, model.run_with_hooks(ids, [("blocks.0.hook_resid_post", hook)]))


def test_replays_give_what_runs_give(family, models, monkeypatch):
    """Buffers of fixed addresses: other values, other shapes, and earlier results that a later run must not change."""
    model, rng = models(family), np.random.default_rng(0)
    calls = []
    for number in range(CudaGraphs.LIMIT + 3):
        ids = rng.integers(3, 64, (1 + number % 2, 4 + number % (CudaGraphs.LIMIT + 1)))
        vector = rng.normal(size=model.hidden_size)
        spec = HookSpec().capture("blocks.*.hook_resid_post")
        calls.append((ids, spec.intervene(HookPoint.ResidPost(0), Intervention.Add(vector, positions=-1))))
    calls += calls[::2]
    plain = [model.forward(ids, spec, use_cache=True) for ids, spec in calls]
    monkeypatch.setattr(OrtProgram, "compute", _replayed)
    replayed = [model.forward(ids, spec, use_cache=True) for ids, spec in calls]
    for one, other in zip(plain, replayed, strict=True):
        assert np.array_equal(one.output(), other.output())
        assert all(np.array_equal(one[name], other[name]) for name in one)
        assert np.array_equal(one.kv_cache.get_layer(0)[0], other.kv_cache.get_layer(0)[0])


def _replayed(program, outputs, feeds):
    return program.cuda_graphs.run(outputs, {name: value for name, value in feeds.items() if name in program.inputs})


def test_what_is_fed_to_a_replay_is_left_alone(rounding):
    replays, x = CudaGraphs(rounding, CPU), np.ones(3, np.float32)
    half = np.full(3, 2.5, ml_dtypes.bfloat16)
    first = replays.run(["half", "whole"], {"x": x, "y": half})
    second = replays.run(["half", "whole"], {"x": x * 3, "y": half * 2})
    known = [(x, 1), (half, 2.5), (first["half"], 1), (first["whole"], 2.5), (second["half"], 3), (second["whole"], 5)]
    assert [float(np.asarray(array)[0]) for array, _ in known] == [number for _, number in known]
    with pytest.raises(ModelError, match="ONNX Runtime failed"):
        replays.run(["half", "whole"], {"x": x})


def test_cuda_graphs_are_refused_where_there_are_none(models):
    with pytest.raises(InputError, match="provider 'cuda'"):
        Options(cuda_graphs=True)
    with pytest.raises(InputError, match="cuda_graphs=True"):
        Options("cuda", provider_options={"enable_cuda_graph": "1"})
    with pytest.raises(InputError, match="cuda_graphs=True is for"):
        MIModel.from_pretrained(models("llama").hooked.folder, cuda_graphs=True)
    graphs = Options("cuda", provider_options={"device_id": 1}, cuda_graphs=True)
    assert graphs.of_provider == {"use_tf32": "0", "device_id": "1", "enable_cuda_graph": "1"}
    assert Options("cuda", provider_options={"use_tf32": 1}).of_provider == {"use_tf32": "1"}
    assert Options("cuda", fast=True).of_provider == Options().of_provider == {}
    assert graphs.place == ("cuda", 1)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_steps_of_one_shape_give_what_growing_ones_give(name, models, monkeypatch):
    """Rows of unequal length, captures, steering by phase and position, a cache to go on from: as on CUDA graphs."""
    model, shapes = models(name), set()
    ids, vector = [[3, 4, 5, 6, 7], [8, 9, 10]], np.cos(np.arange(model.hidden_size)) / 2
    spec = HookSpec().capture("*.hook_resid_post").intervene(HookPoint.ResidPost(0), Intervention.Add(vector))
    spec.intervene(HookPoint.MlpOut(1), Intervention.Scale(0.5, positions=[6, -1]))
    spec.intervene(HookPoint.MlpOut(0), Intervention.Zero(positions="generated", rows=1))
    settings = {"max_new_tokens": 9, "eos_token_id": [], "output_logits": True}
    plain = model.generate(ids, spec, **settings)
    monkeypatch.setattr("mionnx.run.decoding.rolls", lambda program, *rest: _always(program) and rolls(program, *rest))
    run = Replay.run

    def seen(replay, arrays, outputs=None):
        shapes.add(replay.inputs["attention_mask"].shape()[1])
        return run(replay, arrays, outputs)

    monkeypatch.setattr(Replay, "run", seen)
    for _ in range(2):  # the second on the buffers of the first
        rolled = model.generate(ids, spec, **settings)
    assert shapes == {64}
    assert [row.tolist() for row in rolled.new_ids] == [row.tolist() for row in plain.new_ids]
    assert len(rolled.steps) == len(plain.steps)
    for one, other in zip(rolled.steps, plain.steps, strict=True):
        assert all(np.abs(one[hook] - other[hook]).max() < 5e-5 for hook in other)
        assert np.abs(one.output() - other.output()).max() < 5e-5
    assert rolled.cache.attention_mask.tolist() == plain.cache.attention_mask.tolist()
    again = [
        model.generate([[11], [12]], cache=one.cache, max_new_tokens=3, eos_token_id=[]) for one in (rolled, plain)
    ]
    assert [row.tolist() for row in again[0].new_ids] == [row.tolist() for row in again[1].new_ids]
    model.generate(ids, HookSpec().capture("*.hook_pattern"), max_new_tokens=3, eos_token_id=[])
    assert shapes == {64}


def _always(program):
    program.rolls = True
    return True
