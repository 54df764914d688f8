"""Missing parts of a graph: a cache of keys and values, and a mask that heeds padding and a past."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx_ir as ir

from exporters.adopt.attention import TURNED
from exporters.adopt.flow import CONTENT_KEEPING, SIZE_OPERATORS, Flow, perm_of, rank
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
from exporters.op_writer import move
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
SCALING_OPERATORS = frozenset(("Mul", "Div"))
WIDENING = frozenset(("Expand", "Tile"))
HEAD_AXES = 4  # of a product of heads
AS_STOCK = "adopted logits = the file's own"


@dataclass(frozen=True)
class Plain:
    """A graph as it was recognised, with nothing added."""

    # model, proto: its values named, and the same in protobuf.
    model: ir.Model
    proto: onnx.ModelProto
    folder: Path
    structure: Recognised
    probed: Probe
    windows: Sequence[int | None] | None  # of each layer, as the config says; None without a config
    lacks: frozenset[str]  # what the file has not: "mask" (its attention heeds none), "cache"
    counts: bool  # whether the graph makes its positions itself, and they cannot be given
    longest: int = LONGEST_PROBE  # tokens of the longest text that it takes
    adds: bool = False  # whether fused attention of the file adds its mask to scores


def complete(
    plain: Plain,
    clean: Callable[[ir.Model], onnx.ModelProto],
    checked: Callable[[onnx.ModelProto, Probe], list[LawResult]],
) -> tuple[onnx.ModelProto, Probe, list[LawResult]]:
    """Add a cache and a mask to a graph that lacks them, if it keeps the laws with them; else note why not."""
    notes, layers = plain.structure.notes, len(plain.structure.layers)
    before = list(notes)
    try:
        if not extend(plain):
            laws = checked(plain.proto, plain.probed)
            if plain.structure.recurrence:  # states heed padding, and carry on what they have, by nodes written here
                laws += check_extension(plain.probed, plain.proto, plain.folder, layers)
            return plain.proto, plain.probed, laws
        proto = clean(plain.model)
        probed = probe_points(proto, plain.folder, [name for name, _ in plain.structure.points])
        laws = [*checked(proto, probed), *check_extension(probed, proto, plain.folder, layers)]
        # where the file's own graph did not run, the graph without what was added stands for it
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
    # what the failed attempt has noted goes
    notes[:] = [*before, *(f"{LACKING[lack]}; {NOT_ADDED.get(lack, 'it')} cannot be added: {why}" for lack in lacks)]
    return plain.proto, plain.probed, checked(plain.proto, plain.probed)


def extend(plain: Plain) -> bool:
    """Add to a model what its file lacks, in place; returns whether anything was added."""
    model, flow = plain.model, Flow(plain.model.graph)
    values = {value.name: value for node in model.graph for value in node.outputs}
    masks = [
        maskings(flow, layer, values[f"blocks.{layer}.attn.hook_scores"], attention.queries_keys)
        if attention is not None
        else []  # a recurrence heeds padding by itself
        for layer, attention in enumerate(map(plain.structure.attention.get, range(len(plain.structure.layers))))
    ]
    masked = MaskProbe(plain.proto, plain.folder, plain.probed.values, [one for masking in masks for one in masking])
    complete = all(
        not masking or serves_chunks(masked, masking, plain.windows[layer] if plain.windows else None)
        for layer, masking in enumerate(masks)
    )
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
    # before the mask gets new readers: these took its length for that of the text, which a past makes longer
    reads = [(node, place) for node, place in op.inputs[MASK_INPUT].uses()] if MASK_INPUT in op.inputs else []
    stale = [one for layer in range(len(masks)) for one in _add_cache(op, flow, plain, values, layer)] if cache else []
    for layer, masking in enumerate(masks):
        if layer not in plain.structure.attention:
            continue
        scores = values[f"blocks.{layer}.attn.hook_scores"]
        kind = ir.DataType.from_numpy(plain.probed.values[str(scores.name)].dtype)
        replace_masks(op, masking, scores, windows[layer], kind, plain.adds)
    model.graph.insert_before(model.graph[0], op.nodes)
    sweep_away(model.graph, [one.node for masking in masks for one in masking] + stale)
    if cache:
        _read_sizes_of_tokens(reads, op.inputs[TOKEN_INPUT])
    model.graph.sort()
    return True


def _windows(plain: Plain, masked: MaskProbe, masks: Sequence[list[Masking]]) -> list[int | None]:
    """The window of each layer, by the config and by the numbers of its mask."""
    if plain.windows is None:
        raise ExportError("no config.json lies beside the file: whether its attention has a window is not known")
    windows = [
        window_of(masked, masking, window, layer, plain.longest) if masking else window
        for layer, (masking, window) in enumerate(zip(masks, plain.windows, strict=True))
    ]
    plain.structure.windows = windows
    if masked.unseen:
        sizes = ", ".join(map(str, sorted({*masked.unseen.values()})))
        plain.structure.notes.append(
            f"layers {[*masked.unseen]}: a window of {sizes} is what config.json says; the file's mask is that of a "
            "text without a past, and so long a one was not computed"
        )
    return windows


def _add_cache(
    op: DecoderWriter, flow: Flow, plain: Plain, values: dict[str | None, ir.Value], layer: int
) -> list[ir.Node]:
    """Give a layer a past; returns nodes that may not be read any more."""
    attention, prefix = plain.structure.attention[layer], f"blocks.{layer}.attn.hook_"
    count = plain.probed.values[f"{prefix}q"].shape[1]
    keys = values.get(f"{prefix}rot_k") or values[f"{prefix}k"]
    stale = list[ir.Node]()
    for part, heads, product in (
        ("key", keys, attention.queries_keys),
        ("value", values[f"{prefix}v"], attention.pattern_values),
    ):
        _, groups, _, width = plain.probed.values[str(heads.name)].shape
        stale.append(product.inputs[1].producer())
        joined = _add_past(op, layer, part, heads, groups, width)
        _read_joined(op, flow, product, heads, joined, count, groups, width)
    return stale


def _read_sizes_of_tokens(reads: Sequence[tuple[ir.Node, int]], tokens: ir.Value) -> None:
    """Let what took the mask for as long as the tokens read the tokens' size."""
    for node, _ in reads:
        if node.graph is not None and node.op_type not in SIZE_OPERATORS:
            raise ExportError(f"{node.op_type} reads the attention mask for something that is no mask of scores")
    move(((node, place) for node, place in reads if node.graph is not None), tokens)


