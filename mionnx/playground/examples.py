"""Prepared examples of a playground, read from a JSON file and checked against the model.

{"examples": [{"name", "text", "prompt", "second", "compare", "interventions", "view", "layer", "head", "generate"}]};
only `name` and `prompt` are needed. `text` explains it, in plain text, a blank line between paragraphs; `second` is the
prompt that patches come from; `compare` the texts that an embedding model compares with the prompt; `view` is "lens"
(where the head reads whole texts "stream"), "attention" (of `layer` and `head`), "parts" or "steer"; `generate` is a
number of tokens. Interventions are entries of a spec's file with a "value", see this room's README.
"""

import json
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from mionnx.errors import InputError, nearest
from mionnx.model import MIModel
from mionnx.playground.graph import PlaygroundGraph

# Field -> the types that it may have.
FIELDS: dict[str, tuple[type, ...]] = {
    "name": (str,),
    "text": (str,),
    "prompt": (str,),
    "second": (str, type(None)),
    "compare": (list, type(None)),
    "interventions": (list,),
    "view": (str, type(None)),
    "layer": (int, type(None)),
    "head": (int, type(None)),
    "generate": (int, type(None)),
}
VIEWS = ("lens", "stream", "attention", "parts", "steer", None)
ENTRY = ("hook", "kind", "positions", "heads", "rows", "neurons", "value", "strength", "on", "label")


def read_examples(path: str | Path | None, model: MIModel, graph: PlaygroundGraph) -> dict[str, Any]:
    """Read a file of examples that fit the model; none without a file."""
    if path is None:
        return {"examples": []}
    try:
        contents = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read examples from {path}: {error}") from error
    if not isinstance(contents, dict) or [*contents] != ["examples"] or not isinstance(contents["examples"], list):
        raise InputError(f'{path} must be {{"examples": [...]}}')
    for number, example in enumerate(contents["examples"]):
        where = f"{path}, example {number}"
        _check_fields(where, example)
        _check_texts(where, example, model)
        for entry in example.get("interventions", []):
            _check_entry(f"{where} ({example['name']!r})", entry, graph, model.hooked.order)
    return contents


def _check_fields(where: str, example: Any) -> None:
    if not isinstance(example, dict) or not {"name", "prompt"} <= example.keys():
        raise InputError(f'{where} needs "name" and "prompt"')
    for name, value in example.items():
        if name not in FIELDS:
            raise InputError(f"{where} has a field {name!r}{nearest(name, FIELDS)}")
        # True is an integer to Python, and not to a page.
        if not isinstance(value, FIELDS[name]) or isinstance(value, bool):
            raise InputError(f"{where}: {name} is {value!r:.60}")
    if example.get("view") not in VIEWS:
        raise InputError(f"{where}: view {example['view']!r}; one of {', '.join(filter(None, VIEWS))}")


def _check_texts(where: str, example: dict[str, Any], model: MIModel) -> None:
    for name, count in (("layer", model.num_layers), ("head", model.num_heads)):
        if example.get(name) is not None and not 0 <= example[name] < count:
            raise InputError(f"{where}: {name} {example[name]} of {count}")
    meta = model.hooked.metadata
    absent = {"stream": meta.positional, "lens": not meta.positional}
    if absent.get(example.get("view") or ""):
        raise InputError(f"{where}: the page of this model has no view {example['view']!r}")
    if example.get("compare") and not all(isinstance(text, str) for text in example["compare"]):
        raise InputError(f"{where}: compare is a list of texts")
    for text, has_meaning in (("compare", meta.head == "embedding"), ("generate", not meta.reads_whole)):
        if example.get(text) is not None and not has_meaning:
            raise InputError(f"{where}: {text} has no meaning for a model with the head {meta.head!r}")
    for name in ("prompt", "second"):
        if example.get(name) is not None:
            ids = model.tokenize(example[name])
            longest = model.hooked.longest_text if meta.reads_whole else model.hooked.context_length
            if longest is not None and len(ids) > longest:
                raise InputError(f"{where}: {name} has {len(ids)} tokens, and the model is made for {longest}")


def _check_entry(where: str, entry: Any, graph: PlaygroundGraph, names: Iterable[str]) -> None:
    if not isinstance(entry, dict) or not isinstance(entry.get("hook"), str) or "kind" not in entry:
        raise InputError(f'{where}: an intervention needs "hook" and "kind", got {entry!r:.80}')
    for name in entry.keys() - {*ENTRY}:
        raise InputError(f"{where}: an intervention has a field {name!r}{nearest(name, ENTRY)}")
    sites = [name for name in graph.sites if fnmatchcase(name, entry["hook"])]
    if not sites:
        raise InputError(f"{where}: nothing to change at {entry['hook']!r}{nearest(entry['hook'], graph.sites)}")
    other = [name for name in names if fnmatchcase(name, entry["hook"]) and name not in graph.sites]
    if other:
        raise InputError(f"{where}: {entry['hook']!r} means {other[0]} too, which the page cannot change (points=)")
    for name in sites:
        if entry["kind"] not in graph.sites[name].kinds:
            raise InputError(f"{where}: {entry['kind']!r} at {name}; there are {', '.join(graph.sites[name].kinds)}")
