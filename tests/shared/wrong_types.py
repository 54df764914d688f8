"""Every public call of mionnx with arguments that are right, and values of wrong types to put in their place.

`calls(model, recurrent, folder)` names each call; `WRONG` are the values. A call is a function and its right arguments
by name; parameters that stand in none are found in its signature, and are tried too.
"""

import copy
import inspect
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from repository import REPOSITORY
from saelens_fixture import D_IN, D_SAE, random_weights
from safetensors.numpy import save_file
from transcoder_files import write_set

from mionnx import (
    SAE,
    AblationResult,
    Activations,
    Comparison,
    Direction,
    Directions,
    FactoredMatrix,
    Fragment,
    HookPoint,
    HookSpec,
    Intervention,
    JacobianLens,
    KnockoutSpec,
    KVCache,
    LayerCache,
    Logits,
    MIModel,
    Noise,
    Options,
    Report,
    RWKVState,
    StateAblationResult,
    StateKnockoutSpec,
    StateSteeringSpec,
    Subspace,
    TextStreamer,
    TranscoderSet,
    create_knockout_mask,
    probe,
    sample_token,
    sparse_probe,
    statistics_of,
)
from mionnx.analysis.features.config import Config
from mionnx.analysis.similarity.token_pairs import TokenPairs
from mionnx.machine.moments import Moments
from mionnx.run.spans import Spans, TextSpan


class Anything:
    """A class that can be made of anything."""

    def __init__(self, *_: Any) -> None: ...


class Endless:
    """A generator without end, anew for every call."""

    def __iter__(self) -> Iterator[int]:
        return count()


def _deep() -> list[Any]:
    """A list in a list, 3,000 deep."""
    made: list[Any] = [1]
    for _ in range(3000):
        made = [made]
    return made


def _of_itself() -> list[Any]:
    """A list that holds itself."""
    made: list[Any] = [1]
    made.append(made)
    return made


WRONG: dict[str, Any] = {
    "None": None,
    "-1": -1,
    "10**12": 10**12,
    "nonsense": "nonsense",
    "1.5": 1.5,
    "nan": float("nan"),
    "[]": [],
    "{}": {},
    "object": object(),
    "bytes": b"",
    "function": lambda *_: None,
    "surrogate": "\ud800",
    "ragged": [[1], [2, 3]],
    "True": True,
    "set": {1},
    "class": Anything,
    "strings": ["a", 1, None],
    "long": "a" * 5000,
    "null": "a\0b",
    "pairs": {"a": 1},
    "texts": np.array(["a"]),
    "two": range(2),
    "rows": [[0], [1]],
    "truths": np.array([True, False]),
    "cube": np.zeros((2, 3, 4)),
    "number": np.array(3),
    "deep": _deep(),
    "itself": _of_itself(),
    "endless": Endless(),
    "huge": range(10**12),
    "meta": torch.empty(3, device="meta"),
}
PROMPT, OTHER, ANSWER = "The capital of France is", "The capital of Japan is", "Paris"
CHAT, TEMPLATE = [{"role": "user", "content": PROMPT}], "{{ messages[0].content }}"


@dataclass(frozen=True)
class Call:
    """One public call.

    Attributes:
        name: as users write it.
        make: the function to call, made anew for every call where it changes what it belongs to.
        arguments: that are right, by name.
        slow: whether a call that is right takes long.
    """

    name: str
    make: Callable[[], Callable[..., Any]]
    arguments: dict[str, Any]
    slow: bool = False

    @property
    def parameters(self) -> list[str]:
        """Names of all parameters."""
        return [*inspect.signature(self.make()).parameters]

    def __call__(self, **changed: Any) -> Any:
        """Call it with some arguments changed."""
        function = self.make()
        arguments = {**self.arguments, **changed}
        several = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.VAR_POSITIONAL]
        return function(*[arguments.pop(name) for name in several if name in arguments], **arguments)


def _methods(name: str, make: Callable[[], Any], arguments: dict[str, dict[str, Any]]) -> Iterator[Call]:
    for method, right in arguments.items():
        yield Call(f"{name}.{method}", lambda method=method: getattr(make(), method), right)


