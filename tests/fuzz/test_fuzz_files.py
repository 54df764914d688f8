"""Mutants of every kind of file, a few seconds a format; `fuzz_files.py` for longer, with other seeds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("fuzz_files.py")
FORMATS = ("onnx", "safetensors", "npz", "tokenizer.json", "config.json", "gguf", "packed")


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATS)
def test_mutants_are_refused_or_answered(kind):
    seconds, seed = os.environ.get("MIONNX_FUZZ_SECONDS", "20"), os.environ.get("MIONNX_FUZZ_SEED", "0")
    command = [sys.executable, str(PROGRAM), kind, "--seconds", seconds, "--seed", seed]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-1000:]
