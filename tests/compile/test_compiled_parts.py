"""Captures and gradients in part, in compiled graphs: their positions and heads are in the file."""

import numpy as np
import onnxruntime
import pytest
from repository import REPOSITORY

from mionnx import HookSpec, Intervention, InterventionError, MIModel

TEXTS = ["The capital of France is", "one two three"]


def feeds_of(model: MIModel, texts: list[str]) -> dict[str, np.ndarray]:
    """Inputs of a prompt, padded on the left, of a recurrent model on the right."""
    rows = [model.tokenize(text).ids for text in texts]
    ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
    mask = np.zeros_like(ids)
    for row, own in enumerate(rows):
        at = slice(len(own)) if model.hooked.metadata.carries_state else slice(-len(own), None)
        ids[row, at], mask[row, at] = own, 1
    if model.hooked.metadata.carries_state:
        shapes = model.hooked.metadata.past_shapes(2, 0)
        start = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        return {"input_ids": ids, "mionnx.token_positions": np.where(mask, mask.cumsum(1) - 1, -1)} | start
    past = [f"past_key_values.{i}.{part}" for i in range(model.num_layers) for part in ("key", "value")]
    empty = np.zeros((2, model.num_kv_heads, 0, model.head_dim), np.float32)
    feeds = {"input_ids": ids, "attention_mask": mask, "position_ids": np.maximum(mask.cumsum(1) - 1, 0)}
    return feeds | dict.fromkeys(past, empty)


def spec_of(recurrent: bool) -> HookSpec:
    spec = HookSpec().intervene("blocks.1.hook_mlp_out", Intervention.Scale(0.5))
    spec.capture("blocks.1.hook_resid_post", positions=[0, -1]).capture("blocks.0.hook_resid_post", positions=2)
    spec.gradient("blocks.1.hook_resid_post", positions=[1, -1]).set_metric("logit", answer="Paris")
    if recurrent:
        return spec.capture("blocks.2.rwkv.hook_k", heads=[1], positions=[0, -1])
    spec.capture("blocks.2.attn.hook_pattern", positions=-1, heads=[2, 0])
    return spec.gradient("blocks.2.attn.hook_z", heads=1)


def run(folder, feeds):
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    names = [one.name for one in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


@pytest.mark.parametrize("name", ["world-llama", "world-gpt2", pytest.param("world-rwkv7", marks=pytest.mark.slow)])
def test_a_compiled_graph_gives_the_parts_of_forward(name, tmp_path):
    model = MIModel.from_pretrained(REPOSITORY / "models" / name)
    spec = spec_of(model.hooked.metadata.carries_state)
    expected = model.forward(TEXTS, spec)
    found = run(model.compile(spec, tmp_path / "out", knobs={"strength": None}), feeds_of(model, TEXTS))
    for hook, value in expected.items():
        np.testing.assert_allclose(found[f"{hook}.part"], value, rtol=0, atol=2e-5)
    assert expected.grad
    for hook, value in expected.grad.items():
        np.testing.assert_allclose(found[f"{hook}.gradient.part"], value, rtol=0, atol=2e-5)


def test_a_call_without_a_token_at_a_position_gives_nan(shipped, tmp_path):
    """In a later step the prompt's positions are NaN, and the one that has come is there."""
    spec = HookSpec().capture("blocks.1.hook_resid_post", positions=[0, -1, 3])
    folder = shipped.compile(spec, tmp_path / "out")
    feeds = feeds_of(shipped, TEXTS)
    name = "blocks.1.hook_resid_post.part"
    first = run(folder, feeds)
    assert [np.isnan(row).all(-1).tolist() for row in first[name]] == [[False] * 3, [False, False, True]]
    kept = {f"past_key_values.{one[8:]}": value for one, value in first.items() if one.startswith("present.")}
    mask = np.concatenate([feeds["attention_mask"], np.ones((2, 1), np.int64)], 1)
    ids = first["logits"][:, -1].argmax(-1)[:, None]
    second = run(folder, kept | {"input_ids": ids, "attention_mask": mask, "position_ids": mask.sum(1)[:, None] - 1})
    assert [np.isnan(row).all(-1).tolist() for row in second[name]] == [[True] * 3, [True, True, False]]
    text = np.concatenate([shipped.tokenize(TEXTS[1]).ids, ids[1]])
    whole = shipped.forward(text[None], HookSpec().capture("blocks.1.hook_resid_post"))["resid_post", 1]
    np.testing.assert_allclose(second[name][1, 2], whole[0, 3], rtol=0, atol=2e-5)


def test_a_head_that_is_not_there_is_refused(shipped, tmp_path):
    spec = HookSpec().capture("blocks.1.attn.hook_z", heads=99)
    with pytest.raises(InterventionError, match="head 99 of"):
        shipped.compile(spec, tmp_path / "out")
    assert not (tmp_path / "out").exists()
