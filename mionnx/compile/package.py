"""Compiled folders: one plain ONNX model in which a spec's interventions are baked in.

Any ONNX runtime runs it without mionnx. The folder:

model.onnx          the graph; `metadata_props["mionnx.compiled"]` is JSON: what it is, from which model and spec
model.onnx.data,    the weights, if they are not embedded; of the target "generic" they are the files of the hooked
*.safetensors, ...  model: copies (`weights="alongside"`) or hard links (`"referenced"`)
spec.safetensors    the spec, as `HookSpec.save` writes it, every glob and predicate as the names that it means
README.md           the card: that this is not the original model, and what was done to it
config.json, ...    config and tokenizer of the model

The layout "triton" is a model repository: `{name}/config.pbtxt`, `{name}/1/` with the model, `{name}/` with the rest.
"""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnx

from mionnx.bind.bound_spec import Binder, BoundSpec
from mionnx.compile.bake import bake
from mionnx.compile.bake_parts import bake_parts
from mionnx.compile.model_card import card, triton_config
from mionnx.compile.stored_once import reshape_shared, store_once
from mionnx.engine.engines import engine_of
from mionnx.engine.options import Options
from mionnx.errors import InputError, InterventionError, ModelError, nearest
from mionnx.graph import onnx_file
from mionnx.graph.builder import to_proto
from mionnx.graph.dataflow import Dataflow, attributes
from mionnx.graph.folder_file import files_beside, read_json
from mionnx.graph.fused_operators import read_fused, restore
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import GRAPH, INPUT_NAMES, KEPT, ROUNDING_LEVEL, HookedModel
from mionnx.graph.metadata import COMPILED
from mionnx.graph.operator_table import UNPADDED
from mionnx.graph.packed_weight import at_accuracy_level
from mionnx.inputs.tokens import TOKENIZER_FILE, copy_tokenizer
from mionnx.machine.leftovers import new_folder, remove_leftovers
from mionnx.machine.memory import format_bytes
from mionnx.machine.progress import Progress, silent
from mionnx.rewrite.apply_plan import apply_plan
from mionnx.rewrite.gradient.gradient_outputs import add_gradients
from mionnx.rewrite.plan import ALL, NONE, PADDED, Outputs, Plan
from mionnx.rewrite.prune import prune
from mionnx.spec.hook_choice import HookChoice
from mionnx.spec.hook_spec import HookSpec

SPEC = "spec.safetensors"
CARD = "README.md"
DATA = "model.onnx.data"
WEIGHT_PLACES = ("embedded", "alongside", "referenced")
TARGETS = {"generic": None, "ort-cpu": "cpu", "ort-cuda": "cuda", "web": None}
PRODUCT_LEVELS = (0, ROUNDING_LEVEL)  # of accuracy, see `Packaging`
LAYOUTS = ("plain", "optimum", "triton")
FUSED = (NONE, PADDED, ALL)
LIMIT = 2**31 - 2**24  # a protobuf file holds 2 GiB; some is left for the graph
Knobs = Mapping[str, str | HookPoint | Sequence[str | HookPoint] | None]


@dataclass(frozen=True)
class Packaging:
    """Weights, target runtime and layout of a compiled folder.

    Attributes:
        weights: "embedded" in model.onnx (up to 2 GiB), "alongside" as files of its own, or "referenced": hard links
            to the hooked model's files, on the same disk. By default alongside, for the web embedded.
        target: "generic" (the model's own operators: standard ones, and ONNX Runtime's `MatMulNBits` and
            `GatherBlockQuantized` where its weights are blocks), "ort-cpu" or "ort-cuda" (optimised for this version of
            ONNX Runtime, with its own operators), or "web" (one file, for onnxruntime-web).
        layout: "plain", "optimum" (what `ORTModelForCausalLM.from_pretrained` loads) or "triton" (a repository).
        fused: of the fused operators that an adopted file came with, those to keep where nothing inside them is
            touched: "none", "padded" (right for padded texts too) or "all". Only ONNX Runtime has such operators.
        accuracy_level: of products with weights in blocks: 0, in floats, or 4, what they read rounded to 8 bits. None
            is the level that `forward` computes them at.
    """

    weights: str | None = None
    target: str = "generic"
    layout: str = "plain"
    fused: str = NONE
    accuracy_level: int | None = None

    def __post_init__(self) -> None:
        weights = ("weights", self.weights or "alongside", WEIGHT_PLACES)
        target, layout = ("target", self.target, TARGETS), ("layout", self.layout, LAYOUTS)
        for what, choice, choices in (weights, target, layout, ("fused", self.fused, FUSED)):
            if choice not in choices:
                raise InputError(f"{what} {choice!r}; one of {', '.join(choices)}{nearest(str(choice), choices)}")
        if self.accuracy_level not in (None, *PRODUCT_LEVELS):
            raise InputError(f"accuracy_level={self.accuracy_level!r}; one of {', '.join(map(str, PRODUCT_LEVELS))}")
        if self.target.startswith("ort-") and self.weights == "referenced":
            raise InputError(
                f"target {self.target} writes weights anew: they cannot be references to the model's files"
            )

    @property
    def placed(self) -> str:
        """The place of the weights: "embedded", "alongside" or "referenced"."""
        return self.weights or ("embedded" if self.target == "web" else "alongside")


