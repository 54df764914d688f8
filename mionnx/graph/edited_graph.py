"""`edit` opens a graph to edit, `serialise` and `to_proto` write it.

onnx-graphsurgeon's importer and exporter make and read some thousand objects a model, which took nine tenths of the
time of a rewrite. A model that is edited again is a copy of what was imported, and what an edit leaves as it was is
written as it came.
"""

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

import numpy as np
import onnx
from onnx_graphsurgeon import Constant, Graph, Node, Tensor, Variable, export_onnx, import_onnx
from onnx_graphsurgeon.exporters.onnx_exporter import OnnxExporter
from onnx_graphsurgeon.ir.tensor import SparseValues
from onnx_graphsurgeon.logger import G_LOGGER
from onnx_graphsurgeon.logger.logger import LoggerSuppress
from onnx_graphsurgeon.util.misc import SynchronizedList

KEPT_NODES = 2**13  # of all imports that are kept: a base, its pieces, the graph whose gradients are asked for
CAME = "came"  # attribute of a node or a value: what it was imported from, and what of it an edit may have changed

_imports: dict[int, tuple[onnx.ModelProto, int, Graph]] = {}  # by identity, with the size: a model that grew is another
_lock = Lock()


def edit(proto: onnx.ModelProto, again: bool = False) -> Graph:
    """Import a model as a graph to edit; `proto` is left alone.

    Args:
        again: whether the same object will be edited again: its import is kept, and the graph is a copy of it.
    """
    if not again or proto.functions:
        return _imported(proto)
    key, size = id(proto), proto.ByteSize()
    with _lock:
        entry = _imports.pop(key, None)
    if entry is None or entry[0] is not proto or entry[1] != size:
        entry = proto, size, _imported(proto)
    with _lock:
        _imports[key] = entry  # last in the dictionary
        sizes = {old: len(graph.nodes) for old, (_, _, graph) in _imports.items()}
        while len(_imports) > 1 and sum(sizes[old] for old in _imports) > KEPT_NODES:
            del _imports[next(iter(_imports))]
    return _copied(entry[2], {})


def _imported(proto: onnx.ModelProto) -> Graph:
    # graphsurgeon keeps ONNX's number where numpy has no such dtype: bfloat16 is the one of ml_dtypes here.
    with LoggerSuppress(G_LOGGER, G_LOGGER.ERROR):  # it warns of each such number
        graph = import_onnx(proto)
    for part in (graph, *graph.subgraphs(recursive=True)):
        for tensor in (*part.tensors().values(), *part.inputs, *part.outputs):
            if isinstance(tensor, Variable) and isinstance(tensor.dtype, int) and tensor.dtype:
                tensor.dtype = numpy_dtype(tensor.dtype)
    for node, came in zip(graph.nodes, proto.graph.node, strict=True):
        if not branches(node):
            node.__dict__[CAME] = came, [*came.input], [*came.output], {**node.attrs}
    tensors = graph.tensors()
    for value in proto.graph.value_info:
        tensor = tensors.get(value.name)
        if isinstance(tensor, Variable) and value.type.HasField("tensor_type"):
            tensor.__dict__[CAME] = value, tensor.dtype, tensor.shape
    return graph


def _copied(graph: Graph, tensors: dict[int, Tensor]) -> Graph:
    """A copy, of graphs inside of it too; `tensors`: the copies of values, by the identity of what they are of."""
    copy, nodes = object.__new__(Graph), list[Node]()
    for node in graph.nodes:
        own = object.__new__(Node)
        attributes = {
            name: _copied(value, tensors) if isinstance(value, Graph) else value for name, value in node.attrs.items()
        }
        own.__dict__.update(node.__dict__, attrs=attributes)
        for mine, others in (("inputs", "outputs"), ("outputs", "inputs")):
            values = [_copied_tensor(value, tensors) for value in node.__dict__[mine]]
            own.__dict__[mine] = _synchronised(own, others, values)
            for value in values:
                list.append(value.__dict__[others], own)
        nodes.append(own)
    inputs, outputs = ([_copied_tensor(value, tensors) for value in ends] for ends in (graph.inputs, graph.outputs))
    copy.__dict__.update(graph.__dict__, nodes=nodes, inputs=inputs, outputs=outputs, _functions=[])
    copy.import_domains = list(graph.import_domains)
    return copy