def _add_past(op: DecoderWriter, layer: int, part: str, heads: ir.Value, groups: int, width: int) -> ir.Value:
    """Append keys or values, [batch, groups, seq, width], to a past, a new input; what they come to is an output."""
    shape = ir.Shape(["batch", groups, "past", width])
    past = ir.Value(name=f"past_key_values.{layer}.{part}", type=heads.type, shape=shape)
    op.graph.inputs.append(past)
    joined = op.Concat(past, heads, axis=2)
    joined.name, present = f"adopted.{layer}.{part}", op.Identity(joined)
    present.name, present.type = f"present.{layer}.{part}", heads.type
    present.shape = ir.Shape(["batch", groups, "total", width])
    op.graph.outputs.append(present)
    return joined


def _read_joined(
    op: DecoderWriter,
    flow: Flow,
    product: ir.Node,
    heads: ir.Value,
    joined: ir.Value,
    count: int,
    groups: int,
    width: int,
) -> None:
    """Let a product read heads with their past instead of `heads`, repeated, turned and scaled as before."""
    replayed, turned, widened, value = list[ir.Node](), False, False, product.inputs[1]
    while value is not heads:
        node = None if value is None else value.producer()
        text = [] if node is None else flow.text(node)
        if node is None or len(text) != 1:
            raise ExportError(f"{product.op_type} {product.name!r} reads more than keys or values of its layer")
        if node.op_type in SCALING_OPERATORS or node.op_type == "Cast":
            sizes = [size for other in flow.others(node) if other.shape is not None for size in other.shape]
            if any(size != 1 for size in sizes):  # all numbers of a head are treated alike
                raise ExportError(f"{node.op_type} {node.name!r} multiplies keys or values with {sizes}")
            replayed.append(node)
        elif node.op_type == "Transpose":
            turned ^= perm_of(node) in TURNED  # turned twice is not turned
        elif node.op_type in WIDENING:
            widened = True
        elif node.op_type not in CONTENT_KEEPING:
            raise ExportError(f"{node.op_type} changes keys or values on their way to {product.op_type}")
        value = text[0]
    if rank(product.inputs[0]) not in (HEAD_AXES, None):
        raise ExportError(f"{product.op_type} {product.name!r} multiplies heads and rows of a batch as one axis")
    operand = op.repeated(joined, count // groups, count, width) if widened else joined
    operand = op.Transpose(operand, perm=[0, 1, 3, 2]) if turned else operand
    for node in reversed(replayed):
        inputs = [operand if flow.is_text(entry) else entry for entry in node.inputs]
        operand = getattr(op, node.op_type)(
            *inputs, **({"to": node.attributes.get_int("to", 1)} if node.op_type == "Cast" else {})
        )
    product.replace_input_with(1, operand)
