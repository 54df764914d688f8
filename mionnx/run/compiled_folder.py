"""Compiled folders: what one says of itself, the model that it was made of, and the spec that was baked in."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from mionnx.errors import ModelError
from mionnx.graph.embedded_weights import read_properties
from mionnx.graph.folder_file import parse_json
from mionnx.graph.hooked_model import GRAPH, ROUNDING_LEVEL, HookedModel
from mionnx.graph.metadata import COMPILED, DTYPE_NAMES
from mionnx.quantise.settings import BLOCK_DTYPES
from mionnx.spec.hook_spec import HookSpec

SPEC = "spec.safetensors"  # of a compiled folder
LONGEST_WHAT = 300  # characters of the interventions that an error names
# Graphs of compiled folders, by layout: plain, genai and optimum; transformers.js; Triton's repository.
COMPILED_GRAPHS = (GRAPH, "onnx/model*.onnx", f"*/1/{GRAPH}")


def compiled_graphs(folder: Path) -> list[Path]:
    """The first graph of a folder in each place that a layout has for it."""
    return [path for pattern in COMPILED_GRAPHS for path in sorted(folder.glob(pattern))[:1]]


def what_it_is(path: Path, facts: str) -> str:
    """What a compiled graph says of itself, and how the model that it was made of is opened."""
    try:
        content = parse_json(facts)
    except (ModelError, ValueError):
        content = {}
    content = content if isinstance(content, dict) else {}
    done, of = content.get("interventions"), content.get("model")
    what = f" of {of}" if isinstance(of, str) else ""
    what += f" ({'; '.join(map(str, done))[:LONGEST_WHAT]})" if isinstance(done, list) and done else ""
    return (
        f"{path} is a compiled graph{what}: its interventions are a part of it, and it has no hook points; run it as "
        "its README.md says, or open the model that it was made of, with its spec (spec.safetensors): "
        "model, spec = MIModel.from_compiled(FOLDER)"
    )


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
    own: dict[str, Any] = {"dtype": dtype} if dtype in (*DTYPE_NAMES, *BLOCK_DTYPES) else {}
    levels = blocks.get("accuracy_level") if isinstance(blocks, dict) else None
    if isinstance(levels, list) and levels in ([0], [ROUNDING_LEVEL]):
        own["accuracy_level"] = levels[0]  # as the file computes
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
