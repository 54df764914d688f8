"""A course's code on hooks and interventions, written with mionnx as people write it there.

Each piece is no longer than the course's own, in lines and in statements, and what comes out is checked against the
eager torch model, against the same intervention in a `HookSpec`, or both.
"""

import ast
import inspect
import textwrap
from functools import partial

import numpy as np
import pytest
import torch
from oracle import Inputs, run
from repository import REPOSITORY
from scipy.special import log_softmax, softmax
from transformers import AutoModelForCausalLM, PreTrainedModel

from mionnx import HookPoint, HookSpec, Intervention, MIModel

FRANCE, GERMANY = "The capital of France is", "The capital of Germany is"
GIFT = "When Mary and John went to the store , John gave a drink to"

# ---------------------------------------------------------------------------------------------------- the pieces


def looking(model):
    def my_hook(activation, hook):
        print(f"At {hook.name}: shape {activation.shape}")
        return activation

    model.run_with_hooks("The capital of France is", fwd_hooks=[("blocks.0.attn.hook_pattern", my_hook)])


def listing(model):
    for name, _ in model.hook_dict.items():
        print(name)


def storing(model):
    stored_activations = {}

    def store_hook(activation, hook):
        stored_activations[hook.name] = activation.copy()
        return activation

    model.run_with_hooks(
        "The capital of France is",
        fwd_hooks=[("blocks.2.hook_resid_post", store_hook), ("blocks.2.attn.hook_pattern", store_hook)],
    )
    return stored_activations


def zero_head_hook(activation, hook, head_idx):
    activation[:, :, head_idx, :] = 0
    return activation


def ablating(model):
    return model.run_with_hooks(
        "The capital of France is", fwd_hooks=[("blocks.1.attn.hook_z", partial(zero_head_hook, head_idx=5))]
    )


def patch_hook(activation, hook, patch_cache, pos=None):
    patch_value = patch_cache[hook.name]
    if pos is not None:
        activation[:, pos] = patch_value[:, pos]
    else:
        activation[:] = patch_value
    return activation


def patching(model):
    _, clean_cache = model.run_with_cache("The capital of France is")
    return model.run_with_hooks(
        "The capital of Germany is",
        fwd_hooks=[("blocks.1.hook_resid_post", partial(patch_hook, patch_cache=clean_cache))],
    )


def causal_trace(model, clean_prompt, corrupted_prompt, target_token, pos=None):
    clean_logits, clean_cache = model.run_with_cache(clean_prompt)
    corrupted_logits = model(corrupted_prompt)
    results = []
    for layer in range(model.cfg.n_layers):
        patched_logits = model.run_with_hooks(
            corrupted_prompt,
            fwd_hooks=[(f"blocks.{layer}.hook_resid_post", partial(patch_hook, patch_cache=clean_cache, pos=pos))],
        )
        results.append(compute_recovery(corrupted_logits, patched_logits, clean_logits, target_token))
    return results


def hook_filter(name):
    return "attn" in name and "pattern" in name


def filtering(model, my_hook):
    model.run_with_hooks("The capital of France is", fwd_hooks=[(hook_filter, my_hook)])


def measure_importance(model, prompt, layer, head):
    clean_loss = model(prompt, return_type="loss")
    ablated_loss = model.run_with_hooks(
        prompt,
        fwd_hooks=[(f"blocks.{layer}.attn.hook_z", partial(zero_head_hook, head_idx=head))],
        return_type="loss",
    )
    return ablated_loss - clean_loss


def get_head_direct_effect(model, cache, layer, head):
    head_output = cache["z", layer][:, :, head, :]
    head_contrib = head_output @ model.W_O[layer, head]
    logit_effect = head_contrib @ model.W_U
    return logit_effect  # noqa: RET504


def measure_sycophancy_contribution(model, prompt_pairs, threshold, report):
    for honest, sycophantic in prompt_pairs:
        _, honest_cache = model.run_with_cache(honest)
        _, syco_cache = model.run_with_cache(sycophantic)
        for layer in range(model.cfg.n_layers):
            for head in range(model.cfg.n_heads):
                diff = np.linalg.norm(honest_cache["z", layer][:, :, head] - syco_cache["z", layer][:, :, head])
                if diff > threshold:
                    report(layer, head, diff)


# The two exercises, which the course leaves to its readers.


def ablation_experiment(model, prompt, target_token):
    """Heads by how much the loss on the target grows without them; its growth [layer, head]."""

    def loss(hooks=()):
        return -log_softmax(model.run_with_hooks(prompt, fwd_hooks=hooks)[0, -1])[model.to_single_token(target_token)]

    growth = np.full((model.cfg.n_layers, model.cfg.n_heads), -loss())
    for layer, head in np.ndindex(growth.shape):
        growth[layer, head] += loss([(f"blocks.{layer}.attn.hook_z", partial(zero_head_hook, head_idx=head))])
    ranking = sorted(np.ndindex(growth.shape), key=lambda at: -growth[at])
    return ranking, growth


