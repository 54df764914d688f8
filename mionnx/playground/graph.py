"""The one graph of a playground: what can be changed, read and asked for are its inputs and outputs.

1. Every hook point that can be changed has a chain of slots. An affine slot is x * scale + add, two inputs that
   broadcast to the value: it stands for any sequence of adding, scaling, zeroing and replacing. Scores have one slot, a
   mask that is added. `clamp` and `project_out` have slots of their own where a spec uses them, in the spec's order.
2. Every such hook point is an output, after its slots, and so is every attention pattern.
3. A head that says something of each token reads chosen rows of the residual stream; see `mionnx.rewrite.lens_rows`.
   One that says something of a whole text, classes or an embedding, is left as it is.
4. Keys and values of the past are inputs and outputs, for generation; what reads texts whole has none.
5. Weights in blocks can be unpacked when the graph is opened, where there is memory for floats: a second graph of the
   same weight files, see `mionnx.rewrite.products_in_floats`.
6. A lens' matrices map rows of the streams before the head reads them; they are a weight file of their own.
7. Of a model in float16 inputs and outputs are float32 all the same; see `mionnx.rewrite.float32_ports`. What is fed
   must fit float16, except at hook points of a rescaled model that hold more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mionnx.analysis.jacobian_lens.jacobian_lens import JacobianLens
from mionnx.bind.hook_index import index_hooks
from mionnx.errors import HookError, InputError, InterventionError, ModelError, nearest
from mionnx.graph import onnx_file
from mionnx.graph.dataflow import attributes
from mionnx.graph.edited_graph import to_proto
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.rewrite.apply_plan import apply_plan
from mionnx.rewrite.float32_ports import with_float32_ports
from mionnx.rewrite.lens_rows import ROWS_PREFIX, RowMap, lens_rows
from mionnx.rewrite.plan import CaptureNode, Edit, Plan
from mionnx.rewrite.products_in_floats import products_in_floats
from mionnx.rewrite.prune import prune
from mionnx.spec.hook_choice import HookChoice
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.kinds import KINDS

OFFERED = ("Embed", "ResidPre", "AttnScores", "AttnZ", "AttnOut", "SsmOut", "ResidMid", "MlpOut", "ResidPost")
AFFINE = ("add", "replace", "scale", "zero")
MASK_KINDS = ("add", "knockout")  # kinds at scores
EXTRA = ("clamp", "project_out")
COMPUTED = ("float32", "float16")  # dtypes of activations that browsers compute in
READS_BLOCKS = ("MatMulNBits", "GatherBlockQuantized")
AT_ROWS = ("FinalNorm", "Logits", "MlmHead", "TokenLogits")  # behind the rows that the head reads
SHOWN = ("next_token", "masked_lm", "classes", "token_classes", "embedding")  # heads that a page can show
LENS_FILE = "lens.bin"  # the weight file of a lens' matrices
SLOT_KINDS = {"affine": ("scale", "add"), "mask": ("knockout",)} | {kind: (kind,) for kind in EXTRA}


@dataclass
class EditSite:
    """A hook point that can be changed."""

    # axes, dims: the names of its axes, and their sizes where they are fixed.
    axes: tuple[str, ...]
    dims: tuple[str | int, ...]
    kinds: tuple[str, ...] = AFFINE
    slots: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)  # (kind of slot, its inputs) in their order
    limit: float | None = None  # the largest number that it holds; None of float32


@dataclass(frozen=True)
class PlaygroundGraph:
    """The graph, and what the browser has to know of it."""

    model: bytes  # the graph as bytes; its weights lie in the hooked model's files
    weights: Mapping[str, int]  # file -> bytes that the graph reads of it
    sites: Mapping[str, EditSite]
    patterns: Sequence[str]
    streams: Sequence[str]  # residual streams that the head can read, the last layer's last
    floats: bytes | None = None  # of weights in blocks, the graph that unpacks them when it is opened; else None
    floats_bytes: int = 0  # the memory that these take then
    # Of the weights in blocks, each number of bits once; a file's own blocks keep theirs, whatever is asked.
    bits: Sequence[int] = ()
    # The layers whose stream a lens maps, in the order of its rows; and its matrices, the contents of `LENS_FILE`.
    mapped: Sequence[int] = ()
    matrices: bytes = b""


def build_graph(
    model: HookedModel, spec: HookSpec, points: Sequence[str] = (), lens: JacobianLens | None = None
) -> PlaygroundGraph:
    """The graph of a transformer in which the usual hook points, those of a spec, and some more can be changed."""
    _refuse_model(model)
    maps = {} if lens is None else _maps(model, lens)
    sites = _sites(model, spec, points)
    patterns = [name for name in model.order if HookPoint.parse(name).variant == "AttnPattern"]
    layers = model.metadata.sizes.num_layers or 0
    streams = [str(HookPoint.ResidPost(layer)) for layer in range(layers)]
    captures = tuple(CaptureNode(name) for name in sorted({*sites, *patterns}, key=model.order.__getitem__))
    plan = Plan(tuple(edit for name, site in sites.items() for edit in _edits(name, site, model)), captures)
    graph, report = apply_plan(model.proto, plan, model.metadata)
    if model.metadata.positional:
        lens_rows(graph, streams, report, [*maps.values()])
    prune(graph, report)
    proto = with_float32_ports(to_proto(graph, model.proto, {}))
    matrices = onnx_file.set_apart(proto, ROWS_PREFIX, LENS_FILE)
    unpacked, size = products_in_floats(proto)
    floats = unpacked.SerializeToString() if size else None
    bits = sorted({attributes(node).get("bits", 4) for node in proto.graph.node if node.op_type in READS_BLOCKS})
    files = onnx_file.locations(proto)
    graph_bytes = proto.SerializeToString()
    return PlaygroundGraph(graph_bytes, files, sites, patterns, streams, floats, size, bits, [*maps], matrices)


def _maps(model: HookedModel, lens: JacobianLens) -> dict[int, RowMap]:
    """The maps of a lens, by the layer behind which the stream is that they map."""
    if not model.metadata.positional:
        raise ModelError(f"the head of this {model.metadata.family} model reads no token alone: a lens has no place")
    if lens.biases and model.metadata.exponents:
        raise ModelError("streams of a rescaled model hold a power of two of their value, and this lens has biases")
    # A stream before a layer is the one behind the layer before; the embedding has no row on the page.
    behind = {layer - (lens.reads == "resid_pre"): layer for layer in lens.layers}
    maps = {}
    for layer, own in behind.items():
        if layer < 0:
            continue
        point = HookPoint.ResidPost(layer)
        with np.errstate(over="ignore"):  # refused below
            arrays = [one[own].astype(model.dtype(point)) for one in (lens.matrices, lens.biases) if one]
        if not all(np.isfinite(one).all() for one in arrays):
            raise InputError(f"the lens has numbers above the range of {model.metadata.dtype} in layer {own}")
        maps[layer] = RowMap(point.name, *arrays)
    return maps


def _refuse_model(model: HookedModel) -> None:
    model.need_weights("a playground")
    meta = model.metadata
    if meta.head not in SHOWN:
        has = "has no head: it gives its last stream" if meta.head == "none" else f"has the head {meta.head!r}"
        raise ModelError(
            f"a playground shows tokens, labels, tags or how alike texts are, and this {meta.family} model {has}"
        )
    if not meta.attends:
        raise ModelError(f"a playground shows attention, and this {meta.family} model is recurrent: it has none")
    if meta.carries_state:
        raise ModelError(f"a playground carries keys and values, and this {meta.family} model has recurrent layers too")
    if meta.dtype not in COMPUTED:
        raise ModelError(
            f"a playground computes in {' or '.join(COMPUTED)}, and this model in {meta.dtype}: open it so"
        )
    missing = [
        layer for layer in range(meta.sizes.num_layers or 0) if str(HookPoint.ResidPost(layer)) not in model.order
    ]
    if missing or not (model.has_cache or meta.reads_whole):
        lacks = f"hook_resid_post in layer {missing[0]}" if missing else "a past as inputs"
        needs = "the stream behind each layer" if meta.reads_whole else "a lens and a past"
        raise ModelError(f"a playground needs {needs}; this {meta.family} model lacks {lacks}")


def _sites(model: HookedModel, spec: HookSpec, points: Sequence[str]) -> dict[str, EditSite]:
    """The hook points that can be changed, in execution order."""
    names = {name for name in model.order if HookPoint.parse(name).variant in OFFERED}
    names |= {point.name for point, _ in index_hooks(spec, model).interventions}
    for choice in points:
        selected = {name for name in model.order if HookChoice(choice).selects(name)}
        if not selected:
            near = nearest(choice, model.order)
            raise HookError(f"this {model.metadata.family} model has no hook point {choice!r}{near}")
        names |= selected
    sites: dict[str, EditSite] = {}
    for name in sorted(names, key=model.order.__getitem__):
        point = HookPoint.parse(name)
        _refuse_point(point, model)
        scores = point.variant == "AttnScores"
        narrow = np.dtype(model.dtype(point)) == np.float16
        sites[name] = EditSite(
            point.axes or (),
            tuple(model.axes(point)),
            MASK_KINDS if scores else AFFINE,
            limit=float(np.finfo(np.float16).max) if narrow else None,
        )
    _chain(model, spec, sites)
    return sites


def _refuse_point(point: HookPoint, model: HookedModel) -> None:
    if point.derived:
        raise HookError(f"{point} is computed for captures alone; a playground can change {point.instead}")
    if point.variant in AT_ROWS and model.metadata.positional:
        raise HookError(
            f"{point} lies behind the rows that a playground's lens chooses; the nearest that it can change is "
            f"{HookPoint.ResidPost((model.metadata.sizes.num_layers or 1) - 1)}"
        )
    if np.dtype(model.dtype(point)).name not in COMPUTED:
        raise HookError(f"{point} holds {np.dtype(model.dtype(point))}, and a playground changes floats alone")


def _chain(model: HookedModel, spec: HookSpec, sites: Mapping[str, EditSite]) -> None:
    """Give every hook point its slots."""
    order: dict[str, list[str]] = {
        name: ["mask" if "knockout" in site.kinds else "affine"] for name, site in sites.items()
    }
    for point, one in index_hooks(spec, model).interventions:
        _refuse_intervention(point, one, sites[point.name])
        if one.kind in EXTRA:
            # Slots are in the spec's order: what it does after this kind needs an affine slot behind it.
            order[point.name] += [one.kind, "affine"]
            sites[point.name].kinds = tuple(sorted({*sites[point.name].kinds, one.kind}))
    for name, slots in order.items():
        count = 0
        for slot in slots:
            inputs: list[str] = []
            for kind in SLOT_KINDS[slot]:
                # Named as the inputs of the plan's edits: by the number of the edit at its hook point.
                inputs += (f"{name}.{count}.{kind}.{value}" for value in KINDS[kind].values)
                count += 1
            sites[name].slots.append((slot, tuple(inputs)))


def _refuse_intervention(point: HookPoint, one: Any, site: EditSite) -> None:
    allowed = site.kinds if "knockout" in site.kinds else (*AFFINE, *EXTRA)
    if one.kind not in allowed:
        raise InterventionError(f"{one.kind} at {point}: a playground has {', '.join(sorted(allowed))} there")
    # Positions are a phase's name, numbers, or a tuple of numbers for each row.
    by_row = isinstance(one.positions, tuple) and isinstance(one.positions[0], tuple)
    if one.rows is not None or one.experts is not None or by_row:
        raise InterventionError(f"{one.kind} at {point}: a playground runs one prompt, without rows= and experts=")
    if one.kind in EXTRA and one.limited:
        raise InterventionError(f"{one.kind} at {point}: in a playground it holds everywhere, without limits")


def _edits(name: str, site: EditSite, model: HookedModel) -> list[Edit]:
    point = HookPoint.parse(name)
    kinds = [kind for slot, _ in site.slots for kind in SLOT_KINDS[slot]]
    return [Edit(name, KINDS[kind].at(point, site.axes, False), n, site.axes) for n, kind in enumerate(kinds)]