def _specs() -> Iterator[Call]:
    yield from _methods(
        "HookSpec",
        HookSpec,
        {
            "capture": {"hook": "hook_embed"},
            "gradient": {"hook": "hook_embed"},
            "set_metric": {"name": "logit", "answer": ANSWER},
            "intervene": {"hook": "hook_embed", "intervention": Intervention.Zero()},
            "set_state_knockout": {"specs": StateKnockoutSpec()},
            "set_state_steering": {"specs": StateSteeringSpec(2.0)},
            "extend": {"other": HookSpec()},
            "is_captured": {"hook": "hook_embed"},
            "has_intervention_at": {"hook": "hook_embed"},
        },
    )
    yield Call("HookSpec", lambda: HookSpec, {})
    for kind, right in {
        "Replace": {"tensor": 1.0},
        "Add": {"vector": [1.0]},
        "Scale": {"factor": 2.0},
        "Zero": {},
        "ProjectOut": {"direction": [1.0, 0.0]},
        "LowRank": {"read": [1.0, 0.0], "write": [0.0, 1.0], "offset": 0.5},
        "Knockout": {"mask": np.full((2, 2), -np.inf)},
        "Window": {"tokens": 2},
        "Clamp": {"low": 0.0},
        "AddWhen": {"vector": [1.0], "when": ([1.0], 0.5)},
        "Splice": {"fragment": _fragment()},
    }.items():
        yield Call(f"Intervention.{kind}", lambda kind=kind: getattr(Intervention, kind), right)
    yield Call("Intervention", lambda: Intervention, {"kind": "zero"})
    yield Call("create_knockout_mask", lambda: create_knockout_mask, {"spec": _edges(), "n_heads": 2, "seq_len": 4})
    layers = {"layer": {"layer": 0}, "layers": {"layers": [0]}, "layer_range": {"start": 0, "end": 1}}
    asked = {"target_layers": {"num_layers": 4}}
    heads = {"head": {"head": 0}, "heads": {"heads": [0]}}
    state = {"position": {"position": 0}, "positions": {"positions": [0]}}
    valid = {"validate": {"num_layers": 4, "seq_len": 5}}
    edges = {"edge": {"query": 2, "key": 1}, "from_position": {"query": 2}, "to_position": {"key": 1}}
    yield from _methods("KnockoutSpec", KnockoutSpec, {**layers, **asked, **heads, **edges})
    yield from _methods(
        "StateKnockoutSpec", lambda: StateKnockoutSpec().position(0), {**layers, **asked, **state, **valid}
    )
    yield from _methods(
        "StateSteeringSpec",
        lambda: StateSteeringSpec(2.0).position(0),
        {**layers, **asked, **heads, **state, **valid, "target_heads": {"num_heads": 2}},
    )
    yield Call("StateSteeringSpec", lambda: StateSteeringSpec, {"scale": 2.0})
    yield Call("KnockoutSpec", lambda: KnockoutSpec, {})
    yield Call("StateKnockoutSpec", lambda: StateKnockoutSpec, {})
    yield Call("HookPoint.parse", lambda: HookPoint.parse, {"name": "hook_embed"})
    yield Call("HookPoint.Custom", lambda: HookPoint.Custom, {"name": "mine"})
    yield Call("HookPoint.AttnPattern", lambda: HookPoint.AttnPattern, {"layer": 1})
    yield Call("Options", lambda: Options, {})
    yield Call("sample_token", lambda: sample_token, {"logits": [0.0, 1.0], "temperature": 1.0})
    yield Call("Fragment.of", lambda: Fragment.of, {"source": _fragment()})


def _edges() -> KnockoutSpec:
    return KnockoutSpec().edge(2, 1)


def _fragment() -> Any:
    import onnx

    return onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> f (float[batch, seq, 128] x) => (float[batch, seq, 128] y) '
        "{ y = Relu(x) }"
    )


def _files(folder: Path, model: MIModel, recurrent: MIModel) -> Iterator[Call]:
    directions, cache = _directions(), model.forward(PROMPT, use_cache=True).kv_cache
    state = recurrent.forward(PROMPT).state
    assert cache is not None
    assert state is not None
    mixed = LayerCache([{"state": np.ones((1, 2, 4, 4), np.float32)}, {}], np.ones((1, 3), np.int64))
    saved = {HookSpec: HookSpec().capture("hook_embed"), Directions: directions, KVCache: cache, RWKVState: state}
    saved[LayerCache] = mixed
    for kind, one in saved.items():
        path = folder / f"{kind.__name__}.safetensors"
        one.save(path)
        yield Call(f"{kind.__name__}.load", lambda kind=kind: kind.load, {"path": path})
        yield Call(f"{kind.__name__}.save", lambda one=one: one.save, {"path": folder / "again.safetensors"})
    directions.only([1]).to_gguf(folder / "d.gguf")
    yield Call("Directions.from_gguf", lambda: Directions.from_gguf, {"path": folder / "d.gguf"})
    yield Call("Directions.to_gguf", lambda: directions.only([1]).to_gguf, {"path": folder / "e.gguf"})
    save_file(random_weights("standard"), folder / "sae_weights.safetensors")
    config = {"architecture": "standard", "d_in": D_IN, "d_sae": D_SAE, "hook_name": "blocks.1.hook_resid_post"}
    (folder / "cfg.json").write_text(json.dumps({**config, "dtype": "float32", "apply_b_dec_to_input": True}))
    yield Call("SAE.load", lambda: SAE.load, {"path": folder, "hook": "hook_embed"})
    yield Call("Report.from_json", lambda: Report.from_json, {"text": "{}"})


def _directions() -> Directions:
    return Directions(np.eye(4, 128, dtype=np.float32), (0, 1, 2, 3))


