"""Checks on untrusted model files: no path outside the folder, no missing bytes, no unbounded constants.

Checked when a hooked model is opened, before a session is made; in subgraphs and functions too.

1. External data lie in files inside the folder, followed through links (see `mionnx.graph.folder_file`); offset and
   length inside the file, and the length what dtype and shape say. Two weights have the same bytes or none in common.
2. A tensor in the graph has as much data as its dtype and shape say.
3. The graph is valid ONNX by onnx's own checker: known operators, in an order that can run, each value made once.
4. No value grows without bound, see `mionnx.graph.value_sizes`; there are at most `NODES` nodes and `TENSORS` weights.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path

import onnx

from mionnx.errors import ModelError
from mionnx.graph.folder_file import resolve
from mionnx.graph.known_value import Dims
from mionnx.graph.onnx_file import WEIGHTLESS
from mionnx.graph.value_sizes import Scope, check_sizes

UNBOUNDED = 2**63  # bytes of a file that does not exist, in a graph without weights
NODES = 2**15  # a layer has some 50 to 300
TENSORS = 2**17  # 60 layers of 256 experts have some 50,000
PACKED: dict[int, int] = {onnx.TensorProto.INT4: 2, onnx.TensorProto.UINT4: 2, onnx.TensorProto.FLOAT4E2M1: 2}


@dataclass(frozen=True)
class Span:
    """File, offset and length of a weight."""

    location: str
    start: int
    end: int
    name: str


def check(proto: onnx.ModelProto, folder: Path, batches: Sequence[Mapping[str, Dims]] = ()) -> Scope:
    """Check everything above; returns what is known of each value in the last of the batches (inputs' shapes)."""
    check_counts(proto)
    root, sizes, spans = folder.resolve(), dict[str, int](), list[Span]()
    for graph in graphs(proto):
        for tensor in tensors(graph):
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                spans.append(_span(tensor, root, sizes))
            else:
                _check_held(tensor)
    _check_apart(spans)
    _check_valid(proto)
    weights = sum({(span.location, span.start, span.end): span.end - span.start for span in spans}.values())
    weights += sum(len(tensor.raw_data) for tensor in proto.graph.initializer)
    passes = [check_sizes(proto, shapes, weights, all_values=bool(batches)) for shapes in batches or [{}]]
    return passes[-1]


def check_counts(proto: onnx.ModelProto) -> None:
    """Check how many nodes and tensors a graph has, before anything is done for each of them."""
    nodes = tensor_count = 0
    for graph in graphs(proto):
        nodes += len(graph.node)
        tensor_count += len(graph.initializer) if isinstance(graph, onnx.GraphProto) else 0
        if nodes > NODES or tensor_count > TENSORS:
            raise ModelError(f"the graph has more than {NODES:,} nodes, or {TENSORS:,} weights: refused")


def _check_valid(proto: onnx.ModelProto) -> None:
    """Run onnx's checker, external weights shown to it as inputs: it reads their files."""
    try:
        onnx.checker.check_model(_without_files(proto))
    except (onnx.checker.ValidationError, ValueError) as error:  # names that are no text are a ValueError too
        raise ModelError(f"the graph is no valid ONNX: {error}") from error


def _without_files(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose external weights are inputs."""
    shown = onnx.ModelProto()
    shown.CopyFrom(proto)
    inside = [tensor for tensor in shown.graph.initializer if tensor.data_location != onnx.TensorProto.EXTERNAL]
    inputs = {value.name for value in shown.graph.input}
    for tensor in shown.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL and tensor.name not in inputs:
            shown.graph.input.append(
                onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
            )
    del shown.graph.initializer[:]
    shown.graph.initializer.extend(inside)
    return shown


def graphs(proto: onnx.ModelProto) -> Iterator[onnx.GraphProto | onnx.FunctionProto]:
    """The graph, its functions, and all graphs inside their nodes."""
    waiting: list[onnx.GraphProto | onnx.FunctionProto] = [proto.graph, *proto.functions]
    while waiting:
        graph = waiting.pop()
        yield graph
        for node in graph.node:
            for attribute in node.attribute:
                waiting += [attribute.g] if attribute.HasField("g") else []
                waiting += attribute.graphs


def tensors(graph: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.TensorProto]:
    """All tensors of a graph: initializers, sparse ones, and attributes under the node's output."""
    if isinstance(graph, onnx.GraphProto):
        yield from graph.initializer
        for sparse in graph.sparse_initializer:
            raise ModelError(f"weight {sparse.values.name!r} is sparse: no exporter writes such weights")
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("sparse_tensor") or attribute.sparse_tensors:
                raise ModelError(f"{node.op_type} node {node.name!r} has a sparse tensor: no exporter writes such")
            constants = [attribute.t] if attribute.HasField("t") else []
            for tensor in [*constants, *attribute.tensors]:
                if node.op_type == "Constant" and node.output and not tensor.name:
                    named = onnx.TensorProto()
                    named.CopyFrom(tensor)
                    named.name = node.output[0]
                    yield named
                else:
                    yield tensor


def _elements(tensor: onnx.TensorProto) -> int:
    if any(dim < 0 for dim in tensor.dims):
        raise ModelError(f"weight {tensor.name!r} has the shape {list(tensor.dims)}")
    return prod(tensor.dims)


def _length(tensor: onnx.TensorProto) -> int | None:
    """Bytes by dtype and shape; None for texts."""
    if tensor.data_type == onnx.TensorProto.STRING:
        return None
    if tensor.data_type in PACKED:
        return -(-_elements(tensor) // PACKED[tensor.data_type])
    try:
        return _elements(tensor) * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    except (KeyError, ValueError, TypeError) as error:
        raise ModelError(f"weight {tensor.name!r} has the unknown dtype {tensor.data_type}") from error


def _span(tensor: onnx.TensorProto, root: Path, sizes: dict[str, int]) -> Span:
    entry = {item.key: item.value for item in tensor.external_data}
    location, name = entry.get("location", ""), tensor.name
    if location not in sizes:
        sizes[location] = UNBOUNDED if location == WEIGHTLESS else _size(root, location, name)
    try:
        offset, length = int(entry.get("offset", 0)), int(entry["length"])
    except (ValueError, KeyError) as error:
        raise ModelError(f"weight {name!r} has no valid offset and length in {location}") from error
    if offset < 0 or length < 0 or offset + length > sizes[location]:
        raise ModelError(
            f"weight {name!r} lies at bytes {offset} to {offset + length} of {location}, which has {sizes[location]}: "
            "the weight file is short or not the one that was exported"
        )
    expected = _length(tensor)
    if length != expected:
        shape = list(tensor.dims)
        raise ModelError(
            f"weight {name!r} of shape {shape} takes {expected} bytes; the graph says {length} of {location}"
        )
    return Span(location, offset, offset + length, name)


def _size(root: Path, location: str, name: str) -> int:
    try:
        path = resolve(root, location)
    except ModelError as error:
        raise ModelError(f"weight {name!r} points at {location!r}, outside the model's folder: refused") from error
    if not path.is_file():
        raise ModelError(f"weight file {location} is missing from {root}")
    return path.stat().st_size


def _check_apart(spans: list[Span]) -> None:
    spans = [span for span in spans if span.start < span.end]  # an empty weight has no bytes to share
    for one, other in pairwise(sorted(spans, key=lambda span: (span.location, span.start, span.end))):
        same = (one.start, one.end) == (other.start, other.end)  # tied weights
        if one.location == other.location and other.start < one.end and not same:
            raise ModelError(f"weights {one.name!r} and {other.name!r} overlap in {one.location}")


def _check_held(tensor: onnx.TensorProto) -> None:
    """A tensor inside the graph file: the data are there."""
    expected = _length(tensor)
    if expected is None or not (tensor.raw_data or expected):
        return
    if size := len(tensor.raw_data):
        if size != expected:
            shape = list(tensor.dims)
            raise ModelError(f"weight {tensor.name!r} of shape {shape} takes {expected} bytes, and has {size}")
        return
    fields = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data")
    count, elements = max(len(getattr(tensor, field)) for field in fields), _elements(tensor)
    complex_ = tensor.data_type in (onnx.TensorProto.COMPLEX64, onnx.TensorProto.COMPLEX128)
    # complex numbers are stored as pairs of floats
    if count * PACKED.get(tensor.data_type, 1) < elements * (1 + complex_):
        raise ModelError(f"weight {tensor.name!r} of shape {list(tensor.dims)} has {count} of its numbers")


def input_shapes(proto: onnx.ModelProto, batch: int, seq: int, past: int) -> dict[str, Dims]:
    """The shapes of the inputs for a token batch; an input with a default has its default's."""
    # an adopted file without a cache has "total" columns of new tokens alone
    carries = any(dim.dim_param == "past" for value in proto.graph.input for dim in value.type.tensor_type.shape.dim)
    lengths = {"batch": batch, "seq": seq, "past": past, "total": past + seq if carries else seq}
    defaults: dict[str, Dims] = {tensor.name: tuple(tensor.dims) for tensor in proto.graph.initializer}
    shapes: dict[str, Dims] = {}
    for value in proto.graph.input:
        dims = value.type.tensor_type.shape.dim
        shapes[value.name] = tuple(lengths.get(dim.dim_param, seq) if dim.dim_param else dim.dim_value for dim in dims)
    return {name: defaults.get(name, shape) for name, shape in shapes.items()}