def compile_spec(
    model: HookedModel,
    spec: HookSpec,
    folder: str | Path,
    *,
    knobs: Knobs | None = None,
    captures: bool = True,
    last_logits: bool = False,
    plain: bool = False,
    packaging: Packaging | None = None,
    progress: Progress = silent,
) -> Path:
    """See `MIModel.compile`."""
    packaging, target = packaging or Packaging(), Path(folder)
    if target.exists():
        raise ModelError(f"{target} exists already")
    asked_spec = spec if captures else _without_captures(spec)
    _check_plain(asked_spec, plain)
    leveled = _at_level(model, packaging)
    bound = Binder(leveled).bind(asked_spec, Outputs(last=last_logits), differentiated=True).sparing_padding()
    proto = _with_fused(_compiled(bound, model, _indices(bound, knobs or {})), leveled, packaging.fused)
    remove_leftovers(target.parent, holding=(GRAPH,))
    with new_folder(target, ModelError) as partial, _room(model, packaging):
        at = partial / target.name / "1" if packaging.layout == "triton" else partial
        at.mkdir(parents=True, exist_ok=True)
        _write_model(model, proto, at, packaging, progress)
        named = _nameable(bound.spec, bound.plan)
        _write_rest(model, named, proto, at.parent if packaging.layout == "triton" else at, packaging, target.name)
    return target


def _without_captures(spec: HookSpec) -> HookSpec:
    bare = HookSpec().extend(spec)
    bare.captures.clear()
    return bare


def _check_plain(spec: HookSpec, plain: bool) -> None:
    """Refuse an empty spec unless `plain`, and `plain` beside any other spec."""
    if plain != spec.is_empty():
        raise InputError(
            "plain=True compiles the model itself, and the spec is not empty: leave one of the two out"
            if plain
            else "the spec has no intervention and no output of its own, so that nothing would be baked in: give some, "
            "or plain=True (--plain) for the model itself"
        )


def _at_level(model: HookedModel, packaging: Packaging) -> HookedModel:
    """The model with its products of blocks at the level that they are compiled at."""
    level = packaging.accuracy_level
    if level is None:  # a compiled graph gives what `forward` gives
        return model
    proto, products = at_accuracy_level(model.proto, level)
    if not products:
        raise InputError(f"accuracy_level={level} has no effect: {model.name} has no products with weights in blocks")
    return replace(model, proto=proto)


