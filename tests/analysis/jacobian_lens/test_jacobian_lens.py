"""Lenses: their files, those of others, and what the head reads through them."""

import json

import numpy as np
import pytest
import torch
from repository import REPOSITORY

from mionnx import HookError, HookSpec, InputError, JacobianLens, LensResult, MIModel, SpecFileError

PROMPT = "The capital of France is"
RANDOM = np.random.default_rng(0)
MATRICES = {layer: RANDOM.normal(size=(128, 128)).astype(np.float32) for layer in (0, 1, 2)}


def same(one: JacobianLens, other: JacobianLens) -> bool:
    names = ("matrices", "biases")
    equal = all(np.array_equal(getattr(one, n)[i], getattr(other, n)[i]) for n in names for i in getattr(other, n))
    facts = ("layers", "d_model", "reads", "n_prompts", "metadata", "cosines")
    return equal and all(getattr(one, name) == getattr(other, name) for name in facts)


def test_a_lens_is_loaded_as_it_was_saved(tmp_path):
    metadata = {"corpus": "a", "numbers": [1, 2.5, None], "inner": {"x": True}}
    lens = JacobianLens(MATRICES, n_prompts=7, metadata=metadata, cosines={0: 0.5})
    assert same(JacobianLens.load(lens.save(tmp_path / "lens.safetensors")), lens)
    plain = JacobianLens.load(lens.save(tmp_path / "lens.pt"))
    assert same(plain, JacobianLens(MATRICES, n_prompts=7, metadata=metadata))
    half = torch.load(lens.save(tmp_path / "half.pt", dtype="float16"), weights_only=True)
    assert half["J"][1].dtype == torch.float16
    assert half["source_layers"] == [0, 1, 2]
    assert half["metadata"] == metadata
    tuned = JacobianLens(MATRICES, biases={i: np.ones(128) for i in MATRICES}, reads="resid_pre")
    assert same(JacobianLens.load(tuned.save(tmp_path / "tuned.safetensors")), tuned)
    with pytest.raises(SpecFileError, match="holds no biases"):
        tuned.save(tmp_path / "tuned.pt")
    with pytest.raises(SpecFileError, match="above the range of float16"):
        JacobianLens({0: [[1e6]]}).save(tmp_path / "large.pt", dtype="float16")
    with pytest.raises(SpecFileError, match=r"saved as \.safetensors"):
        lens.save(tmp_path / "lens.npz")
    assert "3 layers, d_model 128, 7 prompts" in repr(lens)


def test_files_of_others_are_lenses(tmp_path):
    tensors = {layer: torch.from_numpy(one) for layer, one in MATRICES.items()}
    torch.save({"J": tensors, "n_prompts": 9, "source_layers": [0, 1, 2], "d_model": 128}, tmp_path / "a.pt")
    checkpoint = {"jacobian_sum": {i: 4 * one for i, one in tensors.items()}, "n_done": 4, "next_idx": 5}
    torch.save({**checkpoint, "source_layers": [0, 1, 2], "target_layer": 3, "skip_first": 16}, tmp_path / "b.pt")
    config = {"d_model": 128, "hf_model_name": "x", "num_prompts_trained_on": 64, "lrp_mode": "z"}
    torch.save({"parameters": {"jacobians": tensors}, "config": config}, tmp_path / "c.pt")
    for name, count, key, value in (("a", 9, "J", None), ("b", 4, "target_layer", 3), ("c", 64, "lrp_mode", "z")):
        lens = JacobianLens.load(tmp_path / f"{name}.pt")
        assert lens.n_prompts == count
        assert lens.metadata.get(key) == value
        for layer, matrix in MATRICES.items():
            np.testing.assert_allclose(lens.matrices[layer], matrix, rtol=1e-6)
    (tmp_path / "tuned").mkdir()
    facts = {"base_model_name_or_path": "x", "d_model": 128, "num_hidden_layers": 3, "lens_type": "linear_tuned_lens"}
    (tmp_path / "tuned" / "config.json").write_text(json.dumps(facts))
    state = {f"{i}.weight": one for i, one in tensors.items()} | {f"{i}.bias": torch.ones(128) * i for i in tensors}
    torch.save(torch.nn.Module().state_dict() | state, tmp_path / "tuned" / "params.pt")
    lens = JacobianLens.load(tmp_path / "tuned")
    assert (lens.reads, lens.metadata["base_model_name_or_path"]) == ("resid_pre", "x")
    x = RANDOM.normal(size=(5, 128)).astype(np.float32)
    np.testing.assert_allclose(lens.transport(x, 2), x + x @ MATRICES[2].T + 2, rtol=1e-4, atol=1e-4)


def test_what_is_no_lens_is_refused(tmp_path, shipped):
    for payload, message in (
        ({"a": 1}, "neither 'J', 'jacobian_sum' nor 'parameters'"),
        ([1], "holds a list"),
        ({"J": [torch.eye(2)]}, "holds a list"),
        ({"J": {}}, "one layer at least"),
        ({"J": {0: torch.full((2, 2), float("nan"))}}, "NaN"),
        ({"J": {0: torch.eye(2), 1: torch.eye(3)}}, r"layer 1 is \[3, 3\], and not \[2, 2\]"),
        ({"J": {0: torch.ones(2, 3)}}, r"\[2, 3\]"),
        ({"J": {"a": torch.eye(2)}}, "must be a dictionary"),
        ({"jacobian_sum": {0: torch.eye(2)}, "n_done": 0}, "without a prompt"),
    ):
        torch.save(payload, tmp_path / "x.pt")
        with pytest.raises((SpecFileError, InputError), match=message) as refusal:
            JacobianLens.load(tmp_path / "x.pt")
        assert str(tmp_path) in str(refusal.value)
    with pytest.raises(SpecFileError, match="no saved JacobianLens"):
        JacobianLens.load(shipped.logit_lens(PROMPT).save(tmp_path / "other.safetensors"))
    with pytest.raises(SpecFileError, match="No such file"):
        JacobianLens.load(tmp_path / "nothing.pt")