def _copied_tensor(tensor: Tensor, tensors: dict[int, Tensor]) -> Tensor:
    copy = tensors.get(id(tensor))
    if copy is None:
        copy = tensors[id(tensor)] = object.__new__(type(tensor))
        copy.__dict__.update(tensor.__dict__)
        copy.__dict__["inputs"] = _synchronised(copy, "outputs", ())
        copy.__dict__["outputs"] = _synchronised(copy, "inputs", ())
    return copy


def _synchronised(parent: Any, field: str, values: Sequence[Any]) -> SynchronizedList:
    """graphsurgeon's list of a node's values, or of a value's nodes, without telling the other side."""
    synchronised = SynchronizedList.__new__(SynchronizedList)
    list.extend(synchronised, values)
    synchronised.parent_obj, synchronised.field_name = parent, field
    return synchronised


def serialise(graph: Graph, origin: onnx.ModelProto) -> bytes:
    """Serialise an edited graph as an ONNX model, with the metadata of its origin."""
    proto = to_proto(graph, origin, {})
    proto.metadata_props.extend(origin.metadata_props)
    return proto.SerializeToString()


def to_proto(graph: Graph, origin: onnx.ModelProto, defaults: Mapping[str, Sequence[int | str]]) -> onnx.ModelProto:
    """Convert an edited graph to an ONNX model without metadata; `defaults`: constants that are inputs too."""
    proto = export_onnx(graph) if graph.functions else _exported(graph)
    _restore_defaults(proto, origin)
    for tensor in proto.graph.initializer:
        if tensor.name in defaults:
            value = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(defaults[tensor.name]))
            proto.graph.input.append(value)
    proto.producer_name, proto.producer_version = origin.producer_name, origin.producer_version
    return proto


def _exported(graph: Graph) -> onnx.ModelProto:
    """What graphsurgeon's `export_onnx` gives of a graph without local functions."""
    model, export = onnx.ModelProto(ir_version=graph.ir_version or onnx.IR_VERSION), OnnxExporter
    model.opset_import.extend(_opsets(graph))
    written = model.graph
    written.name = graph.name
    if graph.doc_string:  # an empty one would be written too
        written.doc_string = graph.doc_string
    written.node.extend(map(_node, graph.nodes))
    written.input.extend(export.export_value_info_proto(value, True) for value in graph.inputs)
    written.output.extend(export.export_value_info_proto(value, True) for value in graph.outputs)
    tensors = named(graph)
    constants = [tensor for tensor in tensors.values() if isinstance(tensor, Constant)]
    sparse = [tensor for tensor in constants if isinstance(tensor._values, SparseValues)]
    dense = [tensor for tensor in constants if not isinstance(tensor._values, SparseValues)]
    written.initializer.extend(map(export.export_tensor_proto, dense))
    written.sparse_initializer.extend(map(export.export_sparse_tensor_proto, sparse))
    ends = {value.name for value in (*graph.inputs, *graph.outputs)}
    inner = (value for name, value in tensors.items() if isinstance(value, Variable) and name not in ends)
    written.value_info.extend(_value_info(one) for one in inner if one.dtype is not None or one.shape is not None)
    return model


def _node(node: Node) -> onnx.NodeProto:
    """A node as it was imported where nothing of it is changed, else as graphsurgeon writes it."""
    came, inputs, outputs, attributes = node.__dict__.get(CAME, (None, (), (), {}))
    same = came is not None and node.op == came.op_type and node.name == came.name
    same = (
        same and [value.name for value in node.inputs] == inputs and [value.name for value in node.outputs] == outputs
    )
    if (
        same
        and len(attributes) == len(node.attrs)
        and all(node.attrs.get(name) is attributes[name] for name in attributes)
    ):
        return came
    return OnnxExporter.export_node(node)


