"""Every method on a model of blocks gives what it gives on its float twin: the same numbers in weights of floats."""

import numpy as np
import onnxruntime
import pytest
from float_twin import float_twin
from node_runner import run_in_web
from repository import REPOSITORY
from saelens_fixture import random_weights

from mionnx import SAE, HookPoint, HookSpec, Intervention, MIModel
from mionnx.analysis.features.config import Config

PROMPT, OTHER = "The capital of France is", "The capital of Germany is"
TOLERANCE = 5e-5
KINDS = {
    "world-llama": {"symmetric": False, "importance": True, "in_8_bits": ["*layers.3*"]},
    "world-gpt2": {"keep": ["*h.1.*"]},
}


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    """A model of blocks at level 0, and its twin."""
    source, folder = REPOSITORY / "models" / request.param, tmp_path_factory.mktemp("twins")
    made = MIModel.from_pretrained(source, threads=1).quantise(folder / "made", **KINDS[request.param])
    blocks = MIModel.from_pretrained(made, threads=1, accuracy_level=0)
    return blocks, float_twin(source, blocks.hooked, folder / "twin")


def near(found, expected, tolerance: float = TOLERANCE) -> None:
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * max(1.0, np.nanmax(np.abs(expected))))


def steering(model: MIModel) -> HookSpec:
    vector = np.random.default_rng(0).normal(size=model.hidden_size).astype(np.float32)
    return HookSpec().intervene(HookPoint.ResidPost(1), Intervention.Add(vector, positions=[2, 3]))


@pytest.mark.slow_beyond(1)
def test_sweeps_and_ablations(pair):
    blocks, twin = pair
    for site in ("resid_pre", "z"):
        over = {"over": ("layer", "head")} if site == "z" else {}
        near(*(model.patch_sweep(PROMPT, OTHER, site, **over).values for model in (blocks, twin)))
    near(*(model.ablation_sweep(PROMPT, "mlp_out", over=("layer",)).values for model in (blocks, twin)))


def test_lens_and_attribution(pair):
    blocks, twin = pair
    one, other = (model.logit_lens(PROMPT) for model in (blocks, twin))
    near(one.top_probs, other.top_probs)
    one, other = (model.attribute(PROMPT, "Paris", versus="Berlin") for model in (blocks, twin))
    near(one.total, other.total)
    near(one.values, other.values)
    near(*(model.head_scores(seed=0).values for model in (blocks, twin)))


@pytest.mark.slow_beyond(1)
def test_gradients(pair):
    """Attribution patching reads a product's transposed blocks."""
    blocks, twin = pair
    near(*(model.attribute_patch(PROMPT, OTHER, "resid_pre").values for model in (blocks, twin)))
    near(*(model.integrated_gradients(PROMPT, answer="Paris", steps=4).scores() for model in (blocks, twin)))


def test_generation_with_interventions_and_captures(pair):
    blocks, twin = pair
    spec = steering(twin).capture("blocks.2.hook_resid_post")
    one, other = (model.generate(PROMPT, spec, max_new_tokens=6, eos_token_id=[]) for model in (blocks, twin))
    assert one.ids[0].tolist() == other.ids[0].tolist()
    near(one.captured("blocks.2.hook_resid_post"), other.captured("blocks.2.hook_resid_post"))


def test_a_sparse_autoencoder_spliced_in(pair):
    blocks, twin = pair
    sae = SAE(Config("jumprelu", hook="blocks.2.hook_resid_post"), random_weights("jumprelu"))
    spec = sae.spec(fix={2: 30.0}, positions=[4]).capture(sae.acts)
    one, other = (model.forward(PROMPT, spec) for model in (blocks, twin))
    near(one[sae.acts], other[sae.acts])
    near(one.output(), other.output())


def feeds_of(model: MIModel) -> dict[str, np.ndarray]:
    ids = model.tokenize(PROMPT).ids[None]
    past = np.zeros((1, model.num_kv_heads, 0, model.head_dim), np.float32)
    feeds = {f"past_key_values.{i}.{part}": past for i in range(model.num_layers) for part in ("key", "value")}
    return feeds | {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "position_ids": np.arange(ids.shape[1])[None],
    }


@pytest.mark.parametrize("how", [{"target": "ort-cpu"}, {"target": "generic", "weights": "embedded"}], ids=str)
def test_a_compiled_file_in_onnxruntime_alone(pair, how, tmp_path):
    blocks, twin = pair
    spec = steering(twin)
    folder = blocks.compile(spec, tmp_path / "steered", **how)
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    (logits,) = session.run(["logits"], feeds_of(blocks))
    near(logits, twin.forward(PROMPT, spec).output())
    size = sum(path.stat().st_size for path in folder.iterdir() if "onnx" in path.name or "safetensors" in path.name)
    whole = sum(path.stat().st_size for path in twin.hooked.folder.glob("*.safetensors"))
    if how["target"] == "generic" and "llama" in twin.hooked.metadata.family:
        assert size < 0.5 * whole, "the weights are blocks in it"


@pytest.mark.parametrize("target", ["ort-cpu", "generic"])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_compiled_file_has_the_bits_of_forward_unless_it_keeps_products_of_8_bits(shipped, tmp_path, bits, target):
    """`forward` computes these as two of 4 bits (`mionnx/engine/halved_products.py`), `generic` as they stand."""
    blocks = MIModel.from_pretrained(shipped.quantise(tmp_path / "blocks", bits=bits), threads=1, accuracy_level=0)
    folder = blocks.compile(steering(blocks), tmp_path / "steered", target=target)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    (logits,) = onnxruntime.InferenceSession(folder / "model.onnx", options).run(["logits"], feeds_of(blocks))
    moved = np.abs(logits - blocks.forward(PROMPT, steering(blocks)).output()).max()
    assert moved <= TOLERANCE if (bits, target) == (8, "generic") else moved == 0


@pytest.mark.slow
def test_a_compiled_file_in_onnxruntime_web(pair, web, tmp_path):
    blocks, twin = pair
    spec = steering(twin)
    folder = blocks.compile(spec, tmp_path / "steered", target="web")
    found = run_in_web(web, folder / "model.onnx", feeds_of(blocks), tmp_path)
    near(found["logits"], twin.forward(PROMPT, spec).output())


@pytest.mark.slow
def test_every_hook_point_of_float16_activations(checkpoint, tmp_path):
    """A model of float16: scales and activations are too."""
    half = MIModel.from_pretrained(checkpoint("llama"), dtype="float16", threads=1)
    made = half.quantise(tmp_path / "made", block_size=16, in_8_bits=["*.1.mlp*"], importance=True)
    blocks = MIModel.from_pretrained(made, threads=1, accuracy_level=0)
    twin = float_twin(half.hooked.folder, blocks.hooked, tmp_path / "twin")
    ids = np.random.default_rng(0).integers(3, half.vocab_size, (2, 9))
    found = blocks.verify([ids], ["ort-cpu"], other=twin, points="*", greedy=0, local=False)
    assert found.besides[0].worst.relative < 5e-3
    assert {blocks.hooked.metadata.dtype, twin.hooked.metadata.dtype} == {"float16"}