def test_a_lens_of_another_model_is_refused(shipped):
    for lens, message in (
        (JacobianLens({0: np.eye(64)}), r"width 64, and world-llama has 128"),
        (JacobianLens({5: np.eye(128)}), "belongs to another model"),
        (JacobianLens({3: np.eye(128)}), "belongs to another model"),
        (JacobianLens({0: np.eye(128)}, metadata={"target_layer": 11}), "to layer 11"),
        (JacobianLens({0: np.eye(128)}, metadata={"weights_sha256": "0", "model": "mine"}), "other weights.*on mine"),
    ):
        with pytest.raises(InputError, match=message):
            shipped.logit_lens(PROMPT, lens=lens)
        with pytest.raises(InputError, match=message):
            lens.token_vectors(shipped, ["Paris"], lens.layers[0])


@pytest.mark.parametrize("name", ["world-llama", "world-gpt2"])
def test_the_identity_is_the_logit_lens_to_the_bit(name):
    model = MIModel.from_pretrained(REPOSITORY / "models" / name, threads=1)
    identity = JacobianLens({layer: np.eye(model.hidden_size) for layer in range(model.num_layers - 1)})
    plain, mapped = model.logit_lens(PROMPT, k=5), model.logit_lens(PROMPT, k=5, lens=identity)
    assert mapped.points == plain.points
    for field in ("top", "top_ids", "log_probs", "ranks", "entropy", "divergence"):
        np.testing.assert_array_equal(getattr(mapped.readout, field), getattr(plain.readout, field))


def test_the_head_reads_what_a_lens_maps(shipped, tmp_path):
    lens = JacobianLens(MATRICES)
    found = shipped.logit_lens(PROMPT, k=3, lens=lens, token_ids=["Paris"])
    plain = shipped.logit_lens(PROMPT, k=3)
    assert found.title == "jacobian lens"
    np.testing.assert_array_equal(found.answers, plain.answers)
    np.testing.assert_array_equal(found.top_ids[-1], plain.top_ids[-1])
    stream = shipped.forward(PROMPT, _capture("blocks.1.hook_resid_post"))["resid_post", 1][0]
    read = shipped.logit_lens(lens.transport(stream, 1), k=3)
    assert [[token for token, _ in one] for one in read] == found.top_ids[1].tolist()
    np.testing.assert_allclose(
        shipped.track_token(PROMPT, "Paris", lens=lens), found.probability_of("Paris")[:, -1], rtol=1e-5
    )
    again = LensResult.load(found.save(tmp_path / "read.safetensors"), model=shipped)
    np.testing.assert_allclose(again.probability_of("Tokyo"), found.probability_of("Tokyo"), rtol=1e-5)
    assert "Jacobian lens" in found.page()
    two = shipped.logit_lens(PROMPT, lens=lens, layers=[1])
    assert two.points == ["blocks.1.hook_resid_post"]
    before = JacobianLens(MATRICES, biases={i: np.zeros(128) for i in MATRICES}, reads="resid_pre")
    assert shipped.logit_lens(PROMPT, lens=before).points == [
        *(f"blocks.{i}.hook_resid_pre" for i in range(3)),
        "blocks.3.hook_resid_post",
    ]
    for arguments, error, message in (
        ({"layers": [9]}, InputError, "the lens has no layer 9"),
        ({"points": "resid_mid"}, HookError, "the lens reads resid_post"),
    ):
        with pytest.raises(error, match=message):
            shipped.logit_lens(PROMPT, lens=lens, **arguments)
    with pytest.raises(InputError, match=r"JacobianLens\.transport maps one"):
        shipped.logit_lens(stream, lens=lens)
    with pytest.raises(InputError, match="no matrix for layer 7"):
        lens.transport(stream, 7)


def test_a_ridge_lens_comes_nearer_to_the_model_than_the_plain_one(shipped):
    countries = ("France", "Spain", "Italy", "Japan", "Peru", "Kenya", "Egypt", "Norway", "Chile", "Greece")
    texts = [f"The capital of {country} is" for country in countries]
    lens = shipped.ridge_lens(texts)
    with pytest.raises(InputError, match="penalty=0"):
        shipped.ridge_lens(texts, penalty=0)
    prompt = "The capital of Germany is"
    plain, mapped = shipped.logit_lens(prompt), shipped.logit_lens(prompt, lens=lens)
    assert (mapped.divergence[:3, 1:-1].mean(axis=1) < 0.7 * plain.divergence[:3, 1:-1].mean(axis=1)).all()
    # the closed form, from all streams at once
    points = ["blocks.1.hook_resid_post", "blocks.3.hook_resid_post"]
    caches = [shipped.forward(text, _capture(*points)) for text in texts]
    x, y = (np.concatenate([cache[name][0, :-1] for cache in caches]).astype(np.float64) for name in points)
    x_, y_ = x - x.mean(0), y - y.mean(0)
    penalty = 1e-3 * np.trace(x_.T @ x_) / 128
    solved = np.linalg.solve(x_.T @ x_ + penalty * np.eye(128), x_.T @ y_).T
    np.testing.assert_allclose(lens.matrices[1], solved, atol=1e-4 * np.abs(solved).max())
    np.testing.assert_allclose(lens.transport(x.mean(0), 1), y.mean(0), atol=1e-3)


def _capture(*names: str):
    return HookSpec().capture([*names])