@contextmanager
def _room(model: HookedModel, packaging: Packaging) -> Iterator[None]:
    """Say how much a folder needs where the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        needed = format_bytes(sum(onnx_file.locations(model.proto).values()))
        links = "; --weights referenced (weights='referenced') links them and needs none"
        links *= packaging.target == "generic"
        raise ModelError(f"cannot write the folder: {error.strerror}; its weights are {needed}{links}") from error


def _indices(bound: BoundSpec, knobs: Knobs) -> dict[str, list[int]]:
    """Knob -> indices of the interventions that it turns.

    None for the hook points means all interventions that have a strength; a glob means those at what it matches.
    """
    indices: dict[str, list[int]] = {}
    numbered = [(n, edit.hook, one) for n, (edit, one) in enumerate(bound.edits)]
    for name, where in knobs.items():
        if not name.strip():
            raise InterventionError(f"a knob is an input of the graph, and {name!r} is no name for one")
        if where is None:
            indices[name] = [n for n, _, one in numbered if one.rules.has_strength]
            missing = [] if indices[name] else ["*"]
        else:
            hooks = [HookChoice(str(hook)) for hook in ([where] if isinstance(where, str | HookPoint) else where)]
            indices[name] = [n for n, point, _ in numbered if any(hook.selects(point) for hook in hooks)]
            missing = [str(hook) for hook in hooks if not any(hook.selects(point) for _, point, _ in numbered)]
        if missing:
            there = ", ".join(f"{one.kind} at {point}" for _, point, one in numbered) or "none"
            raise InterventionError(f"knob {name!r}: nothing that it could turn at {missing[0]}; there are: {there}")
    turned = [n for where in indices.values() for n in where]
    if len({*turned}) != len(turned):
        raise InterventionError(f"knobs {', '.join(knobs)}: an intervention can have one knob only")
    return indices


def _compiled(bound: BoundSpec, original: HookedModel, knobs: dict[str, list[int]]) -> onnx.ModelProto:
    """The graph, its weights still in the hooked model's files."""
    model, plan, spec = bound.model, bound.plan, bound.spec
    edited, report = apply_plan(model.proto, plan, model.metadata)
    taken = {*edited.tensors()} & {*knobs}
    if taken:
        raise InterventionError(f"the graph has a value called {taken.pop()!r} already: give the knob another name")
    _refuse_large_fragments(spec)
    bake(edited, bound, knobs, report)
    prune(edited, report)
    proto = to_proto(edited, model.proto, dict.fromkeys(knobs, ()))
    if plan.gradients is not None:
        proto = add_gradients(proto, plan.gradients, report)
    proto = bake_parts(proto, bound, report)
    facts = {
        "what": "a compiled intervention graph: not the original model",
        "family": model.metadata.family,
        "mionnx": version("mionnx"),
        "graph_sha256": hashlib.sha256(original.proto.SerializeToString(deterministic=True)).hexdigest(),
        "weights_sha256": model.weights_sha256,
        "spec_sha256": _nameable(spec, plan).sha256,  # of the file's bytes
        "interventions": [f"{edit.kind} at {edit.hook}" for edit in plan.edits]
        + [state.title for state in (*spec.state_steerings, *spec.state_knockouts)],
        "captures": [want.fetched for want in plan.captures],
        "knobs": {name: [plan.edits[n].hook for n in where] for name, where in knobs.items()},
        "blocks": _blocks(proto),
    }
    if plan.gradients is not None:
        facts |= {"metric": str(spec.metric), "gradients": [node.fetched for node in plan.gradients.by]}
    proto.metadata_props.add(key=COMPILED, value=json.dumps(facts))
    return proto


def _blocks(proto: onnx.ModelProto) -> dict[str, list[int]]:
    """Bits and accuracy levels of a graph's products with weights in blocks; empty without any."""
    products = [attributes(node) for node in proto.graph.node if node.op_type == "MatMulNBits"]
    if not products:
        return {}
    return {
        "bits": sorted({one.get("bits", 4) for one in products}),
        "accuracy_level": sorted({one.get("accuracy_level", 0) for one in products}),
    }


def _with_fused(proto: onnx.ModelProto, model: HookedModel, fused: str) -> onnx.ModelProto:
    """A compiled graph with fused operators of the model's file."""
    if fused == NONE:
        return proto
    flow = Dataflow(model.proto)
    restored, count = restore(proto, flow, read_fused(flow, model.metadata.fused), padding=fused == PADDED)
    if not count:
        has = f"{len(model.metadata.fused)} fused operators" if model.metadata.fused else "no fused operators"
        raise InputError(f"fused={fused!r}: the model has {has}, and none can stand in this graph: use fused='none'")
    entry = next(entry for entry in restored.metadata_props if entry.key == COMPILED)
    attends = any((node.domain, node.op_type) in UNPADDED for node in restored.graph.node)
    entry.value = json.dumps({**json.loads(entry.value), "fused": count, "unpadded": attends})
    return restored


def _refuse_large_fragments(spec: HookSpec) -> None:
    """Refuse fragments beyond 2 GiB: their weights lie in model.onnx, wherever the model's do."""
    size = sum(edit.fragment.size for _, edit in spec.interventions if edit.fragment is not None)
    if size > LIMIT:
        raise InputError(
            f"the splices' weights are {size / 2**30:.1f} GiB, and model.onnx, which they go into, holds 2"
        )


def _nameable(spec: HookSpec, plan: Plan) -> HookSpec:
    """The spec with every capture and gradient by name: a file holds no predicate."""
    named = _without_captures(spec)
    for want in plan.captures:
        named.capture(want.hook, before=want.before, dtype=want.dtype)
    if plan.gradients is not None:
        named.gradients = []
        for want in plan.gradients.by:
            named.gradient(want.hook, before=want.before)
    return named


