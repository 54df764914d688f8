"""Missing parts of a graph: a cache of keys and values, and a mask that heeds padding and a past."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx_ir as ir

from exporters.adopt.caching import add_past, read_joined
from exporters.adopt.flow import SIZE_OPERATORS, Flow
from exporters.adopt.masking import (
    LONGEST_PROBE,
    Masking,
    MaskProbe,
    maskings,
    replace_masks,
    serves_chunks,
    sweep_away,
    window_of,
)
from exporters.adopt.operators.decoder_writer import MASK_INPUT, TOKEN_INPUT, DecoderWriter
from exporters.adopt.recognise import Recognised
from exporters.adopt.self_check import LawResult, check_extension, compare, probe_points
from exporters.probe import Probe
from mionnx.errors import ExportError

LACKING = {
    "mask": "attention_mask: the file attends to padding; give texts of one length",
    "cache": "past_key_values: the file has no cache; generation and sweeps need one",
    "chunks": "attention_mask: the file's own may be wrong for several tokens after a past",
}
ADDED = {
    "mask": "attention_mask: the file attends to padding; a mask was added that does not",
    "cache": "past_key_values: the file has no cache; one was added",
    "chunks": "attention_mask: the file's own is wrong for several tokens after a past; another was put in its place",
}
NOT_ADDED = {"chunks": "another"}
AS_STOCK = "adopted logits = the file's own"


@dataclass(frozen=True)
class Plain:
    """A graph as it was recognised, with nothing added.

    Attributes:
        model: its values named.
        proto: the same, in protobuf.
        windows: of each layer, as the config says; None without a config.
        lacks: what the file has not: "mask" (its attention heeds none), "cache".
        counts: whether the graph makes its positions itself, and they cannot be given.
        longest: tokens of the longest text that it takes.
        adds: whether fused attention of the file adds its mask to scores.
    """

    model: ir.Model
    proto: onnx.ModelProto
    folder: Path
    found: Recognised
    probed: Probe
    windows: Sequence[int | None] | None
    lacks: frozenset[str]
    counts: bool
    longest: int = LONGEST_PROBE
    adds: bool = False


def complete(
    plain: Plain,
    clean: Callable[[ir.Model], onnx.ModelProto],
    checked: Callable[[onnx.ModelProto, Probe], list[LawResult]],
) -> tuple[onnx.ModelProto, Probe, list[LawResult]]:
    """Add a cache and a mask to a graph that lacks them, or leave it and note why.

    They stay if the graph keeps the laws with them.

    Args:
        plain: the graph; its notes are told what was done.
        clean: writes a model as protobuf.
        checked: the laws that hold of every adopted graph.

    Returns:
        the graph, one run of it, and the laws.
    """
    notes, layers = plain.found.notes, len(plain.found.attention)
    before = list(notes)
    try:
        if not extend(plain):
            return plain.proto, plain.probed, checked(plain.proto, plain.probed)
        proto = clean(plain.model)
        probed = probe_points(proto, plain.folder, [name for name, _ in plain.found.points])
        laws = [*checked(proto, probed), *check_extension(probed, proto, plain.folder, layers)]
        if not any(law.law == AS_STOCK for law in laws):
            with_, without = probed.values["logits"], plain.probed.values["logits"]
            laws.append(compare("logits with what was added = without", None, with_, without, layers * probed.rounding))
        broken = [law for law in laws if not law.holds]
        if not broken:
            notes.extend(ADDED[lack] for lack in sorted(plain.lacks or {"chunks"}))
            return proto, probed, laws
        why = "; ".join(map(str, broken))
    except ExportError as error:
        why = str(error)
    lacks = sorted(plain.lacks or {"chunks"})
    notes[:] = [*before, *(f"{LACKING[lack]}; {NOT_ADDED.get(lack, 'it')} cannot be added: {why}" for lack in lacks)]
    return plain.proto, plain.probed, checked(plain.proto, plain.probed)


def extend(plain: Plain) -> bool:
    """Add to a model what its file lacks, in place.

    Returns:
        whether anything was added.

    Raises:
        ExportError: the graph cannot take it, and why.
    """
    model, flow = plain.model, Flow(plain.model.graph)
    values = {value.name: value for node in model.graph for value in node.outputs}
    masks, complete, masked = list[list[Masking]](), True, MaskProbe(plain.proto, plain.folder, plain.probed.values)
    for layer, attention in enumerate(plain.found.attention):
        masks.append(maskings(flow, layer, values[f"blocks.{layer}.attn.hook_scores"], attention.queries_keys))
        masked.expect(masks[-1])
    for layer, masking in enumerate(masks):
        window = None if plain.windows is None else plain.windows[layer]
        complete = complete and (not masking or serves_chunks(masked, masking, window))
    cache = "cache" in plain.lacks
    if not plain.lacks and complete:
        if any(window is not None for window in plain.windows or ()):
            with contextlib.suppress(ExportError):  # nothing is added, so the config is believed
                _windows(plain, masked, masks)
        return False
    if plain.counts and cache:
        raise ExportError("the graph makes its positions itself, so none can be given to the tokens after a past")
    windows = _windows(plain, masked, masks)
    op = DecoderWriter(model)
    op.begin()
    reads = [(node, place) for node, place in _input(model.graph, MASK_INPUT).uses()] if MASK_INPUT in op.inputs else []
    stale = [one for layer in range(len(masks)) for one in _add_cache(op, flow, plain, values, layer)] if cache else []
    for layer, masking in enumerate(masks):
        scores = values[f"blocks.{layer}.attn.hook_scores"]
        kind = ir.DataType.from_numpy(plain.probed.values[str(scores.name)].dtype)
        replace_masks(op, masking, scores, windows[layer], kind, plain.adds)
    model.graph.insert_before(model.graph[0], op.nodes)
    sweep_away(model.graph, [one.node for masking in masks for one in masking] + stale)
    _read_sizes_of_tokens(model.graph, reads, cache)
    model.graph.sort()
    return True


def _input(graph: ir.Graph, name: str) -> ir.Value:
    return next(value for value in graph.inputs if value.name == name)


def _windows(plain: Plain, masked: MaskProbe, masks: Sequence[list[Masking]]) -> list[int | None]:
    """The window of each layer, by the config and by the numbers of its mask."""
    if plain.windows is None:
        raise ExportError("no config.json lies beside the file: whether its attention has a window is not known")
    windows = [
        window_of(masked, masking, window, layer, plain.longest) if masking else window
        for layer, (masking, window) in enumerate(zip(masks, plain.windows, strict=True))
    ]
    plain.found.windows = windows
    if masked.unseen:
        sizes = ", ".join(map(str, sorted({*masked.unseen.values()})))
        plain.found.notes.append(
            f"layers {[*masked.unseen]}: a window of {sizes} is what config.json says; the file's mask is that of a "
            "text without a past, and so long a one was not computed"
        )
    return windows


def _add_cache(
    op: DecoderWriter, flow: Flow, plain: Plain, values: dict[str | None, ir.Value], layer: int
) -> list[ir.Node]:
    """Give a layer a past; returns nodes that may not be read any more."""
    attention, prefix = plain.found.attention[layer], f"blocks.{layer}.attn.hook_"
    count = plain.probed.values[f"{prefix}q"].shape[1]
    keys = values.get(f"{prefix}rot_k") or values[f"{prefix}k"]
    stale = list[ir.Node]()
    for part, heads, product in (
        ("key", keys, attention.queries_keys),
        ("value", values[f"{prefix}v"], attention.pattern_values),
    ):
        _, groups, _, width = plain.probed.values[str(heads.name)].shape
        stale.append(product.inputs[1].producer())
        joined = add_past(op, layer, part, heads, groups, width)
        read_joined(op, flow, product, heads, joined, count, groups, width)
    return stale


def _read_sizes_of_tokens(graph: ir.Graph, reads: Sequence[tuple[ir.Node, int]], cache: bool) -> None:
    """Let what took the mask for as long as the tokens read the tokens' size.

    Raises:
        ExportError: something else follows from the mask.
    """
    for node, place in reads:
        if node.graph is None or not cache:
            continue
        if node.op_type not in SIZE_OPERATORS:
            raise ExportError(f"{node.op_type} reads the attention mask for something that is no mask of scores")
        node.replace_input_with(place, _input(graph, TOKEN_INPUT))
