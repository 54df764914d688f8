"""`Known`: type, shape and, where it is small, content of a value, found without running the graph."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator
from onnx.shape_inference import infer_node_outputs

from mionnx.errors import ModelError
from mionnx.graph.operator_table import DOMAIN, contrib_outputs

MOST_FOLLOWED = 2**12  # elements of a value whose content is followed
Dims = tuple[int | None, ...]
# Operators that compute sizes. None takes longer than its inputs and outputs are large.
FOLDED = frozenset(
    "Abs Add And ArgMax ArgMin Cast Ceil Clip Concat ConstantOfShape CumSum Div Equal Expand Flatten Floor Gather "  # noqa: SIM905
    "GatherElements GatherND Greater GreaterOrEqual Identity Less LessOrEqual Max Min Mod Mul Neg Not Or Pow Range "
    "ReduceMax ReduceMin ReduceProd ReduceSum Reshape Round ScatterElements ScatterND Sign Slice Split Sqrt Squeeze "
    "Sub Sum Tile Transpose Trilu Unsqueeze Where Xor".split()
)
# How many elements come out at most where the shape is not known: as many as go in first, the product of all inputs.
NO_MORE = frozenset(
    "Abs ArgMax ArgMin Cast Ceil Clip Compress CumSum Dropout Erf Exp Flatten Floor Gelu Identity LayerNormalization "  # noqa: SIM905
    "Log LogSoftmax Neg Not RMSNormalization ReduceL1 ReduceL2 ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum "
    "ReduceSumSquare Relu Reshape Round ScatterElements ScatterND Sigmoid Sign Slice Softmax Split Sqrt Squeeze Tanh "
    "TopK Transpose Trilu Unique Unsqueeze".split()
)
NO_MORE_THAN_PRODUCT = frozenset(
    "Add And Div Equal Gather GatherElements GatherND Gemm Greater GreaterOrEqual Less LessOrEqual MatMul Max Min Mod "  # noqa: SIM905
    "Mul Or Pow Sub Sum Where Xor".split()
)
ELEMENTWISE = NO_MORE_THAN_PRODUCT - {"Gather", "GatherElements", "GatherND", "Gemm", "MatMul"}


@dataclass(frozen=True)
class Known:
    """Facts about a value before anything runs."""

    dtype: int = 0
    shape: Dims | None = None  # None for an unknown rank, None for an axis that only a run knows
    most: int | None = None  # upper bound of the elements; None if there is none
    data: NDArray[Any] | None = None
    # Whether no input of the graph takes part in it: a runtime may compute it while it opens the graph.
    constant: bool = False

    @cached_property
    def nbytes(self) -> int:
        """Upper bound of the bytes; 0 without one."""
        return (self.most or 0) * _itemsize(self.dtype)

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """All facts in hashable form."""
        content = None if self.data is None else (str(self.data.dtype), self.data.tobytes())
        return self.dtype, self.shape, self.most, content, self.constant


def _itemsize(dtype: int) -> int:
    try:
        return max(1, onnx.helper.tensor_dtype_to_np_dtype(dtype).itemsize)
    except (KeyError, ValueError, TypeError):
        return 8


def of_shape(dtype: int, shape: Dims | None, constant: bool, data: NDArray[Any] | None = None) -> Known:
    """A value of a known type; its elements are counted if all axes are known."""
    most = None if shape is None or None in shape else prod(dim or 0 for dim in shape)
    return Known(dtype, shape, most, data, constant)


def of_tensor(tensor: onnx.TensorProto) -> Known:
    """A weight or a constant; its content is read if it is small and in the graph."""
    dims, count = tuple(tensor.dims), prod(tensor.dims)
    if tensor.data_type == onnx.TensorProto.STRING:
        raise ModelError(f"{tensor.name!r} is text: no graph of a model computes with texts")
    if count > MOST_FOLLOWED or tensor.data_location == onnx.TensorProto.EXTERNAL:
        return of_shape(tensor.data_type, dims, True)
    return of_shape(tensor.data_type, dims, True, onnx.numpy_helper.to_array(tensor))


def infer(node: onnx.NodeProto, inputs: Sequence[Known | None], opsets: Mapping[str, int]) -> list[Known]:
    """The outputs of a node that has no graph inside."""
    constant = all(fact.constant for fact in inputs if fact is not None)
    # by their input's shape, whose numbers need not be known; onnx's evaluator would need the value itself
    if node.op_type in ("Shape", "Size") and inputs[0] is not None:
        sized = _sizes(node, inputs[0])
        if sized is not None:
            return [of_shape(onnx.TensorProto.INT64, sized.shape, inputs[0].constant, sized)]
    if node.domain == DOMAIN:
        typed = [None if fact is None else (fact.dtype, fact.shape) for fact in inputs]
        outputs, rows = [of_shape(*one, constant) for one in contrib_outputs(node, typed)], inputs[0]
        if node.op_type == "MatMulNBits" and outputs[0].most is None and rows is not None and rows.most is not None:
            # Of the rows no more than their bound is known: each becomes N numbers of K.
            sizes = {entry.name: entry.i for entry in node.attribute}
            outputs[0] = replace(outputs[0], most=rows.most // max(1, sizes["K"]) * sizes["N"])
        return outputs
    # Shapes come from onnx's own inference, node by node: of the whole graph at once it leaves a tenth open. The small
    # numbers that later sizes follow from come from its evaluator. Where neither says a shape, a bound serves.
    types = _types(node, inputs, opsets)
    results = [_of_type(node, types.get(name), constant) for name in node.output]
    results = [_bounded(node, fact, inputs) for fact in results]
    content = _content(node, inputs, results, opsets)
    return [
        fact if array is None else of_shape(fact.dtype, array.shape, constant, array)
        for fact, array in zip(results, content, strict=True)
    ]


def _sizes(node: onnx.NodeProto, value: Known) -> NDArray[Any] | None:
    if value.shape is None or None in value.shape:
        return None
    dims = [dim for dim in value.shape if dim is not None]
    if node.op_type == "Size":
        return np.array(min(prod(dims), 2**63 - 1), np.int64)  # a hostile shape may have more than int64 counts
    bounds = {attribute.name: attribute.i for attribute in node.attribute}
    return np.array(dims[bounds.get("start", 0) : bounds.get("end", len(dims))], np.int64)


def _types(
    node: onnx.NodeProto, inputs: Sequence[Known | None], opsets: Mapping[str, int]
) -> Mapping[str, onnx.TypeProto]:
    named = {name: fact for name, fact in zip(node.input, inputs, strict=True) if fact is not None}
    types = {name: onnx.helper.make_tensor_type_proto(fact.dtype, fact.shape) for name, fact in named.items()}
    content = {name: onnx.numpy_helper.from_array(k.data) for name, k in named.items() if k.data is not None}
    return infer_types_of(node, types, content, opsets)


def infer_types_of(
    node: onnx.NodeProto,
    types: dict[str, onnx.TypeProto],
    content: dict[str, onnx.TensorProto],
    opsets: Mapping[str, int],
) -> Mapping[str, onnx.TypeProto]:
    """Infer the types of a node's outputs by onnx; LookupError where onnx has no such operator."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    try:
        schema = onnx.defs.get_schema(node.op_type, opsets.get(domain, 1), domain)
    except onnx.defs.SchemaError as error:
        raise LookupError(f"onnx has no operator {node.op_type} in the domain {domain or 'ai.onnx'!r}") from error
    imports = [onnx.helper.make_opsetid(name, version) for name, version in opsets.items()]
    return infer_node_outputs(schema, node, types, content, opset_imports=imports)


