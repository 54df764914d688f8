"""circuit-tracer's file of a graph (schema 1): the leading nodes and links, written and read."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np

from mionnx.analysis.tracing.effect_graph import EffectGraph
from mionnx.analysis.tracing.influence import Leading
from mionnx.errors import InputError, ModelError
from mionnx.graph.folder_file import read_json
from mionnx.machine.decimals import decimal

FEATURE, ERROR, TOKEN, LOGIT = "cross layer transcoder", "mlp reconstruction error", "embedding", "logit"
SCHEMA, LARGEST = 1, 2**30  # bytes of a file


def entries(graph: EffectGraph, best: Leading, slug: str, scan: str | None, nodes: float) -> dict[str, Any]:
    """The file's contents."""
    few, sources = len(graph.features), graph.effects.shape[1]
    tables = {i: _node(graph, i, float(best.cumulated[i])) for i in np.flatnonzero(best.nodes).tolist()}
    tables |= {sources + i: _logit(graph, i) for i in range(len(graph.targets))}
    pairs = [
        (row if row < few else sources + row - few, row, column) for row, column in np.argwhere(best.edges).tolist()
    ]
    links = [
        {
            "source": tables[column]["node_id"],
            "target": tables[target]["node_id"],
            "weight": float(graph.effects[row, column]),
        }
        for target, row, column in pairs
        if target in tables and column in tables
    ]
    linked = {link[end] for link in links for end in ("source", "target")}
    shown = [one for one in tables.values() if one["node_id"] in linked or one["feature_type"] in (TOKEN, LOGIT)]
    if len({one["node_id"] for one in shown}) < len(shown):
        warnings.warn(
            "this file names an error as a feature of layer 0 (circuit-tracer's own names do): two nodes are one on "
            "its page; a .safetensors file and a page of mionnx tell them apart",
            stacklevel=4,
        )
    ids = {name: tables[i]["node_id"] for i, name in enumerate(graph.sources) if i in tables}
    ids |= {name: tables[sources + i]["node_id"] for i, name in enumerate(graph.receivers[few:])}
    groups = [[name, *(ids[one] for one in members if one in ids)] for name, members in graph.groups.items()]
    metadata = {
        "slug": slug,
        "scan": graph.scan if scan is None else scan,
        "transcoder_list": [],
        "prompt_tokens": [*graph.tokens],
        "prompt": graph.prompt,
        "node_threshold": nodes,
        "schema_version": SCHEMA,
    }
    start = {"pinnedIds": [], "supernodes": groups, "linkType": "both", "clickedId": "", "sg_pos": ""}
    return {"metadata": metadata, "qParams": start, "nodes": shown, "links": links}


def _entry(node: str, script: str, kind: str, layer: str, position: int, feature: int, **more: Any) -> dict[str, Any]:
    return {
        "node_id": node,
        "feature": feature,
        "layer": layer,
        "ctx_idx": position,
        "feature_type": kind,
        "token_prob": 0.0,
        "is_target_logit": False,
        "run_idx": 0,
        "reverse_ctx_idx": 0,
        "jsNodeId": script,
        "clerp": "",
        "influence": None,
        "activation": None,
        **more,
    }


def _node(graph: EffectGraph, index: int, share: float) -> dict[str, Any]:
    seq, few = len(graph.tokens), len(graph.features)
    if index < few:
        layer, position, feature = graph.features[index].tolist()
        # Cantor's pairing function: one number for layer and feature
        pair = (layer + feature) * (layer + feature + 1) // 2 + feature
        return _entry(
            *(f"{layer}_{feature}_{position}", f"{layer}_{feature}-0", FEATURE, str(layer), position, pair),
            influence=share,
            activation=float(graph.activations[index]),
        )
    layer, position = divmod(index - few, seq)
    if layer < graph.layers:
        ids = f"0_{layer}_{position}", f"{layer}_{position}-0"
        return _entry(*ids, ERROR, str(layer), position, -1, influence=share)
    token = int(graph.token_ids[position])
    return _entry(f"E_{token}_{position}", f"E_{token}-{position}", TOKEN, "E", position, position, influence=share)


