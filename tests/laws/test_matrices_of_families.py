"""The matrices of a model, as they are read from its graph, beside those of the torch model."""

import numpy as np
import pytest
import torch

from mionnx.graph import matrices


def numbers(parameter: torch.Tensor) -> np.ndarray:
    return parameter.detach().numpy()


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "phi3"])
def test_the_matrices_are_those_of_the_torch_model(models, references, family):
    hooked, reference = models(family).hooked, references(family)
    assert np.array_equal(matrices.embedding(hooked), numbers(reference.get_input_embeddings().weight))
    head = reference.get_output_embeddings()
    assert np.array_equal(matrices.unembedding(hooked), numbers(head.weight).T)
    bias = np.zeros(len(head.weight), np.float32) if head.bias is None else numbers(head.bias)
    assert np.array_equal(matrices.unembedding_bias(hooked), bias)
