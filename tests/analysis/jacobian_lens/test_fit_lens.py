"""Fits of Jacobian lenses against torch's autograd, and what is had without a fit against the fit."""

import warnings

import numpy as np
import pytest
import torch
from repository import REPOSITORY

from mionnx import GradientError, InputError, JacobianLens, MIModel, ShortTextWarning, SpecFileError
from mionnx.analysis.jacobian_lens import fit_lens as fitting
from mionnx.analysis.jacobian_lens.pullback import Pullback, stream
from mionnx.graph import matrices

SKIP = 3
TEXTS = [np.random.default_rng(seed).integers(3, 101, length) for seed, length in enumerate((9, 7, 11))]


def by_autograd(model, ids: np.ndarray, skip: int) -> dict[int, np.ndarray]:
    """J of one text by its definition, from blocks' outputs in transformers: a backward pass a number."""
    inner = model.transformer if model.config.model_type == "gpt2" else model.model
    blocks = inner.h if model.config.model_type == "gpt2" else inner.layers
    streams: list[torch.Tensor] = []

    def root(module, args, output):
        value = output[0] if isinstance(output, tuple) else output
        if not streams:
            value = value.detach().requires_grad_(True)
        streams.append(value)
        return (value, *output[1:]) if isinstance(output, tuple) else value

    hooks = [block.register_forward_hook(root) for block in blocks]
    model(torch.from_numpy(ids)[None])
    for hook in hooks:
        hook.remove()
    valid = slice(skip, len(ids) - 1)
    rows = [
        torch.autograd.grad(streams[-1][0, valid, i].sum(), streams[:-1], retain_graph=True)
        for i in range(streams[-1].shape[-1])
    ]
    return {
        layer: torch.stack([row[layer][0, valid].mean(0) for row in rows]).numpy() for layer in range(len(blocks) - 1)
    }


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2"])
def test_a_fit_is_the_mean_derivative(models, references, family):
    model, reference = models(family), references(family)
    lens = model.fit_lens(TEXTS, skip=SKIP, rows=5)
    expected = [by_autograd(reference, ids, SKIP) for ids in TEXTS]
    assert lens.layers == [*range(model.num_layers - 1)]
    assert lens.n_prompts == len(TEXTS)
    for layer, matrix in lens.matrices.items():
        mean = np.mean([one[layer] for one in expected], axis=0)
        assert np.abs(matrix - mean).max() < 1e-4 * np.abs(mean).max()
    assert lens.metadata["target_layer"] == model.num_layers - 1
    assert lens.metadata["skip_first_positions"] == SKIP
    lens.check(model)