def _logit(graph: EffectGraph, index: int) -> dict[str, Any]:
    token, position = int(graph.target_ids[index, 0]), len(graph.tokens) - 1
    layer, share = str(graph.layers + 1), float(graph.probabilities[index])
    return _entry(
        *(f"{layer}_{token}_{position}", f"L_{token}-{position}", LOGIT, layer, position, token),
        token_prob=share,
        is_target_logit=index == 0,
        clerp=f'Output "{graph.targets[index]}" (p={decimal(share, 3)})',
    )


def contents(path: Path) -> dict[str, Any]:
    """The attributes of a graph that a file holds."""
    try:
        file = read_json(path, LARGEST)
        if file["metadata"].get("schema_version", SCHEMA) != SCHEMA:
            raise InputError(f"{path} is of schema {file['metadata']['schema_version']}, and {SCHEMA} is read")
        return _contents(file, path)
    except ModelError as error:
        raise InputError(str(error)) from error
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise InputError(f"{path} is no graph of circuit-tracer's: {type(error).__name__}: {error}") from error


def _contents(file: dict[str, Any], path: Path) -> dict[str, Any]:
    nodes, tokens = file["nodes"], tuple(map(str, file["metadata"]["prompt_tokens"]))
    kinds = {kind: [one for one in nodes if one["feature_type"] == kind] for kind in (FEATURE, ERROR, TOKEN, LOGIT)}
    if not kinds[LOGIT]:
        raise InputError(f"{path} has no logits")
    seq, layers = len(tokens), int(kinds[LOGIT][0]["layer"]) - 1
    names = [one["node_id"] for one in nodes]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"{path} has two nodes {twice!r}: its links do not say which of them they mean")
    features = sorted(_place(one) for one in kinds[FEATURE])
    by_place = {_place(one): one for one in kinds[FEATURE]}
    few = len(features)
    columns = {by_place[place]["node_id"]: i for i, place in enumerate(features)}
    rows = dict(columns)
    columns |= {one["node_id"]: few + int(one["layer"]) * seq + one["ctx_idx"] for one in kinds[ERROR]}
    columns |= {one["node_id"]: few + layers * seq + one["ctx_idx"] for one in kinds[TOKEN]}
    rows |= {one["node_id"]: few + i for i, one in enumerate(kinds[LOGIT])}
    effects = np.zeros((few + len(kinds[LOGIT]), few + (layers + 1) * seq), np.float32)
    for link in file["links"]:
        effects[rows[link["target"]], columns[link["source"]]] = link["weight"]
    ids = np.full(seq, -1)
    for one in kinds[TOKEN]:
        ids[one["ctx_idx"]] = int(one["node_id"].split("_")[1])
    ours = {one["node_id"]: f"error_{one['layer']}_{one['ctx_idx']}" for one in kinds[ERROR]}
    ours |= {one["node_id"]: f"logit_{one['feature']}" for one in kinds[LOGIT]}
    groups = {
        str(name): tuple(ours.get(one, one) for one in members) for name, *members in file["qParams"]["supernodes"]
    }
    return {
        "prompt": str(file["metadata"]["prompt"]),
        "tokens": tokens,
        "token_ids": ids,
        "layers": layers,
        "hook": "",
        "hook_out": "",
        "features": np.array(features, np.int64).reshape(-1, 3),
        "activations": np.array([by_place[place]["activation"] for place in features], np.float32),
        "targets": tuple(one["clerp"].removeprefix('Output "').rpartition('" (p=')[0] for one in kinds[LOGIT]),
        "target_ids": np.array([(int(one["feature"]), -1) for one in kinds[LOGIT]]),
        "probabilities": np.array([float(one["token_prob"]) for one in kinds[LOGIT]]),
        "effects": effects,
        "active": few,
        "scan": str(file["metadata"]["scan"]),
        "groups": groups,
    }


def _place(node: dict[str, Any]) -> tuple[int, int, int]:
    layer, feature, position = map(int, node["node_id"].split("_"))
    return layer, position, feature
