"""`manifest.json` of a playground: what its page and its engine have to know of the model and the files."""

import hashlib
from pathlib import Path
from typing import Any

from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.io_names import KEYS_AND_VALUES
from mionnx.playground.graph import PlaygroundGraph
from mionnx.spec.hook_spec import HookSpec

FORMAT = 1


def manifest_of(
    model: HookedModel,
    graph: PlaygroundGraph,
    spec: HookSpec,
    title: str,
    check: dict[str, Any],
    opened_as: tuple[str, str | None] | None = None,
    chat: dict[str, str] | None = None,
) -> dict[str, Any]:
    """The manifest, its files left out.

    Args:
        spec: interventions that the page offers.
        check: logits that a browser has to find before it shows any.
        opened_as: name and dtype that `from_pretrained` opens the model by; its folder if left out.
        chat: what the model's chat template puts before and after a message.
    """
    sizes = model.metadata.sizes
    return {
        "format": FORMAT,
        "title": title,
        "model": {
            "name": model.name,
            "family": model.metadata.family,
            "chat": chat,
            "source": dict(zip(("name", "dtype"), opened_as or (str(model.folder), None), strict=True)),
            "weights": model.metadata.weight_dtype,
            "bits": list(graph.bits),
            "bytes": sum(graph.weights.values()),
            "layers": sizes.num_layers,
            "heads": sizes.num_heads,
            "kv_heads": sizes.num_kv_heads,
            "head_dim": sizes.head_dim,
            "hidden": sizes.hidden_size,
            "vocabulary": sizes.vocab_size,
            "context": model.context_length,
            "end_tokens": model.end_tokens(),
        },
        "hooks": {name: {"axes": list(site.dims), "kinds": list(site.kinds)} for name, site in graph.sites.items()},
        "hook_points": [str(point) for point in model.hook_points()],
        "patterns": list(graph.patterns),
        "spec": spec_entries(spec),
        "engine": {
            "slots": {
                name: [{"slot": slot, "inputs": list(inputs)} for slot, inputs in site.slots]
                for name, site in graph.sites.items()
            },
            "axes": {name: list(site.axes) for name, site in graph.sites.items()},
            "layers": [_layer(name) for name in graph.patterns],
            "windows": _windows(model),
            "leads": _leads(model, graph),
            "past": _past(model),
            "check": check,
        },
    }


def _leads(model: HookedModel, graph: PlaygroundGraph) -> dict[str, list[str]]:
    """Hook point -> those that its value flows into with none between, and "logits"."""
    sites = frozenset(graph.sites)
    reached = {name: model.influence.of(name, sites - {name}).arrives for name in graph.sites}
    return {name: sorted(points & (sites | {"logits"})) for name, points in reached.items()}


def _windows(model: HookedModel) -> dict[str, int]:
    """Scores of layers with a sliding window -> how many keys a query reads there."""
    windows = {str(HookPoint.AttnScores(n)): one.sliding_window for n, one in enumerate(model.metadata.attention)}
    return {name: size for name, size in windows.items() if size is not None}


def _layer(name: str) -> int | None:
    return HookPoint.parse(name).layer


def spec_entries(spec: HookSpec) -> list[dict[str, Any]]:
    """The interventions of a spec as the page lists them; values lie in `spec.safetensors`."""
    entries = []
    for n, (where, one) in enumerate(spec.interventions):
        stored = [f"interventions.{n}.{name}" for name in one.rules.stored_values]
        value = {"from": "spec", **({"tensor": stored[0]} if len(stored) == 1 else {"tensors": stored})}
        entries.append({**one.to_entry(str(where)), **({"value": value} if stored else {})})
    return entries


def _past(model: HookedModel) -> list[dict[str, Any]]:
    """The past's inputs, with the outputs that follow them; shapes for one text without a past."""
    shapes = model.metadata.past_shapes(1, 0)
    layers = model.metadata.sizes.num_layers or 0
    names = zip(KEYS_AND_VALUES.inputs(layers), KEYS_AND_VALUES.outputs(layers), strict=True)
    return [{"input": past, "output": present, "dims": list(shapes[past])} for past, present in names]


def file_facts(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
