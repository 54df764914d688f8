"""Hybrids in float16: columns of convolutions in half precision, states that sum over the text in float32."""

import numpy as np
import onnxruntime
import pytest
from recurrent_families import make_recurrent

from exporters.transformers import export
from mionnx import HookSpec, Intervention, MIModel, StateKnockoutSpec

HALF = 1e-2  # of the largest logit


def close(one: np.ndarray, other: np.ndarray) -> None:
    assert np.abs(one.astype(np.float64) - other).max() < HALF * np.abs(other).max()


def agrees(half: MIModel, wide: MIModel) -> None:
    """Passes, padded and in two calls, states, and what is hidden from them, as in float32."""
    vocabulary = wide.hooked.metadata.sizes.vocab_size
    ids, mask = np.random.default_rng(0).integers(3, vocabulary, (2, 20)), np.ones((2, 20), np.int64)
    mask[0, :3] = 0
    assert half.hooked.metadata.dtype == "float16"
    expected = wide.forward(ids, attention_mask=mask).output()
    close(half.forward(ids, attention_mask=mask).output()[mask == 1], expected[mask == 1])
    first = half.forward(ids[:, :9], attention_mask=mask[:, :9], use_cache=True)
    cache = first.kv_cache or first.state
    rest = half.forward(ids[:, 9:], attention_mask=mask, cache=cache)
    close(rest.output(), expected[:, 9:])
    parts = [part for layer in cache.device_parts() for part in layer.values()]
    dtypes = {
        port.part: np.asarray(part).dtype.name for port, part in zip(half.hooked.metadata.ports, parts, strict=True)
    }
    assert dtypes == {part: "float32" if part == "state" else "float16" for part in dtypes}
    terms = wide.hooked.metadata.state_gates
    for term in ("convolution", "write"):
        hidden = StateKnockoutSpec(terms=[term, *(["erase"] if term == "write" and "erase" in terms else [])])
        spec = HookSpec().set_state_knockout(hidden.position(4))
        if term in terms:
            without = wide.forward(ids, spec).output()
            assert np.abs(without - wide.forward(ids).output()).max() > 1e-2
            close(half.forward(ids, spec).output(), without)


@pytest.fixture(scope="module")
def world():
    from repository import REPOSITORY

    return MIModel.from_pretrained(REPOSITORY / "models" / "world-hybrid", threads=1)


def test_a_narrowed_hybrid_is_the_wide_one(world, tmp_path):
    world.narrow(tmp_path / "half", dtype="float16")
    agrees(MIModel.from_pretrained(tmp_path / "half", threads=1), world)


@pytest.mark.slow
def test_a_compiled_hybrid_in_half_precision(world, tmp_path):
    spec = HookSpec().intervene("blocks.0.hook_attn_out", Intervention.Scale(0.5))
    folder = world.compile(spec, tmp_path / "out", dtype="float16")
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    kinds = {entry.name: entry.type for entry in session.get_inputs()}
    states = {name: kind for name, kind in kinds.items() if name.startswith("past_state")}
    assert {*states.values()} == {"tensor(float)", "tensor(float16)"}
    assert all((kind == "tensor(float)") == name.endswith(".state") for name, kind in states.items())
    ids = np.random.default_rng(1).integers(3, world.hooked.metadata.sizes.vocab_size, (2, 12))
    feeds = {
        name: np.zeros(shape, np.float32 if kinds[name] == "tensor(float)" else np.float16)
        for name, shape in world.hooked.metadata.past_shapes(2, 0).items()
    }
    feeds |= {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.tile(np.arange(12), (2, 1))}
    (found,) = session.run(["logits"], {name: feeds[name] for name in kinds})
    close(found, world.forward(ids, spec).output())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mamba2", "qwen3_5_text", "recurrent_gemma"])
def test_a_checkpoint_exports_in_half_precision(family, tmp_path):
    make_recurrent(family, tmp_path / "checkpoint")
    models = []
    for dtype in ("float16", "float32"):
        export(tmp_path / "checkpoint", tmp_path / dtype, dtype=dtype)
        models.append(MIModel.from_pretrained(tmp_path / dtype, threads=1))
    agrees(*models)
