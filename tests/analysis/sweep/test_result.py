"""Sweeps as people meet them: the command line, pages, pictures, and what they find in the models that ship."""

import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from command_line import LLAMA, mionnx, succeeded
from matplotlib.image import imread
from nasty import NASTY
from repository import REPOSITORY

from mionnx import HookPoint, HookSpec, Intervention, MIModel
from mionnx.analysis.sweep.result import SweepResult

FRANCE, GERMANY = "The capital of France is", "The capital of Germany is"
GIFT = "When Mary and John went to the store , {} gave a drink to"


@pytest.fixture(scope="module")
def llama() -> MIModel:
    return MIModel.from_pretrained(LLAMA, threads=1)


@pytest.mark.parametrize("name", ["world-llama", "world-gpt2"])
def test_the_country_matters_early_and_the_last_token_late(name):
    model = MIModel.from_pretrained(REPOSITORY / "models" / name, threads=1)
    found = model.patch_sweep(FRANCE, GERMANY, "resid_mid")
    (country,) = model.tokenize(FRANCE).positions_of("France")
    last = len(model.tokenize(FRANCE)) - 1
    share = found.normalized
    assert share[0, country] > 0.9 > 0.2 > abs(share[0, last])
    assert share[-1, last] == pytest.approx(1, abs=0.05)
    assert (found.effect[:, :country] == 0).all()
    crossed = int((share[:, last] > share[:, country]).argmax())
    assert (share[:crossed, country] > 0.5).all()
    assert (share[crossed:, last] > 0.5).all()


def test_ablating_the_heads_of_indirect_objects_removes_the_answer(llama):
    clean, corrupted = GIFT.format("John"), GIFT.format("Mary")
    answer, versus = llama.token_id("Mary"), llama.token_id("John")
    found = llama.patch_sweep(clean, corrupted, "z", ("layer", "head"), patching="noising")
    assert found.clean > 5 > -5 > found.corrupted
    order = np.argsort(found.effect, axis=None)
    chosen = np.transpose(np.unravel_index(order[:4], found.values.shape)).tolist()
    spec = HookSpec()
    for layer, head in chosen:
        spec.intervene(HookPoint.AttnZ(layer), Intervention.Zero(heads=head))
    logits = llama.forward(clean, spec).output()[0, -1]
    assert logits[answer] < logits[versus]


def test_a_page_shows_the_values_under_the_pointer(llama, chromium, tmp_path):
    found = llama.patch_sweep(FRANCE, GERMANY)
    page = chromium(found.save(tmp_path / "sweep.html"))
    cells = page.locator("table.heat td")
    assert cells.count() == found.values.size == 20
    cells.nth(8).hover()
    shown = page.locator("#tip").text_content()
    assert shown.splitlines()[:2] == ["layer 1", "position Germany"]
    assert float(shown.splitlines()[2].split(": ")[1]) == pytest.approx(found.values[1, 3], rel=1e-3)
    assert page.troubles == []


def test_a_page_of_three_axes_opens_on_the_largest_and_lets_choose(llama, chromium, tmp_path):
    found = llama.patch_sweep(GIFT.format("John"), GIFT.format("Mary"), "z", ("layer", "head", "position"))
    page = chromium(found.save(tmp_path / "sweep.html"))
    largest = int(np.unravel_index(np.abs(found.effect).argmax(), found.values.shape)[1])
    assert page.locator("select").input_value() == str(largest)
    page.locator("select").select_option("2")
    page.locator("table.heat td").nth(14 * 3 + 13).hover()
    shown = page.locator("#tip").text_content().splitlines()
    assert shown[:3] == ["layer 3", "head 2", "position to"]
    assert float(shown[3].split(": ")[1]) == pytest.approx(found.values[3, 2, 13], rel=1e-3)
    assert page.troubles == []


@pytest.mark.parametrize("over", [("layer", "head"), ("layer",), ("layer", "head", "position")])
def test_a_table_says_which_hook_point_it_is_of(llama, over):
    table = str(llama.ablation_sweep(FRANCE, over=over, layers=[1]).table())
    assert "Zero ablation of blocks.*.attn.hook_z" in " ".join(table.split())


@pytest.mark.slow
def test_tokens_are_shown_and_never_executed(chromium, tmp_path):
    numbers = np.random.default_rng(0).normal(size=(24, 16, 40))
    labels = {"layer": [str(i) for i in range(24)], "head": [str(i) for i in range(16)], "position": [NASTY, "\n"] * 20}
    found = SweepResult(
        numbers, numbers[None], tuple(labels), labels, 1.0, 0.0, "denoising", NASTY, NASTY, NASTY, NASTY
    )
    page = chromium(found.save(tmp_path / "nasty.html"))
    assert page.locator("img").count() == 0
    assert NASTY in page.locator("table.heat").text_content()
    assert page.troubles == []
    assert imread(found.save(tmp_path / "nasty.png")).shape[1] > 600


def test_the_command_writes_what_it_is_asked_for(tmp_path):
    html, png = tmp_path / "s.html", tmp_path / "s.png"
    shown = succeeded("sweep", LLAMA, FRANCE, GERMANY, "--html", html, "--png", png)
    assert "Germany" in shown
    assert "logit_diff: clean" in shown
    assert html.stat().st_size < 100_000
    assert imread(png).ndim == 3
    found = json.loads(succeeded("sweep", LLAMA, GIFT.format("John"), "--ablate", "zero", "--json"))
    assert np.array(found["values"]).shape == (4, 8)
    path = ("sweep", LLAMA, GIFT.format("John"), GIFT.format("Mary"), "--receivers", "all", "--sender", "z", "--over")
    found = json.loads(succeeded(*path, "layer,head", "--metric", "probability", "--answer", "Mary", "--json"))
    assert max(map(max, found["values"])) > found["corrupted"]


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("corrupted prompt to patch with", [FRANCE]),
        ("goes with patching", [FRANCE, "--ablate", "zero", "--patching", "noising"]),
        ("should end in .html", [FRANCE, GERMANY, "--html", "x.txt"]),
        ("numbers with commas", [FRANCE, GERMANY, "--layers", "1;2"]),
        ("did you mean 'mean'", [FRANCE, "--ablate", "means"]),
    ],
)
def test_wrong_arguments_are_said(message, arguments):
    run = mionnx("sweep", LLAMA, *arguments)
    assert run.returncode != 0
    assert message in " ".join(run.stderr.replace("│", " ").split())


@pytest.mark.slow
def test_an_interrupted_command_keeps_what_it_has(tmp_path, monkeypatch):
    monkeypatch.setenv("MIONNX_CACHE", str(tmp_path))
    program = (
        "import signal, sys, time; from mionnx.analysis.sweep import patched_runs as engine\n"
        "from mionnx.cli import main as cli\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored in a background job
        "def slow(self, cells):\n"
        "    for cell in cells:\n        print('chunk', flush=True); time.sleep(1); yield cell.reshape(1), 0\n"
        "engine.PatchedRuns.batches = slow\n"
        f"sys.argv = ['mionnx', 'sweep', {str(LLAMA)!r}, {FRANCE!r}, {GERMANY!r}, '--json']\ncli.main()"
    )
    running = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for _ in range(3):
        assert running.stdout.readline() == "chunk\n"
    time.sleep(0.2)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 130, said
    assert "goes on where this one stopped" in said
    assert len(list((tmp_path / "sweeps").iterdir())) == 1
    assert np.array(json.loads(succeeded("sweep", LLAMA, FRANCE, GERMANY, "--json"))["values"]).shape == (4, 5)
    assert list((tmp_path / "sweeps").iterdir()) == []
