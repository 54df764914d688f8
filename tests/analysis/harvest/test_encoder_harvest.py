"""A dataset through a text encoder: values of its first tokens, and values of which a text has one."""

import numpy as np
import pytest
import torch

from mionnx import Activations, HookError

TEXTS = ["the man plays the guitar on stage.", "it rains", "a good day for music and for paris, france", "paris"]
STREAM = "blocks.1.hook_resid_post"


@pytest.mark.slow
def test_embeddings_of_a_dataset_are_those_of_embed(text_encoder, tmp_path):
    model, _ = text_encoder("embedding")
    model.harvest(TEXTS, ["hook_pooled", "hook_embedding"], tmp_path / "out", positions="pooled")
    rows = Activations(tmp_path / "out")
    assert rows["hook_embedding"].shape == (len(TEXTS), 32)
    assert np.abs(rows["hook_embedding"][:] - model.embed(TEXTS)).max() < 1e-6
    lengths = np.linalg.norm(rows["hook_pooled"][:], axis=1, keepdims=True)
    assert np.abs(rows["hook_pooled"][:] / lengths - rows["hook_embedding"][:]).max() < 1e-6


@pytest.mark.parametrize("positions", ["first", None])
def test_streams_are_those_of_transformers(text_encoder, tmp_path, positions):
    """Of the first token of each text, or of all tokens without padding, in order."""
    model, reference = text_encoder("classes")
    model.harvest(TEXTS, STREAM, tmp_path / "out", positions=positions, batch_size=4)
    expected = []
    for text in TEXTS:
        ids = torch.from_numpy(model.tokenize(text).ids[None])
        with torch.no_grad():
            stream = reference(input_ids=ids, output_hidden_states=True).hidden_states[-1][0].numpy()
        expected.append(stream[:1] if positions else stream)
    harvested = Activations(tmp_path / "out")[STREAM][:]
    assert harvested.shape == np.concatenate(expected).shape
    assert np.abs(harvested - np.concatenate(expected)).max() < 5e-5


def test_values_of_texts_and_of_tokens_are_not_mixed(text_encoder, tmp_path):
    model, _ = text_encoder("embedding")
    for points, positions in (("hook_embedding", None), (["hook_embedding", STREAM], "pooled"), (STREAM, "pooled")):
        with pytest.raises(HookError, match=r"one value a text.*pooled|a value a token.*first"):
            model.harvest(TEXTS, points, tmp_path / "out", positions=positions)
