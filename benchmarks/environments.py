"""Virtual environments for programs that pin other packages: made on first use, kept in a folder."""

import subprocess
import venv
from collections.abc import Sequence
from pathlib import Path

TORCH = "torch==2.13.0"  # installed by itself first, so that no tool brings a build of its own


def python_of(folder: Path, requirements: Sequence[str]) -> Path:
    """The interpreter of an environment, which is made if need be.

    Args:
        folder: of the environment.
        requirements: what is installed besides torch.
    """
    python, done = folder / "bin" / "python", folder / "installed"
    if not done.exists():
        venv.create(folder, with_pip=True, clear=True)
        for packages in ([TORCH], requirements):
            subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
        done.touch()
    return python