def _of_type(node: onnx.NodeProto, proto: onnx.TypeProto | None, constant: bool) -> Known:
    if proto is None or not proto.ByteSize():
        return Known(constant=constant)
    if not proto.HasField("tensor_type") or proto.tensor_type.elem_type == onnx.TensorProto.STRING:
        raise ModelError(f"{node.op_type} node {label(node)} makes texts or lists, whose size has no bound: refused")
    tensor = proto.tensor_type
    if not tensor.HasField("shape"):
        return of_shape(tensor.elem_type, None, constant)
    dims = tuple(dim.dim_value if dim.HasField("dim_value") else None for dim in tensor.shape.dim)
    if any(dim is not None and dim < 0 for dim in dims):
        raise ModelError(f"{node.op_type} node {label(node)} would make a value of shape {list(dims)}: refused")
    return of_shape(tensor.elem_type, dims, constant)


def _bounded(node: onnx.NodeProto, output: Known, inputs: Sequence[Known | None]) -> Known:
    """The value with an upper bound of its elements, where its shape is not known."""
    if output.most is not None:
        return output
    counts = [fact.most for fact in inputs if fact is not None]
    most: int | None = None
    if node.op_type == "OneHot" and inputs[1] is not None and inputs[1].data is not None and counts[0] is not None:
        most = counts[0] * max(0, int(inputs[1].data.reshape(-1)[0]))
    elif node.op_type == "NonZero" and counts[0] is not None and inputs[0] is not None:
        # an index for each axis, of which numpy has 64 at most
        most = counts[0] * (len(inputs[0].shape) if inputs[0].shape is not None else 64)
    elif (tighter := _by_shapes(node, inputs)) is not None or (tighter := _by_axis(node, output, inputs)) is not None:
        most = tighter
    elif node.op_type in NO_MORE and counts:
        most = counts[0]
    elif node.op_type in NO_MORE_THAN_PRODUCT and None not in counts:
        most = prod(max(1, count or 0) for count in counts)
    elif node.op_type == "Concat" and None not in counts:
        most = sum(count or 0 for count in counts)
    return Known(output.dtype, output.shape, most, None, output.constant)


