"""Where a comparison was made: versions, processor, options, and hashes of what ran."""

import json
import platform
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import onnxruntime

from mionnx import graph, specfile
from mionnx.verify.runtime import Runtime
from mionnx.verify.subject import Subject

PACKAGES = ("mionnx", "onnxruntime", "onnxruntime-gpu", "onnx", "numpy", "openvino", "torch", "transformers")
TOLD = ("avx", "avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_tile", "asimd", "bf16",
        "i8mm", "sve")  # fmt: skip


def environment(runtime: Runtime) -> dict[str, Any]:
    """What may make another machine's numbers differ."""
    name, features = _processor()
    return {
        "runtime": runtime.title,
        "options": runtime.facts(),
        "versions": _versions(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": name,
        "features": features,
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


def _processor() -> tuple[str, list[str]]:
    """The processor's name, and those of its features that choose between kernels."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine(), []
    entries = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = {*(entries.get("flags") or entries.get("Features") or "").split()}
    return entries.get("model name", platform.machine()), [flag for flag in TOLD if flag in flags]


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
        "spec": _spec_hash(specfile.serialise(subject.spec)),
    }


def _spec_hash(data: bytes) -> str:
    """The hash of a saved spec, its header in a fixed order: safetensors writes metadata in any."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8:end]), sort_keys=True)
    return sha256(header.encode() + data[end:]).hexdigest()
