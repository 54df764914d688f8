"""Versions, the device, and whether ONNX Runtime computes on it: one fact a line."""

import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import onnxruntime
import torch

from mionnx import MIModel
from mionnx.engine.placement import providers_of

PACKAGES = ("torch", "transformers", "onnx", "onnx-graphsurgeon", "onnx-ir", "onnxscript", "tokenizers", "numpy")
SHIPPED = Path(__file__).parents[2] / "models" / "world-llama"
QUERY = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,memory.used", "--format=csv,noheader"]


def facts(provider: str) -> None:
    """Print them."""
    print(f"onnxruntime: {onnxruntime.__version__}, {', '.join(onnxruntime.get_available_providers())}")
    for package in PACKAGES:
        try:
            print(f"{package}: {version(package)}")
        except PackageNotFoundError:
            print(f"{package}: not installed")
    if provider == "cuda":
        found = (
            subprocess.run(QUERY, capture_output=True, text=True).stdout if shutil.which(QUERY[0]) else "no nvidia-smi"
        )
        print(f"device: {found.strip()}")
        print(f"torch's CUDA: {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}")
    model = MIModel.from_pretrained(SHIPPED, provider=provider)
    found = model.forward("The capital of France is").output()
    expected = MIModel.from_pretrained(SHIPPED).forward("The capital of France is").output()
    print(f"world-llama beside the CPU: {np.abs(found - expected).max():.1e}")
    graph = next(iter(model.compiled.values()))
    print(f"its nodes: { {name: len(nodes) for name, nodes in providers_of(graph.session).items()} }")


if __name__ == "__main__":
    facts(sys.argv[1])