def activation_patching(model, clean_prompt, corrupted_prompt, target_token):
    """After which layer the last token's stream brings the clean answer back, and how much of it each layer does."""
    recovery = causal_trace(model, clean_prompt, corrupted_prompt, target_token, pos=-1)
    return int(np.argmax(np.array(recovery) > 0.99 * max(recovery))), recovery


# ------------------------------------------------------------------------------------------------ what they give

# Piece -> lines and statements of the course's code, without comments, docstrings, blank lines and printing. Where the
# course has no function around a piece, neither the `def` nor what hands the result over is counted.
LENGTHS = {
    (looking,): (7, 4),
    (listing,): (2, 2),
    (storing,): (11, 5),
    (zero_head_hook, ablating): (9, 4),
    (patch_hook, patching): (15, 8),
    (causal_trace,): (17, 9),
    (hook_filter, filtering): (6, 3),
    (measure_importance,): (11, 4),
    (get_head_direct_effect,): (5, 5),
    (measure_sycophancy_contribution,): (12, 9),
}
WRAPPED = {looking, listing, storing, ablating, patching, filtering}


def length(function) -> tuple[int, int]:
    """Lines and statements."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    handed_over = isinstance(tree.body[-1], ast.Return) and isinstance(tree.body[-1].value, ast.Name)
    extra = int(function in WRAPPED) + int(function in WRAPPED and handed_over)
    lines = {line for node in statements for line in range(node.lineno, node.end_lineno + 1)}
    source = textwrap.dedent(inspect.getsource(function)).splitlines()
    return sum(bool(source[line - 1].strip()) for line in lines) - extra, len(statements) - extra


@pytest.mark.parametrize("functions", LENGTHS, ids=lambda functions: functions[-1].__name__)
def test_no_piece_is_longer_than_in_the_course(functions):
    lines, statements = map(sum, zip(*map(length, functions), strict=True))
    assert lines <= LENGTHS[functions][0]
    assert statements <= LENGTHS[functions][1]


@pytest.fixture(scope="module")
def model() -> MIModel:
    return MIModel.from_pretrained(REPOSITORY / "models" / "world-llama")


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    folder = REPOSITORY / "models" / "world-llama"
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def torch_run(model, reference, prompt, *edits):
    """Logits and values of the eager torch model with edits."""
    ids = model.to_tokens(prompt)
    return run(reference, Inputs(ids, np.ones_like(ids)), edits)


def close(found, expected):
    assert np.abs(found - expected).max() / max(1, np.abs(expected).max()) < 5e-5


def compute_recovery(corrupted_logits, patched_logits, clean_logits, target_token):
    """0 where patching changes nothing, 1 where it brings the clean run's logit of the target back."""
    corrupted, patched, clean = (
        logits[0, -1, target_token] for logits in (corrupted_logits, patched_logits, clean_logits)
    )
    return (patched - corrupted) / (clean - corrupted)


def test_looking(model, capsys):
    looking(model)
    assert capsys.readouterr().out == "At blocks.0.attn.hook_pattern: shape (1, 8, 5, 5)\n"
    listing(model)
    assert capsys.readouterr().out.split() == [str(point) for point in model.hook_points()]


def test_storing(model, reference):
    stored, expected = storing(model), torch_run(model, reference, FRANCE).values
    assert list(stored) == ["blocks.2.attn.hook_pattern", "blocks.2.hook_resid_post"]
    for name, value in stored.items():
        close(value, expected[name])


def test_ablating(model, reference):
    spec = HookSpec().intervene(HookPoint.AttnZ(1), Intervention.Zero(heads=5))
    assert np.array_equal(ablating(model), model.forward(FRANCE, spec).output())
    close(ablating(model), torch_run(model, reference, FRANCE, *spec.interventions).logits)
    assert not np.array_equal(ablating(model), model(FRANCE))


def test_patching(model, reference):
    donor = torch_run(model, reference, FRANCE).values["blocks.1.hook_resid_post"]
    replaced = (HookPoint.ResidPost(1), Intervention.Replace(donor))
    close(patching(model), torch_run(model, reference, GERMANY, replaced).logits)
    assert model.to_string(patching(model)[0, -1].argmax()) == "Paris"
    assert model.to_string(model(GERMANY)[0, -1].argmax()) == "Berlin"


