"""A model in onnxruntime-web under Node."""

import json
import subprocess
from pathlib import Path

import numpy as np
from repository import SHARED


def run_in_web(web: Path, file: Path, feeds: dict[str, np.ndarray], scratch: Path) -> dict[str, np.ndarray]:
    """Run a model; every output by its name, in float32.

    Args:
        web: the folder whose node_modules has onnxruntime-web.
        file: the model, its weights inside.
        feeds: its inputs, int64 or float32.
        scratch: for inputs and outputs on their way.
    """
    text = {
        name: {"type": str(array.dtype), "dims": array.shape, "data": array.ravel().tolist()}
        for name, array in feeds.items()
    }
    (scratch / "feeds.json").write_text(json.dumps(text))
    files = [SHARED / "web_runner.mjs", file, scratch / "feeds.json", scratch / "out.json"]
    ran = subprocess.run(["node", *map(str, files)], cwd=web, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return {
        name: np.array(value["data"], np.float32).reshape(value["dims"])
        for name, value in json.loads((scratch / "out.json").read_text()).items()
    }
