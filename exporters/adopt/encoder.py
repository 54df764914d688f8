"""Encoders of text: told from decoders by their patterns, and the hook points of their heads.

A file is an encoder's if it has no past and every layer gives weight to later tokens. What it is for follows from the
shape of its main output and the matrices behind the stream; config.json and modules.json beside it say what shapes
cannot.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from exporters.adopt.flow import (
    KEEPING,
    SIZE_OPERATORS,
    Flow,
    Origin,
    climb,
    input_of,
    is_linear,
    linear_maps,
    rank,
    static,
    table_of,
)
from exporters.adopt.operators.decoder_writer import MASK_INPUT, POSITIONS
from exporters.adopt.pooling import has_length_one, poolings_of, write_pooling
from exporters.adopt.recognise import Recognised, sum_of
from exporters.head_facts import activation_of, head_named, label_names, tells_replaced
from exporters.op_writer import node_like
from exporters.probe import Array, check_bounded, probe
from exporters.sentence_folder import SentenceModules, sentence_modules, stated_activation
from mionnx.errors import ExportError
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.metadata import HEAD_POINTS, NEXT_TOKEN
from mionnx.graph.output_head import LOGITS

ADDED_EMBEDDINGS = (HookPoint.PosEmbed.name, HookPoint.TokenTypeEmbed.name)
POOLER_OUTPUT = "pooler_output"


@dataclass(frozen=True)
class FileHead:
    """What an adopted file is for; that of a decoder by default.

    Attributes:
        kind: a key of `mionnx.graph.metadata.MAIN_OUTPUTS`.
        config: the table of config.json.
        sentence: what modules.json says; None without one.
        added: whether the pooling is none of the file's own.
        stated: what a CrossEncoder's folder says makes its scores.
    """

    kind: str = NEXT_TOKEN
    config: Mapping[str, Any] = field(default_factory=dict)
    sentence: SentenceModules | None = None
    added: bool = False
    stated: str = ""

    @property
    def both(self) -> bool:
        """Whether tokens read those behind them."""
        return self.kind != NEXT_TOKEN

    def facts(self, values: Mapping[str, Array], last: str) -> dict[str, Any]:
        """The fields of the metadata, by the values of one run; `last` is the hook point of the last stream."""
        if not self.both:
            return {}
        point = HEAD_POINTS.get(self.kind)
        count = values[point].shape[-1] if point else 0
        labels = self.config.get("id2label")
        return {
            "direction": "both",
            "head": self.kind,
            "labels": label_names(self.kind, labels if isinstance(labels, dict) else {}, count),
            "activation": activation_of(self.kind, self.config.get("problem_type"), count, stated=self.stated),
            "pooling": self._pooling(values, last) if self.kind == "embedding" else {},
        }

    def _pooling(self, values: Mapping[str, Array], last: str) -> dict[str, Any]:
        stated: dict[str, Any] = self.sentence.metadata() if self.sentence is not None else {}
        if self.added:
            return stated
        stream = values.get(HookPoint.FinalNorm.name, values[last])
        pooled, embedding = values[HookPoint.Pooled.name], values[HookPoint.Embedding.name]
        own: dict[str, Any] = {"modes": poolings_of(stream, pooled), "normalize": has_length_one(embedding)}
        if stated and len(stated["modes"]) == 1 and own["modes"] and own["modes"] != stated["modes"]:
            raise ExportError(f"the file pools by {own['modes'][0]}, and modules.json says {stated['modes'][0]}")
        return {**stated, **own, "modes": own["modes"] or stated.get("modes", [])}


DECODER_HEAD = FileHead()


def reads_both_ways(decoder: Recognised, write: Callable[[], onnx.ModelProto], folder: Path) -> bool:
    """Whether a graph without a past gives weight to later tokens in every layer; it is run once for that."""
    flow = decoder.flow
    if any(flow.origin.get(value) == Origin.PAST for value in flow.graph.inputs):
        return False
    names, proto = [str(one.pattern.name) for one in decoder.attention.values()], write()
    check_bounded(proto, folder)
    added = [(name, str(value.name)) for name, value in decoder.points if name in ADDED_EMBEDDINGS]
    values = probe(proto, folder, [*names, *(value for _, value in added if value)]).values
    both = all(np.triu(values[name], 1).any() for name in names)
    for name, value in added if both else ():
        if values[value].shape[0] == 1:
            decoder.points[:] = [point for point in decoder.points if point[0] != name]
            decoder.notes.append(f"{name}: the file adds the same to all rows of a batch")
    return both


def find_head(decoder: Recognised, folder: Path, config: Mapping[str, Any]) -> FileHead:
    """What an encoder is for, by its main output, its config and the modules beside it."""
    flow, stream = decoder.flow, _stream(decoder)
    sentence = sentence_modules(folder)
    architecture = next(iter(config.get("architectures") or ()), "")
    stated = head_named(architecture) if isinstance(architecture, str) else None
    if isinstance(architecture, str) and tells_replaced(architecture):
        raise ExportError(
            f"{architecture}: the one logit of each token is not recognised in a file; export its checkpoint"
        )
    maps, width = linear_maps(flow, stream, flow.logits), static(flow.logits, -1)
    if rank(flow.logits) == 2:
        normed = any(node.op_type in ("ReduceL2", "LpNormalization") for node in flow.between(stream, flow.logits))
        plain = sentence is not None or normed or not maps or stated == "none"
        if plain and stated != "classes":
            return FileHead("embedding", config, sentence)
        return FileHead("classes", config, sentence, stated=stated_activation(folder))
    if not maps:
        return FileHead("none" if sentence is None else "embedding", config, sentence, sentence is not None)
    rows = vocabulary(flow)
    few = stated is None and width is not None and rows is not None and width < rows // 2
    return FileHead("token_classes" if stated == "token_classes" or few else "masked_lm", config, sentence)


def vocabulary(flow: Flow) -> int | None:
    """Rows of the embedding of tokens."""
    node = flow.embedding.producer()
    if node is None or node.inputs[0] is None:
        return None
    return static(*table_of(node.inputs[0]))


def name_head(decoder: Recognised, model: ir.Model, head: FileHead) -> None:
    """Put the sums of a normed stream and the points of an encoder's head among the points; outputs stand alone."""
    sums, points = decoder.sums, list[tuple[str, ir.Value]]()
    stream, ends = _stream(decoder), (HookPoint.FinalNorm.name, HookPoint.Logits.name)
    for name, value in decoder.points:
        points += [(sum_of(name), sums[name])] if name in sums else []
        alone = name == HookPoint.Embed.name and decoder.points[1][0] not in ADDED_EMBEDDINGS  # a norm follows
        points += [(name, decoder.flow.embedding if alone else value)] if name not in ends else []
    decoder.notes[:] = [note for note in decoder.notes if not note.startswith(HookPoint.FinalNorm.name)]
    final = _final_norm(decoder, stream)
    points += [(HookPoint.FinalNorm.name, final)] if final is not None else []
    decoder.points, decoder.main = points, HEAD_POINTS.get(head.kind)
    for value in model.graph.inputs:
        if value.name == MASK_INPUT:  # without a past there are no more keys than tokens
            value.shape = ir.Shape(["batch", "seq"])
    if head.kind in ("none", "embedding") and rank(decoder.flow.logits) != 2:
        _show_stream(decoder, model, head)
        return
    points += _before_head(decoder, stream, head)
    points.append((HEAD_POINTS[head.kind], decoder.flow.logits))


def stream_point(names: Sequence[str]) -> str:
    """The hook point of the last stream, the final norm behind it if there is one."""
    ends = [name for name in names if name.endswith(".hook_resid_post") or name == HookPoint.FinalNorm.name]
    return ends[-1]


def _stream(decoder: Recognised) -> ir.Value:
    """The last value of the stream, normed where it is normed after additions."""
    return next(value for name, value in reversed(decoder.points) if name.endswith(".hook_resid_post"))


def _final_norm(decoder: Recognised, stream: ir.Value) -> ir.Value | None:
    """The norm behind the last addition; None where the stream is normed after each."""
    flow, last = decoder.flow, None
    if decoder.sums:
        return None
    for value in flow.chain(flow.logits, stream):
        node = value.producer()
        called = any(flow.origin.get(one) == Origin.CALL for one in flow.others(node))
        if called or rank(value) != 3 or is_linear(flow, node) or node.op_type in ("Gather", "Slice", "GatherElements"):
            break
        last = value
    return None if last is None or climb(last, KEEPING) is climb(stream, KEEPING) else last


def _before_head(decoder: Recognised, stream: ir.Value, head: FileHead) -> list[tuple[str, ir.Value]]:
    """What the last product of a head reads, or the vector before a sentence embedding's last modules."""
    flow, maps = decoder.flow, linear_maps(decoder.flow, stream, decoder.flow.logits)
    if head.kind == "embedding":
        return [(HookPoint.Pooled.name, _pooled(flow, stream, maps))]
    point = {"masked_lm": HookPoint.MlmHead, "classes": HookPoint.Pooler}.get(head.kind)
    read = input_of(flow, maps[-1])
    if point is None or rank(read) != len(point.axes or ()) or climb(read, KEEPING) is climb(stream, KEEPING):
        return []
    return [(point.name, read)]


def _pooled(flow: Flow, stream: ir.Value, maps: Sequence[ir.Node]) -> ir.Value:
    """The first vector of a text: what a matrix or a norm behind the pooling reads, or the embedding itself."""
    for node in flow.between(stream, flow.logits):
        behind = node in maps or node.op_type in ("ReduceL2", "LpNormalization")
        if behind and rank(node.inputs[0]) == 2:
            return node.inputs[0]
    return flow.logits


def _show_stream(decoder: Recognised, model: ir.Model, head: FileHead) -> None:
    """Let the last stream be the main output by a node of its own, and a pooler's the second; or write the pooling."""
    flow, graph = decoder.flow, model.graph
    if head.added and head.sentence is not None:
        pooled, embedding = write_pooling(model, flow.logits, head.sentence)
        decoder.points += [(HookPoint.Pooled.name, pooled), (HookPoint.Embedding.name, embedding)]
        graph.outputs[graph.outputs.index(flow.logits)] = embedding
        flow.logits = embedding
        return
    pooler = next((one for one in graph.outputs if rank(one) == 2 and flow.is_text(one)), None)
    flow.logits = _apart(graph, flow.logits, LOGITS)
    if pooler is not None:
        decoder.points.append((HookPoint.Pooler.name, pooler))
        decoder.other_outputs.append(_apart(graph, pooler, POOLER_OUTPUT))


def _apart(graph: ir.Graph, value: ir.Value, name: str) -> ir.Value:
    """Make an output a copy of its value, so that the value can be a hook point."""
    node = node_like("Identity", [value], value)
    graph.append(node)
    graph.outputs[graph.outputs.index(value)] = node.outputs[0]
    own = value.name
    value.name = f"stock.{own}" if own == name else own
    node.outputs[0].name = name
    return node.outputs[0]


def drop_positions(graph: ir.Graph) -> None:
    """Remove the input of positions that a graph does not read: it makes them itself."""
    for value in [value for value in graph.inputs if value.name == POSITIONS]:
        for node in [node for node, _ in value.uses()]:
            if node.op_type not in SIZE_OPERATORS | {"Identity"} or any(one.uses() for one in node.outputs):
                raise ExportError(f"{node.op_type} reads positions that the graph does not take")
            graph.remove(node, safe=True)
        graph.inputs.remove(value)
