"""The command line, run as a user runs it."""

import os
import subprocess
import sys

from repository import REPOSITORY

LLAMA = REPOSITORY / "models" / "world-llama"
RWKV = REPOSITORY / "models" / "world-rwkv7"
PROMPT = "The capital of France is"


def mionnx(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "mionnx", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, env={**os.environ, "COLUMNS": "120"})


def succeeded(*arguments: object) -> str:
    run = mionnx(*arguments)
    assert run.returncode == 0, run.stderr
    return run.stdout
