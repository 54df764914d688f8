"""Compiled folders, read back: the model that one was made of, and the spec that was baked into it."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from mionnx.errors import ModelError
from mionnx.graph.embedded_weights import read_properties
from mionnx.graph.folder_file import parse_json
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.metadata import COMPILED
from mionnx.run.exporting import DTYPE_CHOICES
from mionnx.run.source_path import compiled_graphs
from mionnx.spec.hook_spec import HookSpec

SPEC = "spec.safetensors"  # of a compiled folder


class Opened(Protocol):
    """A model that is open."""

    hooked: HookedModel


M = TypeVar("M", bound=Opened)


def read_back(
    open_model: Callable[..., M], folder: Path, base: str | Path | None, settings: dict[str, Any]
) -> tuple[M, HookSpec]:
    """Open a compiled folder's own model by `open_model`, and read its spec; both are checked by their hashes."""
    graph, facts = _facts(folder)
    path = next((home / SPEC for home in (graph.parent, *graph.parent.parents) if (home / SPEC).is_file()), None)
    if path is None or not path.is_relative_to(folder):
        raise ModelError(f"{folder} has no {SPEC}: the file that says what was baked in is lost")
    if hashlib.sha256(path.read_bytes()).hexdigest() != facts.get("spec_sha256"):
        raise ModelError(f"{path} is not the spec that {graph.name} was made with: its hash is another one")
    spec = HookSpec.load(str(path))
    name, dtype, blocks = base or facts.get("source") or facts.get("model"), facts.get("dtype"), facts.get("blocks")
    own: dict[str, Any] = {"dtype": dtype} if dtype in DTYPE_CHOICES else {}
    if isinstance(blocks, dict) and (levels := blocks.get("accuracy_level")):
        own["accuracy_level"] = max(levels)  # as the file computes
    try:
        model = open_model(name, **(own | settings))
    except ModelError as error:
        if base is not None:
            raise
        raise ModelError(
            f"{folder} was made of {name}, which is not here: {error}; give base=, the folder or name of that model"
        ) from error
    weights = facts.get("weights_sha256")
    if weights != model.hooked.weights_sha256:
        raise ModelError(
            f"{folder} was made of other weights than {name} has ({weights} and {model.hooked.weights_sha256}): give "
            f"base=, the model that it was made of{f', in {dtype}' if dtype else ''}"
        )
    return model, spec


def _facts(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The first graph of a compiled folder, and what it says of itself."""
    for graph in compiled_graphs(folder):
        properties = read_properties(graph)
        facts = parse_json(properties[COMPILED]) if COMPILED in properties else None
        if isinstance(facts, dict):
            return graph, facts
    raise ModelError(f"{folder} is no compiled folder: no graph in it says what was baked in; use from_pretrained")
