"""`verify` with another model: what a foreign or quantised file lost, and where."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_line import mionnx
from quantised_files import foreign_file
from repository import REPOSITORY
from scipy.special import log_softmax, softmax

from mionnx import HookError, HookSpec, InputError, MIModel, Verification
from mionnx.graph import onnx_file

PROMPT = "The capital of France is Paris . The capital of Japan is"


@pytest.fixture(scope="module")
def coarse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """world-llama as a foreign file of 4 bits."""
    return foreign_file(tmp_path_factory.mktemp("coarse") / "int4", "int4")


@pytest.fixture(scope="module")
def lost(coarse: Path, shipped: MIModel) -> Verification:
    return MIModel.from_pretrained(coarse).verify(PROMPT, ["ort-cpu"], other=shipped, points="*", greedy=0)


def test_losses_are_those_of_two_forward_passes(coarse, lost, shipped):
    stream = HookSpec().capture("*resid_pre").capture("*resid_post")
    runs = [model.forward(PROMPT, stream) for model in (MIModel.from_pretrained(coarse), shipped)]
    (beside,) = lost.besides
    for one in beside.layers:
        for name, found in (("pre", one.before), ("post", one.after)):
            here, there = (run[f"resid_{name}", one.layer].astype(np.float64) for run in runs)
            assert found == pytest.approx(np.linalg.norm(here - there) / np.linalg.norm(there), rel=1e-4, abs=1e-7)
        assert one.added == one.after - one.before
    assert beside.heaviest == max(beside.layers, key=lambda one: one.added)
    assert beside.heaviest.added > 0.01
    here, there = (run.output()[0].astype(np.float64) for run in runs)
    kl = (softmax(there, -1) * (log_softmax(there, -1) - log_softmax(here, -1))).sum(-1)
    assert beside.logits["kl_back_mean"] == pytest.approx(kl.mean(), rel=1e-3)
    assert beside.logits["kl_back_max"] == pytest.approx(kl.max(), rel=1e-3)
    assert beside.logits["top_1"] == (here.argmax(-1) == there.argmax(-1)).mean()
    assert beside.rows[0].name == "hook_embed"
    assert beside.rows[0].lost == 0, "the table of embeddings was not quantised"


def test_losses_are_in_table_page_json_and_file(lost, tmp_path):
    (beside,) = lost.besides
    found = json.loads(json.dumps(lost.to_dict()))["besides"][0]
    assert found["layers"] == [vars(one) for one in beside.layers]
    losses = lost.model_losses()
    assert f"layer {beside.heaviest.layer} adds most" in repr(losses)
    frame = losses.to_frame()
    assert frame.point.tolist() == [*losses.table(len(frame)).columns[0].cells] == [row.name for row in beside.rows]
    assert frame.added.dropna().tolist() == [one.added for one in beside.layers]
    assert frame.point[frame.added.idxmax()] == f"blocks.{beside.heaviest.layer}.hook_resid_post"
    assert Verification.load(lost.save(tmp_path / "lost.safetensors")).besides[0].layers == beside.layers
    assert "Layers, distance from" in lost.page()


def test_the_page_says_which_layer_adds_most_and_fits_a_telephone(lost, chromium, tmp_path):
    (beside,) = lost.besides
    page = chromium(lost.save(tmp_path / "lost.html"))
    assert page.locator("h1").inner_text().startswith("int4 and world-llama: "), "the names, without the store's key"
    layers = page.locator("section", has=page.get_by_role("heading", name="Layers, distance")).last.locator("tr")
    most = layers.filter(has_text="most").locator("td").all_inner_texts()
    assert most[0] == str(beside.heaviest.layer)
    assert float(most[3]) == pytest.approx(beside.heaviest.added, rel=1e-3)
    assert layers.count() == 1 + len(beside.layers)
    cosines = (
        page.locator("section", has=page.get_by_role("heading", name="Hook points of"))
        .last.locator("td:nth-child(8)")
        .all_inner_texts()
    )
    assert cosines == [f"{row.cosine:.5f}" for row in beside.rows], "five digits, as many as the page has"
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert not page.troubles


def test_runtimes_of_one_model_have_no_layers(shipped):
    found = shipped.verify(PROMPT, ["ort-cpu", "ort-cpu:none"], greedy=0, local=False)
    assert found.besides[0].heaviest is None
    with pytest.raises(InputError, match="no second model was compared: give other="):
        found.model_losses()


def test_hook_points_of_one_model_only_are_left_out_and_named(shipped):
    other = MIModel.from_pretrained(REPOSITORY / "models" / "world-gpt2")
    found = other.verify(PROMPT, ["ort-cpu"], other=shipped, points=["*embed"], greedy=0, local=False)
    assert any("world-llama has no hook_pos_embed: left out" in note for note in found.notes)
    assert [row.name for row in found.besides[0].rows] == ["hook_embed", "hook_logits"]
    with pytest.raises(HookError, match="world-llama has no hook point 'hook_pos_embed'"):
        other.verify(PROMPT, ["ort-cpu"], other=shipped, points=["hook_pos_embed"], greedy=0)


def test_the_command_says_what_was_lost(coarse):
    arguments = ["verify", str(coarse), "--other", str(REPOSITORY / "models" / "world-llama"), "--runtimes", "ort-cpu"]
    found = mionnx(*arguments, "--prompt", PROMPT, "--greedy", "0")
    assert found.returncode == 2
    assert "adds most: distance" in " ".join(found.stdout.split())
    assert "KL(ort-cpu, other model || this)" in " ".join(found.stdout.split())


@pytest.mark.slow
def test_a_soft_cap_that_an_export_lost_is_found(checkpoint, hooked, tmp_path):
    """Gemma 2 through torch's scaled dot product attention has no soft cap, as optimum exports it."""
    from exporters.transformers import export

    wrong = tmp_path / "checkpoint"
    wrong.mkdir()
    for path in checkpoint("gemma2").iterdir():
        (wrong / path.name).write_bytes(path.read_bytes())
    config = json.loads((wrong / "config.json").read_text())
    (wrong / "config.json").write_text(json.dumps({**config, "attn_logit_softcapping": None}))
    export(wrong, tmp_path / "hooked")
    proto = onnx_file.read(tmp_path / "hooked" / "model.onnx")
    onnx_file.embed(proto, tmp_path / "hooked")
    del proto.metadata_props[:]
    (tmp_path / "stock").mkdir()
    onnx.save(proto, tmp_path / "stock" / "model.onnx")
    stock, right = MIModel.from_pretrained(tmp_path / "stock"), MIModel.from_pretrained(hooked("gemma2"))
    ids = np.random.default_rng(0).integers(3, 100, (1, 12))
    (beside,) = stock.verify([ids], ["ort-cpu"], other=right, points="*", greedy=0).besides
    assert next(row.name for row in beside.rows if row.relative > 5e-5) == "blocks.0.attn.hook_scores"
    assert beside.fault.hook == "blocks.0.attn.hook_scores"
    assert all(row.finite for row in beside.rows)
    assert [row.name for row in beside.rows if (row.local or 0) > 5e-5] == [
        f"blocks.{layer}.attn.hook_scores" for layer in range(stock.num_layers)
    ]
