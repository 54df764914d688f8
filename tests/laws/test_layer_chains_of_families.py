"""Models cut before each layer, whose matrices are fed: the same logits, and each matrix changes them."""

import numpy as np

from mionnx.analysis.quantisation.budget import whole_stacks
from mionnx.analysis.quantisation.candidates import of_blocks
from mionnx.analysis.quantisation.layer_chain import Stage, mean_squares
from mionnx.analysis.quantisation.matrix_loss import FloatModel, matrix_losses
from mionnx.engine.options import Options
from mionnx.inputs.token_batch import make_token_batch
from mionnx.quantise import Quantisation
from mionnx.quantise.choice import choose


def test_a_chain_gives_the_models_logits_and_every_matrix_changes_them(family, models):
    model = models(family)
    ids = np.random.default_rng(0).integers(3, model.vocab_size, (2, 9))
    calls = [make_token_batch(one[None], None, None, model.hooked) for one in ids]
    floats = FloatModel(model.hooked, Options(threads=1, prepack=False))
    expected = [model.forward(call.input_ids).output() for call in calls]
    found = [*floats.chain.logits_of([*map(Stage.first, calls)])]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=5e-5 * max(1, np.abs(other).max()))
    settings = Quantisation(block_size=16)
    matrices = whole_stacks(choose(model.hooked, floats.uses, settings).matrices)
    candidates = [of_blocks(floats, name, matrix, settings) for name, matrix in matrices.items()]
    losses = matrix_losses(floats, candidates, calls)
    assert [one.name for one in losses] == [*matrices]
    assert all(0.01 < one.weight_error < 0.3 for one in losses)
    assert all(0 < one.output_error < 1 for one in losses)
    assert all(one.kl > 0 for one in losses)
    squares = mean_squares(model.hooked, calls, Options(threads=1, prepack=False))
    assert squares.keys() == {one.weight for one in floats.uses.products}
    assert all(len(value) == floats.own(name).shape[1] and (value > 0).any() for name, value in squares.items())
    fed = {name: floats.in_graph(one.name, one.numbers()) for one in candidates for name in one.inputs}
    changed = floats.chain.logits_of(
        [*map(Stage.first, calls)], lambda names: {one: fed[one] for one in fed if one in names}
    )
    for one, other in zip(changed, expected, strict=True):
        assert np.abs(one - other).max() > 1e-3