def _steering() -> Iterator[Call]:
    yield from _methods(
        "Directions",
        _directions,
        {
            "intervention": {"layer": 1},
            "spec": {"layers": [1]},
            "ablation_spec": {"layer": 1},
            "only": {"layers": [1]},
            "point": {"layer": 1},
            "table": {},
        },
    )
    yield Call("Directions", lambda: Directions, {"vectors": np.eye(2, 128), "layers": (0, 1)})
    direction = Direction(HookPoint.ResidPost(1), np.ones(128, np.float32))
    yield from _methods("Direction", lambda: direction, {"intervention": {}, "spec": {}})
    pair = Subspace([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
    yield Call("Subspace", lambda: Subspace, {"vectors": [[1.0, 0.0], [0.0, 1.0]], "orthonormal": True})
    activations = {"source": [1.0, 2.0, 3.0]}
    built = {"random": {"k": 1, "width": 3}, "neurons": {"neurons": [0], "width": 3}}
    built["mean_differences"] = {"activations": [[1.0, 2.0], [3.0, 4.0]], "labels": [0, 1]}
    moves = {"ablate": {}, "steer": {"coordinates": 1.0}, "clamp": {"coordinates": [1.0, 2.0]}, "swap": {}}
    moves |= {"interchange": activations, "placebo": {"base": [0.0, 1.0, 0.0], **activations}}
    yield from _methods("Subspace", lambda: pair, {**built, **moves, "coordinates": {"activations": [1.0, 2.0, 3.0]}})
    lens = JacobianLens({0: np.eye(8), 1: np.eye(8)}, n_prompts=2)
    yield Call("JacobianLens", lambda: JacobianLens, {"matrices": {0: np.eye(3)}})
    yield from _methods(
        "JacobianLens", lambda: lens, {"merged": {"other": lens}, "transport": {"activations": np.ones(8), "layer": 1}}
    )
    yield Call("Direction", lambda: Direction, {"hook": "blocks.1.hook_resid_post", "vector": np.ones(128)})


def _caches(model: MIModel, recurrent: MIModel) -> Iterator[Call]:
    def cache() -> KVCache:
        made = model.forward(PROMPT, use_cache=True).kv_cache
        assert made is not None
        return made

    def state() -> RWKVState:
        made = recurrent.forward(PROMPT).state
        assert made is not None
        return made

    def mixed() -> LayerCache:
        mask = np.ones((1, 3), np.int64)
        heads = {"key": np.ones((1, 2, 3, 4), np.float32), "value": np.ones((1, 2, 3, 4), np.float32)}
        return LayerCache([heads, {"state": np.ones((1, 2, 4, 4), np.float32)}, heads, {}], mask)

    keys, values = cache().get_layer(0)
    layer = state().get_layer(0)
    shared: dict[str, dict[str, Any]] = {
        "get_layer": {"layer": 0},
        "clear_layer": {"layer": 0},
        "repeat": {"rows": 2},
        "row": {"row": 0},
        "select": {"rows": [0, 0]},
    }
    yield from _methods(
        "KVCache",
        cache,
        {
            **shared,
            "set_layer": {"layer": 0, "keys": keys, "values": values},
            "set_parts": {"layer": 0, "key": keys},
            "clone_layer_from": {"donor": cache(), "layer": 0},
            "clone_layer_position_range": {"donor": cache(), "layer": 0, "start": 0, "end": 2},
            "trim_to": {"seq_len": 2},
        },
    )
    yield from _methods(
        "RWKVState",
        state,
        {
            **shared,
            "set_parts": {"layer": 0, "wkv": layer.wkv},
            "set_layer": {"layer": 0, "wkv": layer.wkv, "att_shift": layer.att_shift, "ffn_shift": layer.ffn_shift},
            "clone_layer_from": {"donor": state(), "layer": 0},
        },
    )
    yield from _methods(
        "LayerCache",
        mixed,
        {
            **shared,
            "set_parts": {"layer": 1, "state": np.zeros((1, 2, 4, 4))},
            "clone_layer_from": {"donor": mixed(), "layer": 0},
            "clone_layer_position_range": {"donor": mixed(), "layer": 0, "start": 0, "end": 2},
        },
    )
    empty = {"num_layers": 2, "batch": 1, "n_kv_heads": 2, "head_dim": 4, "dtype": np.float32}
    yield Call("KVCache.empty", lambda: KVCache.empty, empty)
    sizes = recurrent.hooked.metadata.sizes
    yield Call("RWKVState.empty", lambda: RWKVState.empty, {"sizes": sizes, "batch": 1, "dtype": np.float32})
    found = model.forward(PROMPT, HookSpec().capture("*.hook_resid_post"))
    name = {"hook": "blocks.1.hook_resid_post"}
    yield from _methods("HookCache", lambda: found, {"get": name, "require": name, "stack": {"short": "resid_post"}})
    yield Call("HookCache[]", lambda: lambda hook: found[hook], name)
    tokens = model.tokenize(PROMPT)
    yield Call("Tokens.positions_of", lambda: tokens.positions_of, {"part": "France"})
    chat = model.tokenize_chat(CHAT, chat_template=TEMPLATE)
    one = {"message": 0, "role": "user"}
    yield from _methods("ChatTokens", lambda: chat, {"positions_of": {"part": "France", **one}, "positions_in": one})
    yield Call("Logits", lambda: Logits, {})
    streamer = {"tokenizer": model.tokenizer}
    yield Call("TextStreamer", lambda: TextStreamer, streamer)
    yield Call("TextStreamer.put", lambda: TextStreamer(model.tokenizer).put, {"value": np.array([1])})


def _verbs(model: MIModel, folder: Path) -> dict[str, dict[str, Any]]:
    """Verb -> right arguments."""
    spec, one = HookSpec().capture("hook_embed"), {"prompt": PROMPT}
    asked = {**one, "answer": ANSWER, "versus": "Berlin"}
    stream = model.run_with_cache(PROMPT, return_type=None)[1]
    residual = stream["blocks.1.hook_resid_post"]
    row, ids = residual[0, -1], model.tokenize(PROMPT).ids
    stack = np.stack([residual, residual])
    swept = {"clean": PROMPT, "corrupted": OTHER, "layers": [1]}
    at = [(1, 0)]
    zero = HookSpec().intervene("blocks.1.hook_mlp_out", Intervention.Zero())
    return {
        "forward": {"tokens": PROMPT, "hooks": spec},
        "generate": {"tokens": PROMPT, "max_new_tokens": 2},
        "gradients": {"tokens": PROMPT, "points": "hook_embed", "metric": "logit", "answer": ANSWER},
        "gradient_times_input": {"tokens": PROMPT, "answer": ANSWER},
        "integrated_gradients": {"tokens": PROMPT, "answer": ANSWER, "steps": 2},
        "give_back": {},
        "run_with_hooks": {"tokens": PROMPT, "fwd_hooks": [("hook_embed", lambda value, hook: None)]},
        "run_with_cache": {"tokens": PROMPT, "names_filter": "hook_embed"},
        "opened": {"kind": Anything},
        "compile_graph": {"hooks": spec},
        "warm": {"hooks": spec},
        "report": {"hooks": spec},
        "estimate": {"hooks": spec, "batch": 1, "seq": 5},
        "tokenize": {"text": PROMPT},
        "tokenize_chat": {"messages": CHAT, "chat_template": TEMPLATE},
        "token_id": {"text": ANSWER},
        "to_tokens": {"text": PROMPT},
        "to_str_tokens": {"tokens": PROMPT},
        "to_string": {"tokens": ids},
        "to_single_token": {"text": ANSWER},
        "attention": {**one, "layers": [1]},
        "head_scores": {"batch": 2, "period": 4},
        "logit_lens": {"source": PROMPT, "layers": [1]},
        "fit_lens": {"texts": [PROMPT], "layers": [2], "skip": 1, "max_tokens": 8, "rows": 128},
        "ridge_lens": {"texts": [PROMPT, OTHER], "layers": [2], "skip": 0, "max_tokens": 8},
        "lens_vectors": {"texts": [PROMPT], "token_ids": [5], "layers": [2], "skip": 1, "max_tokens": 8},
        "lens_transport": {"texts": [PROMPT], "vectors": row, "layer": 2, "skip": 1, "max_tokens": 8},
        "project_to_vocab": {"residual": row},
        "patchscope": {"source": PROMPT, "layers": [1], "target": OTHER, "max_new_tokens": 1},
        "track_token": {**one, "token": ANSWER},
        "track_token_at": {"residual": row, "token": ANSWER},
        "track_race": {"source": PROMPT},
        "embedding_for": {"token": ANSWER},
        "unembedding_for": {"token": ANSWER},
        "embedding_neighbors": {"query": ANSWER},
        "project_through_unembed": {"vec": row},
        "attribute": asked,
        "decomposition_hooks": {},
        "decompose_resid": {"source": stream},
        "accumulated_resid": {"source": stream},
        "stack_head_results": {"source": PROMPT},
        "all_composition_scores": {"mode": "K"},
        "accumulated_bias": {"layer": 1},
        "apply_ln_to_stack": {"stack": stack, "source": stream},
        "logit_attrs": {"stack": stack, "source": stream, "token_ids": ANSWER},
        "get_logit_diff": asked,
        "contrast": {"positive": [PROMPT], "negative": [OTHER]},
        "calibrate": {"directions": _directions(), "prompts": [PROMPT]},
        "dose_response": {
            "prompts": PROMPT,
            "direction": Direction(HookPoint.ResidPost(1), np.ones(128, np.float32)),
            "strengths": [0, 1],
            "bisect": None,
        },
        "subspace_interchange": {
            "clean": PROMPT,
            "corrupted": OTHER,
            "subspace": Subspace(np.eye(2, 128)),
            "hook": HookPoint.ResidPost(1),
            "placebos": 1,
        },
        "features": {**one, "sae": _sae()},
        "trace": {**one, "transcoders": _transcoders(model, folder)},
        "max_activations": {
            "activations": model.harvest([PROMPT], "blocks.*.mlp.hook_pre", folder / "values"),
            "coders": _transcoders(model, folder),
            "features": ["1_9"],
        },
        "capture_residuals": {**one, "layers": [1]},
        "forward_with_capture": {**one, "layers": [1]},
        "forward_ablate": {**one, "ablate_layers": [1], "capture_layers": [1]},
        "forward_steer": {**one, "steers": [(1, np.ones(128), 1.0)], "capture_layers": [1]},
        "patch_activations": {"donor": PROMPT, "recipient": OTHER, "coordinates": at, "capture_layers": [2]},
        "generate_with_hooks": {**one, "max_new_tokens": 2},
        "patch_sweep": {**swept, "answer": ANSWER},
        "attribute_patch": {**swept, "answer": ANSWER},
        "path_patch": {**swept, "receivers": "hook_final_norm", "answer": ANSWER},
        "edge_attribution": {"clean": PROMPT, "corrupted": OTHER, "senders": "z", "receivers": "hook_final_norm"},
        "circuit": {"clean": PROMPT, "corrupted": OTHER, "edges": 10, "steps": 1},
        "ablation_sweep": {"prompts": PROMPT, "metric": "probability", "answer": ANSWER, "layers": [1]},
        "compile": {"hooks": zero, "folder": "compiled"},
        "lens_monitor": {"layer": 1, "k": 2},
        "verify": {"prompts": PROMPT, "runtimes": ["ort-cpu", "ort-cpu:none"], "greedy": 0},
        "bisect": {"prompt": PROMPT, "runtimes": ["ort-cpu", "ort-cpu:none"]},
    }


def _weights(model: MIModel) -> Iterator[Call]:
    """Weights by name, circuits, foldings."""
    layer, mode = {"layer": 1}, {"mode": "K"}
    yield from _methods(
        "Weights",
        lambda: model.weights,
        {
            "QK": layer,
            "OV": layer,
            "accumulated_bias": layer,
            "behind": {"point": "blocks.1.mlp.hook_up"},
            "composition_scores": mode,
            "copying_scores": {},
            "neuron": {**layer, "index": 3},
            "singular_vectors": {"kind": "W_out", **layer, "k": 2},
        },
    )
    matrix = model.weights.OV(1)
    yield from _methods("FactoredMatrix", lambda: matrix, {"get_corner": {"k": 2}})
    yield Call("FactoredMatrix", lambda: FactoredMatrix, {"A": np.ones((3, 2)), "B": np.ones((2, 3))})
    yield Call("FactoredMatrix[]", lambda: lambda index: matrix[index], {"index": (0, 1)})
    yield Call("FactoredMatrix@", lambda: lambda other: matrix @ other, {"other": np.ones((128, 2))})
    yield Call("FactoredMatrix.@", lambda: lambda other: matrix.__rmatmul__(other), {"other": np.ones((2, 128))})
    yield Call("FactoredMatrix*", lambda: lambda factor: matrix * factor, {"factor": 2.0})
    yield Call("W_Q[]", lambda: lambda index: model.W_Q[index], {"index": (1, 2)})
    yield from _methods("Neuron", lambda: model.weights.neuron(1, 3), {"reads": {"k": 2}, "writes": {"k": 2}})
    found = model.weights.singular_vectors("OV", 1, head=0, k=2)
    yield from _methods("SingularVectors", lambda: found, {"tokens": {"number": 0, "k": 2}})


def _sae() -> SAE:
    return SAE(Config("standard", hook="blocks.1.hook_resid_post"), random_weights("standard"))


def _transcoders(model: MIModel, folder: Path) -> TranscoderSet:
    path = folder / "transcoders"
    if not path.exists():
        write_set(model, path)
    return TranscoderSet.load(path)


def _graphs(model: MIModel, folder: Path) -> Iterator[Call]:
    """Methods of attribution graphs, and of what they are traced through."""
    transcoders = _transcoders(model, folder)
    graph = model.trace(PROMPT, transcoders)
    node, of_both = graph.sources[0], {"model": model, "transcoders": transcoders}
    (folder / "graph.json").write_text(json.dumps(graph.to_circuit_tracer()))
    methods: dict[str, dict[str, Any]] = {
        **{name: {} for name in ("influence", "leading", "prune", "top", "table", "to_circuit_tracer")},
        "group": {"name": "a", "nodes": [node]},
        "read": {"path": folder / "graph.json"},
        "intervene": {**of_both, "scale": {node: 0.0}},
        "confirm": {**of_both, "node": node},
        "attention": {**of_both, "layer": 1, "head": 2, "query": -1, "key": 3},
    }
    yield from _methods("AttributionGraph", lambda: graph, methods)
    yield from _stored(folder, graph)
    score = graph.attention(model, transcoders, 1, 2, -1, 3)
    yield from _methods("AttentionScore", lambda: score, {"pairs": {}, "top": {}, "table": {}})
    made = model.harvest([PROMPT], "blocks.*.mlp.hook_pre", folder / "values")
    seen = model.max_activations(made, transcoders, ["1_9"], k=1)
    yield from _methods("FeatureDashboards", lambda: seen, {"texts": {"feature": "1_9"}, "table": {}})
    yield from _methods(
        "TranscoderSet", lambda: transcoders, {"load": {"path": folder / "transcoders"}, "layer": {"number": 0}}
    )
    weights = {name: array for name, array in random_weights("standard").items() if name != "b_pre"}
    sae = SAE(Config("standard", transcoder=True, hook="hook_embed", hook_out="hook_embed"), weights)
    yield Call("TranscoderSet", lambda: TranscoderSet, {"layers": [sae]})


def _results(model: MIModel, folder: Path) -> Iterator[Call]:
    """Methods of what verbs give."""
    hook, token = {"hook": "hook_embed"}, {"token": ANSWER}
    lens = model.logit_lens(PROMPT, layers=[1])
    tracked = model.logit_lens(PROMPT, layers=[1], token_ids=[ANSWER])
    yield from _methods("LensResult", lambda: lens, {"at": {"position": 0}, "best": {"point": 0, "position": 0}})
    asked = dict.fromkeys(("probability_of", "log_probability_of", "rank_of"), token)
    yield from _methods("LensResult", lambda: tracked, asked | {"table": {}})
    patterns = model.attention(PROMPT, layers=[1])
    yield from _methods(
        "AttentionPatterns", lambda: patterns, {"at": {"position": 0}, "of": {"layer": 1, "head": 0}, "table": {}}
    )
    scores = model.head_scores(batch=2, period=4)
    yield from _methods("HeadScores", lambda: scores, {"top": {"kind": "induction"}, "table": {}})
    scope = model.patchscope(PROMPT, target=OTHER, layers=[1], max_new_tokens=1)
    yield from _methods("Patchscope", lambda: scope, {"table": {}})
    attribution = model.attribute(PROMPT, ANSWER)
    yield from _methods("Attribution", lambda: attribution, {"top": {}, "table": {}})
    several = model.attribute([PROMPT, OTHER], ANSWER)
    yield from _methods("Attributions", lambda: several, {"top": {}, "table": {}})
    differences = model.get_logit_diff([PROMPT, OTHER], ANSWER, "Berlin")
    over = {"interval": {}, "p_value": {}, "accuracy_interval": {}}
    yield from _methods("LogitDiffs", lambda: differences, {"table": {}, **over})
    upwards = Direction(HookPoint.ResidPost(1), np.ones(128, np.float32))
    doses = model.dose_response(PROMPT, upwards, [0, 1], bisect=None)
    yield from _methods("DoseResponse", lambda: doses, {"top": {}, "turn": {}, "table": {}})
    found = model.features(PROMPT, _sae())
    yield from _methods("FeatureActivations", lambda: found, {"top": {"position": 0}, "table": {}})
    followed = model.features(PROMPT, _sae(), follow=[1])
    yield from _methods("FeatureActivations", lambda: followed, {"of": {"feature": 1}})
    calibration = model.calibrate(_directions(), [PROMPT])
    share = {"share": {"layer": 1, "strength": 1.0}, "strength": {"layer": 1, "share": 0.5}}
    yield from _methods("SteeringCalibration", lambda: calibration, share)
    generation = model.generate(PROMPT, HookSpec().capture("hook_embed"), max_new_tokens=2)
    yield from _methods("Generation", lambda: generation, {"captured": hook})
    cache = model.forward(PROMPT).output()
    ablation = AblationResult(cache[0, -1], cache[0, -2])
    changes = {"logit_diff": {"token": 1, "versus": 2}, "top_changed_tokens": {}}
    yield from _methods("AblationResult", lambda: ablation, changes)
    sae = {
        "at": {"hook": "blocks.1.hook_resid_post"},
        "direction": {"feature": 1},
        "fragment": {},
        "number_of": {"feature": 1},
        "monitor": {"features": [1]},
        "spec": {"fix": {1: 1.0}},
        "splice": {},
    }
    yield from _methods("SAE", _sae, sae)
    yield from _graphs(model, folder)
    sweep = model.patch_sweep(PROMPT, OTHER, layers=[1], answer=ANSWER)
    yield from _methods("SweepResult", lambda: sweep, {"top": {}, "table": {}})
    swept = model.patch_sweep([PROMPT, OTHER], [OTHER, PROMPT], layers=[1])
    yield from _methods("SweepResult", lambda: swept, {"interval": {}, "p_value": {}})
    saliency = model.gradient_times_input(PROMPT, answer=ANSWER)
    yield from _methods("Saliency", lambda: saliency, {"scores": {}, "table": {}})
    state = StateAblationResult(cache[0, -1], cache[0, -2], StateKnockoutSpec().position(0))
    bisection = model.bisect(PROMPT, ["ort-cpu", "ort-cpu:none"])
    yield from _stored(folder, lens, patterns, scores, attribution, doses, found, sweep, saliency, calibration)
    yield from _stored(folder, several, differences, scope)
    several_rows = model.forward([PROMPT, OTHER], HookSpec().capture("hook_embed"), batch_size=1)
    yield from _stored(folder, generation, ablation, state, bisection, several_rows)
    yield from _activations(model, folder)
    yield from _datasets(model, folder)
    yield from _edges_between(model, folder)
    compared = model.verify(PROMPT, ["ort-cpu", "ort-cpu:none"], points="hook_embed", greedy=0, local=False)
    yield from _methods("Verification", lambda: compared, {"table": {}, "beside": {"title": "ort-cpu:none"}})
    other = MIModel.from_pretrained(model.quantise(folder / "int4"))
    losses = model.verify(PROMPT, ["ort-cpu"], points="*.hook_resid_p*", greedy=0, other=other)
    yield from _methods("Verification", lambda: losses, {"model_losses": {}})
    tables = {"ModelLosses": losses.model_losses(), "MatrixLosses": losses.matrix_losses()}
    for name, table in tables.items():
        yield from _methods(name, lambda table=table: table, {"table": {}})
    yield from _stored(folder, compared, *tables.values())
    ranges, forecast, diagnosis = model.check_range(PROMPT), model.forecast(PROMPT), model.doctor(PROMPT)
    bert = MIModel.from_pretrained(REPOSITORY / "models" / "world-bert")
    hidden = "The capital of <mask> is Paris ."
    yield from _methods("MIModel", lambda: bert, {"fill_mask": {"texts": hidden}})
    filled = bert.fill_mask(hidden)
    spans = Spans.of(["Ann lives"], [TextSpan(0, "PER", "Ann", 0, 3, (1, 1), 0.75)])
    pairs = TokenPairs("late interaction", ("a", "b"), ("a",), ("b",), np.ones((1, 1)), 1.0)
    yield from _methods("Predictions", lambda: filled, {"table": {}, "probability": {"choice": filled.top[0]}})
    yield from _methods("Spans", lambda: spans, {"table": {}, "of_text": {}})
    yield from _methods("TokenPairs", lambda: pairs, {"table": {}, "top": {}})
    yield from _stored(folder, filled, spans, pairs)
    yield from _methods("RangeReport", lambda: ranges, {"over": {}, "table": {}, "line": {}})
    yield from _methods("Forecast", lambda: forecast, {"table": {}, "line": {}})
    yield from _methods("Diagnosis", lambda: diagnosis, {"table": {}, "line": {}})
    yield from _stored(folder, ranges, forecast, diagnosis)


def _stored(folder: Path, *results: Any) -> Iterator[Call]:
    """What saves a result and loads it."""
    for result in results:
        kind, name = type(result), type(result).__name__
        path = folder / f"{name}.safetensors"
        result.save(path)
        yield Call(f"{name}.load", lambda kind=kind: kind.load, {"path": path})
        yield Call(f"{name}.save", lambda result=result: result.save, {"path": folder / f"{name} again.safetensors"})


def _activations(model: MIModel, folder: Path) -> Iterator[Call]:
    made = model.harvest([PROMPT, OTHER], "hook_embed", folder / "harvested")
    batches: dict[str, dict[str, Any]] = {"batches": {"size": 3}, "get": {"key": "hook_embed"}}
    yield from _methods("Activations", lambda: made, batches)
    yield Call("Activations", lambda: Activations, {"folder": folder / "harvested"})
    array = made["hook_embed"]
    yield Call("Activations[][]", lambda: lambda index: array[index], {"index": 0})


def _datasets(model: MIModel, folder: Path) -> Iterator[Call]:
    """Statistics and probes."""
    hook, texts = {"hook": "hook_embed"}, [PROMPT, OTHER]
    stats = model.statistics(texts, "hook_embed", covariance=True)
    by = model.statistics(texts, "hook_embed", by="token")
    plain = {"count": hook, "mean": hook, "variance": hook, "std": hook, "covariance": hook, "classes": hook}
    ids = model.tokenize(PROMPT).ids
    methods = {**plain, "merged": {"other": stats}, "at": {**hook, "ids": ids}}
    yield from _methods("Statistics", lambda: stats, {**methods, "ablation": {"model": model, "prompts": PROMPT}})
    part = Moments.of(np.ones((2, 128)), ids[:2])
    yield Call("Statistics.add", lambda: copy.deepcopy(by).add, {**hook, "moments": part})
    made = model.harvest(texts, "blocks.*.hook_resid_post", folder / "probed")
    found = probe(made, ["a", "b"] * 5, per="token", folds=2)
    point = {"hook": "blocks.1.hook_resid_post"}
    asked = {"score": {"metric": "accuracy"}, "spread": {}, "top": {}, "direction": point, "table": {}}
    yield from _methods("ProbeResult", lambda: found, asked)
    sparse = sparse_probe(made, ["a", "b"] * 5, [1, 2], per="token", folds=2, controls=1)
    yield from _methods("SparseProbes", lambda: sparse, {"top": {}, "table": {}})
    asked = {"activations": made, "labels": ["a", "b"] * 5, "sizes": [1], "folds": 2, "points": [point["hook"]]}
    yield Call("sparse_probe", lambda: sparse_probe, {**asked, "controls": 1})
    yield from _stored(folder, stats, found, sparse)
    labels = {"labels": ["a", "b"] * 5, "folds": 2, "points": [point["hook"]]}
    yield Call("probe", lambda: probe, {"activations": made, **labels})
    yield Call("statistics_of", lambda: statistics_of, {"activations": made})
    yield Call("Noise", lambda: Noise, {"positions": "France"})
    yield Call("Comparison", lambda: Comparison, {"clean": PROMPT, "corrupted": OTHER})


def _lenses(model: MIModel, folder: Path) -> Iterator[Call]:
    """A lens with its model, and what a subspace does."""
    lens, activation = JacobianLens({1: np.eye(128)}), np.ones(128)
    asked = {"model": model, "activation": activation, "layer": 1}
    methods: dict[str, dict[str, Any]] = {
        "check": {"model": model},
        "token_vectors": {"model": model, "token_ids": [5], "layer": 1},
        "dictionary": {"model": model, "layer": 1},
        "decompose": {**asked, "k": 2},
        "occupancy": {**asked, "max_atoms": 2, "dictionaries": 1},
    }
    yield from _methods("JacobianLens", lambda: lens, methods)
    effect = model.subspace_interchange(
        [PROMPT, OTHER], [OTHER, PROMPT], Subspace(np.eye(2, 128)), HookPoint.ResidPost(1)
    )
    yield from _methods("SubspaceEffect", lambda: effect, {"interval": {}, "table": {}})
    yield from _stored(folder, lens, effect)


def _edges_between(model: MIModel, folder: Path) -> Iterator[Call]:
    yield from _lenses(model, folder)
    circuit = model.circuit([PROMPT, OTHER], [OTHER, PROMPT], 10, steps=1)
    edge = {"sender": "m1", "receiver": "logits"}
    path = circuit.attribution.to_importances(folder / "importances.json", model)
    files = {"to_importances": {"path": folder / "other.json", "model": model}, "ranked": {"rank": "score"}}
    files["from_importances"] = {"path": path, "model": model}
    yield from _methods(
        "EdgeAttribution", lambda: circuit.attribution, {"top": {}, "table": {}, "score": edge, **files}
    )
    methods: dict[str, dict[str, Any]] = {"leading": {"edges": 3}, "smallest": {}, "table": {}, "interval": {}}
    yield from _methods("Circuit", lambda: circuit, methods)
    yield from _stored(folder, circuit, circuit.attribution)


def _model_verbs(model: MIModel, recurrent: MIModel, folder: Path) -> Iterator[Call]:
    for verb, right in _verbs(model, folder).items():
        yield Call(f"MIModel.{verb}", lambda verb=verb: getattr(model, verb), right, verb in SLOW)
    yield Call("MIModel.check_token", lambda: model.check_token, {"token": 3})
    texts, tiny = {"texts": [PROMPT], "points": "hook_embed", "folder": "written"}, {"folder": "written"}
    yield Call("MIModel.statistics", lambda: model.statistics, {"texts": [PROMPT], "points": "hook_embed"})
    yield Call("MIModel.harvest", lambda: _anew(model.harvest), texts)
    yield Call("MIModel.narrow", lambda: _anew(model.narrow), {**tiny, "texts": PROMPT}, slow=True)
    yield Call("MIModel.check_range", lambda: model.check_range, {"texts": PROMPT})
    yield Call("MIModel.forecast", lambda: model.forecast, {"texts": PROMPT, "alone": False})
    yield Call("MIModel.doctor", lambda: _anew(model.doctor), {**tiny, "texts": PROMPT}, slow=True)
    yield Call("MIModel.quantise", lambda: _anew(model.quantise), tiny, slow=True)
    yield Call("Noise.specs", lambda: Noise("France").specs, {"model": model, "prompts": PROMPT})
    yield Call("Comparison.on", lambda: Comparison(PROMPT, OTHER).on, {"model": model})
    yield Call("MIModel(rwkv).forward", lambda: recurrent.forward, {"tokens": PROMPT, "hooks": HookSpec()})
    source = {"source": model.hooked.folder}
    yield Call("MIModel.from_pretrained", lambda: MIModel.from_pretrained, source)
    baked = model.compile(HookSpec().intervene("blocks.1.hook_mlp_out", Intervention.Scale(0.5)), folder / "baked")
    yield Call("MIModel.from_compiled", lambda: MIModel.from_compiled, {"folder": baked, "base": model.hooked.folder})


def _anew(write: Callable[..., Any]) -> Callable[..., Any]:
    """A verb whose folder is not there yet."""
    shutil.rmtree("written", ignore_errors=True)
    return write


SLOW = {"verify", "bisect"}
GROUPS: dict[str, Callable[[MIModel, MIModel, Path], Iterator[Call]]] = {
    "specs": lambda model, recurrent, folder: _specs(),
    "files": lambda model, recurrent, folder: _files(folder, model, recurrent),
    "steering": lambda model, recurrent, folder: _steering(),
    "caches": lambda model, recurrent, folder: _caches(model, recurrent),
    "results": lambda model, recurrent, folder: _results(model, folder),
    "weights": lambda model, recurrent, folder: _weights(model),
    "verbs": _model_verbs,
}