def _write_model(
    model: HookedModel, proto: onnx.ModelProto, at: Path, packaging: Packaging, progress: Progress
) -> None:
    provider = TARGETS[packaging.target]
    if provider is not None or packaging.placed == "embedded":
        model.need_weights(f"a file for {packaging.target} with its weights {packaging.placed}")
    if provider is not None:
        _check_size(proto, packaging)
        options = Options(provider)
        engine_of(options).write_optimised(proto.SerializeToString(), model.folder, at / GRAPH, DATA, options)
        written = onnx.load(at / GRAPH, load_external_data=False)
        del written.metadata_props[:]
        written.metadata_props.extend(proto.metadata_props)
        if (at / DATA).exists():
            store_once(written, at / DATA)
        if packaging.placed == "embedded":
            reshape_shared(written)
            onnx_file.embed(written, at)
            (at / DATA).unlink(missing_ok=True)
        (at / GRAPH).write_bytes(written.SerializeToString())
        return
    if packaging.placed == "embedded":
        reshape_shared(proto)
        _check_size(proto, packaging)
        onnx_file.embed(proto, model.folder)
    else:
        for done, name in enumerate(files := onnx_file.locations(proto) if model.has_weights else {}):
            progress(f"writing {name}", done, len(files))
            (at / name).parent.mkdir(parents=True, exist_ok=True)
            _deliver((model.folder / name).resolve(), at / name, packaging.placed)
    (at / GRAPH).write_bytes(proto.SerializeToString())


def _check_size(proto: onnx.ModelProto, packaging: Packaging) -> None:
    size = sum(onnx_file.locations(proto).values())
    if packaging.placed == "embedded" and size > LIMIT:
        raise InputError(
            f"the weights are {size / 2**30:.1f} GiB, and a file with its weights embedded holds 2: use "
            "weights='alongside'"
        )


def _deliver(source: Path, target: Path, how: str) -> None:
    if how == "alongside":
        shutil.copyfile(source, target)
        return
    try:
        os.link(source, target)
    except OSError as error:
        raise InputError(
            f"{source} cannot be linked to from {target.parent} ({error.strerror}): use weights='alongside'"
        ) from error


def _write_rest(
    model: HookedModel, spec: HookSpec, proto: onnx.ModelProto, at: Path, packaging: Packaging, name: str
) -> None:
    facts = json.loads(next(entry.value for entry in proto.metadata_props if entry.key == COMPILED))
    spec.save(str(at / SPEC))
    for file in files_beside(model.folder, KEPT):
        (copy_tokenizer if file.name == TOKENIZER_FILE else shutil.copyfile)(file, at / file.name)
    _name_inputs(at / "tokenizer_config.json")
    if packaging.layout == "optimum" and not (at / "config.json").is_file():
        raise ModelError(f"{model.folder} has no config.json, and optimum loads no model without one")
    interface = [(value, _type(value)) for value in proto.graph.input if value.name not in _initializers(proto)]
    optional = [(value, _type(value)) for value in proto.graph.input if value.name in _initializers(proto)]
    outputs = [(value, _type(value)) for value in proto.graph.output]
    (at / CARD).write_text(card(facts, spec, model.metadata, interface, optional, outputs, packaging.target))
    if packaging.layout == "triton":
        (at / "config.pbtxt").write_text(triton_config(_triton_name(name), interface, optional, outputs))


def _name_inputs(path: Path) -> None:
    """Name the graph's inputs in a tokenizer's config without their names.

    A tokenizer class of transformers 4 gives segments too, which no decoder reads.
    """
    config = read_json(path) if path.is_file() else None
    if isinstance(config, dict) and "model_input_names" not in config:
        path.write_text(json.dumps({**config, "model_input_names": [*INPUT_NAMES]}, ensure_ascii=False, indent=1))


def _initializers(proto: onnx.ModelProto) -> set[str]:
    return {tensor.name for tensor in proto.graph.initializer}


def _type(value: onnx.ValueInfoProto) -> tuple[str, list[Any]]:
    """The dtype's ONNX name and the shape, numbers and names."""
    tensor = value.type.tensor_type
    dims = [dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?" for dim in tensor.shape.dim]
    return onnx.TensorProto.DataType.Name(tensor.elem_type), dims


def _triton_name(name: str) -> str:
    if not re.fullmatch(r"[\w.-]+", name):
        raise InputError(f"{name!r} is no name for a Triton model: letters, digits, '.', '-' and '_' only")
    return name