def _value_info(value: Variable) -> onnx.ValueInfoProto:
    came, dtype, shape = value.__dict__.get(CAME, (None, None, None))
    if came is not None and came.name == value.name and dtype is value.dtype and shape is value.shape:
        return came
    return OnnxExporter.export_value_info_proto(value, True)


def named(graph: Graph) -> dict[str, Tensor]:
    """Name -> value of a graph, as `Graph.tensors` gives them, without a search for doubles."""
    tensors = {value.name: value for value in graph.inputs if value.name}
    for node in graph.nodes:
        for values in (node.inputs, node.outputs):
            for value in values:
                if value.name:
                    tensors[value.name] = value
    return tensors | {value.name: value for value in graph.outputs if value.name}


def _opsets(graph: Graph) -> list[onnx.OperatorSetIdProto]:
    """The versions of operator sets that a graph imports, version 1 of those that an edit brought."""
    imported = [*(graph.import_domains or [onnx.helper.make_opsetid("", graph.opset)])]
    used, waiting = dict[str, None](), [graph]
    while waiting:
        for node in waiting.pop().nodes:
            used[node.domain or ""] = None
            waiting += branches(node)
    domains = {entry.domain for entry in imported} | {""}
    return [*imported, *(onnx.helper.make_opsetid(domain, 1) for domain in used if domain not in domains)]


def _restore_defaults(proto: onnx.ModelProto, origin: onnx.ModelProto) -> None:
    """Restore inputs with a default; graphsurgeon takes them for constants."""
    # an input with a default is an initializer too; graphsurgeon drops the input, as it takes it for a constant
    constants = {tensor.name for tensor in proto.graph.initializer} - {value.name for value in proto.graph.input}
    proto.graph.input.extend(value for value in origin.graph.input if value.name in constants)


def numpy_dtype(dtype: Any) -> np.dtype[Any]:
    """Numpy's dtype, or that of ml_dtypes, of a dtype or of ONNX's number of one."""
    return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(dtype) if isinstance(dtype, int) else dtype)


def branches(node: Node) -> list[Graph]:
    """The graphs inside of a node; `Node.subgraphs` takes a hundred times as long, as most nodes have none."""
    return [value for value in node.attrs.values() if isinstance(value, Graph)]


def sort_nodes(graph: Graph) -> None:
    """Sort nodes so that each can run, as `Graph.toposort` does, in a chain of any length.

    That one goes from a node to what it reads by recursion: 600 interventions at one hook point are too many.
    """
    for node in graph.nodes:
        for inner in branches(node):
            sort_nodes(inner)
    local = {value.name for node in graph.nodes for value in node.outputs if value.name}
    levels, nodes = dict[int, int](), dict[int, Node]()

    def read(node: Node) -> list[Node]:
        """The makers of a node's inputs, and of what its subgraphs read from outside."""
        values = [*node.inputs, *(one for inner in branches(node) for one in inner._foreign_tensors().values())]
        return [maker for value in values if value.name in local for maker in value.inputs]

    for node in graph.nodes:
        # a stack in the place of recursion; a node stays on it until all makers of its inputs have a level
        waiting = [(node, read(node))]
        while waiting:
            last, makers = waiting[-1]
            unknown = [maker for maker in makers if id(maker) not in levels]
            if unknown:
                waiting.append((unknown[0], read(unknown[0])))
                continue
            nodes[id(last)] = last
            levels.setdefault(id(last), 1 + max([levels[id(maker)] for maker in makers], default=-1))
            waiting.pop()
    graph.nodes = sorted(nodes.values(), key=lambda one: levels[id(one)])  # stable: nodes of one level keep their order
