"""`MIModel.compile`: a model with a spec's interventions baked in, written to a folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import onnx

from mionnx.bind.bound_spec import Binder, BoundSpec
from mionnx.bind.metric_inputs import with_ids
from mionnx.bind.state_gates import states_of
from mionnx.compile.bake import TurnedKnob, bake, knob_default
from mionnx.compile.bake_outputs import bake_parts
from mionnx.compile.fused_attention import fuse_attention
from mionnx.compile.fused_nodes import fuse_norms
from mionnx.compile.in_dtype import NarrowingModel, in_dtype
from mionnx.compile.knobs import Knob, Knobs, as_knobs, check_strength, knob_facts
from mionnx.compile.layouts import CLIENT_LAYOUTS
from mionnx.compile.monitors import Monitor, add_monitors, as_monitor, monitor_facts
from mionnx.compile.package import LIMIT, write_package
from mionnx.compile.packaging import Packaging
from mionnx.errors import InputError, InterventionError, ModelError
from mionnx.graph.dataflow import Dataflow
from mionnx.graph.edited_graph import to_proto
from mionnx.graph.fused_operators import read_fused, restore
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import ROUNDING_LEVEL, HookedModel
from mionnx.graph.metadata import COMPILED
from mionnx.graph.operator_table import UNPADDED
from mionnx.graph.own_version import own_version
from mionnx.graph.packed_weight import at_accuracy_level, attributes
from mionnx.machine.progress import Progress, shown
from mionnx.machine.typed import typed
from mionnx.rewrite.apply_plan import apply_plan
from mionnx.rewrite.gradient.gradient_outputs import add_gradients
from mionnx.rewrite.plan import NONE, PADDED, Outputs, Plan
from mionnx.rewrite.prune import prune
from mionnx.spec.hook_choice import HookChoice
from mionnx.spec.hook_spec import HookSpec


class RunningModel(NarrowingModel, Protocol):
    """A model with a tokenizer; its class, `run.Runner`, stands on this floor too."""

    def token_id(self, text: str) -> int:
        """The id of a text that is one token."""

    def check_token(self, token: int) -> int:
        """Refuse an id outside the vocabulary."""

    def watch_memory(self) -> None:
        """Return memory in the next pause, if the process has grown."""


@typed()
def compile_model(
    model: RunningModel,
    hooks: HookSpec,
    folder: str | Path,
    *,
    knobs: Knobs | None = None,
    captures: bool = True,
    last_logits: bool = False,
    weights: str | None = None,
    target: str = "generic",
    layout: str = "plain",
    fused: str = "none",
    accuracy_level: int | None = None,
    plain: bool = False,
    required: bool | None = None,
    monitors: Mapping[str, Any] | None = None,
    dtype: str | None = None,
    texts: str | Sequence[str] | None = None,
    bound: float | None = None,
) -> Path:
    """Write a folder with one plain ONNX model in which a spec's interventions are baked in.

    `mionnx.compile.package` describes the folder. A call of the compiled graph that starts at token 0 is the prompt:
    negative positions count from its end, and "generated" means the tokens of later calls.

    Args:
        hooks: the spec. Values must be the same for all tokens they apply to. Its metric and gradients are outputs of
            the graph, `mionnx.metric` [batch] and `{hook point}.gradient`; its tokens and arrays must be the same for
            all rows.
        folder: path of a folder that does not exist yet.
        knobs: name of a graph input -> the hook points whose interventions it scales (None: all that have a strength).
            A glob means those that it matches. The input multiplies what is added or projected out, by default by 1,
            or is the factor of a scale. A `Knob` says its range, unit and meaning too, or writes a file a dose.
        required: whether knobs must be fed; else they may be left out, in clients that know inputs with a default. By
            default as the layout's client needs it.
        monitors: name of an output -> what is read at every token: a direction (the projection on it), probes of
            `mionnx.probe` (the best of them), a pair (hook point, linear probe of scikit-learn's or mionnx'), a
            `lens_monitor` or an `sae_monitor`.
        captures: keep the spec's captures as outputs.
        last_logits: return the logits of the last position only.
        weights, target, layout, fused, accuracy_level: see `mionnx.compile.packaging.Packaging`; a level that the
            model was opened with is that of the file, which else is 4 where weights are blocks.
        plain: compile the model itself, of an empty spec, which is refused otherwise.
        dtype: "float16" or "bfloat16", of a model of float32: it is narrowed first, with an exact remedy for what
            overflows, and the card says what was done; the spec means the same. If left out, the model's own.
        texts, bound: of a dtype, as for `narrow`.

    Returns:
        the folder.

    Raises:
        HookError, InterventionError, GradientError: a spec that does not fit the model, or that only a single call can
            have.
        InputError: an empty spec without `plain`, a level for a model without weights in blocks, or what the layout's
            client cannot run.
        ModelError: the folder exists or cannot be written.
        RuntimeMissingError: the target's provider is not installed.

    Example:
        spec = HookSpec().intervene("blocks.1.attn.hook_z", Intervention.Zero(heads=[3]))
        folder = model.compile(spec, "without-head-3")
    """
    level = model.options.accuracy_level if accuracy_level is None else accuracy_level
    if level is None and model.hooked.in_blocks:
        level = ROUNDING_LEVEL  # ONNX Runtime computes such products in floats some ten times slower
    packaging, folder = Packaging(weights, target, layout, fused, level), Path(folder)
    if folder.exists():
        raise ModelError(f"{folder} exists already")
    spec = hooks if captures else _without_captures(hooks)
    if plain != (spec.is_empty() and not monitors):
        raise InputError(
            "plain=True compiles the model itself, and the spec is not empty: leave one of the two out"
            if plain
            else "the spec has no intervention and no output of its own, so that nothing would be baked in: give some, "
            "or plain=True (--plain) for the model itself"
        )
    if hooks.metric is not None:
        # A compiled graph has no tokenizer: texts become ids.
        spec = replace(spec, metric=with_ids(hooks.metric, model.token_id, model.check_token))
    reads = {name: as_monitor(name, what, model.hooked) for name, what in (monitors or {}).items()}
    named = as_knobs(knobs or {})
    required = _required(named, required, packaging.layout)
    name = model.source[0] if model.source is not None and not Path(model.source[0]).expanduser().exists() else None

    def baked(hooked: HookedModel) -> tuple[onnx.ModelProto, HookSpec]:
        leveled = _at_level(hooked, packaging)
        chosen = Binder(leveled).bind(spec, Outputs(last=last_logits), differentiated=True).sparing_padding()
        proto = _compiled(chosen, hooked, name, _turned(chosen, named), required, reads)
        # a mask with holes, of an invisible token, is for those operators that are right for padding
        part = PADDED if packaging.fused != NONE and states_of(chosen.spec) else packaging.fused
        return _with_fused(proto, leveled, part), _nameable(chosen.spec, chosen.plan)

    if dtype is not None:
        baked(model.hooked)  # what does not fit is refused before minutes of measuring
    with in_dtype(model, dtype, texts, bound, folder) as written, shown() as progress:
        proto, nameable = baked(written.hooked)
        write_package(written.hooked, proto, nameable, folder, packaging, named, last_logits, progress)
    model.watch_memory()
    return folder


def compile_plain(
    model: HookedModel, folder: Path, layout: str, check: Callable[[Path], Mapping[str, Any]], progress: Progress
) -> Path:
    """Write a model itself in a layout.

    Args:
        check: called with the path of the graph before the folder is in its place; what the card says of it.
    """
    packaging = Packaging(layout=layout, accuracy_level=ROUNDING_LEVEL if model.in_blocks else None)
    leveled = _at_level(model, packaging)
    bound = Binder(leveled).bind(HookSpec(), Outputs(), differentiated=True)
    proto = _compiled(bound, model, None, {}, False, {})
    write_package(model, proto, HookSpec(), folder, packaging, {}, False, progress, check)
    return folder


def _required(knobs: Mapping[str, Knob], required: bool | None, layout: str) -> bool:
    """Whether knobs must be fed."""
    client, inputs = CLIENT_LAYOUTS[layout], [name for name, knob in knobs.items() if not knob.doses]
    if required is not None and not inputs:
        raise InputError("required= is of knobs, and no knob is an input here")
    if inputs and not client.turns_knobs:
        raise client.refuse(
            f"{client.client} feeds a graph no inputs of its own, so that nobody could turn {inputs[0]!r}: give "
            f"knobs={{{inputs[0]!r}: Knob(doses=[0, 0.5, 1])}} for a file a dose"
        )
    if inputs and client.required_knobs and required is False:
        raise client.refuse(f"{client.client} feeds no input that has a default: leave required=False out")
    return client.required_knobs if required is None else required


def _without_captures(spec: HookSpec) -> HookSpec:
    bare = HookSpec().extend(spec)
    bare.captures.clear()
    return bare


def _at_level(model: HookedModel, packaging: Packaging) -> HookedModel:
    """The model with its products of blocks at the level that they are compiled at."""
    level = packaging.accuracy_level
    if level is None:  # a compiled graph gives what `forward` gives
        return model
    proto, products = at_accuracy_level(model.proto, level)
    if not products:
        raise InputError(f"accuracy_level={level} has no effect: {model.name} has no products with weights in blocks")
    return replace(model, proto=proto)


def _turned(bound: BoundSpec, knobs: Mapping[str, Knob]) -> dict[str, TurnedKnob]:
    """Knob -> the interventions that it turns.

    None for the hook points means all interventions that have a strength; a glob means those at what it matches.
    """
    turned: dict[str, TurnedKnob] = {}
    numbered = [(n, edit.hook, one) for n, (edit, one) in enumerate(bound.edits)]
    for name, knob in knobs.items():
        where = knob.points
        if where is None:
            indices = [n for n, _, one in numbered if one.rules.has_strength]
            missing = [] if indices else ["*"]
        else:
            hooks = [HookChoice(str(hook)) for hook in ([where] if isinstance(where, str | HookPoint) else where)]
            indices = [n for n, point, _ in numbered if any(hook.selects(point) for hook in hooks)]
            missing = [str(hook) for hook in hooks if not any(hook.selects(point) for _, point, _ in numbered)]
        if missing:
            there = ", ".join(f"{one.kind} at {point}" for _, point, one in numbered) or "none"
            raise InterventionError(f"knob {name!r}: nothing that it could turn at {missing[0]}; there are: {there}")
        edits = [bound.edits[n] for n in indices]
        turned[name] = TurnedKnob(knob, indices, [edit.hook for edit, _ in edits], knob_default(name, edits))
        check_strength(knob, f"knob {name!r}: its default", turned[name].default)
    taken = [n for one in turned.values() for n in one.indices]
    if len({*taken}) != len(taken):
        raise InterventionError(f"knobs {', '.join(knobs)}: an intervention can have one knob only")
    return turned


def _compiled(
    bound: BoundSpec,
    original: HookedModel,
    source: str | None,
    knobs: Mapping[str, TurnedKnob],
    required: bool,
    monitors: Mapping[str, Monitor],
) -> onnx.ModelProto:
    """The graph, its weights still in the hooked model's files; `source` is the name that opens the model, if any."""
    model, spec = bound.model, bound.spec
    # positions are counted on the mask as it comes: `bake_gates` hides tokens behind it
    plan = replace(bound.plan, edits=tuple(replace(edit, counted=False) for edit in bound.plan.edits))
    edited, report = apply_plan(model.proto, plan, model.metadata, {one.hook for one in monitors.values()})
    taken = {*edited.tensors()} & {*knobs}
    if taken:
        raise InterventionError(f"the graph has a value called {taken.pop()!r} already: give the knob another name")
    _refuse_large_fragments(spec)
    bake(edited, bound, knobs, report)
    add_monitors(edited, monitors, model, report)
    prune(edited, report)
    # A knob is one number: an input of shape [].
    proto = to_proto(edited, model.proto, {name: () for name, one in knobs.items() if not one.knob.doses})
    if plan.gradients is not None:
        proto = add_gradients(proto, plan.gradients, report)
    proto = bake_parts(proto, bound, report)
    facts = {
        "what": "a compiled intervention graph: not the original model",
        "model": original.name,
        "source": source,
        "dtype": model.metadata.weight_dtype,
        "family": model.metadata.family,
        "mionnx": own_version(),
        # Serialisation is not the same bytes each time unless asked for.
        "graph_sha256": hashlib.sha256(original.proto.SerializeToString(deterministic=True)).hexdigest(),
        "weights_sha256": model.weights_sha256,
        "spec_sha256": _nameable(spec, plan).sha256,  # of the file's bytes
        "interventions": [f"{edit.kind} at {edit.hook}" for edit in plan.edits]
        + [state.title for state in (*spec.state_steerings, *spec.state_knockouts)],
        "captures": [want.fetched for want in plan.captures],
        "knobs": {
            name: knob_facts(one.knob, one.default, one.hooks, required)
            for name, one in knobs.items()
            if not one.knob.doses
        },
        "doses": {name: [*one.knob.doses] for name, one in knobs.items() if one.knob.doses},
        "monitors": monitor_facts(monitors),
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
    """A compiled graph with fused operators: those of an adopted model's file, or attention as one node."""
    if fused == NONE:
        return proto
    flow, adopted = Dataflow(model.proto), bool(model.metadata.fused)
    if adopted:
        result, count = restore(proto, flow, read_fused(flow, model.metadata.fused), padding=fused == PADDED)
    else:
        result, count = fuse_attention(proto, model, padding=fused == PADDED)
        result = fuse_norms(result) if count else result
    if not count:
        has = f"{len(model.metadata.fused)} fused operators" if adopted else "no fused operators"
        raise InputError(f"fused={fused!r}: the model has {has}, and none can stand in this graph: use fused='none'")
    entry = next(entry for entry in result.metadata_props if entry.key == COMPILED)
    attends = any((node.domain, node.op_type) in UNPADDED for node in result.graph.node)
    rotates = any(attributes(node).get("do_rotary") for node in result.graph.node)
    facts = {"fused": count, "adopted": adopted, "unpadded": adopted and attends, "one_row": attends}
    facts["right"] = not adopted and rotates  # where padding has to stand
    entry.value = json.dumps(json.loads(entry.value) | facts)
    return result


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
