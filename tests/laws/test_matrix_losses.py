"""What each quantised matrix costs by itself: one forward pass of the floats with that matrix' numbers put in."""

import json

import numpy as np
import pytest
import torch
from command_line import mionnx
from repository import REPOSITORY
from scipy.special import log_softmax, softmax
from transformers import AutoModelForCausalLM

from mionnx import HookSpec, InputError, Intervention, MIModel, Verification
from mionnx.graph.weight_value import weight_numbers

FLOATS = REPOSITORY / "models" / "world-llama"
TEXT = "The capital of France is Paris . The capital of Japan is Tokyo . The capital of Spain is Madrid ."


@pytest.fixture(scope="module")
def blocks(tmp_path_factory, shipped):
    return MIModel.from_pretrained(shipped.quantise(tmp_path_factory.mktemp("blocks") / "int4"), threads=1)


@pytest.fixture(scope="module")
def lost(blocks, shipped) -> Verification:
    return shipped.verify(TEXT, other=blocks, greedy=0, local=False)


def test_each_matrix_costs_what_transformers_says_with_its_numbers(blocks, shipped, lost):
    """Torch with one weight exchanged, and the output of its product by a hook of torch's own."""
    ids = torch.from_numpy(np.asarray(shipped.tokenize(TEXT).ids)[None])
    model = AutoModelForCausalLM.from_pretrained(FLOATS, attn_implementation="eager", dtype=torch.float32).eval()
    parameters, own = model.state_dict(), {}
    assert len(lost.matrices) == 30
    kls = [one.kl for one in lost.matrices]
    assert kls == sorted(kls, reverse=True)
    for one in [*lost.matrices[:6], *lost.matrices[-3:]]:
        module = model.get_submodule(one.name.removesuffix(".weight"))
        outputs: list[np.ndarray] = []
        handle = module.register_forward_hook(lambda *given, outputs=outputs: outputs.append(given[2].numpy().copy()))
        name = f"{one.name}_{'table' if 'embed' in one.name else 'blocks'}"
        numbers = blocks.W_E if "embed" in one.name else weight_numbers(blocks.hooked.proto, blocks.hooked.folder, name)
        with torch.no_grad():
            before = model(ids).logits[0].numpy().astype(np.float64)
            own[one.name] = parameters[one.name].clone()
            parameters[one.name].copy_(torch.from_numpy(np.ascontiguousarray(numbers)))
            after = model(ids).logits[0].numpy().astype(np.float64)
            parameters[one.name].copy_(own[one.name])
        handle.remove()
        kl = (softmax(before, -1) * (log_softmax(before, -1) - log_softmax(after, -1))).sum(-1).mean()
        assert one.kl == pytest.approx(kl, rel=2e-3, abs=1e-9), one.name
        assert one.top_1 == (before.argmax(-1) == after.argmax(-1)).mean()
        lengths = [np.linalg.norm(array) for array in (own[one.name].numpy() - numbers, own[one.name].numpy())]
        assert one.weight_error == pytest.approx(lengths[0] / lengths[1], rel=1e-4)
        if "embed" not in one.name:
            off = np.linalg.norm(outputs[1] - outputs[0]) / np.linalg.norm(outputs[0])
            assert one.output_error == pytest.approx(off, rel=1e-3)


def test_the_same_matrices_from_either_side_in_table_file_and_json(blocks, shipped, lost, tmp_path):
    back = blocks.verify(TEXT, other=shipped, greedy=0, local=False)
    assert back.matrices == lost.matrices
    assert Verification.load(lost.save(tmp_path / "lost.safetensors")).matrices == lost.matrices
    assert json.loads(json.dumps(lost.to_dict()))["matrices"][0]["name"] == lost.matrices[0].name
    assert [*lost.matrix_losses().table(5).columns[0].cells] == [one.name for one in lost.matrices[:5]]
    assert any("30 matrices of int4, one at a time in world-llama: over" in note for note in lost.notes)
    sizes = sum(one.bytes for one in lost.matrices)
    assert 0.95 * sizes < sum(file.stat().st_size for file in blocks.hooked.folder.glob("*.safetensors")) < 1.2 * sizes


def test_the_page_lists_matrices_and_fits_a_telephone(lost, chromium, tmp_path):
    page = chromium(lost.save(tmp_path / "lost.html"))
    rows = page.locator("section", has=page.get_by_role("heading", name="Matrices")).locator("tr")
    cells = rows.nth(1).locator("td").all_inner_texts()
    assert cells[0] == lost.matrices[0].name
    assert float(cells[5]) == pytest.approx(lost.matrices[0].kl, rel=1e-3)
    page.get_by_role("button").click()
    assert rows.count() == 1 + len(lost.matrices)
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert not page.troubles


def test_matrices_that_cannot_be_measured_are_refused(blocks, shipped):
    with pytest.raises(InputError, match="must be the floats"):
        shipped.verify(TEXT, other=shipped, matrices=True, greedy=0, local=False)
    spec = HookSpec().intervene("blocks.1.hook_mlp_out", Intervention.Zero())
    with pytest.raises(InputError, match="without interventions"):
        shipped.verify(TEXT, other=blocks, hooks=spec, matrices=True, greedy=0, local=False)
    assert shipped.verify(TEXT, other=blocks, hooks=spec, greedy=0, local=False).matrices == []
    assert shipped.verify(TEXT, other=blocks, matrices=False, greedy=0, local=False).matrices == []


def test_the_command_takes_a_text_in_windows(blocks, tmp_path):
    (tmp_path / "text.txt").write_text(" ".join([TEXT] * 20))
    found = mionnx("verify", FLOATS, "--other", blocks.hooked.folder, "--texts", tmp_path / "text.txt", "--no-local")
    assert found.returncode == 2
    said = " ".join(found.stdout.split())
    assert "model.layers.2.self_attn.v_proj.weight" in said
    assert "2 prompts" in said
    assert "10 more" in said
