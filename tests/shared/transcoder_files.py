"""Transcoders of random features, some of them active at each token, in the files of those who train transcoders."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from mionnx import (
    AttentionScore,
    AttributionGraph,
    FeatureDashboards,
    HookSpec,
    Intervention,
    MIModel,
    TranscoderSet,
)

TEXTS = ["The capital of France is Paris", "Mary and John went to the store and John gave a drink to Mary"]
SHARE = 0.1  # of tokens at which a feature is active
KINDS = ("plt", "jump_skip", "clt")


def random_layers(
    model: MIModel, kind: str, hook: str, features: int, seed: int, texts: Sequence[Any]
) -> list[dict[str, np.ndarray]]:
    """W_enc [f, d], b_enc, W_dec [f, layers, d], b_dec of each layer; of "jump_skip" threshold and skip [d, d] too."""
    random, width, layers = np.random.default_rng(seed), model.hidden_size, []
    points = [hook.format(i) for i in range(model.num_layers)]
    caches = [model.forward(text, HookSpec().capture(points), logits=False) for text in texts]
    for i, point in enumerate(points):
        x = np.concatenate([cache[point][0] for cache in caches])
        encoder = random.standard_normal((features, width)).astype(np.float32)
        encoder /= np.sqrt((x**2).sum(1).mean())
        place = (int((1 - SHARE) * (len(x) - 1)) + 0.5) / (len(x) - 1)  # between two tokens: none is on a threshold
        edge = np.quantile(x @ encoder.T, place, axis=0).astype(np.float32)
        written = model.num_layers - i if kind == "clt" else 1
        one = {"W_enc": encoder, "b_dec": 0.1 * random.standard_normal(width), "b_enc": -edge}
        one["W_dec"] = random.standard_normal((features, written, width)) * 0.3
        if kind == "jump_skip":
            one |= {"b_enc": np.zeros(features), "threshold": np.maximum(edge, 1e-3)}
            one["skip"] = 0.02 * random.standard_normal((width, width))
        one["b_enc"][: model.num_layers] -= 1e3  # circuit-tracer names errors as features of these numbers
        layers.append({name: np.ascontiguousarray(array, np.float32) for name, array in one.items()})
    return layers


def write_set(
    model: MIModel,
    folder: Path,
    kind: str = "plt",
    hook: str = "blocks.{}.mlp.hook_pre",
    features: int = 64,
    seed: int = 0,
    texts: Sequence[Any] = TEXTS,
) -> list[dict[str, np.ndarray]]:
    """Write random transcoders as circuit-tracer's files."""
    layers = random_layers(model, kind, hook, features, seed, texts)
    folder.mkdir(parents=True, exist_ok=True)
    theirs = {"mlp.hook_pre": "mlp.hook_in"}
    name = hook.removeprefix("blocks.{}.")
    config = {"model_kind": "cross_layer_transcoder" if kind == "clt" else "transcoder_set", "scan": "random"}
    config |= {"feature_input_hook": theirs.get(name, name), "feature_output_hook": "hook_mlp_out"}
    (folder / "config.yaml").write_text("".join(f'{key}: "{value}"\n' for key, value in config.items()))
    for i, one in enumerate(layers):
        if kind == "clt":
            save_file(
                {f"{key}_{i}": one[key] for key in ("W_enc", "b_enc", "b_dec")}, folder / f"W_enc_{i}.safetensors"
            )
            save_file({f"W_dec_{i}": one["W_dec"]}, folder / f"W_dec_{i}.safetensors")
            continue
        file = {key: one[key] for key in ("W_enc", "b_enc", "b_dec")} | {"W_dec": one["W_dec"][:, 0].copy()}
        if kind == "jump_skip":
            file |= {"activation_function.threshold": one["threshold"], "W_skip": one["skip"].T.copy()}
        save_file(file, folder / f"layer_{i}.safetensors")
    return layers


def traced(model: MIModel, **settings: Any) -> AttributionGraph:
    """A graph of random transcoders."""
    with TemporaryDirectory() as folder:
        write_set(model, Path(folder))
        return model.trace(TEXTS[0], TranscoderSet.load(folder), **settings)


def effects_by_gradients(
    model: MIModel, graph: AttributionGraph, layers: Sequence[dict[str, np.ndarray]], answer: int, versus: int
) -> np.ndarray:
    """What features add to a difference of logits: their products with gradients by what MLPs write, all MLPs held."""
    outputs = [f"blocks.{i}.hook_mlp_out" for i in range(model.num_layers)]
    cache, held = model.forward([graph.token_ids], HookSpec().capture(outputs)), HookSpec()
    for name in outputs:
        held.intervene(name, Intervention.Replace(cache[name]))
    rules = "frozen_norm_pattern"
    grad = model.gradients(graph.token_ids, outputs, "logit_diff", answer, versus, hooks=held, rules=rules).grad
    places = graph.features.tolist()
    writes = np.array([layers[layer]["W_dec"][feature, 0] for layer, _, feature in places])
    ways = np.array([grad[outputs[layer]][0, position] for layer, position, _ in places])
    effects: np.ndarray = graph.activations * np.einsum("fd,fd->f", writes, ways)
    return effects


def scored(model: MIModel) -> AttentionScore:
    """A score of attention, explained through random transcoders."""
    with TemporaryDirectory() as folder:
        write_set(model, Path(folder))
        transcoders = TranscoderSet.load(folder)
        return model.trace(TEXTS[0], transcoders).attention(model, transcoders, 1, 2, -1, 3)


def boards(model: MIModel) -> FeatureDashboards:
    """Dashboards of three random features."""
    with TemporaryDirectory() as folder:
        write_set(model, Path(folder) / "transcoders")
        made = model.harvest(TEXTS, "blocks.*.mlp.hook_pre", f"{folder}/made")
        return model.max_activations(made, TranscoderSet.load(f"{folder}/transcoders"), ["1_9", "1_3", "3_12"], k=2)
