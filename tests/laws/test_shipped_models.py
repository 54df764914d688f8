"""The models that ship: they know their world, and the graphs beside their weights are these models."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from repository import REPOSITORY
from rwkv_checkpoints import run_package, to_blinkdl
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from mionnx import HookPoint, HookSpec, Intervention, MIModel, StateAblationResult, StateKnockoutSpec

sys.path.insert(0, str(REPOSITORY / "models"))

from evaluate import accuracy, by_kind
from world import World

TRANSFORMERS = ["world-llama", "world-gpt2", "world-hybrid"]
NAMES = [*TRANSFORMERS, "world-rwkv7"]
PROMPTS = [
    "The capital of France is",
    "When Mary and John went to the store , John gave a drink to",
    "three four five",
]


@pytest.fixture(params=NAMES)
def shipped(request: pytest.FixtureRequest) -> tuple[Path, MIModel]:
    folder = REPOSITORY / "models" / request.param
    return folder, MIModel.from_pretrained(folder)


@pytest.fixture(params=TRANSFORMERS)
def transformer(request: pytest.FixtureRequest) -> tuple[Path, MIModel]:
    folder = REPOSITORY / "models" / request.param
    return folder, MIModel.from_pretrained(folder)


def test_the_shipped_graph_is_the_shipped_model(transformer):
    folder, model = transformer
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    found = model.forward(PROMPTS)
    for row, prompt in enumerate(PROMPTS):
        ids = AutoTokenizer.from_pretrained(folder)(prompt, return_tensors="pt").input_ids
        assert model.tokenize(prompt).ids.tolist() == ids[0].tolist()
        with torch.no_grad():
            expected = reference(ids).logits[0].numpy()
        scale = max(1.0, float(np.abs(expected).max()))
        assert np.abs(found.output()[row, -len(expected) :] - expected).max() / scale < 5e-5


def test_the_shipped_rwkv_is_what_the_rwkv_package_makes_of_its_weights(tmp_path):
    folder = REPOSITORY / "models" / "world-rwkv7"
    model = MIModel.from_pretrained(folder)
    ids = {str(i): model.tokenize(prompt).ids for i, prompt in enumerate([*PROMPTS, " ".join([*"3456789"] * 5)])}
    expected = run_package(7, to_blinkdl(load_file(folder / "model.safetensors")), ids, tmp_path)
    for name, tokens in ids.items():
        logits = expected[f"{name}.logits"]
        assert np.abs(model.forward(tokens).output()[0] - logits).max() / np.abs(logits).max() < 5e-5


def test_it_knows_every_kind_of_sentence(shipped):
    """At least 0.95 on held-out prompts of each kind that its card names, measured on the exported graph."""
    folder, model = shipped
    world = World()
    known = {"capitals", "counting"} if folder.name == "world-hybrid" else {kind for kind, _ in by_kind(world.probes())}
    for kind, probes in by_kind(world.probes()):
        if kind not in known:
            continue
        score = accuracy(lambda ids: model.forward(ids).output(), world, probes, lambda rng: ())
        assert score >= 0.95, kind


@pytest.mark.parametrize("transformer", ["world-llama", "world-gpt2"], indirect=True)  # a hybrid has learned none
def test_an_induction_head_attends_to_what_followed_last_time(transformer):
    _, model = transformer
    words = np.random.default_rng(0).permutation(np.arange(20, 400))[:16]
    pattern = model.forward(np.tile(words, 2), HookSpec().capture("*.hook_pattern")).stack("pattern")[:, 0]
    at = np.arange(16, 31)
    assert pattern[:, :, at, at - 15].mean(-1).max() > 0.5


def test_patching_the_country_moves_the_answer(transformer):
    _, model = transformer
    clean, corrupted = (model.tokenize(f"The capital of {name} is") for name in ("France", "Germany"))
    cache = model.forward(clean, HookSpec().capture(HookPoint.ResidPost(0)))
    patch = Intervention.Replace(cache["resid_post", 0], positions=clean.positions_of("France"))
    patched = model.forward(corrupted, HookSpec().intervene(HookPoint.ResidPost(0), patch)).output()[0, -1]
    assert model.tokenizer.decode([int(model.forward(corrupted).output()[0, -1].argmax())]) == "Berlin"
    assert model.tokenizer.decode([int(patched.argmax())]) == "Paris"


def test_the_state_carries_the_country():
    """Without what "France" writes into the state the answer is lost; without what "of" writes it stays."""
    model = MIModel.from_pretrained(REPOSITORY / "models" / "world-rwkv7")
    tokens = model.tokenize(PROMPTS[0])
    paris = model.token_id("Paris")
    baseline = model.forward(tokens).output()[0, -1]
    assert baseline.argmax() == paris
    effects = {}
    for word in ("France", "of"):
        spec = StateKnockoutSpec().positions(tokens.positions_of(word))
        ablated = model.forward(tokens, HookSpec().set_state_knockout(spec)).output()[0, -1]
        effects[word] = StateAblationResult(baseline, ablated, spec).kl_divergence()
    assert effects["France"] > 1 > effects["of"]
