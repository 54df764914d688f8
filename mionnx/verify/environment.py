"""Environment of a comparison: versions, processor, options, and hashes of model and spec."""

import platform
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from mionnx.engine.engines import ENGINES
from mionnx.engine.options import installed_providers
from mionnx.graph import onnx_file
from mionnx.machine.cache_keys import instruction_sets, processor_name
from mionnx.verify.graph_under_test import GraphUnderTest
from mionnx.verify.runtime import Runtime

OF_ENGINES = tuple(name for engine in ENGINES.values() for name in engine.packages)
PACKAGES = ("mionnx", "numpy", "torch", "transformers", *OF_ENGINES)


def environment(runtime: Runtime) -> dict[str, Any]:
    """Collect the facts that may make another machine's numbers differ."""
    return {
        "runtime": runtime.title,
        "options": runtime.facts(),
        "versions": _versions(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": processor_name(),
        "features": instruction_sets(),
        "providers": installed_providers(),
    }


def _versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def hashes(graph: GraphUnderTest) -> dict[str, str]:
    """SHA-256 of the rewritten graph, of the bytes of its weights, and of the spec."""
    weights = sha256()
    for name in sorted(onnx_file.locations(graph.model.proto)):
        with (graph.model.folder / name).open("rb") as file:
            while block := file.read(2**20):
                weights.update(block)
    return {"graph": graph.graph_hash(), "weights": weights.hexdigest(), "spec": graph.spec.sha256}