def _by_shapes(node: onnx.NodeProto, inputs: Sequence[Known | None]) -> int | None:
    """An upper bound of gathered rows and of rows times a matrix, where enough axes are known."""
    if len(node.input) != 2 or inputs[0] is None or inputs[1] is None or not inputs[0].shape:
        return None
    attributes = {attribute.name: attribute.i for attribute in node.attribute}
    shape, matrix = inputs[0].shape, inputs[1].shape or ()
    if node.op_type == "Gather" and inputs[1].most is not None:
        axis = attributes.get("axis", 0) % len(shape)
        beside = [*shape[:axis], *shape[axis + 1 :]]
        return None if None in beside else inputs[1].most * prod(dim or 0 for dim in beside)
    if node.op_type in ("MatMul", "Gemm") and len(shape) == len(matrix) == 2 and not attributes.get("transA", 0):
        inner, out = matrix[::-1] if attributes.get("transB", 0) else matrix
        return None if not inner or out is None or inputs[0].most is None else inputs[0].most // inner * out
    return None


def _by_axis(node: onnx.NodeProto, output: Known, inputs: Sequence[Known | None]) -> int | None:
    """An upper bound of an elementwise operator's output, one of whose axes is not known."""
    if node.op_type not in ELEMENTWISE or output.shape is None or output.shape.count(None) != 1:
        return None
    place, longest = output.shape.index(None) - len(output.shape), 1
    for fact in (fact for fact in inputs if fact is not None):
        if fact.shape is None or fact.most is None:
            return None
        if len(fact.shape) >= -place:
            length = fact.shape[place]
            beside = prod(max(1, dim) for dim in fact.shape if dim is not None)
            longest = max(longest, fact.most // beside if length is None else length)
    return longest * prod(dim for dim in output.shape if dim is not None)


def _content(
    node: onnx.NodeProto, inputs: Sequence[Known | None], outputs: Sequence[Known], opsets: Mapping[str, int]
) -> list[NDArray[Any] | None]:
    """The outputs of a node of small inputs."""
    nothing: list[NDArray[Any] | None] = [None] * len(outputs)
    if node.op_type not in FOLDED or node.domain not in ("", "ai.onnx"):
        return nothing
    if any(fact is not None and fact.data is None for fact in inputs):
        return nothing
    # before it is computed: a small input may ask for a huge output (ConstantOfShape, Expand)
    if any(fact.most is None or fact.most > MOST_FOLLOWED for fact in outputs):
        return nothing
    graph = onnx.helper.make_graph(
        [node],
        "one",
        [onnx.helper.make_value_info(name, onnx.TypeProto()) for name in dict.fromkeys(node.input) if name],
        [onnx.helper.make_value_info(name, onnx.TypeProto()) for name in node.output],
    )
    imports = [onnx.helper.make_opsetid(name, version) for name, version in opsets.items()]
    feeds = {name: fact.data for name, fact in zip(node.input, inputs, strict=True) if fact is not None}
    try:
        with np.errstate(all="ignore"):
            arrays: Any = ReferenceEvaluator(onnx.helper.make_model(graph, opset_imports=imports)).run(None, feeds)
    except Exception:  # numpy's and the evaluator's own errors: then the content stays unknown
        return nothing
    return [np.asarray(array) if isinstance(array, np.ndarray | np.generic) else None for array in arrays]


def label(node: onnx.NodeProto) -> str:
    """The name of a node, for messages."""
    return repr(node.name or next(iter(node.output), ""))