@pytest.mark.parametrize("rules", ["relp", "frozen_norm"])
def test_rows_at_once_are_the_public_verb_by_any_rules(shipped, rules):
    back = Pullback(shipped, [0, 2], rules)
    ids, at = TEXTS[2], np.arange(SKIP, 10)
    numbers = np.random.default_rng(1).normal(size=(4, shipped.hidden_size)).astype(np.float32)
    rows = back.rows(ids, numbers, at)
    assert back.together
    seed = np.zeros((4, len(ids), shipped.hidden_size), np.float32)
    seed[:, at] = numbers[:, None]
    points = [stream(0), stream(2)]
    cache = shipped.gradients(np.repeat(ids[None], 4, 0), points, of=stream(3), cotangent=seed, rules=rules)
    for row, name in zip(rows, points, strict=True):
        expected = cache.grad[name][:, at].mean(axis=1)
        assert np.abs(row - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.slow
def test_a_recurrent_model_goes_back_row_by_row(recurrent):
    back = Pullback(recurrent, [1], "gradient")
    ids, at = TEXTS[0], np.arange(SKIP, 8)
    numbers = np.eye(2, recurrent.hidden_size, dtype=np.float32)
    rows = back.rows(ids, numbers, at)
    seed = np.zeros((2, len(ids), recurrent.hidden_size), np.float32)
    seed[:, at] = numbers[:, None]
    last = stream(recurrent.num_layers - 1)
    expected = recurrent.gradients(np.repeat(ids[None], 2, 0), [stream(1)], of=last, cotangent=seed).grad[stream(1)]
    np.testing.assert_allclose(rows[0], expected[:, at].mean(axis=1), atol=1e-5 * np.abs(expected).max())


def test_an_interrupted_fit_goes_on(models, tmp_path, monkeypatch):
    model, path = models("llama"), tmp_path / "fit.safetensors"
    monkeypatch.setattr(fitting, "EVERY", 0.0)
    expected = model.fit_lens(TEXTS, skip=SKIP)

    def breaking():
        yield from TEXTS[:2]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.fit_lens(breaking(), skip=SKIP, resume=path)
    counted: list[int] = []
    rows = Pullback.rows
    monkeypatch.setattr(Pullback, "rows", lambda self, ids, *rest: counted.append(len(ids)) or rows(self, ids, *rest))
    lens = model.fit_lens(TEXTS, skip=SKIP, resume=path)
    assert {*counted} == {len(TEXTS[2])}
    for layer, matrix in expected.matrices.items():
        np.testing.assert_array_equal(lens.matrices[layer], matrix)
    assert lens.cosines == expected.cosines
    for settings, message in (({"skip": 2}, "skip_first_positions"), ({"skip": SKIP, "rules": "relp"}, "rules")):
        with pytest.raises(InputError, match=rf"another fit, which differs in .*{message}"):
            model.fit_lens(TEXTS, resume=path, **settings)
    with pytest.raises(InputError, match="3 texts that are not the first of these"):
        model.fit_lens([TEXTS[1], *TEXTS[1:]], skip=SKIP, resume=path)
    with pytest.raises(InputError, match="not the first of these"):
        model.fit_lens(TEXTS[:2], skip=SKIP, resume=path)
    expected.save(path)
    with pytest.raises(SpecFileError, match="no saved LensProgress"):
        model.fit_lens(TEXTS, skip=SKIP, resume=path)


def test_parts_are_merged_and_halves_compared(models):
    model = models("llama")
    lens, one, rest = (model.fit_lens(texts, skip=SKIP) for texts in (TEXTS, TEXTS[:1], TEXTS[1:]))
    merged = one.merged(rest)
    assert merged.n_prompts == merged.metadata["n_prompts"] == 3
    for layer, matrix in lens.matrices.items():
        np.testing.assert_allclose(merged.matrices[layer], matrix, atol=1e-6 * np.abs(matrix).max())
    first = [model.fit_lens([text], skip=SKIP).matrices[0].astype(np.float64) for text in TEXTS]
    halves = first[0] + first[2], first[1]
    cosine = (halves[0] * halves[1]).sum() / np.linalg.norm(halves[0]) / np.linalg.norm(halves[1])
    assert lens.cosines[0] == pytest.approx(cosine, abs=1e-5)
    assert one.cosines == {}
    with pytest.raises(InputError, match="differ in skip_first_positions"):
        lens.merged(model.fit_lens(TEXTS, skip=2))
    with pytest.raises(InputError, match="how many prompts"):
        JacobianLens({0: np.eye(2)}).merged(JacobianLens({0: np.eye(2)}))


def test_vectors_of_tokens_need_no_fit(models):
    model, token_ids = models("gpt2"), [5, 40, 77]
    lens, vectors = model.fit_lens(TEXTS, skip=SKIP), model.lens_vectors(TEXTS, token_ids, skip=SKIP)
    unembedding = np.asarray(matrices.unembedding(model.hooked), np.float32)
    for layer, rows in vectors.items():
        own = lens.token_vectors(model, token_ids, layer)
        np.testing.assert_allclose(own, (lens.matrices[layer].T @ unembedding[:, token_ids]).T, atol=1e-6)
        np.testing.assert_allclose(rows, own, atol=1e-5 * np.abs(own).max())
        np.testing.assert_allclose(lens.dictionary(model, layer)[token_ids], own, atol=1e-6)


def test_a_vector_is_transported_by_two_passes(shipped):
    texts = [f"{prompt} is" for prompt in ("The capital of France", "The capital of Germany")]
    lens = shipped.fit_lens(texts, skip=1)
    vectors = np.random.default_rng(0).normal(size=(2, shipped.hidden_size)).astype(np.float32)
    moved = shipped.lens_transport(texts, vectors, 2, skip=1)
    expected = lens.transport(vectors, 2)
    assert np.abs(moved - expected).max() < 1e-2 * np.abs(expected).max()
    np.testing.assert_allclose(shipped.lens_transport(texts, vectors[1], 2, skip=1), moved[1], atol=1e-4)


def test_what_cannot_be_fitted_is_refused(shipped):
    text = "The capital of France is"
    for call, error, message in (
        (lambda: shipped.fit_lens([text]), InputError, "no text that is long enough"),
        (lambda: shipped.fit_lens([], skip=1), InputError, "no text that is long enough"),
        (lambda: shipped.fit_lens([text], skip=1, layers=[3]), InputError, "a lens maps layers 0 to 2 to layer 3"),
        (lambda: shipped.fit_lens([text], skip=1, layers=[]), InputError, "no layer"),
        (lambda: shipped.fit_lens([text], skip=1, rules="relb"), GradientError, "did you mean"),
        (lambda: shipped.fit_lens([text], skip=-1), InputError, "skip must be 0"),
        (lambda: shipped.fit_lens([text], skip=4, max_tokens=5), InputError, "max_tokens must be 6"),
        (lambda: shipped.lens_vectors([text], [], skip=1), InputError, "no tokens"),
        (lambda: shipped.lens_transport([text], np.zeros(128), 1, skip=1), InputError, "none of zeros"),
        (lambda: shipped.lens_transport([text], np.full(128, np.nan), 1, skip=1), InputError, "NaN"),
        (
            lambda: MIModel.from_pretrained(REPOSITORY / "models" / "world-bert").fit_lens([text]),
            InputError,
            "both dir",
        ),
    ):
        with warnings.catch_warnings(action="ignore", category=ShortTextWarning), pytest.raises(error, match=message):
            call()
    with pytest.warns(ShortTextWarning, match="text 0 has 5 tokens"), pytest.raises(InputError):
        shipped.fit_lens([text])
