"""Programs that open compiled folders, and know nothing of mionnx."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

from repository import SHARED

CLIENTS = SHARED / "clients"
OPTIMUM = "optimum-onnx==0.1.0"


def loop_of(card: Path) -> str:
    """The program on a card."""
    found = re.search(r"## Running it.*?```\w+\n(.*?)\n```", card.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def run(command: list[Any], cwd: Path) -> str:
    """What a program prints that knows nothing of mionnx."""
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, env=bare)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout
