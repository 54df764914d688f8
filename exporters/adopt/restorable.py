"""What the metadata of an adopted model keep of its file: fused operators to put back, and the graph as it came.

Both run wherever nothing between is asked for; each is tried here beside the nodes in its place.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx_ir as ir

from exporters.adopt.naming import DROPPED_OUTPUT
from exporters.adopt.operators.fused import Fused
from exporters.adopt.self_check import compare, rounding
from exporters.adopt.source_file import SourceFile
from exporters.probe import Probe, feed_of, open_session, run
from mionnx.errors import ExportError, ModelError
from mionnx.graph.dataflow import Dataflow
from mionnx.graph.fused_operators import FusedOperator, read_fused, restore, standing, written
from mionnx.graph.io_names import KEYS_AND_VALUES, PASTS
from mionnx.graph.metadata import PREFIX
from mionnx.graph.output_head import LOGITS
from mionnx.graph.stock_graph import StockGraph, check_stock, packed
from mionnx.graph.validate import graphs

CAST = ".own_dtype"  # ends names of inputs and outputs in the file's own dtype
PLANES = ".planes"  # ends the name of positions that a token has several of
OWN = ".stock"  # ends names that the hooked model has for other values


def keep_fused(
    proto: onnx.ModelProto, folder: Path, probed: Probe, fused: Iterable[Fused], layers: int, notes: list[str]
) -> None:
    """Put the fused operators into the metadata of an adopted graph, if they run and agree with their nodes."""
    flow = Dataflow(proto)
    allowed = layers * rounding(proto, probed)
    operators = read_fused(flow, standing(flow, filter(None, (one.proto() for one in fused))))
    # all together, and then those alone that are right for padded texts
    for chosen in (operators, [one for one in operators if not one.unpadded]):
        if not chosen:
            return
        problem = _problem(proto, flow, folder, probed, chosen, allowed)
        if problem is None:
            _keep(proto, "fused", [written(one.node) for one in chosen])
            return
        left = sorted({one.node.op_type for one in chosen})
        notes.append(f"{', '.join(left)}: standard nodes always stand for them: {problem}")


def _keep(proto: onnx.ModelProto, key: str, table: object) -> None:
    proto.metadata_props.add(key=f"{PREFIX}{key}", value=json.dumps(table, separators=(",", ":")))


def _problem(
    proto: onnx.ModelProto, flow: Dataflow, folder: Path, probed: Probe, fused: list[FusedOperator], allowed: float
) -> str | None:
    """Why some operators cannot be put back; None if they can."""
    restored, _ = restore(proto, flow, fused, padding=False)
    names = [entry.name for entry in restored.graph.output]
    try:
        values = run(open_session(restored, folder), names, probed.feeds)
    except ExportError as error:
        return str(error)
    results = [
        compare(f"fused {name} = that of its nodes", None, value, probed.values[name], allowed)
        for name, value in zip(names, values, strict=True)
    ]
    return next((str(result) for result in results if not result.holds), None)


@dataclass(frozen=True)
class Interface:
    """The inputs and outputs of a file by its own names, and those of the hooked model for them."""

    inputs: Mapping[str, str]
    outputs: Mapping[str, str]

    @classmethod
    def of(cls, inputs: Mapping[str, str], ends: Mapping[str, ir.Value], logits: str) -> "Interface":
        """The names, once caches have theirs; those of outputs and logits are the file's own."""
        dropped = {own: str(value.name) for own, value in ends.items() if str(value.name).startswith(DROPPED_OUTPUT)}
        presents = {own: name.removeprefix(DROPPED_OUTPUT) for own, name in dropped.items()}
        return cls({own: name for name, own in inputs.items()}, {**presents, logits: LOGITS})


def keep_stock(
    proto: onnx.ModelProto,
    folder: Path,
    source: SourceFile,
    names: Interface,
    probed: Probe,
    expanded: bool,
    runs: bool,
    notes: list[str],
) -> None:
    """Put a file's own graph into the metadata, to be tried beside the adopted one in use, or note what prevents it."""
    layers = len({value.name.split(".")[1] for value in proto.graph.input if value.name.startswith(PASTS)})
    try:
        stock = StockGraph(_by_hooked_names(source, names, proto), expanded, max(1, layers) * rounding(proto, probed))
        check_stock(stock, proto, folder)
        if not runs:  # it has not run yet: at least once, with one row
            session = open_session(stock.proto, folder)
            run(session, [LOGITS], {entry.name: feed_of(entry, 1) for entry in session.get_inputs()})
    except (ExportError, ModelError) as error:
        notes.append(f"specs that touch nothing run the adopted graph, not the file's own: {error}")
        return
    _keep(proto, "stock", packed(stock))


def _by_hooked_names(source: SourceFile, names: Interface, hooked: onnx.ModelProto) -> onnx.ModelProto:
    """The graph of a file with the interface of the hooked model; its nodes are its own."""
    # Inputs, keys and values of other dtypes are cast; logits stay in the file's own. The flag of a merged decoder says
    # whether there is a past.
    proto, renamed = onnx.ModelProto(), dict[str, str]()
    proto.CopyFrom(source.stock)
    before = _take_inputs(proto.graph, names.inputs, hooked, source.flag, renamed)
    after = _take_outputs(proto.graph, names.outputs, hooked, renamed)
    _rename(proto, renamed)
    nodes = [*before, *proto.graph.node, *after]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    _forget_origin(proto)
    return proto


def _take_inputs(
    graph: onnx.GraphProto, names: Mapping[str, str], hooked: onnx.ModelProto, flag: str | None, renamed: dict[str, str]
) -> list[onnx.NodeProto]:
    """Give a graph the inputs of the hooked model; returns nodes that adapt them."""
    constants, own = {tensor.name for tensor in graph.initializer}, {value.name: value for value in hooked.graph.input}
    inputs, read, added = list(graph.input), dict[str, None](), list[onnx.NodeProto]()
    for value in inputs:
        new = names.get(value.name)
        if value.name in constants:
            continue
        if value.name == flag:
            added += _has_past(value, own)
        elif new not in own:
            raise ExportError(f"its input {value.name} is not one of the adopted graph")
        else:
            read[new] = None
            kind = value.type.tensor_type.elem_type
            same, renamed[value.name] = own[new].type.tensor_type.elem_type == kind, new
            if not same:
                renamed[value.name] = f"{new}{CAST}"
                added.append(onnx.helper.make_node("Cast", [new], [f"{new}{CAST}"], f"{new}{CAST}", to=kind))
            if len(value.type.tensor_type.shape.dim) > len(own[new].type.tensor_type.shape.dim):
                added += _in_planes(value, renamed)
    del graph.input[:]
    graph.input.extend(
        [*(own[name] for name in own if name in read), *(one for one in inputs if one.name in constants)]
    )
    return added


def _in_planes(value: onnx.ValueInfoProto, renamed: dict[str, str]) -> list[onnx.NodeProto]:
    """Nodes that repeat the positions of a text, [batch, seq], for each of a token's places."""
    name, node = renamed[value.name], onnx.helper.make_node
    renamed[value.name], sizes = f"{name}{PLANES}", f"{name}{PLANES}.sizes"
    planes = value.type.tensor_type.shape.dim[0].dim_value
    wide = node("Expand", [name, sizes], [renamed[value.name]], renamed[value.name])
    return [node("Constant", [], [sizes], sizes, value_ints=[planes, 1, 1]), wide]


def _take_outputs(
    graph: onnx.GraphProto, names: Mapping[str, str], hooked: onnx.ModelProto, renamed: dict[str, str]
) -> list[onnx.NodeProto]:
    """Give a graph the outputs of the hooked model; returns nodes that make them."""
    own, outputs, added = (
        {value.name: value for value in hooked.graph.output},
        list(graph.output),
        list[onnx.NodeProto](),
    )
    shared = [value for value in outputs if names.get(value.name) in own]
    for value in shared:
        new, kind = names[value.name], own[names[value.name]].type.tensor_type.elem_type
        same = value.type.tensor_type.elem_type == kind or new == LOGITS
        renamed[value.name] = new if same else f"{new}{CAST}"
        added += [] if same else [onnx.helper.make_node("Cast", [f"{new}{CAST}"], [new], new, to=kind)]
    del graph.output[:]
    for value in shared:
        graph.output.add().CopyFrom(own[names[value.name]])
        # no Cast behind the logits: whoever reads them casts, and bits are those of the file
        if names[value.name] == LOGITS:
            graph.output[-1].type.tensor_type.elem_type = value.type.tensor_type.elem_type
    return added


def _has_past(flag: onnx.ValueInfoProto, inputs: Mapping[str, onnx.ValueInfoProto]) -> list[onnx.NodeProto]:
    """Nodes that compute the flag of a merged decoder."""
    past, name = KEYS_AND_VALUES.layer_inputs(0)[0], flag.name
    if past not in inputs:
        raise ExportError(f"its flag {name} asks for a past, which the adopted graph does not take")
    node, numbers = onnx.helper.make_node, (("axis", 2), ("none", 0))  # the past's length is axis 2 of its keys
    constants = [
        node("Constant", [], [f"{name}.{what}"], f"{name}.{what}", value_ints=[number]) for what, number in numbers
    ]
    sized = node("Shape", [past], [f"{name}.shape"], f"{name}.shape")
    length = node("Gather", [f"{name}.shape", f"{name}.axis"], [f"{name}.length"], f"{name}.length")
    return [*constants, sized, length, node("Greater", [f"{name}.length", f"{name}.none"], [name], f"{name}.past")]


def _rename(proto: onnx.ModelProto, names: dict[str, str]) -> None:
    """Rename values, in graphs inside too; others that have one of the names give way."""
    taken = {*names.values(), *(value.name for value in (*proto.graph.input, *proto.graph.output))}
    everywhere = [one for one in graphs(proto) if isinstance(one, onnx.GraphProto)]
    for graph in everywhere:
        defined = [name for node in graph.node for name in node.output] + [tensor.name for tensor in graph.initializer]
        names |= {name: f"{name}{OWN}" for name in defined if name in taken and name not in names}
    for graph in everywhere:
        for node in graph.node:
            node.input[:] = [names.get(name, name) for name in node.input]
            node.output[:] = [names.get(name, name) for name in node.output]
        # the outermost outputs are renamed already, by what the hooked model calls them
        inside = [] if graph is proto.graph else graph.output
        for one in (*graph.initializer, *graph.value_info, *inside):
            one.name = names.get(one.name, one.name)


def _forget_origin(proto: onnx.ModelProto) -> None:
    """Drop what an exporter noted: paths of its machine, among others."""
    del proto.metadata_props[:]
    proto.ClearField("doc_string")
    for graph in graphs(proto):
        graph.ClearField("doc_string")
        for node in graph.node:
            node.ClearField("doc_string")
            del node.metadata_props[:]
