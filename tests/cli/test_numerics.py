"""Commands on numbers: their exit codes, files and JSON."""

import json
import shutil
from pathlib import Path

import pytest
from command_line import LLAMA, mionnx, succeeded
from rescaled import planted

from mionnx.graph.hooked_model import HookedModel


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("The capital of France is Paris .")
    return path


def test_range_says_what_overflows_by_its_exit_code(text, tmp_path):
    fits = succeeded("range", LLAMA, "--text", text, "--html", tmp_path / "range.html")
    assert "nothing overflows" in fits
    assert "<title>" in (tmp_path / "range.html").read_text()
    loud = planted(LLAMA, tmp_path / "loud", "model.layers.2.mlp.down_proj.weight", 2.0**14).hooked.folder
    run = mionnx("range", loud, "--text", text, "--json")
    assert run.returncode == 2
    facts = json.loads(run.stdout)
    assert facts["overflows"][0] == ["blocks.2.mlp.hook_post", "value"]
    assert mionnx("range", loud, "--text", text, "--beside", "bfloat16").returncode == 0
    assert mionnx("forecast", loud, "--text", text, "--no-alone").returncode == 2
    diagnosis = mionnx("doctor", loud, "--text", text, "-o", tmp_path / "sound", "--html", tmp_path / "doctor.html")
    assert diagnosis.returncode == 2
    assert "Remedy: the residual stream times 2^-" in diagnosis.stdout.replace("\n", " ")
    assert HookedModel.open(tmp_path / "sound").metadata.exponents


@pytest.mark.slow
def test_narrow_writes_a_model_and_says_what_it_did(text, tmp_path):
    said = succeeded("narrow", LLAMA, "-o", tmp_path / "half", "--text", text, "--rescale", "4")
    assert "blocks.0.hook_resid_pre times 2^-4" in said
    assert "forecast KL in nats" in said
    assert HookedModel.open(tmp_path / "half").metadata.dtype == "float16"


def test_a_text_without_a_narrow_dtype_is_refused(text, tmp_path):
    refused = mionnx("export", LLAMA, "-o", tmp_path / "half", "--text", text)
    assert refused.returncode == 2
    assert not (tmp_path / "half").exists()


@pytest.mark.slow
def test_an_export_in_float16_with_a_text_has_the_remedy(text, tmp_path):
    source = shutil.copytree(LLAMA, tmp_path / "checkpoint")
    (source / "model.onnx").unlink()
    succeeded("export", source, "-o", tmp_path / "half", "--dtype", "float16", "--text", text)
    metadata = HookedModel.open(tmp_path / "half").metadata
    assert metadata.dtype == "float16"
    assert metadata.narrowed["after"]["kl"] < 1e-3
