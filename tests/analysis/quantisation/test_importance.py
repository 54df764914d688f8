"""Scales by what multiplies the weights: least weighted squares, on the model's own text."""

import numpy as np
import pytest
from command_line import succeeded
from repository import REPOSITORY

from mionnx import HookSpec, InputError, MIModel
from mionnx.analysis.quantisation.layer_chain import mean_squares
from mionnx.engine.options import Options
from mionnx.graph.blocks import numbers_of
from mionnx.inputs.token_batch import make_token_batch
from mionnx.quantise.blocks import quantise_blocks

TEXT = "The capital of France is Paris . The capital of Japan is Tokyo . The capital of Spain is Madrid . "


def weighted_error(matrix: np.ndarray, read: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """[rows]."""
    return (weights * np.square(matrix - read)).sum(-1)


@pytest.mark.parametrize("symmetric", [True, False])
def test_scales_are_near_the_best_of_all_and_never_far_from_plain_ones(symmetric):
    """Beside every scale (and zero point) of a fine grid, block by block."""
    random = np.random.default_rng(0)
    matrix = random.normal(size=(12, 32)).astype(np.float32) * 3
    matrix[3] = 0
    weights = np.exp(random.normal(size=32) * 1.5)
    weights[5] = 0
    plain, made = (numbers_of(quantise_blocks(matrix, 4, 32, symmetric, given), 4, 32) for given in (None, weights))
    found, before = (weighted_error(matrix, read, weights) for read in (made, plain))
    best = np.full(len(matrix), np.inf)
    for zero in [8] if symmetric else range(16):
        for scale in np.concatenate(
            [-(grid := np.linspace(0.02, 3, 1500)), grid] if symmetric else [np.linspace(0.02, 3, 800)]
        ):
            read = (np.clip(np.rint(matrix / scale) + zero, 0, 15) - zero) * scale
            best = np.minimum(best, weighted_error(matrix, read, weights))
    assert not made[3].any()
    assert found.sum() < 0.8 * before.sum()
    assert found.sum() < (1.25 if symmetric else 1.6) * best[np.arange(len(best)) != 3].sum()
    np.testing.assert_array_equal(
        quantise_blocks(matrix, 8, 32, symmetric, weights).packed, quantise_blocks(matrix, 8, 32, symmetric).packed
    )


def test_importance_is_the_mean_square_of_what_a_product_reads(shipped):
    calls = [
        make_token_batch(shipped.tokenize(text).ids[None], None, None, shipped.hooked) for text in (TEXT, TEXT[:30])
    ]
    found = mean_squares(shipped.hooked, calls, Options(threads=1, prepack=False))
    spec = HookSpec().capture("*mlp.hook_pre").capture("*mlp.hook_act").capture("*hook_z").capture("hook_final_norm")
    runs = [shipped.forward(call.input_ids, spec) for call in calls]
    for layer in range(shipped.num_layers):
        for part, hook in (
            ("mlp.gate_proj", "mlp.hook_pre"),
            ("mlp.down_proj", "mlp.hook_act"),
            ("self_attn.o_proj", "attn.hook_z"),
        ):
            name = f"blocks.{layer}.{hook}"
            rows = np.concatenate([run[name].reshape(run[name].shape[1], -1) for run in runs])
            expected = np.square(rows.astype(np.float64)).mean(axis=0)
            np.testing.assert_allclose(found[f"model.layers.{layer}.{part}.weight"], expected, rtol=1e-4, atol=1e-9)
    rows = np.concatenate([run["hook_final_norm"][0] for run in runs]).astype(np.float64)
    np.testing.assert_allclose(found["lm_head.weight"], np.square(rows).mean(axis=0), rtol=1e-4, atol=1e-9)
    assert len(found) == 29, "seven in each layer, and the unembedding"


@pytest.mark.slow
def test_products_are_nearer_to_those_of_floats_in_the_same_bytes(shipped, tmp_path):
    made = {"plain": shipped.quantise(tmp_path / "plain")}
    made |= {name: shipped.quantise(tmp_path / name, importance=True) for name in ("own", "again")}
    off = {}
    for name, folder in made.items():
        losses = shipped.verify(other=MIModel.from_pretrained(folder), texts=TEXT * 8, local=False).matrices
        off[name] = {one.name: one.output_error for one in losses if "embed" not in one.name}
    ratios = [off["own"][name] / off["plain"][name] for name in off["plain"]]
    assert np.mean(ratios) < 0.9
    assert np.mean([ratio < 1 for ratio in ratios]) > 0.8
    sizes = {name: (folder / "quantised.safetensors").stat().st_size for name, folder in made.items()}
    assert sizes["own"] == sizes["plain"]
    for file in sorted(path.name for path in made["own"].iterdir()):
        assert (made["own"] / file).read_bytes() == (made["again"] / file).read_bytes(), file
    said = MIModel.from_pretrained(made["own"]).hooked.metadata.quantised["importance"]
    assert (said["text"], said["tokens"]) == ("own", 1024)


@pytest.mark.slow
def test_a_budget_is_met_with_importance_too(shipped, tmp_path):
    folder = shipped.quantise(tmp_path / "made", budget=0.004, texts=TEXT * 8, importance=TEXT * 4)
    said = MIModel.from_pretrained(folder, accuracy_level=0).hooked.metadata.quantised
    assert said["budget"]["kl"] <= 0.004 < said["budget"]["kl_without"]
    assert said["importance"]["text"] == said["budget"]["text"] == "given"
    assert said["importance"]["text_sha256"] != said["budget"]["text_sha256"]


def test_importance_without_effect_is_refused(shipped, tmp_path):
    with pytest.raises(InputError, match="no effect on 8 bits"):
        shipped.quantise(tmp_path / "made", bits=8, importance=True)
    assert not [*tmp_path.iterdir()]


def test_the_command_takes_a_text(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    source = REPOSITORY / "models" / "world-llama"
    succeeded("quantise", source, "-o", tmp_path / "made", "--importance-texts", tmp_path / "text.txt")
    assert MIModel.from_pretrained(tmp_path / "made").hooked.metadata.quantised["importance"]["text"] == "given"