def test_causal_tracing(model, reference):
    paris = model.to_single_token("Paris")
    assert np.allclose(causal_trace(model, FRANCE, GERMANY, paris), 1)  # all positions: the clean run from there on
    country, last = (
        causal_trace(model, FRANCE, GERMANY, paris, pos=3),
        causal_trace(model, FRANCE, GERMANY, paris, pos=-1),
    )
    assert country[0] > 0.9 > 0.5 > country[-1]
    assert last[0] < 0.5 < 0.9 < last[-1]
    clean, corrupted = (torch_run(model, reference, prompt) for prompt in (FRANCE, GERMANY))
    for layer, recovery in enumerate(country):
        donor = clean.values[f"blocks.{layer}.hook_resid_post"]
        patch = (HookPoint.ResidPost(layer), Intervention.Replace(donor, positions=3))
        patched = torch_run(model, reference, GERMANY, patch)
        expected = compute_recovery(corrupted.logits, patched.logits, clean.logits, paris)
        assert abs(recovery - expected) < 5e-5


def test_filtering(model):
    found = []
    filtering(model, lambda activation, hook: found.append(hook.name))
    assert found == [f"blocks.{layer}.attn.hook_pattern" for layer in range(4)]


def torch_loss(logits, ids):
    return float(torch.nn.functional.cross_entropy(torch.from_numpy(logits[0, :-1]), torch.from_numpy(ids[0, 1:])))


def test_importance(model, reference):
    ids = model.to_tokens(GIFT)
    clean = torch_loss(torch_run(model, reference, GIFT).logits, ids)
    for layer, head in ((0, 0), (2, 3), (3, 7)):
        zero = (HookPoint.AttnZ(layer), Intervention.Zero(heads=head))
        expected = torch_loss(torch_run(model, reference, GIFT, zero).logits, ids) - clean
        assert abs(measure_importance(model, GIFT, layer, head) - expected) < 5e-5


def test_direct_effect(model, reference):
    _, cache = model.run_with_cache(FRANCE)
    values = torch_run(model, reference, FRANCE).values
    head_matrix = reference.lm_head.weight.detach().numpy()
    for layer in range(model.cfg.n_layers):
        found = sum(get_head_direct_effect(model, cache, layer, head) for head in range(model.cfg.n_heads))
        close(found, values[f"blocks.{layer}.hook_attn_out"] @ head_matrix.T)  # Llama's projections have no bias


def test_pairs_of_prompts(model, reference):
    """Heads that tell the two prompts of a pair apart; without them the two answers are no longer told apart."""
    found = {}

    def report(layer, head, diff):
        found[layer, head] = diff

    measure_sycophancy_contribution(model, [(FRANCE, FRANCE)], 0, report)
    assert not found
    measure_sycophancy_contribution(model, [(FRANCE, GERMANY)], 0.5, report)
    france, germany = (torch_run(model, reference, prompt).values for prompt in (FRANCE, GERMANY))
    expected = {}
    for layer, head in np.ndindex(model.cfg.n_layers, model.cfg.n_heads):
        one, other = (values[f"blocks.{layer}.attn.hook_z"][:, :, head] for values in (france, germany))
        expected[layer, head] = np.linalg.norm(one - other)
    assert found.keys() == {at for at, diff in expected.items() if diff > 0.5}
    assert all(abs(diff - expected[at]) < 5e-5 * max(1, diff) for at, diff in found.items())
    assert 0 < len(found) < len(expected)
    hooks = [(f"blocks.{layer}.attn.hook_z", partial(zero_head_hook, head_idx=head)) for layer, head in found]
    gap, plain = (
        np.abs(
            softmax(model.run_with_hooks(FRANCE, given)[0, -1]) - softmax(model.run_with_hooks(GERMANY, given)[0, -1])
        )
        for given in (hooks, [])
    )
    assert gap.max() < 0.5 * plain.max()


def test_the_first_exercise(model, reference):
    ranking, growth = ablation_experiment(model, GIFT, "Mary")
    target = model.to_single_token("Mary")
    plain = -log_softmax(torch_run(model, reference, GIFT).logits[0, -1].astype(np.float64))[target]
    best, worst = ranking[0], ranking[-1]
    for layer, head in (best, worst):
        zero = (HookPoint.AttnZ(layer), Intervention.Zero(heads=head))
        logits = torch_run(model, reference, GIFT, zero).logits[0, -1].astype(np.float64)
        assert abs(growth[layer, head] - (-log_softmax(logits)[target] - plain)) < 5e-5 * max(
            1, abs(growth[layer, head])
        )
    assert sorted(ranking) == list(np.ndindex(4, 8))
    assert growth[best] > 0.1
    assert growth[best] == growth.max() > 10 * growth[ranking[8]]  # a few heads carry the answer


def test_the_second_exercise(model):
    layer, recovery = activation_patching(model, FRANCE, GERMANY, model.to_single_token("Paris"))
    assert layer == 2  # it is there that the last token reads the country: see the README's knockout
    assert max(recovery[:layer]) < 0.5
    assert min(recovery[layer:]) > 0.9
