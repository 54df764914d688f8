"""Where a comparison was made: versions, processor, options, and hashes of what ran."""

import platform
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import onnxruntime

from mionnx import graph, processor, specfile
from mionnx.verify.runtime import Runtime
from mionnx.verify.subject import Subject

PACKAGES = ("mionnx", "onnxruntime", "onnxruntime-gpu", "onnx", "numpy", "openvino", "torch", "transformers")


def environment(runtime: Runtime) -> dict[str, Any]:
    """What may make another machine's numbers differ."""
    return {
        "runtime": runtime.title,
        "options": runtime.facts(),
        "versions": _versions(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": processor.name(),
        "features": processor.features(),
        "providers": onnxruntime.get_available_providers(),
    }


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def hashes(subject: Subject) -> dict[str, str]:
    """SHA-256 of the graph that runs, of the bytes of its weights, and of the spec."""
    held = sha256()
    for name in sorted(graph.locations(subject.model.proto)):
        with (subject.model.folder / name).open("rb") as file:
            while block := file.read(2**20):
                held.update(block)
    return {
        "graph": subject.graph_hash(),
        "weights": held.hexdigest(),
        "spec": sha256(specfile.serialise(subject.spec)).hexdigest(),
    }
