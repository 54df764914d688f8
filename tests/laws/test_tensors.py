"""Torch tensors of any dtype wherever a public verb takes numbers: the same as their numbers in numpy."""

import numpy as np
import pytest

from mionnx import SAE, AblationResult, Direction, HookSpec, Intervention, InterventionError, sample_token

torch = pytest.importorskip("torch")

PROMPT = "The capital of France is"
POINT = "blocks.1.hook_resid_post"
# numbers that all of these dtypes hold exactly
TENSORS = {
    "bfloat16": lambda array: torch.tensor(array).bfloat16(),
    "float16": lambda array: torch.tensor(array).half(),
    "float64": lambda array: torch.tensor(array).double(),
    "of a gradient": lambda array: torch.tensor(array).bfloat16().requires_grad_() * 1,
    "parameter": lambda array: torch.nn.Parameter(torch.tensor(array)),
    "list": lambda array: [*torch.tensor(array).bfloat16()],
}
if torch.cuda.is_available():
    TENSORS["gpu"] = lambda array: torch.tensor(array, device="cuda").bfloat16()


@pytest.fixture
def vector(shipped):
    return np.random.default_rng(0).integers(-8, 8, shipped.hidden_size).astype(np.float32) / 8


@pytest.mark.parametrize("kind", TENSORS)
def test_a_tensor_is_its_numbers(shipped, vector, kind):
    tensor = TENSORS[kind]
    given = tensor(vector)

    def logits(*steps):
        spec = HookSpec()
        for point, intervention in steps:
            spec.intervene(point, intervention)
        return shipped.forward(PROMPT, spec).output()

    plain = logits()
    for make in (Intervention.Add, Intervention.Replace, Intervention.ProjectOut, Intervention.Scale):
        options = {"positions": [2, 3]} if make is Intervention.Replace else {}
        found = logits((POINT, make(given, **options)))
        assert np.array_equal(found, logits((POINT, make(vector, **options))))
        assert np.abs(found - plain).max() > 0.01
    found = logits((POINT, Intervention.Clamp(low=tensor(-np.abs(vector)), high=tensor(np.abs(vector)))))
    assert np.array_equal(found, logits((POINT, Intervention.Clamp(low=-np.abs(vector), high=np.abs(vector)))))
    mask = np.zeros((5, 5), np.float32)
    mask[4, 3] = -np.inf
    scores = "blocks.2.attn.hook_scores"
    assert np.array_equal(
        logits((scores, Intervention.Knockout(tensor(mask)))), logits((scores, Intervention.Knockout(mask)))
    )
    assert np.array_equal(Direction(POINT, given).vector, Direction(POINT, vector).vector)
    assert shipped.logit_lens(given, k=3) == shipped.logit_lens(vector, k=3)
    assert np.array_equal(shipped.project_to_vocab(given), shipped.project_to_vocab(vector))
    assert shipped.embedding_neighbors(given, k=2) == shipped.embedding_neighbors(vector, k=2)
    steered = (shipped.forward_steer(PROMPT, [(1, one, 1.0)], [2])[2].tolist() for one in (given, vector))
    assert next(steered) == next(steered)
    assert sample_token(given) == sample_token(vector)
    assert AblationResult(given, vector).kl_divergence() == 0


def test_what_a_function_returns_may_be_a_tensor(shipped):
    double = shipped.run_with_hooks(PROMPT, [(POINT, lambda value, hook: torch.tensor(value * 2).requires_grad_())])
    assert np.array_equal(double, shipped.run_with_hooks(PROMPT, [(POINT, lambda value, hook: value * 2)]))


def test_layers_of_a_cache_are_set_from_tensors(shipped):
    cache = shipped.forward(PROMPT, use_cache=True).kv_cache
    keys, values = cache.get_layer(1)
    cache.set_layer(1, torch.tensor(keys).bfloat16().requires_grad_(), torch.tensor(values).half())
    assert np.array_equal(cache.get_layer(1)[0], torch.tensor(keys).bfloat16().float().numpy())


def test_positions_and_rows_may_be_tensors(shipped):
    spec, same = (
        HookSpec().intervene(POINT, Intervention.Zero(positions=positions, rows=rows))
        for positions, rows in ((torch.tensor([1, 3]), torch.tensor([0])), ([1, 3], [0]))
    )
    assert np.array_equal(shipped.forward(PROMPT, spec).output(), shipped.forward(PROMPT, same).output())


def test_weights_of_an_sae_may_be_tensors(shipped):
    from mionnx.analysis.features.config import Config

    draw = np.random.default_rng(1)
    shapes = {"W_enc": (128, 16), "W_dec": (16, 128), "b_enc": (16,), "b_dec": (128,)}
    weights = {name: draw.integers(-8, 8, shape).astype(np.float32) / 8 for name, shape in shapes.items()}
    tensors = {name: torch.nn.Parameter(torch.tensor(array).bfloat16()) for name, array in weights.items()}
    found, expected = (
        shipped.features(PROMPT, SAE(Config("standard", hook=POINT), one), k=3) for one in (tensors, weights)
    )
    assert np.array_equal(found.values, expected.values)
    assert found.values.max() > 0


def test_a_tensor_without_data_is_refused_by_name():
    with pytest.raises(InterventionError, match=r"add: the value is no array of numbers: .*meta"):
        Intervention.Add(torch.empty(4, device="meta"))
