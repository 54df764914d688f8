"""The command line on the models that ship, in the test's own process and in one of its own."""

import os
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from unittest.mock import patch

from repository import REPOSITORY

LLAMA = REPOSITORY / "models" / "world-llama"
RWKV = REPOSITORY / "models" / "world-rwkv7"
PROMPT = "The capital of France is"
WIDTH = {"COLUMNS": "120"}


def in_a_process(*arguments: object) -> subprocess.CompletedProcess:
    """`python -m mionnx` from the repository's root."""
    command = [sys.executable, "-m", "mionnx", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, env={**os.environ, **WIDTH})


def mionnx(*arguments: object) -> subprocess.CompletedProcess:
    """The same without a process: `main` with these arguments, its output caught. A process takes two seconds more."""
    from mionnx.cli.main import main

    command, output, errors = ["mionnx", *map(str, arguments)], StringIO(), StringIO()
    with (
        patch.object(sys, "argv", command),
        patch.dict(os.environ, WIDTH),
        chdir(REPOSITORY),
        redirect_stdout(output),
        redirect_stderr(errors),
    ):
        try:
            main()
            code = 0
        except SystemExit as stopped:
            code = stopped.code if isinstance(stopped.code, int) else int(stopped.code is not None)
    return subprocess.CompletedProcess(command, code, output.getvalue(), errors.getvalue())


def succeeded(*arguments: object) -> str:
    run = mionnx(*arguments)
    assert run.returncode == 0, run.stderr
    return run.stdout
